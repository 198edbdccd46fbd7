// A block of rows times 32 packed columns: int8 products of digits, folded to float per group.

static inline F scales_f(const Weight& w, int64_t i) {
  F s;
  if (w.scale_type == E8M0) {
    // 2^(b - 127): the exponent of a float; 2^-127, b = 0, is the subnormal number with the highest bit of the mantissa.
    // b = 255 is NaN.
    const I b = bytes_i((const uint8_t*)w.scale + i);
    s = from_bits(max_i(add_i(shl_i<23>(b), shl_i<22>(shr_i<8>(add_i(b, set_i(1))))), set_i(0x00400000)));
  } else {
    s = widen_f(w.scale, i, w.scale_type);
  }
  if (w.divisor != 1.0f) s = div_f(s, set_f(w.divisor));
  if (w.factor != 1.0f) s = mul_f(s, set_f(w.factor));
  return s;
}

// v with the NaN of arithmetic in place of others: rounding as below keeps that one a NaN.
static inline F quiet(F v) {
  const I magnitude = min_i(and_i(bits(v), set_i(0x7fffffff)), set_i(0x7fc00000));
  return from_bits(or_i(magnitude, and_i(bits(v), set_i((int32_t)0x80000000))));
}
static inline float quiet(float v) { return v == v ? v : __builtin_nanf(""); }
// Its bits, of which the upper half is bfloat16, rounded half to even.
static inline I rounded_bits(F v) {
  return add_i(bits(v), add_i(and_i(shr_i<16>(bits(v)), set_i(1)), set_i(0x7fff)));
}

// bfloat16 in the low half of each lane, rounded half to even: vcvtneps2bf16 would flush denormals. NaN, quiet after any
// arithmetic, is kept from running over into the sign.
static inline I bf16_words(F v) {
  const I magnitude = min_i(and_i(bits(v), set_i(0x7fffffff)), set_i(0x7fc00000));
  const I odd = and_i(shr_i<16>(magnitude), set_i(1));
  const I rounded = add_i(magnitude, add_i(odd, set_i(0x7fff)));
  return shr_i<16>(or_i(rounded, and_i(bits(v), set_i((int32_t)0x80000000))));
}

static inline void store_result(void* y, int64_t i, Type type, F v) {
  if (type == F32) store_f((float*)y + i, v);
  else if (type == BF16) store_words((uint16_t*)y + i, bf16_words(v));
  else store_fp16((uint16_t*)y + i, v);
}

// Bias, rounding and bounds for `columns` results of one row, which lie in `values` [LANES-padded].
static void finish_row(const Output& out, int64_t row, int64_t column, int64_t n, int columns, const float* bias,
                       float* values) {
  const int64_t here = n - column < columns ? n - column : columns;
  if (out.bias)
    for (int c = 0; c < columns; c += LANES) store_f(values + c, add_f(load_f(values + c), load_f(bias + c)));
  char* y = (char*)out.y + row * out.stride * type_size(out.type);
  if (out.type == I8) {
    const float scale = out.scales ? out.scales[row] : out.scale;
    const I zero = set_i(out.zeros ? out.zeros[row] : out.zero);
    alignas(64) int8_t codes[COLUMNS];
    for (int c = 0; c < columns; c += LANES) {
      const F q = max_f(min_f(div_f(load_f(values + c), set_f(scale)), set_f(1e6f)), set_f(-1e6f));
      narrow_i(codes + c, add_i(round_i(q), zero));
    }
    __builtin_memcpy(y + column, codes, (size_t)here);
  } else if (here == columns) {
    for (int c = 0; c < columns; c += LANES) store_result(y, column + c, out.type, load_f(values + c));
  } else {
    alignas(64) char rounded[COLUMNS * 4];
    const int size = type_size(out.type);
    for (int c = 0; c < columns; c += LANES) store_result(rounded, c, out.type, load_f(values + c));
    __builtin_memcpy(y + column * size, rounded, (size_t)here * size);
  }
}

static inline void read_bias(const Output& out, int64_t column, int64_t n, int columns, float* bias) {
  int64_t here = n - column < columns ? n - column : columns;
  if (!out.bias || here < 0) here = 0;
  if (here) widen((const char*)out.bias + column * type_size(out.bias_type), out.bias_type, here, bias);
  for (int64_t i = here; i < columns; i++) bias[i] = 0;
}

