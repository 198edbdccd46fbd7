// Convolutions: the largest magnitudes, or the extremes, of runs of values, from which scales are made.

// The largest magnitudes of `count` values, in lanes.
template <Type TYPE>
static inline I lane_magnitudes(const char* x, int64_t count) {
  const I all_but_sign = set_i(0x7fffffff);
  I most = set_i(0);
  int64_t i = 0;
#ifdef QCORE_PARTS
  if constexpr (TYPE == BF16) {  // whose bits are those of a float's upper half
    I words = set_i(0);
    const auto include = [&](I v) { words = max_words(words, and_i(v, set_i(0x7fff7fff))); };
    for (; i + 2 * LANES <= count; i += 2 * LANES) include(load_i((const uint16_t*)x + i));
    if (i < count) include(load_part_32((const uint16_t*)x + i, count - i));
    return max_i(shl_i<16>(words), and_i(words, set_i((int32_t)0xffff0000)));
  }
#endif
  for (; i + LANES <= count; i += LANES) most = max_i(most, and_i(bits(widen_f(x, i, TYPE)), all_but_sign));
  if (i < count) {
#ifdef QCORE_PARTS
    const F rest = widen_part_f(x, i, TYPE, count - i);
#else
    alignas(64) float values[LANES] = {0};
    widen(x + i * type_size(TYPE), TYPE, count - i, values);
    const F rest = load_f(values);
#endif
    most = max_i(most, and_i(bits(rest), all_but_sign));
  }
  return most;
}

static int32_t magnitude(const void* x, Type type, int64_t count) {
  const char* from = (const char*)x;
  return largest_i(type == F32    ? lane_magnitudes<F32>(from, count)
                   : type == BF16 ? lane_magnitudes<BF16>(from, count)
                                  : lane_magnitudes<F16>(from, count));
}

template <Type TYPE>
static void run_magnitudes(const Runs& x, int32_t* to) {
  const char* from = (const char*)x.x;
#ifdef QCORE_PARTS  // as many runs as a vector has lanes are reduced together
  for (int64_t first = 0; first < x.runs; first += LANES) {
    const int64_t here = x.runs - first < LANES ? x.runs - first : LANES;
    F most[LANES];
    for (int i = 0; i < LANES; i++) most[i] = set_f(0);
    for (int64_t r = 0; r < here; r++, from += x.step * type_size(TYPE))
      most[r] = from_bits(lane_magnitudes<TYPE>(from, x.count));
    store_part_f((float*)to + first, from_bits(largest_each_i(most)), here);
  }
#else
  for (int64_t r = 0; r < x.runs; r++, from += x.step * type_size(TYPE))
    to[r] = largest_i(lane_magnitudes<TYPE>(from, x.count));
#endif
}

static void magnitudes(const Runs& x, int32_t* to) {
  if (x.type == F32) run_magnitudes<F32>(x, to);
  else if (x.type == BF16) run_magnitudes<BF16>(x, to);
  else run_magnitudes<F16>(x, to);
}

// The same of positive and of negative values, each 0 where there are none; NaN counts by its sign. A float is the larger the
// larger its bits are, as integers, and those of negative ones are negative.
template <Type TYPE>
static inline void lane_extremes(const char* x, int64_t count, I& high, I& low) {
  const I sign = set_i((int32_t)0x80000000);
  high = low = set_i(0);
  int64_t i = 0;
#ifdef QCORE_PARTS
  if constexpr (TYPE == BF16) {
    const I signs = set_i((int32_t)0x80008000);
    const auto include = [&](I v) { high = max_signed_words(high, v), low = max_signed_words(low, xor_i(v, signs)); };
    for (; i + 2 * LANES <= count; i += 2 * LANES) include(load_i((const uint16_t*)x + i));
    if (i < count) include(load_part_32((const uint16_t*)x + i, count - i));  // 0 behind them, or -0
    high = max_i(shl_i<16>(high), and_i(high, set_i((int32_t)0xffff0000)));
    low = max_i(shl_i<16>(low), and_i(low, set_i((int32_t)0xffff0000)));
    return;
  }
#endif
  const auto include = [&](F v) {
    high = max_i(high, bits(v));
    low = max_i(low, add_i(bits(v), sign));  // the other sign
  };
  for (; i + LANES <= count; i += LANES) include(widen_f(x, i, TYPE));
  if (i == count) return;
#ifdef QCORE_PARTS
  include(widen_part_f(x, i, TYPE, count - i));
#else
  alignas(64) float values[LANES] = {0};
  widen(x + i * type_size(TYPE), TYPE, count - i, values);
  include(load_f(values));
#endif
}

template <Type TYPE>
static void run_extremes(const Runs& x, int32_t* high, int32_t* low) {
  const char* from = (const char*)x.x;
#ifdef QCORE_PARTS
  for (int64_t first = 0; first < x.runs; first += LANES) {
    const int64_t here = x.runs - first < LANES ? x.runs - first : LANES;
    F most[LANES], least[LANES];
    for (int i = 0; i < LANES; i++) most[i] = least[i] = set_f(0);
    for (int64_t r = 0; r < here; r++, from += x.step * type_size(TYPE)) {
      I above, below;
      lane_extremes<TYPE>(from, x.count, above, below);
      most[r] = from_bits(above), least[r] = from_bits(below);
    }
    store_part_f((float*)high + first, from_bits(largest_each_i(most)), here);
    store_part_f((float*)low + first, from_bits(largest_each_i(least)), here);
  }
#else
  for (int64_t r = 0; r < x.runs; r++, from += x.step * type_size(TYPE)) {
    I above, below;
    lane_extremes<TYPE>(from, x.count, above, below);
    high[r] = largest_i(above), low[r] = largest_i(below);
  }
#endif
}

static void extremes(const Runs& x, int32_t* high, int32_t* low) {
  if (x.type == F32) run_extremes<F32>(x, high, low);
  else if (x.type == BF16) run_extremes<BF16>(x, high, low);
  else run_extremes<F16>(x, high, low);
}

// The largest of each of `count` runs of words that are not negative, `step` words apart.
static void largest_of_runs(const int32_t* from, int64_t run, int64_t step, int64_t count, int32_t* to) {
  alignas(64) static const int32_t present[2 * 16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  const int64_t whole = (run - 1) / LANES * LANES;
  const I rest = load_i(present + 16 - (run - whole));
  for (int64_t v = 0; v < count; v += LANES) {
    F most[LANES];
    for (int64_t r = 0; r < LANES; r++) {
      const int32_t* words = from + (v + r < count ? v + r : v) * step;
      I here = and_i(load_i(words + whole), rest);
      for (int64_t i = 0; i < whole; i += LANES) here = max_i(here, load_i(words + i));
      most[r] = from_bits(here);
    }
#ifdef QCORE_PARTS
    store_i(to + v, largest_each_i(most));
#else
    for (int r = 0; r < LANES; r++) to[v + r] = largest_i(bits(most[r]));
#endif
  }
}
