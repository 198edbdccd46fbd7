// Kernels of elements.h. Each value is rounded to its type where torch rounds it; sums are taken in another order.

static void narrow_run(const float* from, Type type, int64_t count, void* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_result(to, i, type, load_f(from + i));
  if (i == count) return;
  alignas(64) float values[LANES] = {0};
  alignas(64) char raw[LANES * 4];
  __builtin_memcpy(values, from + i, (size_t)(count - i) * 4);
  store_result(raw, 0, type, load_f(values));
  __builtin_memcpy((char*)to + i * type_size(type), raw, (size_t)(count - i) * type_size(type));
}

static inline float number_at(const void* p, int64_t i, Type type) {
  if (type == I64) return (float)((const int64_t*)p)[i];
  if (type == I32) return (float)((const int32_t*)p)[i];
  if (type == B8) return ((const uint8_t*)p)[i] ? 1.0f : 0.0f;
  if (type == F32) return ((const float*)p)[i];
  float value;
  widen((const uint16_t*)p + i, type, 1, &value);
  return value;
}

static void load_run(const void* from, Type type, int64_t stride, int64_t count, float* to) {
  if (stride == 1 && (type == F32 || type == BF16 || type == F16)) return widen(from, type, count, to);
  if (stride == 0) {
    const float value = number_at(from, 0, type);
    for (int64_t i = 0; i < count; i++) to[i] = value;
    return;
  }
  for (int64_t i = 0; i < count; i++) to[i] = number_at(from, i * stride, type);
}

static void store_run(const float* from, Type type, int64_t count, void* to) {
  if (type != B8) return narrow_run(from, type, count, to);
  for (int64_t i = 0; i < count; i++) ((uint8_t*)to)[i] = from[i] != 0;
}

// e^x to 1.5 units in the last place: 2^n * e^r with n whole and |r| <= ln(2) / 2, e^r by a polynomial. Beyond what
// float32 holds 0 and Inf. NaN stays: the smaller or larger of a number and NaN, in this order, is NaN.
static inline F exp_f(F x) {
  const F bounded = min_f(set_f(89.0f), max_f(set_f(-104.0f), x));
  const I n = round_i(mul_f(bounded, set_f(1.44269504f)));
  const F whole = to_f(n);  // ln(2) in two parts, of which the first times n is exact
  const F r = sub_f(sub_f(bounded, mul_f(whole, set_f(0.693145752f))), mul_f(whole, set_f(1.42860677e-6f)));
  F p = add_f(mul_f(set_f(1.98412698e-4f), r), set_f(1.38888889e-3f));
  p = add_f(mul_f(p, r), set_f(8.33333333e-3f));
  p = add_f(mul_f(p, r), set_f(4.16666667e-2f));
  p = add_f(mul_f(p, r), set_f(1.66666667e-1f));
  p = add_f(mul_f(p, r), set_f(0.5f));
  p = add_f(add_f(mul_f(mul_f(p, r), r), r), set_f(1.0f));
  // In two factors, as 2^n itself may be no float32.
  const I half = sra_i<1>(n), rest = sub_i(n, half), bias = set_i(127);
  return mul_f(mul_f(p, from_bits(shl_i<23>(add_i(half, bias)))), from_bits(shl_i<23>(add_i(rest, bias))));
}
static inline F negative(F x) { return sub_f(set_f(0), x); }
static inline F sigmoid_f(F x) { return div_f(set_f(1), add_f(set_f(1), exp_f(negative(x)))); }
static inline F silu_f(F x) { return div_f(x, add_f(set_f(1), exp_f(negative(x)))); }
// 0.5 * (1 + tanh(u)) is the logistic function of 2 * u.
static inline F gelu_tanh_f(F x) {
  const F cube = mul_f(mul_f(x, x), x);
  return mul_f(x, sigmoid_f(mul_f(set_f(1.59576912f), add_f(x, mul_f(set_f(0.044715f), cube)))));
}
// x * P(x), P of the normal distribution by Abramowitz and Stegun, 7.1.26 (an error of 1.5e-7): P(-|x|) is
// 0.5 * erfc(|x| / sqrt(2)), and P(|x|) is 1 less that.
static inline F gelu_f(F x) {
  const F z = mul_f(from_bits(and_i(bits(x), set_i(0x7fffffff))), set_f(0.707106781f));
  const F t = div_f(set_f(1), add_f(set_f(1), mul_f(set_f(0.3275911f), z)));
  F p = add_f(mul_f(set_f(1.061405429f), t), set_f(-1.453152027f));
  p = add_f(mul_f(p, t), set_f(1.421413741f));
  p = add_f(mul_f(p, t), set_f(-0.284496736f));
  p = add_f(mul_f(p, t), set_f(0.254829592f));
  const F tail = mul_f(mul_f(mul_f(set_f(0.5f), p), t), exp_f(negative(mul_f(z, z))));
  const F positive = to_f(add_i(set_i(1), sra_i<31>(bits(x))));  // 1, or 0 for negative x
  return mul_f(x, add_f(tail, mul_f(sub_f(set_f(1), add_f(tail, tail)), positive)));
}

