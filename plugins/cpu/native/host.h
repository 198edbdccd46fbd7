// What calls from torch and from ctypes share: the instruction set in use and torch's threads.
#pragma once
#include "core.h"

#define QCORE_EXPORT extern "C" __attribute__((visibility("default")))

namespace qcore_cpu {

// The kernels that serve this process; throws if `QCORE_CPU_ISA` names an instruction set that is not there.
const Kernels& kernels();

// As many threads as torch has now.
Pool pool();

}  // namespace qcore_cpu

// For ctypes; see host.cpp.
QCORE_EXPORT int64_t qcore_cpu_form_size();
QCORE_EXPORT int qcore_cpu_linear(const void* form, const void* x, int64_t rows, const void* codes, int64_t size,
                                  const void* scale, int scale_type, const void* zero, const void* bias, int bias_type,
                                  void* y);
