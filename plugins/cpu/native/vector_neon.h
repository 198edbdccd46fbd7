// 4 lanes of NEON. QCORE_DOTPROD: with the signed 8-bit products of Armv8.2 (dotprod); QCORE_I8MM: with the matrix and dot
// products of unsigned and signed bytes of Armv8.6 (i8mm), see mmla.inl; else by widening products.
using I = int32x4_t;
using F = float32x4_t;
constexpr int LANES = 4;
constexpr bool SHORT_FOLDS = false;  // a tile of its own for groups of 32 is worth its size
constexpr int REGISTERS = 32;
#ifdef QCORE_I8MM
constexpr int TILE_COLUMNS = 8;
constexpr int DIGIT_ROWS = 12;  // 24 accumulators, 4 vectors of codes, a mask, a table and two rows in 32 registers
constexpr int DIGIT_RUN = 8;
constexpr bool SIGNED_CODES = false;
#else
constexpr int TILE_COLUMNS = 16;
constexpr int DIGIT_ROWS = 4;  // 16 accumulators, 8 vectors of codes, a mask and the row in 32 registers
constexpr int DIGIT_RUN = 4;
constexpr bool SIGNED_CODES = true;  // products take signed codes: 8-bit ones are read with the top bit inverted
#endif
constexpr int PANEL_ROWS = DIGIT_ROWS;
constexpr int FLOAT_PANEL_FROM = 0;  // never: products of bytes are faster
static inline I set_i(int32_t v) { return vdupq_n_s32(v); }
static inline I load_i(const void* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
static inline I or_i(I a, I b) { return vorrq_s32(a, b); }
static inline I and_i(I a, I b) { return vandq_s32(a, b); }
static inline I add_i(I a, I b) { return vaddq_s32(a, b); }
static inline I dot_words(I acc, I a, I b) { return vmlal_s16(acc, vmovn_s32(a), vmovn_s32(b)); }  // of the low words
static inline I sub_i(I a, I b) { return vsubq_s32(a, b); }
static inline I mul_i(I a, I b) { return vmulq_s32(a, b); }
static inline I max_i(I a, I b) { return vmaxq_s32(a, b); }
static inline I min_i(I a, I b) { return vminq_s32(a, b); }
template <int N> static inline I shl_i(I a) { return vshlq_n_s32(a, N); }
template <int N> static inline I sra_i(I a) { return vshrq_n_s32(a, N); }
template <int N> static inline I shr_i(I a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), N)); }
static inline I shr_any_i(I a, int n) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-n))); }
static inline I nibble_mask() { return vreinterpretq_s32_u8(vdupq_n_u8(15)); }
static inline I low_nibbles(I a, I mask) { return vandq_s32(a, mask); }
static inline I high_nibbles(I a, I) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
static inline I table_bytes(const uint8_t* t) { return load_i(t); }
static inline I lookup_bytes(I table, I index) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(index)));
}
static inline I invert_top(I codes) { return vreinterpretq_s32_u8(veorq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(128))); }
#if defined(QCORE_I8MM)
static inline I dot(I acc, I codes, I x) { return vusdotq_s32(acc, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(x)); }
// Two rows of 8 codes each times two rows of 8 digits of x: [row of codes][row of x].
static inline I dot_pairs(I acc, I codes, I x) {
  return vusmmlaq_s32(acc, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(x));
}
static inline I join_low(I a, I b) { return vzip1q_s32(a, b); }
static inline I join_high(I a, I b) { return vzip2q_s32(a, b); }
static inline I even_lanes(I a, I b) { return vuzp1q_s32(a, b); }
static inline I odd_lanes(I a, I b) { return vuzp2q_s32(a, b); }
static inline I set_pair(const int32_t* p) { return vcombine_s32(vld1_s32(p), vld1_s32(p)); }
static inline I load_halves(const int8_t* a, const int8_t* b) {
  return vreinterpretq_s32_s8(vcombine_s8(vld1_s8(a), vld1_s8(b)));
}
static inline I load_half(const int8_t* p) { return vreinterpretq_s32_s8(vcombine_s8(vld1_s8(p), vdup_n_s8(0))); }
#elif defined(QCORE_DOTPROD)
static inline I dot(I acc, I codes, I x) { return vdotq_s32(acc, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(x)); }
#else
static inline I dot(I acc, I codes, I x) {
  const int8x16_t w = vreinterpretq_s8_s32(codes), a = vreinterpretq_s8_s32(x);
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(a)));
  return vaddq_s32(acc, vpaddq_s32(low, high));
}
#endif
static inline I signed_bytes_i(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)))));
}
static inline I bytes_i(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_s32(vdup_n_s32(word))))));
}
static inline void narrow_i(int8_t* p, I v) {
  const int16x4_t words = vqmovn_s32(v);
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  const int32_t word = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  __builtin_memcpy(p, &word, 4);
}
static inline I bits(F v) { return vreinterpretq_s32_f32(v); }
static inline F from_bits(I v) { return vreinterpretq_f32_s32(v); }
static inline F to_f(I v) { return vcvtq_f32_s32(v); }
static inline I round_i(F v) { return vcvtnq_s32_f32(v); }
static inline F set_f(float v) { return vdupq_n_f32(v); }
static inline F load_f(const float* p) { return vld1q_f32(p); }
static inline void store_f(float* p, F v) { vst1q_f32(p, v); }
static inline F add_f(F a, F b) { return vaddq_f32(a, b); }
static inline F sub_f(F a, F b) { return vsubq_f32(a, b); }
static inline F mul_f(F a, F b) { return vmulq_f32(a, b); }
static inline F div_f(F a, F b) { return vdivq_f32(a, b); }
static inline F fma_f(F a, F b, F c) { return vfmaq_f32(c, a, b); }
static inline F max_f(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // as x86: b where one is NaN
static inline F min_f(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline F fp16_f(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline F bf16_f(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline void store_fp16(uint16_t* p, F v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
static inline void store_words(uint16_t* p, I v) { vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(v))); }
static inline int32_t sum_i(I v) { return vaddvq_s32(v); }
static inline int32_t largest_i(I v) { return vmaxvq_s32(v); }
// The sums of 4 vectors.
static inline F sums_f(const F (&v)[4]) { return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])); }
static inline float sum_f(F v) { return vaddvq_f32(v); }
static inline float largest_f(F v) { return vmaxvq_f32(v); }
static inline float least_f(F v) { return vminvq_f32(v); }
static inline I absolute_i(I v) { return vabsq_s32(v); }
static inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }
struct Numbers { uint8x16x4_t all; };
static inline Numbers numbers16(const float* t) { return {vld1q_u8_x4((const uint8_t*)t)}; }
static inline F pick(const Numbers& n, I index) {
  // Byte indices of the float: 4 * code + 0..3 in each lane.
  const I first = vmulq_s32(vandq_s32(index, vdupq_n_s32(15)), vdupq_n_s32(0x04040404));
  const uint8x16_t at = vreinterpretq_u8_s32(vaddq_s32(first, vdupq_n_s32(0x03020100)));
  return vreinterpretq_f32_u8(vqtbl4q_u8(n.all, at));
}
static inline F gather(const float* t, I index) {
  const float r[4] = {t[vgetq_lane_s32(index, 0)], t[vgetq_lane_s32(index, 1)], t[vgetq_lane_s32(index, 2)],
                      t[vgetq_lane_s32(index, 3)]};
  return vld1q_f32(r);
}
// Results 2 * i of `even` and 2 * i + 1 of `odd`, for 4 each.
static inline void store_pairs_f(float* p, F even, F odd) {
  store_f(p, vzip1q_f32(even, odd));
  store_f(p + 4, vzip2q_f32(even, odd));
}
// See vector_avx512.h.
template <int S> static inline I largest_in_groups(I v) { return S > 1 ? set_i(vmaxvq_s32(v)) : v; }
static inline I low_bytes_in_blocks(I v) { return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(v), vreinterpretq_u8_s32(set_i(0x0c080400)))); }
template <int, int> static inline I rotated_blocks(I v) { return v; }  // there is one