template <F (*FUNCTION)(F)>
static void apply_f(float* a, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_f(a + i, FUNCTION(load_f(a + i)));
  if (i == count) return;
  alignas(64) float rest[LANES] = {0};
  __builtin_memcpy(rest, a + i, (size_t)(count - i) * 4);
  store_f(rest, FUNCTION(load_f(rest)));
  __builtin_memcpy(a + i, rest, (size_t)(count - i) * 4);
}
static inline float exp_of(float x) {
  apply_f<exp_f>(&x, 1);
  return x;
}

#define QCORE_RUN(value) \
  for (int64_t i = 0; i < count; i++) { const float x = a[i]; a[i] = (value); } \
  return

static void apply(Operation op, float* __restrict a, const float* __restrict b, const float* __restrict c, int64_t count,
                  float alpha) {
  switch (op) {
    case IDENTITY: return;
    case SUB: return apply(ADD, a, b, c, count, -alpha);
    case ADD:  // rounded once, as in torch
      if (alpha == 1 || alpha == -1) {
        QCORE_RUN(x + alpha * b[i]);
      }
      QCORE_RUN(__builtin_fmaf(alpha, b[i], x));
    case MUL: QCORE_RUN(x * b[i]);
    case DIV: QCORE_RUN(x / b[i]);
    case MAXIMUM: QCORE_RUN(x != x ? x : b[i] > x || b[i] != b[i] ? b[i] : x);
    case MINIMUM: QCORE_RUN(x != x ? x : b[i] < x || b[i] != b[i] ? b[i] : x);
    case POW: QCORE_RUN(__builtin_powf(x, b[i]));
    case EQ: QCORE_RUN(x == b[i] ? 1.0f : 0.0f);
    case NE: QCORE_RUN(x != b[i] ? 1.0f : 0.0f);
    case LT: QCORE_RUN(x < b[i] ? 1.0f : 0.0f);
    case LE: QCORE_RUN(x <= b[i] ? 1.0f : 0.0f);
    case GT: QCORE_RUN(x > b[i] ? 1.0f : 0.0f);
    case GE: QCORE_RUN(x >= b[i] ? 1.0f : 0.0f);
    case AND: QCORE_RUN(x != 0 && b[i] != 0 ? 1.0f : 0.0f);
    case OR: QCORE_RUN(x != 0 || b[i] != 0 ? 1.0f : 0.0f);
    case XOR: QCORE_RUN((x != 0) != (b[i] != 0) ? 1.0f : 0.0f);
    case NOT: QCORE_RUN(x == 0 ? 1.0f : 0.0f);
    case WHERE: QCORE_RUN(x != 0 ? b[i] : c[i]);
    case CLAMP:  // to NaN where a bound is
      QCORE_RUN(b[i] != b[i] || c[i] != c[i] ? b[i] + c[i] : (x < b[i] ? b[i] : x) > c[i] ? c[i] : x < b[i] ? b[i] : x);
    case NEG: QCORE_RUN(-x);
    case ABS: QCORE_RUN(__builtin_fabsf(x));
    case RECIPROCAL: QCORE_RUN(1.0f / x);
    case RSQRT: QCORE_RUN(1.0f / __builtin_sqrtf(x));
    case SQRT: QCORE_RUN(__builtin_sqrtf(x));
    case EXP: return apply_f<exp_f>(a, count);
    case LOG: QCORE_RUN(__builtin_logf(x));
    case SIN: QCORE_RUN(__builtin_sinf(x));
    case COS: QCORE_RUN(__builtin_cosf(x));
    case TANH: QCORE_RUN(__builtin_tanhf(x));
    case ERF: QCORE_RUN(__builtin_erff(x));
    case SIGMOID: return apply_f<sigmoid_f>(a, count);
    case SILU: return apply_f<silu_f>(a, count);
    case GELU: return apply_f<gelu_f>(a, count);
    case GELU_TANH: return apply_f<gelu_tanh_f>(a, count);
    case RELU: QCORE_RUN(x < 0 ? 0.0f : x);
  }
}
#undef QCORE_RUN

