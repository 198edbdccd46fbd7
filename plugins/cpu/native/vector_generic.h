// 4 lanes in portable C++: SSE2, NEON or scalar code, as the compiler has it. The fallback, and the reference.
constexpr int LANES = 4;
constexpr int TILE_COLUMNS = 16;
constexpr int DIGIT_ROWS = 4;
constexpr int PANEL_ROWS = DIGIT_ROWS;
constexpr int FLOAT_PANEL_FROM = 0;
constexpr bool SHORT_FOLDS = false;  // a tile of its own for groups of 32 is worth its size
constexpr int REGISTERS = 16;
#define QCORE_NO_FMA  // where the processor has none, or may have none, it is a function
constexpr bool SIGNED_CODES = false;
struct I { alignas(16) int32_t v[4]; };
struct F { alignas(16) float v[4]; };
#define QCORE_EACH for (int i = 0; i < 4; i++)
static inline I set_i(int32_t a) { return {{a, a, a, a}}; }
static inline I load_i(const void* p) { I r; __builtin_memcpy(r.v, p, 16); return r; }
static inline I or_i(I a, I b) { QCORE_EACH a.v[i] |= b.v[i]; return a; }
static inline I and_i(I a, I b) { QCORE_EACH a.v[i] &= b.v[i]; return a; }
static inline I add_i(I a, I b) { QCORE_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
static inline I sub_i(I a, I b) { QCORE_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return a; }
static inline I mul_i(I a, I b) { QCORE_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i]); return a; }
static inline I max_i(I a, I b) { QCORE_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline I min_i(I a, I b) { QCORE_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
template <int N> static inline I shl_i(I a) { QCORE_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] << N); return a; }
template <int N> static inline I sra_i(I a) { QCORE_EACH a.v[i] >>= N; return a; }
template <int N> static inline I shr_i(I a) { QCORE_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] >> N); return a; }
static inline I shr_any_i(I a, int n) { QCORE_EACH a.v[i] = (int32_t)((uint32_t)a.v[i] >> n); return a; }
static inline I nibble_mask() { return set_i(0x0f0f0f0f); }
static inline I low_nibbles(I a, I mask) { return and_i(a, mask); }
static inline I high_nibbles(I a, I mask) { return and_i(shr_i<4>(a), mask); }
static inline I table_bytes(const uint8_t* t) { return load_i(t); }
static inline I lookup_bytes(I table, I index) {
  uint8_t t[16], n[16], r[16];
  __builtin_memcpy(t, table.v, 16);
  __builtin_memcpy(n, index.v, 16);
  for (int i = 0; i < 16; i++) r[i] = t[n[i] & 15];
  return load_i(r);
}
static inline I dot(I acc, I codes, I x) {
  uint8_t w[16];
  int8_t a[16];
  __builtin_memcpy(w, codes.v, 16);
  __builtin_memcpy(a, x.v, 16);
  QCORE_EACH acc.v[i] = (int32_t)((uint32_t)acc.v[i] + (uint32_t)(w[4 * i] * a[4 * i] + w[4 * i + 1] * a[4 * i + 1] +
                                                                  w[4 * i + 2] * a[4 * i + 2] + w[4 * i + 3] * a[4 * i + 3]));
  return acc;
}
static inline I bytes_i(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
static inline I dot_words(I acc, I a, I b) { QCORE_EACH acc.v[i] += (int16_t)a.v[i] * (int16_t)b.v[i]; return acc; }
static inline I signed_bytes_i(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
static inline void narrow_i(int8_t* p, I v) {
  QCORE_EACH p[i] = (int8_t)(v.v[i] < -128 ? -128 : v.v[i] > 127 ? 127 : v.v[i]);
}
static inline I bits(F v) { I r; __builtin_memcpy(r.v, v.v, 16); return r; }
static inline F from_bits(I v) { F r; __builtin_memcpy(r.v, v.v, 16); return r; }
static inline F to_f(I v) { F r; QCORE_EACH r.v[i] = (float)v.v[i]; return r; }
// Half to even in the default rounding mode; what is out of range becomes the least integer, as on x86.
static inline I round_i(F v) {
  I r;
  QCORE_EACH r.v[i] = v.v[i] >= -2147483648.0f && v.v[i] < 2147483648.0f ? (int32_t)__builtin_rintf(v.v[i]) : INT32_MIN;
  return r;
}
static inline F set_f(float a) { return {{a, a, a, a}}; }
static inline F load_f(const float* p) { F r; __builtin_memcpy(r.v, p, 16); return r; }
static inline void store_f(float* p, F v) { __builtin_memcpy(p, v.v, 16); }
static inline F add_f(F a, F b) { QCORE_EACH a.v[i] += b.v[i]; return a; }
static inline F sub_f(F a, F b) { QCORE_EACH a.v[i] -= b.v[i]; return a; }
static inline F mul_f(F a, F b) { QCORE_EACH a.v[i] *= b.v[i]; return a; }
static inline F div_f(F a, F b) { QCORE_EACH a.v[i] /= b.v[i]; return a; }
static inline F fma_f(F a, F b, F c) { QCORE_EACH c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return c; }
static inline F max_f(F a, F b) { QCORE_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F min_f(F a, F b) { QCORE_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline float fp16_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t u;
  if (exponent == 0) {
    const float f = (float)mantissa * 0x1p-24f;
    __builtin_memcpy(&u, &f, 4);
  } else {
    u = exponent == 31 ? 0x7f800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
  }
  u |= sign;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t float_to_fp16(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
  if (a < 0x38800000) {                                   // below 2^-14: whole multiples of 2^-24
    __builtin_memcpy(&f, &a, 4);
    return (uint16_t)(sign | (uint32_t)__builtin_rintf(f * 0x1p24f));
  }
  return (uint16_t)(sign | (a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13);
}
static inline F fp16_f(const uint16_t* p) { F r; QCORE_EACH r.v[i] = fp16_to_float(p[i]); return r; }
static inline F bf16_f(const uint16_t* p) { I r; QCORE_EACH r.v[i] = (int32_t)((uint32_t)p[i] << 16); return from_bits(r); }
static inline void store_fp16(uint16_t* p, F v) { QCORE_EACH p[i] = float_to_fp16(v.v[i]); }
static inline void store_words(uint16_t* p, I v) { QCORE_EACH p[i] = (uint16_t)v.v[i]; }
static inline int32_t sum_i(I v) { return v.v[0] + v.v[1] + v.v[2] + v.v[3]; }
static inline int32_t largest_i(I v) { int32_t m = v.v[0]; QCORE_EACH m = v.v[i] > m ? v.v[i] : m; return m; }
static inline float sum_f(F v) { return (v.v[0] + v.v[1]) + (v.v[2] + v.v[3]); }
// The sums of 4 vectors.
static inline F sums_f(const F (&v)[4]) { return {{sum_f(v[0]), sum_f(v[1]), sum_f(v[2]), sum_f(v[3])}}; }
static inline float largest_f(F v) { float m = v.v[0]; QCORE_EACH m = v.v[i] > m ? v.v[i] : m; return m; }
static inline float least_f(F v) { float m = v.v[0]; QCORE_EACH m = v.v[i] < m ? v.v[i] : m; return m; }
static inline I absolute_i(I v) { QCORE_EACH v.v[i] = v.v[i] < 0 ? (int32_t)(0u - (uint32_t)v.v[i]) : v.v[i]; return v; }
static inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }
struct Numbers { const float* all; };
static inline Numbers numbers16(const float* t) { return {t}; }
static inline F pick(const Numbers& n, I index) { F r; QCORE_EACH r.v[i] = n.all[index.v[i] & 15]; return r; }
static inline F gather(const float* t, I index) { F r; QCORE_EACH r.v[i] = t[index.v[i]]; return r; }
// Results 2 * i of `even` and 2 * i + 1 of `odd`, for 4 each.
static inline void store_pairs_f(float* p, F even, F odd) {
  QCORE_EACH p[2 * i] = even.v[i], p[2 * i + 1] = odd.v[i];
}
// See vector_avx512.h.
template <int S> static inline I largest_in_groups(I v) { return S > 1 ? set_i(largest_i(v)) : v; }
static inline I low_bytes_in_blocks(I v) {
  uint32_t word = 0;
  QCORE_EACH word |= (uint32_t)(v.v[i] & 255) << 8 * i;
  return set_i((int32_t)word);
}
template <int, int> static inline I rotated_blocks(I v) { return v; }  // there is one
