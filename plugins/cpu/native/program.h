// Programs: the steps of a captured model, one after the other, without Python in between. Built through ctypes by
// qcore_cpu/graphs/steps.py, which mirrors these structures.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "elements.h"
#include "host.h"

namespace qcore_cpu {

constexpr int DIMS = 6, OPERANDS = 3;

// Memory `offset` bytes into base number `slot` of a call; slot -1: none.
struct Place {
  int32_t slot, type;
  int64_t offset;
};

// Strides are in elements, innermost last, as sizes are.
struct Operand {
  Place at;  // slot -1: the number
  int64_t strides[DIMS];
  double number;
  int64_t whole;  // the number, of integers
};

// A contiguous result of operands that are broadcast to `sizes`.
struct Elementwise {
  int32_t operation, integers, dims, count;
  int64_t sizes[DIMS];
  double alpha;
  int64_t whole_alpha;
  Operand operands[OPERANDS];
  Place to;
};

struct Copy {
  Place from, to;
  int32_t dims, size;  // size: bytes of an element
  int64_t sizes[DIMS], from_strides[DIMS], to_strides[DIMS];
};

struct NormStep {
  Place x, weight, bias, y;
  int64_t rows, n;
  double eps;
  int32_t centred;
};

// x * cos + cat(-x2, x1) * sin: x (sizes..., width), cos and sin broadcast to it; y contiguous.
struct Rope {
  Place x, cos, sin, y;
  int64_t sizes[3], width, x_strides[3], cos_strides[3], sin_strides[3];
};

// q (batch, heads, rows, width), k and v (batch, kv_heads, positions, ...), y contiguous. Strides but of the last dimension.
struct Attention {
  Place q, k, v, mask, y;
  int64_t batch, heads, kv_heads, rows, positions, width, v_width;
  int64_t q_strides[3], k_strides[3], v_strides[3], mask_strides[4];
  double scale;
  int32_t causal;
};

// x[outer][index[i]] = source[outer][i], of `inner` bytes each.
struct IndexCopy {
  Place x, index, source;
  int64_t outer, size, count, inner;
};

// As `LinearArguments` (host.h).
struct LinearStep {
  Place x, codes, scale, zero, sums, table, factor, bias, y;
  int64_t rows, size;
};

// Rows of a quantized table (v, k); `type` of indices: I64 or I32.
struct EmbeddingStep {
  Place indices, codes, scale, zero, table, factor, y;
  int64_t count, v, k, group, row_bytes;
  int32_t element, float_zeros, divides;
};

// What a call of a program works on.
struct Frame {
  char* const* bases;
  const Kernels& kernels;
  Pool pool;
  char* at(const Place& p) const { return p.slot < 0 ? nullptr : bases[p.slot] + p.offset; }
};

// A linear layer among the steps; `form`: of qcore_cpu_form. `beside`: it may run together with the step before.
struct LinearLayer {
  LinearStep step;
  std::vector<char> form;
  bool beside;
};

// A function, or a linear layer.
struct Step {
  std::function<void(const Frame&)> run;
  std::unique_ptr<const LinearLayer> layer;
};

struct Program {
  std::vector<Step> steps;
};

}  // namespace qcore_cpu
