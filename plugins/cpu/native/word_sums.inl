// The products of `tile` where the processor's product of bytes, vpmaddubsw, sums pairs in 16 bits and saturates: AVX2 without
// VNNI.
//
// 4-bit codes: such sums, at most 2 * 15 * 128, are added in 16-bit words, as many as these hold, and words are then widened
// to the int32 accumulators: two instructions for 32 products.
// 8-bit codes would reach 2 * 255 * 128. They and the digits become 16-bit words, whose products vpmaddwd sums exactly in 32
// bits: four instructions for 32 products, and three for the digits, which all columns share.

// Steps of 8 columns whose sums, two for each accumulator, a 16-bit word holds: 2 * steps * (2 * code * 128) < 2^15.
template <Element E> constexpr int64_t WORD_STEPS = E == INT4 ? 4 : 2;  // codes up to 15, or 24 of fp4

template <Element E, int T, int H>
static inline __attribute__((always_inline)) void
sum_of_words(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, int64_t row_step, I mask, I table,
             I (&acc)[T][H]) {
  constexpr int BYTES = LANES * 4;
  I words[T][H];
#pragma GCC unroll 24
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) words[t][h] = set_i(0);
#pragma GCC unroll 1
  for (int64_t i = 0; i < steps; i++, codes += 128, q += 2 * k_step) {
    I low[H], high[H];
    for (int h = 0; h < H; h++) {
      prefetch(codes + 2048 + BYTES * h);
      const I v = load_i(codes + BYTES * h);
      low[h] = low_nibbles(v, mask), high[h] = high_nibbles(v, mask);
      if constexpr (E == HALVES4) low[h] = lookup_bytes(table, low[h]), high[h] = lookup_bytes(table, high[h]);
    }
#pragma GCC unroll 24
    for (int t = 0; t < T; t++) {
      int32_t first, second;
      __builtin_memcpy(&first, q + t * row_step, 4);
      __builtin_memcpy(&second, q + k_step + t * row_step, 4);
      for (int h = 0; h < H; h++) {
        words[t][h] = add_products(words[t][h], low[h], set_i(first));
        words[t][h] = add_products(words[t][h], high[h], set_i(second));
      }
    }
  }
#pragma GCC unroll 24
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) acc[t][h] = add_words(acc[t][h], words[t][h]);
}

template <int T, int H>
static inline __attribute__((always_inline)) void
products_of_words(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, int64_t row_step,
                  I (&acc)[T][H]) {
  constexpr int BYTES = LANES * 4;
  for (int64_t i = 0; i < steps; i++, codes += 128, q += k_step) {
    I even[H], odd[H];
    for (int h = 0; h < H; h++) {
      prefetch(codes + 2048 + BYTES * h);
      const I v = load_i(codes + BYTES * h);
      even[h] = even_bytes(v), odd[h] = odd_bytes(v);
    }
#pragma GCC unroll 24
    for (int t = 0; t < T; t++) {
      int32_t word;
      __builtin_memcpy(&word, q + t * row_step, 4);
      const I digits = set_i(word), first = even_signed_bytes(digits), second = odd_signed_bytes(digits);
      for (int h = 0; h < H; h++) acc[t][h] = add_i(acc[t][h], products_of(even[h], first));
      for (int h = 0; h < H; h++) acc[t][h] = add_i(acc[t][h], products_of(odd[h], second));
    }
  }
}

// As `sweep` in tile.inl.
template <Element E, int T, int H, bool BESIDE, int = 0>
static inline __attribute__((always_inline)) void
sweep(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, int64_t row_step, I mask, I table,
      I (&acc)[T][H]) {
  if constexpr (E == INT8) {
    products_of_words<T, H>(codes, q, steps, k_step, row_step, acc);
  } else {
    constexpr int64_t MOST = WORD_STEPS<E>;
#pragma GCC unroll 1
    for (int64_t i = 0; i < steps; i += MOST, codes += MOST * 128, q += 2 * MOST * k_step)
      sum_of_words<E, T, H>(codes, q, steps - i < MOST ? steps - i : MOST, k_step, row_step, mask, table, acc);
  }
}
