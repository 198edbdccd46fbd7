// What calls from torch and from ctypes share: the instruction set in use and torch's threads.
#pragma once
#include "core.h"

#define QCORE_EXPORT extern "C" __attribute__((visibility("default")))

namespace qcore_cpu {

// The kernels that serve this process; throws if `QCORE_CPU_ISA` names an instruction set that is not there.
const Kernels& kernels();

// As many threads as torch has now.
Pool pool();

// What a call of a linear layer adds to its form: x and y, and the packed tensors, null for those that there are not.
struct LinearArguments {
  const void* x;
  int64_t rows;
  const uint8_t* codes;
  int64_t size;            // bytes of the codes
  const void* scale;
  Type scale_type;
  const void* zero;        // as the form says, integers or numbers of the scale's type
  const int32_t* sums;
  const float *table, *factor;
  const void* bias;
  Type bias_type;
  void* y;
};

// Compute up to `MOST_BESIDE` linear layers on the same x, whose forms `reads_alike` tells to be so; `forms`: of
// qcore_cpu_form. False if memory ran out or the codes are too few.
constexpr int MOST_BESIDE = 4;
bool linear_of(const void* const* forms, const LinearArguments* given, int count);
// Results of a row.
int64_t columns_of(const void* form);
// Whether layers of two forms turn x into the same rows.
bool reads_alike(const void* form, const void* other);

}  // namespace qcore_cpu

// For ctypes; see host.cpp.
QCORE_EXPORT int64_t qcore_cpu_form_size();
