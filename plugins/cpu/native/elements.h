// What programs of whole models (program.h) compute beside quantized products: numbers element by element, norms,
// rotary embeddings, attention. Plain data; elements.inl has the kernels of an instruction set.
#pragma once
#include "problem.h"

namespace qcore_cpu {

// An operation on floats a, b, c, element by element. Comparisons give 1 or 0.
enum Operation : int {
  IDENTITY, ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, POW,       // ADD, SUB: of alpha * b
  EQ, NE, LT, LE, GT, GE, AND, OR, XOR, NOT, WHERE, CLAMP,   // WHERE: a ? b : c; CLAMP: a within b and c
  NEG, ABS, RECIPROCAL, RSQRT, SQRT, EXP, LOG, SIN, COS, TANH, ERF, SIGMOID, SILU, GELU, GELU_TANH, RELU,
};

// One row of a norm along contiguous numbers. weight, bias: null for none.
struct Norm {
  Type x, weight_type, bias_type, result;
  int64_t n;
  float eps;
  bool centred;  // a layer norm; else rms, whose result is rounded to x's type before the weight multiplies it
};

// Rows of a rotary embedding; `angles`: the type of cos and sin.
struct Rotated {
  Type x, angles, result;
  int64_t width;
};

// Attention of some rows of queries that share one head of keys and values, over positions from `begin` to `end`.
//   out[r] = sum of exp(s[r] - largest[r]) * v, s = scale * (q[r] . k) + mask; total[r]: the sum of exp.
struct Attended {
  const float* q;            // [rows][width], scaled
  int64_t rows, width, v_width;
  const char *k, *v;         // of position 0
  Type type;
  int64_t k_step, v_step;    // bytes from position to position; numbers of one position are contiguous
  const char* mask;          // of row 0 and position 0, or null
  Type mask_type;            // B8: 0 hides a position; floats are added
  const int64_t* mask_rows;  // [rows], bytes from row 0
  int64_t mask_step;         // bytes from position to position
  const int64_t* limits;     // [rows]: positions that a row sees, at most
  int64_t begin, end;
  float *largest, *total;    // [rows]
  float* out;                // [rows][v_width]
  float* scores;             // [rows][ATTENDED] scratch, and then ATTENDED * max(width, v_width) more
};
constexpr int64_t ATTENDED = 64;  // positions at a time: keys of 64 to 128 numbers stay in the cache

struct Elements {
  // `count` numbers of any type but I8 and E8M0, `stride` elements apart.
  void (*load)(const void* from, Type type, int64_t stride, int64_t count, float* to);
  // To floats, or to B8, which is 0 for 0.
  void (*store)(const float* from, Type type, int64_t count, void* to);
  void (*apply)(Operation op, float* a, const float* b, const float* c, int64_t count, float alpha);
  // `scratch`: 2 * n floats.
  void (*norm)(const Norm& norm, const void* x, const void* weight, const void* bias, void* y, float* scratch);
  void (*rope)(const Rotated& form, const void* x, const void* cos, const void* sin, void* y);
  void (*attend)(const Attended& a);
};

}  // namespace qcore_cpu
