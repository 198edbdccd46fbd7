// A block of rows times 32 packed columns: int8 products of digits, folded to float per group.

#ifdef QCORE_I8MM
#include "mmla.inl"
#else
// Accumulators of T digit rows: a vector of each for every H.
template <int T> constexpr int SLOTS = T;
#ifdef QCORE_WORD_SUMS
constexpr int FEW_ROWS = 3, FEW_COLUMNS = COLUMNS;
#else
constexpr int FEW_ROWS = 0, FEW_COLUMNS = TILE_COLUMNS;
#endif

template <int T, int H>
static inline __attribute__((always_inline)) void begin_sums(const int32_t* start, I (&acc)[T][H]) {
#pragma GCC unroll 24
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) acc[t][h] = set_i(start[t]);
}

template <int T, int H>
static inline __attribute__((always_inline)) void end_sums(I (&)[T][H]) {}

#ifdef QCORE_WORD_SUMS
#include "word_sums.inl"
#else
// The products of T digit rows with `steps` times 128 bytes of codes, H vectors of each, added to acc.
// The codes hold 4 (8-bit) or 8 (4-bit) columns of x for 32 outputs; the next 2 KiB of them are on their way meanwhile.
// Four digits of a row are broadcast once for H vectors. `k_step`, `row_step`: bytes of x from one set of 4 columns, or
// from one row, to the next; BESIDE: `row_step` is DIGIT_RUN. STEPS: their number if it is known, else 0.
template <Element E, int T, int H, bool BESIDE, int STEPS = 0>
static inline __attribute__((always_inline)) void
sweep(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, int64_t row_step, I mask, I table,
      I (&acc)[T][H]) {
  constexpr int BYTES = LANES * 4;  // of one vector of codes
  const auto step = [&]() __attribute__((always_inline)) {
    I low[H], high[H];
    for (int h = 0; h < H; h++) {
      prefetch(codes + 2048 + BYTES * h);
      const I v = load_i(codes + BYTES * h);
      if constexpr (E == INT8) {
        low[h] = SIGNED_CODES ? invert_top(v) : v;
      } else {
        low[h] = low_nibbles(v, mask), high[h] = high_nibbles(v, mask);
        if constexpr (E == HALVES4) low[h] = lookup_bytes(table, low[h]), high[h] = lookup_bytes(table, high[h]);
      }
    }
#pragma GCC unroll 24
    for (int t = 0; t < T; t++) {
      int32_t word;
      __builtin_memcpy(&word, q + t * row_step, 4);
      const I digits = set_i(word);
      for (int h = 0; h < H; h++) acc[t][h] = dot(acc[t][h], low[h], digits);
    }
    if constexpr (E != INT8) {
#pragma GCC unroll 24
      for (int t = 0; t < T; t++) {
        int32_t word;
        __builtin_memcpy(&word, q + k_step + t * row_step, 4);
        const I digits = set_i(word);
        for (int h = 0; h < H; h++) acc[t][h] = dot(acc[t][h], high[h], digits);
      }
    }
    codes += 128, q += (E == INT8 ? 1 : 2) * k_step;
  };
  if constexpr (STEPS) {
#pragma GCC unroll 4
    for (int i = 0; i < STEPS; i++) step();
  } else {
#pragma GCC unroll 2
    for (int64_t i = 0; i < steps; i++) step();
  }
}
#endif
#endif

// The same as a function of its own, where registers do not hold both accumulators and float sums: a compiler that sees
// both would rather spill accumulators in the innermost loop.
template <Element E, int T, int H>
static void __attribute__((noinline))
sweep_apart(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, I mask, I table, const int32_t* start,
            I (&result)[SLOTS<T>][H]) {
  I acc[SLOTS<T>][H];
  begin_sums<T, H>(start, acc);
  sweep<E, T, H, true>(codes, q, steps, k_step, DIGIT_RUN, mask, table, acc);
  end_sums<T, H>(acc);
#pragma GCC unroll 24
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) result[t][h] = acc[t][h];
}

