// Windows of a convolution, as rows of codes, times weights with a scale for each group of K: the sums of a group become
// floats at once, in the order of `tile`, for the same bits.

// The sums of R windows from `first` on with one vector set of columns, from column `column` on, scaled by group.
template <Element E, int R, int H>
static void __attribute__((noinline))
group_sweep(const Weight& w, const Windows& x, int64_t first, int64_t nb, int vector, F* result) {
  const int64_t group = w.at.group, steps = group / (E == INT8 ? 4 : 8);
  const uint8_t* codes = w.data + nb * w.at.groups * steps * 128 + vector * LANES * 4;
  const int8_t* q = x.x + first * x.step;
  const bool own_zeros = w.zero, zeroed = w.sums && x.zeros;
  const int signed_offset = SIGNED_CODES && E == INT8 ? 128 : 0;
  const I mask = nibble_mask();
  const ScaleVectors scales(w);
  F sum[R][H];
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) sum[r][h] = set_f(0);
  for (int64_t g = 0; g < w.at.groups; g++, codes += steps * 128, q += group) {
    const int64_t at = g * x.groups->step + first, parameters = (nb * w.at.groups + g) * COLUMNS + vector * LANES;
    I acc[SLOTS<R>][H];
    alignas(64) int32_t start[SLOTS<R>];
    start[SLOTS<R> - 1] = 0;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) start[r] = own_zeros ? 0 : x.groups->begin[at + r];
    begin_sums<R, H>(start, acc);
    sweep<E, R, H, false>(codes, q, steps, 4, x.step, mask, mask, acc);
    end_sums<R, H>(acc);
    if (own_zeros)
      for (int h = 0; h < H; h++) {
        const I zero = sub_i(bytes_i(w.zero + parameters + h * LANES), set_i(signed_offset));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) acc[r][h] = sub_i(acc[r][h], mul_i(zero, set_i(x.groups->sums[at + r])));
      }
    if (zeroed)
      for (int h = 0; h < H; h++) {
        const I own = load_i(w.sums + parameters + h * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) acc[r][h] = sub_i(acc[r][h], mul_i(own, set_i(x.zeros[first + r])));
      }
    for (int h = 0; h < H; h++) {
      const F scale = scales(parameters + h * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) sum[r][h] = fma_f(to_f(acc[r][h]), scale, sum[r][h]);
    }
    if (w.added)
      for (int h = 0; h < H; h++) {
        const F added = widen_f(w.added, parameters + h * LANES, w.scale_type);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sum[r][h] = fma_f(added, set_f(x.groups->totals[at + r]), sum[r][h]);
      }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) result[r * H + h] = sum[r][h];
}

using GroupSweep = void (*)(const Weight&, const Windows&, int64_t, int64_t, int, F*);

template <Element E, int R, int H>
static GroupSweep choose_groups(int count) {
  if constexpr (R > DIGIT_ROWS) return nullptr;
  else return count == R ? group_sweep<E, R, H> : choose_groups<E, R + 1, H>(count);
}

template <Type TYPE, int H>
static void group_ends(const Output& out, const Windows& x, int64_t first, int64_t count, int64_t column, int64_t n,
                       int64_t row0, const float* bias, const F* sums) {
  char* y = (char*)out.y + ((row0 + first) * out.stride + column) * type_size(out.type);
  for (int64_t r = first; r < first + count; r++, sums += H, y += out.stride * type_size(out.type)) {
    F results[H];
    for (int h = 0; h < H; h++) results[h] = mul_f(sums[h], set_f(x.scales[r]));
    finish_window<TYPE, H>(out, y, row0 + r, column, n, n - column < H * LANES ? n - column : H * LANES, bias, results);
  }
}

template <Element E, int H>
static void group_tiles(const Weight& w, const Output& out, const Windows& x, int64_t nb, int vector, int64_t count,
                        int64_t row0) {
  const int64_t column = nb * COLUMNS + vector * LANES;
  const int most = even_rows(count, DIGIT_ROWS);
  const GroupSweep whole = choose_groups<E, 1, H>(most);
  alignas(64) float bias[COLUMNS];
  read_bias(out, column, w.n, H * LANES, bias);
  F sums[DIGIT_ROWS * H];
  for (int64_t r = 0; r < count; r += most) {
    const int here = (int)(count - r < most ? count - r : most);
    (here == most ? whole : choose_groups<E, 1, H>(here))(w, x, r, nb, vector, sums);
#ifdef QCORE_PARTS
    if (out.type == BF16) group_ends<BF16, H>(out, x, r, here, column, w.n, row0, bias, sums);
    else if (out.type == F32) group_ends<F32, H>(out, x, r, here, column, w.n, row0, bias, sums);
    else
#endif
    group_ends<I8, H>(out, x, r, here, column, w.n, row0, bias, sums);
  }
}

static void group_product(const Weight& w, const Output& out, const Windows& x, int64_t nb, int64_t count, int64_t row0) {
  constexpr int WIDE = TILE_COLUMNS / LANES;
  const bool four = w.element == INT4, narrow = LANES == 16 && w.at.group <= 64 && count > 2;  // as `tiles`
  for (int first = 0, width = 1; first < COLUMNS / LANES && nb * COLUMNS + first * LANES < w.n; first += width) {
    width = narrow || w.n - nb * COLUMNS - first * LANES <= LANES ? 1 : WIDE;
    if (width == 1) (four ? group_tiles<INT4, 1> : group_tiles<INT8, 1>)(w, out, x, nb, first, count, row0);
    else (four ? group_tiles<INT4, WIDE> : group_tiles<INT8, WIDE>)(w, out, x, nb, first, count, row0);
  }
}
