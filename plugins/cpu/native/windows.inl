// Convolutions: products of windows that lie at a constant step; with weights in groups see groups.inl.

// The products of R windows from `first` on with one vector set of columns; a function of its own for the reason of
// `sweep_apart`.
template <Element E, int R, int H>
static void __attribute__((noinline))
window_sweep(const uint8_t* codes, const Windows& x, int64_t first, int32_t offset, bool own_zeros, I* result) {
  const I mask = nibble_mask();
  const int64_t steps = x.run / (E == INT8 ? 4 : 8);
  I acc[SLOTS<R>][H];
  int32_t start[SLOTS<R>] = {0};
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) start[r] = own_zeros ? 0 : -offset * x.sums[first + r];
  begin_sums<R, H>(start, acc);
  for (int64_t t = 0; t < x.count; t++, codes += steps * 128)
    sweep<E, R, H, false>(codes, x.x + first * x.step + x.taps[t], steps, 4, x.step, mask, mask, acc);
  end_sums<R, H>(acc);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) result[r * H + h] = acc[r][h];
}

// Results of a window, of which `here` are at y, with bias. TYPE: of results, or I8 for any.
template <Type TYPE, int H>
static inline __attribute__((always_inline)) void
finish_window(const Output& out, [[maybe_unused]] char* y, int64_t row, int64_t column, int64_t n,
              [[maybe_unused]] int64_t here, const float* bias, F (&results)[H]) {
#ifdef QCORE_PARTS
  if constexpr (TYPE != I8) {
    if (out.bias)
      for (int h = 0; h < H; h++) results[h] = add_f(results[h], load_f(bias + h * LANES));
    if (H > 1 && here == H * LANES) return store_vectors<H>(y, 0, TYPE, results);
    return store_some<H>(y, 0, TYPE, here, results);
  }
#endif
  finish_vectors(out, row, column, n, bias, results);
}

// What becomes of the sums of H vectors of columns: scales and zero points of the weight, one for each channel. ZEROS:
// there are zero points of any kind.
template <int H, bool ZEROS>
struct WindowEnd {
  const Weight& w;
  const Output& out;
  const Windows& x;
  int64_t column;
  F scale[H], added[H];
  I sums_of_weight[H];
  alignas(64) float bias[COLUMNS];
  WindowEnd(const Weight& w, const Output& out, const Windows& x, int64_t column)
      : w(w), out(out), x(x), column(column) {
    read_bias(out, column, w.n, H * LANES, bias);
    for (int h = 0; h < H; h++) {
      scale[h] = scales_f(w, column + h * LANES);
      added[h] = ZEROS && w.added ? widen_f(w.added, column + h * LANES, w.scale_type) : set_f(0);
      sums_of_weight[h] = ZEROS && w.sums && x.zeros ? load_i(w.sums + column + h * LANES) : set_i(0);
    }
  }
  // Windows from `first` on, whose sums of columns lie `step` vectors apart; result `row0` is that of window 0. LATE:
  // the offset of the codes is still to be subtracted, where there are no zero points. TYPE: of results, or I8 for any.
  template <Type TYPE, bool LATE>
  void rows_as(const I* sums, int64_t step, int64_t first, int64_t count, int signed_offset, int64_t row0) const {
    [[maybe_unused]] const int64_t here = w.n - column < H * LANES ? w.n - column : H * LANES;
    [[maybe_unused]] const bool zeroed = w.sums && x.zeros;
    char* y = (char*)out.y + ((row0 + first) * out.stride + column) * type_size(out.type);
    for (int64_t r = first; r < first + count; r++, sums += step, y += out.stride * type_size(out.type)) {
      F results[H];
      for (int h = 0; h < H; h++) {
        const int64_t at = column + h * LANES;
        I c = sums[h];
        if (LATE && !(ZEROS && w.zero)) c = sub_i(c, set_i(w.offset * x.sums[r]));
        if (ZEROS && w.zero) c = sub_i(c, mul_i(sub_i(bytes_i(w.zero + at), set_i(signed_offset)), set_i(x.sums[r])));
        if (ZEROS && zeroed) c = sub_i(c, mul_i(sums_of_weight[h], set_i(x.zeros[r])));
        F v = mul_f(to_f(c), scale[h]);
        if (ZEROS && w.added) {
          const int32_t centered = x.sums[r] - (x.zeros ? (int32_t)w.at.k * x.zeros[r] : 0);
          v = fma_f(added[h], set_f((float)centered), v);
        }
        results[h] = mul_f(v, set_f(x.scales[r]));
      }
      finish_window<TYPE, H>(out, y, row0 + r, column, w.n, here, bias, results);
    }
  }
  template <bool LATE = false>
  void rows(const I* sums, int64_t step, int64_t first, int64_t count, int signed_offset, int64_t row0) const {
#ifdef QCORE_PARTS
    if (out.type == BF16) return rows_as<BF16, LATE>(sums, step, first, count, signed_offset, row0);
    if (out.type == F32) return rows_as<F32, LATE>(sums, step, first, count, signed_offset, row0);
#endif
    rows_as<I8, LATE>(sums, step, first, count, signed_offset, row0);
  }
};
static inline bool has_zeros(const Weight& w) { return w.zero || w.added || w.sums; }