static inline float one_scale(const Weight& w, int64_t i) {
  float s;
  if (w.scale_type == F32) {
    s = ((const float*)w.scale)[i];
  } else if (w.scale_type == E8M0) {
    const uint32_t b = ((const uint8_t*)w.scale)[i], u = b ? b << 23 : 0x00400000;
    __builtin_memcpy(&s, &u, 4);
  } else if (w.scale_type == BF16) {
    const uint32_t u = (uint32_t)((const uint16_t*)w.scale)[i] << 16;
    __builtin_memcpy(&s, &u, 4);
  } else {
    widen((const uint16_t*)w.scale + i, F16, 1, &s);
  }
  if (w.divisor != 1.0f) s /= w.divisor;
  return w.factor != 1.0f ? s * w.factor : s;
}

// Scales per channel, and float zero points times `total`, the sum of x, on `vectors` vectors of sums of one row. For
// weights in groups they are in the sums already.
static inline void apply_channels(const Weight& w, int64_t nb, int first, int vectors, float total, float* values) {
  if (w.at.groups > 1) return;
  for (int h = 0; h < vectors; h++) {
    const int64_t at = nb * COLUMNS + (first + h) * LANES;
    F v = mul_f(load_f(values + h * LANES), scales_f(w, at));
    if (w.added) v = fma_f(widen_f(w.added, at, w.scale_type), set_f(total), v);
    store_f(values + h * LANES, v);
  }
}

// Add the products of spikes, in float: value * weight, column by column.
static void add_spikes(const Weight& w, const SpikeList& list, int64_t nb, int half, int columns, int row, float* values) {
  for (int64_t i = 0; i < list.count; i++) {
    const Spike& spike = list.items[i];
    if (spike.row != row) continue;
    const int64_t group = spike.k / (w.at.block * w.at.blocks);
    for (int c = 0; c < columns; c++) {
      const int column = half + c;
      int code;
      if (w.element == INT8) {
        code = w.data[(nb * (w.at.packed() / 4) + spike.k / 4) * 128 + column * 4 + spike.k % 4];
      } else {
        const uint8_t pair = w.data[(nb * (w.at.packed() / 8) + spike.k / 8) * 128 + column * 4 + spike.k % 4];
        code = spike.k % 8 < 4 ? pair & 15 : pair >> 4;
        if (w.element == HALVES4) code = w.whole[code];
      }
      const int64_t at = (nb * w.at.groups + group) * COLUMNS + column;
      code -= w.zero ? w.zero[at] : w.offset;
      float weight = (float)code * one_scale(w, at);
      if (w.added) {
        float added;
        widen((const char*)w.added + at * type_size(w.scale_type), w.scale_type, 1, &added);
        weight += added;
      }
      values[c] += spike.value * weight;
    }
  }
}

