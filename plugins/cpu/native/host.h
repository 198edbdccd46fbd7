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
