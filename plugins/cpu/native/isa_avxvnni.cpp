#define QCORE_ISA avxvnni
#define QCORE_VECTOR "vector_avx2.h"
#define QCORE_VNNI
#include "isa.inl"
