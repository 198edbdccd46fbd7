#define QCORE_ISA avx512bf16
#define QCORE_VECTOR "vector_avx512.h"
#define QCORE_PAIRS
#include "isa.inl"
