// 8 lanes of AVX2 with FMA and F16C; QCORE_VNNI: with the VNNI products that have 256-bit VEX forms (AVX-VNNI).
using I = __m256i;
using F = __m256;
constexpr int LANES = 8;
constexpr int TILE_COLUMNS = 16;
constexpr int DIGIT_ROWS = 4;  // 8 accumulators and 4 vectors of codes in 16 registers
constexpr int PANEL_ROWS = 6;  // 12 accumulators, 2 vectors of numbers, a broadcast
#ifdef QCORE_VNNI
constexpr int FLOAT_PANEL_FROM = 64;  // rows from which on float x meets integer codes as numbers
#else  // a product of 32 bytes takes two instructions, of 8-bit codes five, and float x has two or three digits
constexpr int FLOAT_PANEL_FROM = 16;
#endif
constexpr int FLOATS_FROM_4[2] = {0, 4}, FLOATS_FROM_8[2] = {6, 2};  // rows of x that has 2 or 3 digits; 0: never
constexpr bool SHORT_FOLDS = false;  // a tile of its own for groups of 32 is worth its size
constexpr int REGISTERS = 16;
constexpr bool SIGNED_CODES = false;
static inline I set_i(int32_t v) { return _mm256_set1_epi32(v); }
static inline I load_i(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline I or_i(I a, I b) { return _mm256_or_si256(a, b); }
static inline I and_i(I a, I b) { return _mm256_and_si256(a, b); }
static inline I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
static inline I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
static inline I mul_i(I a, I b) { return _mm256_mullo_epi32(a, b); }
static inline I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
static inline I min_i(I a, I b) { return _mm256_min_epi32(a, b); }
template <int N> static inline I shl_i(I a) { return _mm256_slli_epi32(a, N); }
template <int N> static inline I sra_i(I a) { return _mm256_srai_epi32(a, N); }
template <int N> static inline I shr_i(I a) { return _mm256_srli_epi32(a, N); }
static inline I shr_any_i(I a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline I high_nibbles(I a, I mask) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), mask); }
static inline I low_nibbles(I a, I mask) { return _mm256_and_si256(a, mask); }
static inline I nibble_mask() { return _mm256_set1_epi8(15); }
static inline I lookup_bytes(I table, I index) { return _mm256_shuffle_epi8(table, index); }
static inline I table_bytes(const uint8_t* t) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)t)); }
// The products of low words, if the high ones of b are 0.
static inline I dot_words(I acc, I a, I b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#ifdef QCORE_VNNI
static inline I dot(I acc, I codes, I x) { return _mm256_dpbusd_avx_epi32(acc, codes, x); }
#else
// See word_sums.inl.
#define QCORE_WORD_SUMS
static inline I add_products(I words, I codes, I x) {
  I sum = _mm256_add_epi16(words, _mm256_maddubs_epi16(codes, x));
  asm("" : "+x"(sum));  // one after the other: a compiler that adds products first runs out of registers
  return sum;
}
static inline I products_of(I a, I b) { return _mm256_madd_epi16(a, b); }
static inline I add_words(I acc, I words) { return add_i(acc, products_of(words, _mm256_set1_epi16(1))); }
static inline I even_bytes(I v) { return and_i(v, _mm256_set1_epi16(255)); }
static inline I odd_bytes(I v) { return _mm256_srli_epi16(v, 8); }
static inline I even_signed_bytes(I v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
static inline I odd_signed_bytes(I v) { return _mm256_srai_epi16(v, 8); }
// The same as above of 4 products each, exactly.
static inline I dot(I acc, I codes, I x) {
  const I even = products_of(even_bytes(codes), even_signed_bytes(x));
  return add_i(acc, add_i(even, products_of(odd_bytes(codes), odd_signed_bytes(x))));
}
#endif
static inline I bytes_i(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline I signed_bytes_i(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline void narrow_i(int8_t* p, I v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
static inline I bits(F v) { return _mm256_castps_si256(v); }
static inline F from_bits(I v) { return _mm256_castsi256_ps(v); }
static inline F to_f(I v) { return _mm256_cvtepi32_ps(v); }
static inline I round_i(F v) { return _mm256_cvtps_epi32(v); }
static inline F set_f(float v) { return _mm256_set1_ps(v); }
static inline F load_f(const float* p) { return _mm256_loadu_ps(p); }
static inline void store_f(float* p, F v) { _mm256_storeu_ps(p, v); }
static inline F add_f(F a, F b) { return _mm256_add_ps(a, b); }
static inline F sub_f(F a, F b) { return _mm256_sub_ps(a, b); }
static inline F mul_f(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F div_f(F a, F b) { return _mm256_div_ps(a, b); }
static inline F fma_f(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F max_f(F a, F b) { return _mm256_max_ps(a, b); }
static inline F min_f(F a, F b) { return _mm256_min_ps(a, b); }
static inline F fp16_f(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline F bf16_f(const uint16_t* p) {
  return from_bits(shl_i<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))));
}
static inline void store_words(uint16_t* p, I v) {
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static inline void store_fp16(uint16_t* p, F v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, 0)); }
static inline int32_t sum_i(I v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
static inline int32_t largest_i(I v) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
// The sums of 8 vectors.
static inline __attribute__((always_inline)) F sums_f(const F (&v)[8]) {
  const F first = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const F last = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(first, last, 0x20), _mm256_permute2f128_ps(first, last, 0x31));
}
static inline float sum_f(F v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static inline float largest_f(F v) {
  float t[8], m;
  store_f(t, v);
  m = t[0];
  for (int i = 1; i < 8; i++) m = t[i] > m ? t[i] : m;
  return m;
}
static inline float least_f(F v) { return -largest_f(sub_f(set_f(0), v)); }
static inline I absolute_i(I v) { return _mm256_abs_epi32(v); }
static inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
struct Numbers { F low, high; };
static inline Numbers numbers16(const float* t) { return {_mm256_loadu_ps(t), _mm256_loadu_ps(t + 8)}; }
static inline F pick(const Numbers& n, I index) {
  const F upper = from_bits(shl_i<28>(index));  // bit 3 of the index as the sign
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(n.low, index), _mm256_permutevar8x32_ps(n.high, index), upper);
}
static inline F gather(const float* t, I index) { return _mm256_i32gather_ps(t, index, 4); }
// Results 2 * i of `even` and 2 * i + 1 of `odd`, for 8 each.
static inline void store_pairs_f(float* p, F even, F odd) {
  const F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  store_f(p, _mm256_permute2f128_ps(low, high, 0x20));
  store_f(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
// 32 words of a table of 16 by the 4-bit codes of 16 bytes, low ones first.
#define QCORE_WORDS
struct Words { __m128i low, high; };
static inline Words words16(const uint16_t* t) {
  const __m128i a = _mm_loadu_si128((const __m128i*)t), b = _mm_loadu_si128((const __m128i*)(t + 8));
  const __m128i byte = _mm_set1_epi16(255);
  return {_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)),
          _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
}
static inline void store_words_of(const Words& words, const uint8_t* pairs, uint16_t* to) {
  const __m128i v = _mm_loadu_si128((const __m128i*)pairs), nibble = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(v, nibble), odd = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
  const __m128i codes[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
  for (int i = 0; i < 2; i++) {
    const __m128i low = _mm_shuffle_epi8(words.low, codes[i]), high = _mm_shuffle_epi8(words.high, codes[i]);
    _mm_storeu_si128((__m128i*)(to + 16 * i), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128((__m128i*)(to + 16 * i + 8), _mm_unpackhi_epi8(low, high));
  }
}
// See vector_avx512.h.
template <int S> static inline I largest_in_groups(I v) {
  if (S > 1) v = max_i(v, _mm256_shuffle_epi32(v, 0xb1)), v = max_i(v, _mm256_shuffle_epi32(v, 0x4e));
  return S > 4 ? max_i(v, _mm256_permute2x128_si256(v, v, 1)) : v;
}
static inline I low_bytes_in_blocks(I v) { return _mm256_shuffle_epi8(v, set_i(0x0c080400)); }
template <int, int> static inline I rotated_blocks(I v) { return _mm256_permute2x128_si256(v, v, 1); }
