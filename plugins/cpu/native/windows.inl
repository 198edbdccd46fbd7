// Convolutions: codes of whole images or windows, and products of windows that lie at a constant step.

// The sum of codes: of vectors, and of what is no whole vector.
struct CodeSum {
  I lanes = set_i(0);
  int32_t rest = 0;
  int32_t all() const { return sum_i(lanes) + rest; }
#ifdef QCORE_FOUR_TO_CODES
  void store(I q, int8_t* codes) {  // 4 * LANES codes
    lanes = dot(lanes, set_bytes(1), q);
    store_i(codes, q);
  }
#endif
};

// CLAMP: values may lie beyond the codes; without it the scale was made for their largest.
template <Type TYPE, bool CLAMP>
static inline __attribute__((always_inline)) void
run_codes(const char* x, int64_t count, float inverse, int32_t zero, int8_t* codes, CodeSum& sum) {
  const F f = set_f(inverse), most = set_f(1e6f), least = set_f(-1e6f);
  const I z = set_i(zero), high = set_i(127), low = set_i(-128);
  const auto code = [&](F v) {
    if (TYPE == I8) return round_i(v);
    if (!CLAMP) return round_i(mul_f(v, f));
    return max_i(min_i(add_i(round_i(max_f(min_f(mul_f(v, f), most), least)), z), high), low);
  };
  int64_t i = 0;
#ifdef QCORE_FOUR_TO_CODES  // narrowed by saturation, which takes care of bounds
  if constexpr (TYPE != I8) {
    const I zeros = set_words((int16_t)zero);
    const auto whole = [&](int64_t at) {
      const F v = mul_f(widen_f(x, at, TYPE), f);
      return round_i(CLAMP ? min_f(v, most) : v);  // what is below int32 becomes its least number
    };
    const auto codes_at = [&](int64_t at) {
#ifdef QCORE_BF16_TO_CODES
      if constexpr (TYPE == BF16 && !CLAMP) return bf16_to_codes((const uint16_t*)x + at, f);
#endif
      return four_to_codes(whole(at), whole(at + LANES), whole(at + 2 * LANES), whole(at + 3 * LANES), zeros);
    };
    for (; i + 4 * LANES <= count; i += 4 * LANES) sum.store(codes_at(i), codes + i);
  }
#endif
  for (; i + LANES <= count; i += LANES) {
    const I q = code(widen_f(x, i, TYPE));
    sum.lanes = add_i(sum.lanes, q);
    narrow_i(codes + i, q);
  }
  if (i < count) {
    alignas(64) float rest[LANES] = {0};
    alignas(64) int8_t narrow[LANES];
    widen(x + i * type_size(TYPE), TYPE, count - i, rest);
    narrow_i(narrow, code(load_f(rest)));
    for (int j = 0; i < count; i++, j++) codes[i] = narrow[j], sum.rest += narrow[j];
  }
}

static inline void copy_codes(const int8_t* from, int64_t count, int8_t* codes, CodeSum& sum) {
  int64_t i = 0;
#ifdef QCORE_FOUR_TO_CODES
  for (; i + 4 * LANES <= count; i += 4 * LANES) sum.store(load_i(from + i), codes + i);
#endif
  for (; i < count; i++) codes[i] = from[i], sum.rest += from[i];
}

template <Type TYPE, bool CLAMP>
static int32_t all_codes(const Runs& x, float inverse, int32_t zero, int8_t* codes, int32_t* sums) {
  const char* from = (const char*)x.x;
  CodeSum total;
  for (int64_t r = 0; r < x.runs; r++, from += x.step * type_size(TYPE), codes += x.count) {
    if (x.ready) copy_codes(x.codes + r * x.count, x.ready, codes, total);
    run_codes<TYPE, CLAMP>(from + x.ready * type_size(TYPE), x.count - x.ready, inverse, zero, codes + x.ready, total);
    if (!sums) continue;
    sums[r] = total.all();
    total = {};
  }
  return sums ? 0 : total.all();
}