// A vector rounded to a type of floats.
static inline F rounded_f(F v, Type type) {
  if (type == F32) return v;
  if (type == BF16) return from_bits(shl_i<16>(bf16_words(v)));
  alignas(64) uint16_t words[LANES];
  store_fp16(words, v);
  return fp16_f(words);
}

// x * cos + cat(-x2, x1) * sin, x1 and x2 the halves of x; products and sum are rounded to the result's type.
static void rope_row(const Rotated& form, const void* x, const void* cos, const void* sin, void* y) {
  const int64_t half = form.width / 2;
  const auto turn = [&](const void* x, int64_t at, int64_t other, F sign, const void* cos, const void* sin, void* y) {
    const F straight = rounded_f(mul_f(widen_f(x, at, form.x), widen_f(cos, at, form.angles)), form.result);
    const F turned = mul_f(mul_f(widen_f(x, other, form.x), sign), widen_f(sin, at, form.angles));
    store_result(y, at, form.result, add_f(straight, rounded_f(turned, form.result)));
  };
  const F minus = set_f(-1), plus = set_f(1);
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    turn(x, i, half + i, minus, cos, sin, y);
    turn(x, half + i, i, plus, cos, sin, y);
  }
  for (; i < half; i++) {  // one element of each half, padded to vectors
    alignas(64) char part[4][2 * LANES * 4] = {};
    const auto copy = [&](int slot, const void* from, Type type) {
      const int size = type_size(type);
      __builtin_memcpy(part[slot], (const char*)from + i * size, (size_t)size);
      __builtin_memcpy(part[slot] + LANES * size, (const char*)from + (half + i) * size, (size_t)size);
    };
    copy(0, x, form.x), copy(1, cos, form.angles), copy(2, sin, form.angles);
    turn(part[0], 0, LANES, minus, part[1], part[2], part[3]);
    turn(part[0], LANES, 0, plus, part[1], part[2], part[3]);
    const int size = type_size(form.result);
    __builtin_memcpy((char*)y + i * size, part[3], (size_t)size);
    __builtin_memcpy((char*)y + (half + i) * size, part[3] + LANES * size, (size_t)size);
  }
}

static float dot_of(const float* a, const float* b, int64_t count) {
  F first = set_f(0), second = set_f(0);
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    first = fma_f(load_f(a + i), load_f(b + i), first);
    second = fma_f(load_f(a + i + LANES), load_f(b + i + LANES), second);
  }
  float sum = sum_f(add_f(first, second));
  for (; i < count; i++) sum += a[i] * b[i];
  return sum;
}

static void norm_row(const Norm& norm, const void* x, const void* weight, const void* bias, void* y, float* scratch) {
  const int64_t n = norm.n;
  float *values = scratch, *factors = scratch + n;
  widen(x, norm.x, n, values);
  if (norm.centred) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += values[i];
    const double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) values[i] = (float)(values[i] - mean);
  }
  const float scale = 1.0f / __builtin_sqrtf(dot_of(values, values, n) / (float)n + norm.eps);
  for (int64_t i = 0; i < n; i++) values[i] *= scale;
  if (!norm.centred && norm.x != F32) {  // rounded here, in y's memory or that of the factors
    narrow_run(values, norm.x, n, factors);
    widen(factors, norm.x, n, values);
  }
  if (weight) {
    widen(weight, norm.weight_type, n, factors);
    for (int64_t i = 0; i < n; i++) values[i] *= factors[i];
  }
  if (bias) {
    widen(bias, norm.bias_type, n, factors);
    for (int64_t i = 0; i < n; i++) values[i] += factors[i];
  }
  narrow_run(values, norm.result, n, y);
}

#include "attention.inl"

static constexpr Elements ELEMENTS = {load_run, store_run, apply, norm_row, rope_row, attend};
