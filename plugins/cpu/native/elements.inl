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

// e^x to 1.5 units in the last place: 2^n * e^r with n whole and |r| <= ln(2) / 2, r by a polynomial. In a form that
// compilers make vectors of. Beyond what float32 holds 0 and Inf, NaN stays.
static inline float exp_of(float x) {
  const float bounded = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;  // NaN: neither comparison holds
  constexpr float MAGIC = 12582912.0f;                                  // 1.5 * 2^23: adding it rounds to whole numbers
  const float n = bounded * 1.44269504f + MAGIC - MAGIC;
  const float r = bounded - n * 0.693145752f - n * 1.42860677e-6f;  // ln(2) in two parts
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  // In two factors, as 2^n itself may be no float32.
  const int32_t whole = n == n ? (int32_t)n : 0, half = whole >> 1;
  const int32_t first = (half + 127) << 23, second = (whole - half + 127) << 23;
  float a, b;
  __builtin_memcpy(&a, &first, 4);
  __builtin_memcpy(&b, &second, 4);
  return p * a * b;
}
static inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

#define QCORE_RUN(value) \
  for (int64_t i = 0; i < count; i++) { const float x = a[i]; a[i] = (value); } \
  return

static void apply(Operation op, float* __restrict a, const float* __restrict b, const float* __restrict c, int64_t count,
                  float alpha) {
  switch (op) {
    case IDENTITY: return;
    case ADD: QCORE_RUN(x + alpha * b[i]);
    case SUB: QCORE_RUN(x - alpha * b[i]);
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
    case CLAMP: QCORE_RUN((x < b[i] ? b[i] : x) > c[i] ? c[i] : x < b[i] ? b[i] : x);
    case NEG: QCORE_RUN(-x);
    case ABS: QCORE_RUN(__builtin_fabsf(x));
    case RECIPROCAL: QCORE_RUN(1.0f / x);
    case RSQRT: QCORE_RUN(1.0f / __builtin_sqrtf(x));
    case SQRT: QCORE_RUN(__builtin_sqrtf(x));
    case EXP: QCORE_RUN(exp_of(x));
    case LOG: QCORE_RUN(__builtin_logf(x));
    case SIN: QCORE_RUN(__builtin_sinf(x));
    case COS: QCORE_RUN(__builtin_cosf(x));
    case TANH: QCORE_RUN(__builtin_tanhf(x));
    case ERF: QCORE_RUN(__builtin_erff(x));
    case SIGMOID: QCORE_RUN(sigmoid_of(x));
    case SILU: QCORE_RUN(x / (1.0f + exp_of(-x)));
    case GELU: QCORE_RUN(x * 0.5f * (1.0f + __builtin_erff(x * 0.707106781f)));
    case GELU_TANH: QCORE_RUN(0.5f * x * (1.0f + __builtin_tanhf(0.797884561f * (x + 0.044715f * x * x * x))));
    case RELU: QCORE_RUN(x < 0 ? 0.0f : x);
  }
}
#undef QCORE_RUN

static inline float sum_f(F v) {
  alignas(64) float t[LANES];
  store_f(t, v);
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += t[i];
  return sum;
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
    const float mean = (float)(sum / (double)n);
    for (int64_t i = 0; i < n; i++) values[i] -= mean;
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

// Scores of some positions, then their part of the sums, which are scaled down whenever a larger score appears. What no
// row sees is not read.
static void attend(const Attended& a) {
  float* number = a.scores + a.rows * ATTENDED;
  for (int64_t r = 0; r < a.rows; r++) a.largest[r] = -__builtin_inff(), a.total[r] = 0;
  for (int64_t i = 0; i < a.rows * a.v_width; i++) a.out[i] = 0;
  for (int64_t from = a.begin; from < a.end; from += ATTENDED) {
    const int64_t count = a.end - from < ATTENDED ? a.end - from : ATTENDED;
    for (int64_t j = 0; j < count; j++) {
      const int64_t s = from + j;
      bool read = false;
      for (int64_t r = 0; r < a.rows; r++) {
        float added = s < a.limits[r] ? 0.0f : -__builtin_inff();
        if (a.mask && added == 0) {
          const char* at = a.mask + a.mask_rows[r] + s * a.mask_step;
          added = a.mask_type != B8 ? number_at(at, 0, a.mask_type) : *at ? 0.0f : -__builtin_inff();
        }
        float score = added;
        if (added != -__builtin_inff()) {
          if (!read) widen(a.k + s * a.k_step, a.type, a.width, number), read = true;
          score += dot_of(a.q + r * a.width, number, a.width);
        }
        a.scores[r * ATTENDED + j] = score;
      }
    }
    for (int64_t r = 0; r < a.rows; r++) {
      float *scores = a.scores + r * ATTENDED, *out = a.out + r * a.v_width;
      float largest = a.largest[r];
      for (int64_t j = 0; j < count; j++) largest = scores[j] > largest || scores[j] != scores[j] ? scores[j] : largest;
      if (largest == -__builtin_inff()) {
        for (int64_t j = 0; j < count; j++) scores[j] = 0;
        continue;
      }
      const float before = exp_of(a.largest[r] - largest);
      for (int64_t j = 0; j < count; j++) scores[j] = exp_of(scores[j] - largest);
      float total = a.total[r] * before;
      for (int64_t j = 0; j < count; j++) total += scores[j];
      for (int64_t i = 0; i < a.v_width; i++) out[i] *= before;
      a.largest[r] = largest, a.total[r] = total;
    }
    for (int64_t j = 0; j < count; j++) {
      bool read = false;
      for (int64_t r = 0; r < a.rows; r++) {
        const float weight = a.scores[r * ATTENDED + j];
        if (weight == 0) continue;
        if (!read) widen(a.v + (from + j) * a.v_step, a.type, a.v_width, number), read = true;
        float* out = a.out + r * a.v_width;
        const F factor = set_f(weight);
        int64_t i = 0;
        for (; i + LANES <= a.v_width; i += LANES) store_f(out + i, fma_f(factor, load_f(number + i), load_f(out + i)));
        for (; i < a.v_width; i++) out[i] += weight * number[i];
      }
    }
  }
}

static constexpr Elements ELEMENTS = {load_run, store_run, apply, norm_row, attend};