// R rows of D digits, H vectors of columns from vector `first` of block nb on. ZEROS: there are zero points of any kind;
// without them the fold has no conditions. STEPS: of a group, if that is one
// fold of a known number of steps, else 0.
template <Element E, int R, int D, int H, bool ZEROS, int STEPS>
static void __attribute__((noinline))
tile(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int first, int rows, int64_t row0) {
  constexpr int T = R * D;
  constexpr bool FOUR = E != INT8;
  const int64_t steps_bytes = w.at.packed() / (FOUR ? 8 : 4) * 128;
  const uint8_t* codes = w.data + nb * steps_bytes + first * LANES * 4;
  const int64_t fold = w.fold, folds_per_group = STEPS ? 1 : w.at.block * w.at.blocks / fold;
  const bool grouped = STEPS || w.at.groups > 1;
  const bool zeroed = ZEROS && w.sums && in.mode != DIGITS, own_zeros = ZEROS && w.zero;
  const int signed_offset = SIGNED_CODES && !FOUR ? 128 : 0;
  const I mask = nibble_mask();
  const I table = E == HALVES4 ? table_bytes(w.whole) : mask;
  const ScaleVectors scales(w);
  F sum[R][H];
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) sum[r][h] = set_f(0);
  int64_t f = 0;
  const int8_t* q = x.q;
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int64_t parameters = (nb * w.at.groups + g) * COLUMNS + first * LANES;
    F scale[H];
    I zero[H];
    for (int h = 0; h < H; h++) {
      scale[h] = grouped ? scales(parameters + h * LANES) : set_f(1);
      zero[h] = set_i(0);
      if (own_zeros) zero[h] = sub_i(bytes_i(w.zero + parameters + h * LANES), set_i(signed_offset));
    }
    for (int64_t i = 0; i < folds_per_group; i++, f++) {
      // 1. The offset of the codes is one number per row: the accumulators start with it. Zero points that differ by
      //    column are subtracted at the end.
      I acc[SLOTS<T>][H];
      const int32_t *sums = x.sum + f * rows * D, *begin = x.begin + f * rows * D;
      alignas(64) int32_t start[SLOTS<T>];
      start[SLOTS<T> - 1] = 0;
#pragma GCC unroll 24
      for (int t = 0; t < T; t++) start[t] = own_zeros ? 0 : begin[t];
      // 2. Products.
      const int64_t steps = fold / (FOUR ? 8 : 4), k_step = 4 * rows * D;
      if constexpr (R * H + SLOTS<T> * H > REGISTERS - 6) {
        sweep_apart<E, T, H>(codes, q, steps, k_step, mask, table, start, acc);
      } else {
        begin_sums<T, H>(start, acc);
        sweep<E, T, H, true, STEPS>(codes, q, steps, k_step, DIGIT_RUN, mask, table, acc);
        end_sums<T, H>(acc);
      }
      codes += steps * 128, q += fold * rows * D;
      // 3. Fold: zero points, digits to one number, scales.
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
          F v;
          if constexpr (D == 1) {
            I c = acc[r][h];
            if (own_zeros) c = sub_i(c, mul_i(zero[h], set_i(sums[r])));
            if (zeroed) {
              const int64_t at = (nb * w.folds() + f) * COLUMNS + (first + h) * LANES;
              c = sub_i(c, mul_i(load_i(w.sums + at), set_i(x.zero[r])));
            }
            v = to_f(c);
            sum[r][h] = grouped ? fma_f(v, scale[h], sum[r][h]) : add_f(sum[r][h], v);
          } else {
            // Two digits are one number modulo 2^32, and so are the sums that zero points multiply.
            I c = add_i(acc[r * D][h], shl_i<8>(acc[r * D + 1][h]));
            if (own_zeros) {
              const int32_t both = (int32_t)((uint32_t)sums[r * D] + ((uint32_t)sums[r * D + 1] << 8));
              c = sub_i(c, mul_i(zero[h], set_i(both)));
            }
            v = to_f(c);
            if constexpr (D == 3) {
              I third = acc[r * D + 2][h];
              if (own_zeros) third = sub_i(third, mul_i(zero[h], set_i(sums[r * D + 2])));
              v = fma_f(to_f(third), set_f(65536.0f), v);
            }
            const F step = set_f(x.scale[f * rows + r]);
            sum[r][h] = fma_f(v, grouped ? mul_f(scale[h], step) : step, sum[r][h]);
          }
        }
      }
      if (ZEROS && w.added && grouped) {
        for (int h = 0; h < H; h++) {
          const F added = widen_f(w.added, parameters + h * LANES, w.scale_type);
          for (int r = 0; r < R; r++) sum[r][h] = fma_f(added, set_f(x.total[f * rows + r]), sum[r][h]);
        }
      }
    }
  }
  // 4. Scales per channel and of the row, spikes, bias, rounding.
  alignas(64) float bias[COLUMNS];
  const int64_t column = nb * COLUMNS + first * LANES;
  if (column >= w.n) return;
  read_bias(out, column, w.n, H * LANES, bias);
  for (int r = 0; r < R; r++) {
    F v[H];  // a copy: sums of which there are references would lie in memory
    for (int h = 0; h < H; h++) v[h] = sum[r][h];
    finish_sums(w, out, x, nb, first, rows, r, row0, D == 1, bias, v);
  }
}

