// 16 lanes of AVX-512 with VNNI. Included inside the namespace of one instruction set.
using I = __m512i;
using F = __m512;
constexpr int LANES = 16;
constexpr int TILE_COLUMNS = 32;  // two accumulators per digit row, so that one broadcast serves two products
constexpr int DIGIT_ROWS = 12;    // 24 accumulators, 4 vectors of codes and a mask fill the 32 registers
constexpr int PANEL_ROWS = DIGIT_ROWS;
constexpr int FLOAT_PANEL_FROM = 0;  // never: products of bytes are faster
constexpr bool SHORT_FOLDS = true;  // a tile of its own for groups of 32 is worth its size
constexpr int REGISTERS = 32;
constexpr bool SIGNED_CODES = false;
static inline I set_i(int32_t v) { return _mm512_set1_epi32(v); }
static inline I load_i(const void* p) { return _mm512_loadu_si512(p); }
static inline I or_i(I a, I b) { return _mm512_or_si512(a, b); }
static inline I and_i(I a, I b) { return _mm512_and_si512(a, b); }
static inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
static inline I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
static inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
static inline I min_i(I a, I b) { return _mm512_min_epi32(a, b); }
template <int N> static inline I shl_i(I a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline I sra_i(I a) { return _mm512_srai_epi32(a, N); }
template <int N> static inline I shr_i(I a) { return _mm512_srli_epi32(a, N); }
static inline I shr_any_i(I a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline I high_nibbles(I a, I mask) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), mask); }
static inline I low_nibbles(I a, I mask) { return _mm512_and_si512(a, mask); }
static inline I nibble_mask() { return _mm512_set1_epi8(15); }
static inline I lookup_bytes(I table, I index) { return _mm512_shuffle_epi8(table, index); }
static inline I table_bytes(const uint8_t* t) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)t)); }
static inline I dot(I acc, I codes, I x) { return _mm512_dpbusd_epi32(acc, codes, x); }
static inline I dot_words(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }  // of low words, if the high ones of b are 0
static inline I bytes_i(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline I signed_bytes_i(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
// Parts of vectors, of at least one value: others are neither read nor written, and are 0 in registers.
#define QCORE_PARTS
static inline __mmask16 part_16(int64_t count) { return (__mmask16)(count < 16 ? (1u << count) - 1 : 0xffff); }
static inline __mmask32 part_32(int64_t count) { return count < 32 ? (__mmask32)((1ull << count) - 1) : ~(__mmask32)0; }
static inline __mmask64 part_64(int64_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; }
static inline F load_part_f(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(part_16(count), p); }
static inline __m256i load_part_words(const uint16_t* p, int64_t count) {
  return _mm256_maskz_loadu_epi16(part_16(count), p);
}
static inline F fp16_part_f(const uint16_t* p, int64_t count) { return _mm512_cvtph_ps(load_part_words(p, count)); }
static inline F bf16_part_f(const uint16_t* p, int64_t count) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_part_words(p, count)), 16));
}
static inline I signed_bytes_part_i(const int8_t* p, int64_t count) {
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(part_16(count), p));
}
static inline I load_part_32(const uint16_t* p, int64_t count) { return _mm512_maskz_loadu_epi16(part_32(count), p); }
static inline I load_part_64(const int8_t* p, int64_t count) { return _mm512_maskz_loadu_epi8(part_64(count), p); }
static inline I part_of_64(I v, int64_t count) { return _mm512_maskz_mov_epi8(part_64(count), v); }
static inline void store_part_64(void* p, I v, int64_t count) { _mm512_mask_storeu_epi8(p, part_64(count), v); }
static inline void store_part_f(float* p, F v, int64_t count) { _mm512_mask_storeu_ps(p, part_16(count), v); }
static inline void store_part_fp16(uint16_t* p, F v, int64_t count) {
  _mm256_mask_storeu_epi16(p, part_16(count), _mm512_cvtps_ph(v, 0));
}
static inline void store_part_of_words(uint16_t* p, I v, int64_t count) {
  _mm256_mask_storeu_epi16(p, part_16(count), _mm512_cvtepi32_epi16(v));
}
static inline void narrow_i(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v)); }
// Four vectors as 64 codes plus a zero point, in int8 by saturation.
static inline I set_words(int16_t v) { return _mm512_set1_epi16(v); }
static inline I set_bytes(int8_t v) { return _mm512_set1_epi8(v); }
static inline void store_i(void* p, I v) { _mm512_storeu_si512(p, v); }
static inline I max_words(I a, I b) { return _mm512_max_epu16(a, b); }
static inline I max_signed_words(I a, I b) { return _mm512_max_epi16(a, b); }
static inline I xor_i(I a, I b) { return _mm512_xor_si512(a, b); }
static inline I four_to_codes(I a, I b, I c, I d, I zeros) {
  const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const I first = _mm512_adds_epi16(_mm512_packs_epi32(a, b), zeros), second = _mm512_adds_epi16(_mm512_packs_epi32(c, d), zeros);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
}
// 64 numbers of bfloat16 times f, rounded to codes that are all within int8. Even and odd numbers apart: a float with the
// lower 16 bits cleared, or moved up; the codes of both, within 16 bits, are put together in order.
static inline __attribute__((always_inline)) I bf16_code_words(I pairs, F f) {
  const I even = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), f));
  const I odd = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(and_i(pairs, set_i((int32_t)0xffff0000))), f));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
}
static inline __attribute__((always_inline)) I bf16_to_codes(I first, I second, F f) {
  const I codes = _mm512_packs_epi16(bf16_code_words(first, f), bf16_code_words(second, f));
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes);
}
// The same plus a zero point, in int8 by saturation.
static inline __attribute__((always_inline)) I bf16_to_codes(I first, I second, F f, I zeros) {
  const I low = _mm512_adds_epi16(bf16_code_words(first, f), zeros), high = _mm512_adds_epi16(bf16_code_words(second, f), zeros);
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi16(low, high));
}
static inline __attribute__((always_inline)) I bf16_to_codes(I only, F f, I zeros) {
  return _mm512_zextsi256_si512(_mm512_cvtsepi16_epi8(_mm512_adds_epi16(bf16_code_words(only, f), zeros)));
}
// Without one for 32, and 0 behind them.
static inline __attribute__((always_inline)) I bf16_to_codes(I only, F f) {
  return _mm512_zextsi256_si512(_mm512_cvtsepi16_epi8(bf16_code_words(only, f)));
}
static inline I bits(F v) { return _mm512_castps_si512(v); }
static inline F from_bits(I v) { return _mm512_castsi512_ps(v); }
static inline F to_f(I v) { return _mm512_cvtepi32_ps(v); }
static inline I round_i(F v) { return _mm512_cvtps_epi32(v); }
static inline F set_f(float v) { return _mm512_set1_ps(v); }
static inline F load_f(const float* p) { return _mm512_loadu_ps(p); }
static inline void store_f(float* p, F v) { _mm512_storeu_ps(p, v); }
static inline F add_f(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub_f(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul_f(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div_f(F a, F b) { return _mm512_div_ps(a, b); }
static inline F fma_f(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F max_f(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min_f(F a, F b) { return _mm512_min_ps(a, b); }
static inline F fp16_f(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline F bf16_f(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline void store_fp16(uint16_t* p, F v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, 0)); }
static inline void store_words(uint16_t* p, I v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(v)); }
static inline int32_t sum_i(I v) { return _mm512_reduce_add_epi32(v); }
static inline int32_t largest_i(I v) { return _mm512_reduce_max_epi32(v); }
static inline float sum_f(F v) { return _mm512_reduce_add_ps(v); }
// 16 vectors reduced to a lane each: halves of two side by side, then quarters of four, and so on.
template <class Join>
static inline __attribute__((always_inline)) F reduced(const F (&v)[16], const Join& join) {
  F halves[8], quarters[4], pairs[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const F low = _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44), high = _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee);
    halves[i] = join(low, high);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const F even = _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88);
    quarters[i] = join(even, _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const F low = _mm512_shuffle_ps(quarters[2 * i], quarters[2 * i + 1], 0x44);
    pairs[i] = join(low, _mm512_shuffle_ps(quarters[2 * i], quarters[2 * i + 1], 0xee));
  }
  const F all = join(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
}
static inline __attribute__((always_inline)) F sums_f(const F (&v)[16]) { return reduced(v, add_f); }
// Of integers, whose bits these are.
static inline __attribute__((always_inline)) I sums_i(const F (&v)[16]) {
  return bits(reduced(v, [](F a, F b) { return from_bits(add_i(bits(a), bits(b))); }));
}
static inline __attribute__((always_inline)) I largest_each_i(const F (&v)[16]) {
  return bits(reduced(v, [](F a, F b) { return from_bits(max_i(bits(a), bits(b))); }));
}
// For channels in groups of S lanes: the largest of each group in all its lanes; the lowest bytes of the lanes of each block
// of 4 in all of them; blocks exchanged among B, so that each is the R-th next.
template <int S> static inline I largest_in_groups(I v) {
  if (S > 1) v = max_i(v, _mm512_shuffle_epi32(v, (_MM_PERM_ENUM)0xb1)), v = max_i(v, _mm512_shuffle_epi32(v, (_MM_PERM_ENUM)0x4e));
  if (S > 4) v = max_i(v, _mm512_shuffle_i32x4(v, v, 0xb1));
  return S > 8 ? max_i(v, _mm512_shuffle_i32x4(v, v, 0x4e)) : v;
}
static inline __attribute__((always_inline)) I low_bytes_in_blocks(I v) { return _mm512_shuffle_epi8(v, set_i(0x0c080400)); }
template <int B, int R> static inline __attribute__((always_inline)) I rotated_blocks(I v) {
  return _mm512_shuffle_i32x4(v, v, B == 2 ? 0xb1 : R == 1 ? 0x39 : R == 2 ? 0x4e : 0x93);
}
static inline float largest_f(F v) { return _mm512_reduce_max_ps(v); }
static inline float least_f(F v) { return _mm512_reduce_min_ps(v); }
static inline I absolute_i(I v) { return _mm512_abs_epi32(v); }
static inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// 16 numbers of a table by the low 4 bits of each lane.
struct Numbers { F all; };
static inline Numbers numbers16(const float* t) { return {_mm512_loadu_ps(t)}; }
static inline F pick(const Numbers& n, I index) { return _mm512_permutexvar_ps(index, n.all); }
static inline F gather(const float* t, I index) { return _mm512_i32gather_ps(index, t, 4); }
// Results 2 * i of `even` and 2 * i + 1 of `odd`, for 16 each.
static inline void store_pairs_f(float* p, F even, F odd) {
  const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const I high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  store_f(p, _mm512_permutex2var_ps(even, low, odd));
  store_f(p + 16, _mm512_permutex2var_ps(even, high, odd));
}
// 32 words of a table of 16 by the 4-bit codes of 16 bytes, low ones first.
#define QCORE_WORDS
struct Words { I twice; };
static inline Words words16(const uint16_t* t) { return {_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)t))}; }
static inline void store_words_of(const Words& words, const uint8_t* pairs, uint16_t* to) {
  const I v = bytes_i(pairs);  // vpermw takes 5 bits of a word, of which the table ignores the highest
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(or_i(v, shl_i<12>(v)), words.twice));
}
// The upper halves of the lanes of a, then those of b; such a table.
#define QCORE_UPPER_WORDS
static inline I upper_halves(I a, I b) {
  alignas(64) static const uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(upper), b);
}
static inline void store_upper_words(uint16_t* p, I a, I b) { _mm512_storeu_si512(p, upper_halves(a, b)); }
static inline Words upper_words(I v) { return {upper_halves(v, v)}; }
// Numbers of fp8 as bfloat16, which holds them: 32 words by the codes in them, of a table of 128 and the sign.
#define QCORE_CODE_WORDS
struct CodeWords { I part[4]; };
static inline CodeWords code_words(const float* t) {
  CodeWords words;
  for (int i = 0; i < 4; i++) words.part[i] = upper_halves(_mm512_loadu_si512(t + 32 * i), _mm512_loadu_si512(t + 32 * i + 16));
  return words;
}
static inline __attribute__((always_inline)) I words_by(const CodeWords& words, I codes) {
  const I low = _mm512_permutex2var_epi16(words.part[0], codes, words.part[1]);
  const I high = _mm512_permutex2var_epi16(words.part[2], codes, words.part[3]);
  const I number = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), high);
  return _mm512_or_si512(number, _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16((int16_t)0x8000)));
}
// Those of 32 bytes.
static inline I words_at(const CodeWords& words, const uint8_t* codes) {
  return words_by(words, _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes)));
}
// Those of bytes 0 and 2, and of 1 and 3, of each lane.
static inline __attribute__((always_inline)) void words_by_bytes(const CodeWords& words, I v, I& even, I& odd) {
  even = words_by(words, _mm512_and_si512(v, _mm512_set1_epi16(255)));
  odd = words_by(words, _mm512_srli_epi16(v, 8));
}
#ifdef __AVX512BF16__
// The processor's own rounding to bfloat16, right but for subnormal numbers, which it takes for 0, and the bits of NaN.
#define QCORE_BF16_CONVERSION
static inline I lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
static inline bool any_unusual(F v) { return _mm512_fpclass_ps_mask(v, 0xa1); }  // quiet NaN, subnormal, signaling NaN
static inline bool any_unusual(F a, F b) { return _mm512_fpclass_ps_mask(a, 0xa1) | _mm512_fpclass_ps_mask(b, 0xa1); }
// For scales: whole numbers times normal ones are 0 or normal, or overflow.
static inline bool all_normal_or_zero(F v) { return !_mm512_fpclass_ps_mask(v, 0xb9); }
static inline void store_part_converted(uint16_t* p, F v, int64_t count) {
  _mm256_mask_storeu_epi16(p, part_16(count), (__m256i)_mm512_cvtneps_pbh(v));
}
static inline void store_converted(uint16_t* p, F a, F b) { _mm512_storeu_si512(p, (I)_mm512_cvtne2ps_pbh(b, a)); }
// Pairs of a lane of each, `first` in the low half, if both are such numbers.
static inline I converted_pairs(F first, F second) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), (I)_mm512_cvtne2ps_pbh(second, first));
}
// Whether all lanes are 0 or of a magnitude of 2^-100 to 2^100: whole numbers times one, plus another, are 0 or normal.
static inline bool all_moderate(F v) {
  const I magnitude = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
  const I above = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(27 << 23));
  const __mmask16 inside = _mm512_cmple_epu32_mask(above, _mm512_set1_epi32(200 << 23));
  return (__mmask16)(inside | _mm512_testn_epi32_mask(magnitude, magnitude)) == 0xffff;
}
static inline Words converted_words(F v) { return {_mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(v))}; }
#endif
#define QCORE_PAIR_ORDER
// The words of 8 columns as pairs (0, 2), (4, 6), (1, 3), (5, 7): k of the two 4-bit codes at 4 * j bits of a lane.
static inline __m128i pair_order() { return _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15); }
