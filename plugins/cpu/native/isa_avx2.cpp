#define QCORE_ISA avx2
#define QCORE_VECTOR "vector_avx2.h"
#include "isa.inl"