using Tile = void (*)(const Weight&, const Input&, const Output&, const Rows&, int64_t, int, int, int64_t);

// The tile of `count` rows, from R to as many as have MOST digit rows.
template <Element E, int D, int H, bool ZEROS, int STEPS, int R, int MOST>
static Tile choose(int count) {
  if constexpr (R * D > MOST && R > 1) return nullptr;
  else return count == R ? tile<E, R, D, H, ZEROS, STEPS> : choose<E, D, H, ZEROS, STEPS, R + 1, MOST>(count);
}

template <Element E, int D, int H, int R, int MOST, int STEPS = 0>
static Tile tile_for(int count, bool zeros) {
  return zeros ? choose<E, D, H, true, STEPS, R, MOST>(count) : choose<E, D, H, false, STEPS, R, MOST>(count);
}

template <Element E, int D>
static void tiles(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows, int count,
                  int64_t row0) {
  constexpr int WIDE = TILE_COLUMNS / LANES;
  // Groups of up to 64, and digits of 4-bit codes, are folded so often that the float sums should stay in registers: half as
  // many columns.
  constexpr int NARROW = WIDE > 1 && LANES == 16 ? 1 : WIDE;
  const bool narrow = D == 1 ? w.at.groups > 1 && w.at.group <= 64 && count > 2 : E != INT8 && count > 1;
  const bool zeros = w.zero || w.added || w.sums;
  int width = narrow ? NARROW : WIDE;
  Tile run;
  if constexpr (FEW_ROWS) {  // wider still
    constexpr int FEW = FEW_COLUMNS / LANES;
    const bool few = count * D <= FEW_ROWS;
    if (few) width = FEW;
    run = few ? tile_for<E, D, FEW, 1, FEW_ROWS>(count, zeros)
              : tile_for<E, D, WIDE, FEW_ROWS / D + 1, DIGIT_ROWS>(count, zeros);
  } else {
    run = narrow ? tile_for<E, D, NARROW, 1, DIGIT_ROWS>(count, zeros) : tile_for<E, D, WIDE, 1, DIGIT_ROWS>(count, zeros);
    if constexpr (E == INT4 && SHORT_FOLDS) {  // groups of 32, the most common
      const bool shortest = w.at.groups > 1 && w.at.block == 32 && w.at.blocks == 1;
      if (shortest && narrow) run = tile_for<E, D, NARROW, D == 1 ? 3 : 2, DIGIT_ROWS, 4>(count, zeros);
      else if (shortest && count == 1) run = tile_for<E, D, WIDE, 1, D, 4>(count, zeros);
    }
  }
  for (int first = 0; first < COLUMNS / LANES; first += width) run(w, in, out, x, nb, first, rows, row0);
}

template <Element E>
static void product_of(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows,
                       int count, int digits, int64_t row0) {
  if (digits == 1) tiles<E, 1>(w, in, out, x, nb, rows, count, row0);
  else if (digits == 2) tiles<E, 2>(w, in, out, x, nb, rows, count, row0);
  else tiles<E, 3>(w, in, out, x, nb, rows, count, row0);
}

static void product(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows, int count,
                    int digits, int64_t row0) {
  if (w.element == INT4) product_of<INT4>(w, in, out, x, nb, rows, count, digits, row0);
  else if (w.element == INT8) product_of<INT8>(w, in, out, x, nb, rows, count, digits, row0);
  else product_of<HALVES4>(w, in, out, x, nb, rows, count, digits, row0);
}
