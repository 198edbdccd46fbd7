// Linear layers with fp8 activations (mode FP8).
#pragma once
#include "core.h"

namespace qcore_cpu {

// As `linear`, whose layers read the same x. False if memory ran out.
bool by_fp8(const Kernels& kernels, const Pool& pool, const Layer* layers, int count, const Input& in);

}  // namespace qcore_cpu
