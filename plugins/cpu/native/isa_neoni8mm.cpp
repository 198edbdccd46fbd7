#define QCORE_ISA neoni8mm
#define QCORE_VECTOR "vector_neon.h"
#define QCORE_NEON
#define QCORE_I8MM
#include "isa.inl"
