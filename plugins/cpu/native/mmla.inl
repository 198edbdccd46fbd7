// Products by USMMLA: 2 columns of the weight times 2 digit rows, 8 columns of x deep, into 2 x 2 sums. One instruction
// does what two of SDOT do. The weight is packed for 4 columns of x at a time, as for SDOT: `zip` joins two such sets.
// Codes are unsigned, as packed: SMMLA would need the top bit of 8-bit ones inverted, 4 instructions more in 43.
//
// Counted, GCC 12 and -O3: 12 digit rows x 8 columns x 8 columns of x take 24 USMMLA of 44 instructions with 4-bit codes,
// 24 of 43 with 8-bit ones; as many products of `neondot` 48 SDOT of 122 and of 105. Under qemu, whole linear layers of
// 96 rows, K = 1024, N = 256 (SDOT, all -> USMMLA, all; millions):
//   w4a8-g128 1.57 of 6.4 -> 0.79 of 3.9; w8a8 1.57 of 5.3 -> 0.79 of 3.5; w4a16-g128, float16 3.15 of 11.3 -> 1.57 of 6.1
//
// Sums of two digit rows t, t + 1 and 4 columns of the weight lie in two vectors: acc[t] holds columns 0 and 1, acc[t + 1]
// columns 2 and 3, each [column][row]. They start and stay so until `end_sums` gives each row its own vector.

// Rows of digits in their accumulators: an odd one has a row of zeros beside it. A single row has dot products.
template <int T> constexpr int SLOTS = T > 1 ? (T + 1) / 2 * 2 : 1;

// Up to so many digit rows take so many columns at a time: fewer passes over the codes, and as many accumulators.
constexpr int FEW_ROWS = 4, FEW_COLUMNS = 16;

template <int T, int H>
static inline __attribute__((always_inline)) void begin_sums(const int32_t* start, I (&acc)[SLOTS<T>][H]) {
#pragma GCC unroll 24
  for (int t = 0; t < SLOTS<T>; t++)
    for (int h = 0; h < H; h++) acc[t][h] = T == 1 ? set_i(start[0]) : set_pair(start + t / 2 * 2);
}

template <int T, int H>
static inline __attribute__((always_inline)) void end_sums(I (&acc)[SLOTS<T>][H]) {
  if constexpr (T == 1) return;
#pragma GCC unroll 24
  for (int t = 0; t + 1 < SLOTS<T>; t += 2) {
    for (int h = 0; h < H; h++) {
      const I left = acc[t][h], right = acc[t + 1][h];
      acc[t][h] = even_lanes(left, right);
      acc[t + 1][h] = odd_lanes(left, right);
    }
  }
}

// 8 columns of x; HALF: 4, the codes of the others are taken as 0, and x is read on for 4 bytes, which its buffer has.
template <Element E, int T, int H, bool BESIDE, bool HALF>
static inline __attribute__((always_inline)) void
sweep_step(const uint8_t* codes, const int8_t* q, int64_t row_step, I mask, I table, I (&acc)[SLOTS<T>][H]) {
  // 1. Codes of 4 columns of the weight in each vector: x's columns 0 to 3 (`low`) and 4 to 7 (`high`).
  I low[H], high[H];
  prefetch(codes + 2048);
  if constexpr (E == INT8) prefetch(codes + 2048 + 128);
  for (int h = 0; h < H; h++) {
    const I v = load_i(codes + 16 * h);
    if constexpr (E == INT8) {
      low[h] = v, high[h] = HALF ? set_i(0) : load_i(codes + 128 + 16 * h);
    } else {
      low[h] = low_nibbles(v, mask), high[h] = high_nibbles(v, mask);
      if constexpr (E == HALVES4) low[h] = lookup_bytes(table, low[h]), high[h] = lookup_bytes(table, high[h]);
    }
  }
  // 2. One row: dot products with 4 of its digits at a time.
  if constexpr (T == 1) {
    int32_t words[2];
    __builtin_memcpy(words, q, HALF ? 4 : 8);
    for (int h = 0; h < H; h++) acc[0][h] = dot(acc[0][h], low[h], set_i(words[0]));
    if constexpr (!HALF)
      for (int h = 0; h < H; h++) acc[0][h] = dot(acc[0][h], high[h], set_i(words[1]));
    return;
  } else {
    // 3. Pairs of rows: 8 codes of one column together, two columns in a vector.
    for (int h = 0; h < H; h++) {
      const I left = join_low(low[h], high[h]), right = join_high(low[h], high[h]);
      low[h] = left, high[h] = right;
    }
#pragma GCC unroll 24
    for (int t = 0; t < T; t += 2) {
      const int8_t* row = q + t * row_step;
      const I digits = t + 1 == T ? load_half(row) : BESIDE ? load_i(row) : load_halves(row, row + row_step);
      for (int h = 0; h < H; h++) {
        acc[t][h] = dot_pairs(acc[t][h], low[h], digits);
        acc[t + 1][h] = dot_pairs(acc[t + 1][h], high[h], digits);
      }
    }
  }
}

// As the `sweep` of other instruction sets. 8 columns of one row lie together; the next ones 2 * `k_step` bytes on.
template <Element E, int T, int H, bool BESIDE, int = 0>
static inline __attribute__((always_inline)) void
sweep(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, int64_t row_step, I mask, I table,
      I (&acc)[SLOTS<T>][H]) {
  constexpr int64_t SETS = E == INT8 ? 2 : 1;  // of 128 bytes of codes, for 8 columns of x
  for (int64_t i = 0; i < steps / SETS; i++, codes += SETS * 128, q += 2 * k_step)
    sweep_step<E, T, H, BESIDE, false>(codes, q, row_step, mask, table, acc);
  if constexpr (E == INT8 && !BESIDE)  // only a convolution's windows may end with 4 columns
    if (steps % 2) sweep_step<E, T, H, BESIDE, true>(codes, q, row_step, mask, table, acc);
}