// The sums of some windows from x on, with one set of vectors of columns.
template <int H>
using WindowSweep = void (*)(const uint8_t*, const Windows&, int64_t, int32_t, bool, I*);

template <Element E, int R, int H>
static WindowSweep<H> choose_sweep(int count) {
  if constexpr (R > DIGIT_ROWS) return nullptr;
  else return count == R ? window_sweep<E, R, H> : choose_sweep<E, R + 1, H>(count);
}

template <Element E, int H, bool ZEROS>
static void window_tiles(const Weight& w, const Output& out, const Windows& x, int64_t nb, int first, int64_t count,
                         int64_t row0) {
  const int64_t column = nb * COLUMNS + first * LANES;
  const uint8_t* codes = w.data + nb * (w.at.packed() / (E == INT8 ? 4 : 8)) * 128 + first * LANES * 4;
  const int signed_offset = SIGNED_CODES && E == INT8 ? 128 : 0;
  const WindowEnd<H, ZEROS> end(w, out, x, column);
  const int most = even_rows(count, DIGIT_ROWS);
  const WindowSweep<H> whole = choose_sweep<E, 1, H>(most);
  I sums[DIGIT_ROWS * H];
  for (int64_t r = 0; r < count; r += most) {
    const int here = (int)(count - r < most ? count - r : most);
    (here == most ? whole : choose_sweep<E, 1, H>(here))(codes, x, r, w.offset - signed_offset, w.zero, sums);
    end.rows(sums, H, r, here, signed_offset, row0);
  }
}

template <Element E, int H>
static void window_tiles_of(const Weight& w, const Output& out, const Windows& x, int64_t nb, int first, int64_t count,
                            int64_t row0) {
  (has_zeros(w) ? window_tiles<E, H, true> : window_tiles<E, H, false>)(w, out, x, nb, first, count, row0);
}

#include "groups.inl"

static void window_product(const Weight& w, const Output& out, const Windows& x, int64_t nb, int64_t count,
                           int64_t row0) {
  constexpr int H = TILE_COLUMNS / LANES;
  const bool four = w.element == INT4;
  if (x.groups) return group_product(w, out, x, nb, count, row0);
  for (int first = 0; first < COLUMNS / LANES && nb * COLUMNS + first * LANES < w.n; first += H) {
    const bool single = w.n - nb * COLUMNS - first * LANES <= LANES;  // vector of columns
    if (single) (four ? window_tiles_of<INT4, 1> : window_tiles_of<INT8, 1>)(w, out, x, nb, first, count, row0);
    else (four ? window_tiles_of<INT4, H> : window_tiles_of<INT8, H>)(w, out, x, nb, first, count, row0);
  }
}
