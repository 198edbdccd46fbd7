#pragma once

#include "core.h"

namespace qcore_cpu {

// y (batch, columns, rows) of x (batch, rows, columns), elements of `size` bytes: 2 or 4.
void transpose(const Pool& pool, const void* x, void* y, int64_t batch, int64_t rows, int64_t columns, int64_t size);

}  // namespace qcore_cpu