static int32_t quantize_runs(const Runs& x, float inverse, int32_t zero, bool clamp, int8_t* codes, int32_t* sums) {
  if (x.type == I8) return all_codes<I8, false>(x, inverse, zero, codes, sums);
  if (x.type == F32) return (clamp ? all_codes<F32, true> : all_codes<F32, false>)(x, inverse, zero, codes, sums);
  if (x.type == BF16) return (clamp ? all_codes<BF16, true> : all_codes<BF16, false>)(x, inverse, zero, codes, sums);
  return (clamp ? all_codes<F16, true> : all_codes<F16, false>)(x, inverse, zero, codes, sums);
}

static int32_t magnitude(const void* x, Type type, int64_t count) {
  const I all_but_sign = set_i(0x7fffffff);
  I most = set_i(0);
  int64_t i = 0;
#ifdef QCORE_FOUR_TO_CODES
  if (type == BF16) {  // whose bits are those of a float's upper half
    I words = set_i(0);
    for (; i + 2 * LANES <= count; i += 2 * LANES)
      words = max_words(words, and_i(load_i((const uint16_t*)x + i), set_i(0x7fff7fff)));
    most = max_i(shl_i<16>(words), and_i(words, set_i((int32_t)0xffff0000)));
  }
#endif
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

// What becomes of the sums of H vectors of columns: scales and zero points of the weight, one for each channel.
template <int H>
struct WindowEnd {
  const Weight& w;
  const Output& out;
  const Windows& x;
  int64_t column;
  F scale[H], added[H];
  alignas(64) float bias[COLUMNS];
  WindowEnd(const Weight& w, const Output& out, const Windows& x, int64_t column) : w(w), out(out), x(x), column(column) {
    read_bias(out, column, w.n, H * LANES, bias);
    for (int h = 0; h < H; h++) {
      scale[h] = scales_f(w, column + h * LANES);
      added[h] = w.added ? widen_f(w.added, column + h * LANES, w.scale_type) : set_f(0);
    }
  }
  // Sums of window r, from which the offset is subtracted where there are no zero points.
  inline __attribute__((always_inline)) void finish(int r, const I (&sums)[H], int signed_offset, int64_t row) const {
    const F total = set_f((float)(x.sums[r] - (int32_t)w.at.k * x.zero)), step = set_f(x.scales[r]);
    F results[H];
    for (int h = 0; h < H; h++) {
      const int64_t at = column + h * LANES;
      I c = sums[h];
      if (w.zero) c = sub_i(c, mul_i(sub_i(bytes_i(w.zero + at), set_i(signed_offset)), set_i(x.sums[r])));
      if (w.sums) c = sub_i(c, mul_i(load_i(w.sums + at), set_i(x.zero)));
      F v = mul_f(to_f(c), scale[h]);
      if (w.added) v = fma_f(added[h], total, v);
      results[h] = mul_f(v, step);
    }
    finish_vectors(out, row, column, w.n, bias, results);
  }
};

template <Element E, int R>
static void window_tile(const Weight& w, const Output& out, const Windows& x, int64_t nb, int first, int64_t row0) {
  constexpr int H = TILE_COLUMNS / LANES;
  const int64_t column = nb * COLUMNS + first * LANES;
  if (column >= w.n) return;
  const uint8_t* codes = w.data + nb * (w.at.packed() / (E == INT8 ? 4 : 8)) * 128 + first * LANES * 4;
  const int signed_offset = SIGNED_CODES && E == INT8 ? 128 : 0;
  I acc[R][H];
  window_sweep<E, R, H>(codes, x, w.offset - signed_offset, w.zero, acc);
  const WindowEnd<H> end(w, out, x, column);
  for (int r = 0; r < R; r++) end.finish(r, acc[r], signed_offset, row0 + r);
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
