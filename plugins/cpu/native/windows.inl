// Convolutions: codes of whole images or windows, and products of windows that lie at a constant step.

// CLAMP: values may lie beyond the codes; without it the scale was made for their largest.
template <Type TYPE, bool CLAMP>
static int32_t run_codes(const void* x, int64_t count, float inverse, int32_t zero, int8_t* codes) {
  const F f = set_f(inverse), most = set_f(1e6f), least = set_f(-1e6f);
  const I z = set_i(zero), high = set_i(127), low = set_i(-128);
  const auto code = [&](F v) {
    if (TYPE == I8) return round_i(v);
    if (!CLAMP) return round_i(mul_f(v, f));
    return max_i(min_i(add_i(round_i(max_f(min_f(mul_f(v, f), most), least)), z), high), low);
  };
  I sum = set_i(0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const I q = code(widen_f(x, i, TYPE));
    sum = add_i(sum, q);
    narrow_i(codes + i, q);
  }
  int32_t total = sum_i(sum);
  if (i < count) {
    alignas(64) float rest[LANES] = {0};
    alignas(64) int8_t narrow[LANES];
    widen((const char*)x + i * type_size(TYPE), TYPE, count - i, rest);
    narrow_i(narrow, code(load_f(rest)));
    for (int j = 0; i < count; i++, j++) codes[i] = narrow[j], total += narrow[j];
  }
  return total;
}

static int32_t quantize_run(const void* x, Type type, int64_t count, float inverse, int32_t zero, bool clamp,
                            int8_t* codes) {
  if (type == I8) return run_codes<I8, false>(x, count, inverse, zero, codes);
  if (type == F32) return (clamp ? run_codes<F32, true> : run_codes<F32, false>)(x, count, inverse, zero, codes);
  if (type == BF16) return (clamp ? run_codes<BF16, true> : run_codes<BF16, false>)(x, count, inverse, zero, codes);
  return (clamp ? run_codes<F16, true> : run_codes<F16, false>)(x, count, inverse, zero, codes);
}

static int32_t magnitude(const void* x, Type type, int64_t count) {
  const I all_but_sign = set_i(0x7fffffff);
  I most = set_i(0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) most = max_i(most, and_i(bits(widen_f(x, i, type)), all_but_sign));
  if (i < count) {
    alignas(64) float rest[LANES] = {0};
    widen((const char*)x + i * type_size(type), type, count - i, rest);
    most = max_i(most, and_i(bits(load_f(rest)), all_but_sign));
  }
  return largest_i(most);
}

// The products of R windows with one vector set of columns; a function of its own for the reason of `sweep_apart`.
template <Element E, int R, int H>
static void __attribute__((noinline))
window_sweep(const uint8_t* codes, const Windows& x, int32_t offset, bool own_zeros, I (&result)[R][H]) {
  const I mask = nibble_mask();
  const int64_t steps = x.run / (E == INT8 ? 4 : 8);
  I acc[SLOTS<R>][H];
  int32_t start[SLOTS<R>] = {0};
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) start[r] = own_zeros ? 0 : -offset * x.sums[r];
  begin_sums<R, H>(start, acc);
  for (int64_t t = 0; t < x.count; t++, codes += steps * 128)
    sweep<E, R, H, false>(codes, x.x + x.taps[t], steps, 4, x.step, mask, mask, acc);
  end_sums<R, H>(acc);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) result[r][h] = acc[r][h];
}

template <Element E, int R>
static void window_tile(const Weight& w, const Output& out, const Windows& x, int64_t nb, int first, int64_t row0) {
  constexpr int H = TILE_COLUMNS / LANES;
  const int64_t column = nb * COLUMNS + first * LANES;
  if (column >= w.n) return;
  const uint8_t* codes = w.data + nb * (w.at.packed() / (E == INT8 ? 4 : 8)) * 128 + first * LANES * 4;
  const int signed_offset = SIGNED_CODES && E == INT8 ? 128 : 0;
  I acc[R][H];
  window_sweep<E, R, H>(codes, x, w.offset - signed_offset, w.zero, acc);
  alignas(64) float bias[COLUMNS], values[COLUMNS];
  read_bias(out, column, w.n, TILE_COLUMNS, bias);
  F scale[H], added[H];  // one for each channel
  for (int h = 0; h < H; h++) {
    scale[h] = scales_f(w, column + h * LANES);
    added[h] = w.added ? widen_f(w.added, column + h * LANES, w.scale_type) : set_f(0);
  }
  for (int r = 0; r < R; r++) {
    const F total = set_f((float)(x.sums[r] - (int32_t)w.at.k * x.zero)), step = set_f(x.scales[r]);
    for (int h = 0; h < H; h++) {
      const int64_t at = column + h * LANES;
      I c = acc[r][h];
      if (w.zero) c = sub_i(c, mul_i(sub_i(bytes_i(w.zero + at), set_i(signed_offset)), set_i(x.sums[r])));
      if (w.sums) c = sub_i(c, mul_i(load_i(w.sums + at), set_i(x.zero)));
      F v = mul_f(to_f(c), scale[h]);
      if (w.added) v = fma_f(added[h], total, v);
      store_f(values + h * LANES, mul_f(v, step));
    }
    finish_row(out, row0 + r, column, w.n, TILE_COLUMNS, bias, values);
  }
}

using WindowTile = void (*)(const Weight&, const Output&, const Windows&, int64_t, int, int64_t);

template <Element E, int R>
static WindowTile choose_window(int count) {
  if constexpr (R > DIGIT_ROWS) return nullptr;
  else return count == R ? window_tile<E, R> : choose_window<E, R + 1>(count);
}

static void window_product(const Weight& w, const Output& out, const Windows& x, int64_t nb, int count, int64_t row0) {
  const WindowTile run = w.element == INT4 ? choose_window<INT4, 1>(count) : choose_window<INT8, 1>(count);
  for (int first = 0; first < COLUMNS / LANES; first += TILE_COLUMNS / LANES) run(w, out, x, nb, first, row0);
}