// The sums of row r, `vectors` vectors of columns from vector `first` on, to results: scales per channel and of the row
// (`scaled`: of int8 activations), spikes, bias, rounding.
static void finish_sums(const Weight& w, const Output& out, const Rows& x, int64_t nb, int first, int vectors, int rows,
                        int r, int64_t row0, bool scaled, const float* bias, float* values) {
  float total = 0;
  if (w.added)
    for (int64_t b = 0; b < w.folds(); b++) total += x.total[b * rows + r];
  apply_channels(w, nb, first, vectors, total, values);
  if (scaled)
    for (int h = 0; h < vectors; h++) store_f(values + h * LANES, mul_f(load_f(values + h * LANES), set_f(x.scale[r])));
  if (x.spikes->count) add_spikes(w, *x.spikes, nb, first * LANES, vectors * LANES, r, values);
  finish_row(out, row0 + r, nb * COLUMNS + first * LANES, w.n, vectors * LANES, bias, values);
}

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
// from one row, to the next; BESIDE: `row_step` is DIGIT_RUN.
template <Element E, int T, int H, bool BESIDE>
static inline __attribute__((always_inline)) void
sweep(const uint8_t* codes, const int8_t* q, int64_t steps, int64_t k_step, int64_t row_step, I mask, I table,
      I (&acc)[T][H]) {
  constexpr int BYTES = LANES * 4;  // of one vector of codes
#pragma GCC unroll 2
  for (int64_t i = 0; i < steps; i++, codes += 128, q += (E == INT8 ? 1 : 2) * k_step) {
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
// without them the fold has no conditions.
template <Element E, int R, int D, int H, bool ZEROS>
static void __attribute__((noinline))
tile(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int first, int rows, int64_t row0) {
  constexpr int T = R * D;
  constexpr bool FOUR = E != INT8;
  const int64_t steps_bytes = w.at.packed() / (FOUR ? 8 : 4) * 128;
  const uint8_t* codes = w.data + nb * steps_bytes + first * LANES * 4;
  const int64_t fold = w.fold, folds_per_group = w.at.block * w.at.blocks / fold;
  const bool grouped = w.at.groups > 1;
  const bool zeroed = ZEROS && w.sums && in.mode != DIGITS, own_zeros = ZEROS && w.zero;
  const int signed_offset = SIGNED_CODES && !FOUR ? 128 : 0;  // codes are read less this
  const int32_t offset = w.offset - signed_offset;
  const I mask = nibble_mask();
  const I table = E == HALVES4 ? table_bytes(w.whole) : mask;
  F sum[R][H];
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) sum[r][h] = set_f(0);
  int64_t f = 0;
  const int8_t* q = x.q;
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int64_t parameters = (nb * w.at.groups + g) * COLUMNS + first * LANES;
    F scale[H];
    I zero[H];
    for (int h = 0; h < H; h++) {
      scale[h] = grouped ? scales_f(w, parameters + h * LANES) : set_f(1);
      zero[h] = set_i(0);
      if (own_zeros) zero[h] = sub_i(bytes_i(w.zero + parameters + h * LANES), set_i(signed_offset));
    }
    for (int64_t i = 0; i < folds_per_group; i++, f++) {
      // 1. The offset of the codes is one number per row: the accumulators start with it. Zero points that differ by
      //    column are subtracted at the end.
      I acc[SLOTS<T>][H];
      const int32_t* sums = x.sum + f * rows * D;
      alignas(64) int32_t start[SLOTS<T>];
      start[SLOTS<T> - 1] = 0;
#pragma GCC unroll 24
      for (int t = 0; t < T; t++) start[t] = own_zeros ? 0 : -offset * sums[t];
      // 2. Products.
      const int64_t steps = fold / (FOUR ? 8 : 4), k_step = 4 * rows * D;
      if constexpr (R * H + SLOTS<T> * H > REGISTERS - 6) {
        sweep_apart<E, T, H>(codes, q, steps, k_step, mask, table, start, acc);
      } else {
        begin_sums<T, H>(start, acc);
        sweep<E, T, H, true>(codes, q, steps, k_step, DIGIT_RUN, mask, table, acc);
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
  alignas(64) float bias[COLUMNS], values[COLUMNS];
  const int64_t column = nb * COLUMNS + first * LANES;
  if (column >= w.n) return;
  read_bias(out, column, w.n, H * LANES, bias);
  for (int r = 0; r < R; r++) {
    for (int h = 0; h < H; h++) store_f(values + h * LANES, sum[r][h]);
    finish_sums(w, out, x, nb, first, H, rows, r, row0, D == 1, bias, values);
  }
}

using Tile = void (*)(const Weight&, const Input&, const Output&, const Rows&, int64_t, int, int, int64_t);

// The tile of `count` rows, from R to as many as have MOST digit rows.
template <Element E, int D, int H, bool ZEROS, int R, int MOST>
static Tile choose(int count) {
  if constexpr (R * D > MOST && R > 1) return nullptr;
  else return count == R ? tile<E, R, D, H, ZEROS> : choose<E, D, H, ZEROS, R + 1, MOST>(count);
}

template <Element E, int D, int H, int R, int MOST>
static Tile tile_for(int count, bool zeros) {
  return zeros ? choose<E, D, H, true, R, MOST>(count) : choose<E, D, H, false, R, MOST>(count);
}

template <Element E, int D>
static void tiles(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows, int count,
                  int64_t row0) {
  constexpr int WIDE = TILE_COLUMNS / LANES;
  // Groups of up to 64 are folded so often that the float sums should stay in registers: half as many columns.
  constexpr int NARROW = WIDE > 1 && LANES == 16 ? 1 : WIDE;
  const bool narrow = D == 1 && w.at.groups > 1 && w.at.group <= 64 && count > 2;
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
