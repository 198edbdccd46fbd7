#define QCORE_ISA amxint8
#define QCORE_VECTOR "vector_avx512.h"
#define QCORE_AMX
#include "isa.inl"
