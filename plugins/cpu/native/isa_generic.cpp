#define QCORE_ISA generic
#define QCORE_VECTOR "vector_generic.h"
#include "isa.inl"
