#define QCORE_ISA neondot
#define QCORE_VECTOR "vector_neon.h"
#define QCORE_NEON
#define QCORE_DOTPROD
#include "isa.inl"
