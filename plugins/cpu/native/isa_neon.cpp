#define QCORE_ISA neon
#define QCORE_VECTOR "vector_neon.h"
#define QCORE_NEON
#include "isa.inl"
