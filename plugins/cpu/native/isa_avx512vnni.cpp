#define QCORE_ISA avx512vnni
#define QCORE_VECTOR "vector_avx512.h"
#include "isa.inl"
