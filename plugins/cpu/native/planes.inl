// Convolutions of few channels: positions of the results are lanes. The windows of a channel group become codes
// [packed / 4][positions], four columns of a window in each lane, once for all its results; then the codes of each result's
// weight, four in all lanes, meet them. Nothing is left empty where a group has one channel.

constexpr int PLANE_VECTORS = 4;                      // of positions in a tile
constexpr int PLANE_ROWS = REGISTERS == 32 ? 4 : 2;   // of the weight
static_assert(PLANE_ROWS <= MOST_PLANE_ROWS && PLANE_VECTORS * LANES <= PLANE_POSITIONS, "the driver's scratch holds a tile");

template <int STEP>
static inline void take_every_nth(const float* __restrict from, int64_t step, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; i++) to[i] = from[i * (STEP ? STEP : step)];
}
static void take_every(const float* from, int64_t step, int64_t count, float* to) {
  (step == 2 ? take_every_nth<2> : take_every_nth<0>)(from, step, count, to);  // shuffles for 2
}

static inline void store_lanes(void* p, I v) { store_f((float*)p, from_bits(v)); }

// `usable_scale` in lanes, of values that are not negative.
static inline F usable_scales(F scale) {
  const I none = sra_i<31>(sub_i(bits(scale), set_i(1)));  // all bits where the scale is 0
  const F usable = max_f(scale, set_f(1.17549435e-38f));
  const I rest = and_i(bits(usable), sub_i(set_i(-1), none));
  return from_bits(or_i(and_i(none, bits(set_f(1.0f))), rest));
}

// v / N, rounded as a division is, in a third of its time: the remainder is exact. Checked with every float from 0 on for N of
// 127 and 255.
template <int N>
static inline F divided_by(F v) {
#ifdef QCORE_NO_FMA
  return div_f(v, set_f((float)N));
#else
  const F inverse = set_f(1.0f / N), quotient = mul_f(v, inverse);
  return fma_f(fma_f(quotient, set_f((float)-N), v), inverse, quotient);
#endif
}

// Scales of windows of which these are the largest magnitudes, NaN where one is not finite, and by what values are multiplied.
static inline __attribute__((always_inline)) void dynamic_steps(I most, F& scale, F& inverse) {
  const I nan = and_i(sra_i<31>(sub_i(set_i(INFINITE - 1), most)), set_i(0x7fc00000));
  const F usable = usable_scales(divided_by<127>(from_bits(min_i(most, set_i(INFINITE - 1)))));
  scale = from_bits(or_i(bits(usable), nan));
  inverse = div_f(set_f(1), usable);
}

// The same with zero points, which are any where a scale is NaN. `high`, `low`: the largest magnitudes of positive and of negative
// values.
static inline __attribute__((always_inline)) void affine_steps(I high, I low, F& scale, F& inverse, I& zero) {
  const I nan = and_i(sra_i<31>(sub_i(set_i(INFINITE - 1), max_i(high, low))), set_i(0x7fc00000));
  const F least = from_bits(or_i(low, set_i((int32_t)0x80000000)));
  const F range = sub_f(from_bits(high), least);  // Inf where it is too large: the scale is Inf, and codes are those of 0
  const I infinite = sra_i<31>(sub_i(set_i(INFINITE - 1), bits(range)));
  const F usable = usable_scales(from_bits(min_i(max_i(bits(divided_by<255>(range)), and_i(infinite, set_i(INFINITE))), set_i(INFINITE))));
  inverse = div_f(set_f(1), usable);
  zero = round_i(sub_f(set_f(-128.0f), div_f(least, usable)));
  scale = from_bits(or_i(bits(usable), nan));
}

// Scales and zero points of windows of which these are the largest magnitudes, the least and the largest values; see `step_of`.
static inline void plane_steps(const Input& in, I most, F low, F high, F& scale, I& zero) {
  const I nan = and_i(sra_i<31>(sub_i(set_i(in.mode == STATIC ? INFINITE : INFINITE - 1), most)), set_i(0x7fc00000));
  zero = set_i(in.mode == STATIC ? in.zero : 0);
  if (in.mode == STATIC) scale = set_f(in.scale);
  else if (in.mode == DYNAMIC) scale = usable_scales(divided_by<127>(from_bits(min_i(most, set_i(INFINITE - 1)))));
  else {
    scale = usable_scales(div_f(sub_f(high, low), set_f(255.0f)));
    // 0 where the scale is NaN, as the zero point of a row.
    const I offset = round_i(sub_f(set_f(-128.0f), div_f(low, scale)));
    zero = and_i(offset, sub_i(set_i(-1), sra_i<31>(sub_i(set_i(INFINITE - 1), most))));
  }
  scale = from_bits(or_i(bits(scale), nan));
}

// The largest magnitudes of the windows, to `scales`: over channels, then over lines, then over columns.
static void plane_magnitudes(const Planes& x, const PlaneCodes& to) {
  const I all_but_sign = set_i(0x7fffffff);
  for (int64_t p = 0; p < x.channel; p += LANES) {
    I most = set_i(0);
    for (int64_t c = 0; c < x.channels; c++) most = max_i(most, and_i(bits(load_f(x.x + c * x.channel + p)), all_but_sign));
    store_lanes(to.pixels + p, most);
  }
  const int64_t lines = x.lines * x.step;  // what windows of the results begin in, and the columns behind
  for (int64_t phase = 0; phase < x.phases; phase++)
    for (int64_t p = phase * x.plane, end = p + lines; p < end; p += LANES) {
      I most = load_i(to.pixels + x.down[0] + p);
      for (int64_t i = 1; i < x.kh; i++) most = max_i(most, load_i(to.pixels + x.down[i] + p));
      store_lanes(to.stacks + p, most);
    }
  for (int64_t p = 0; p < x.positions; p += LANES) {
    I most = load_i(to.stacks + x.across[0] + p);
    for (int64_t j = 1; j < x.kw; j++) most = max_i(most, load_i(to.stacks + x.across[j] + p));
    store_lanes(to.scales + p, most);
  }
}

// Scales and zero points of all windows.
static void plane_scales(const Input& in, const Planes& x, const PlaneCodes& to) {
  if (in.type != I8) plane_magnitudes(x, to);
  for (int64_t p = 0; p < x.positions; p += LANES) {
    const I most = in.type == I8 ? set_i(0) : load_i(to.scales + p);
    F low = set_f(0), high = set_f(0), scale;
    if (in.mode == AFFINE)
      for (int64_t c = 0; c < x.channels; c++)
        for (int64_t i = 0; i < x.kh; i++)
          for (int64_t j = 0; j < x.kw; j++) {
            const F v = load_f(x.x + c * x.channel + x.down[i] + x.across[j] + p);
            low = min_f(v, low), high = max_f(v, high);
          }
    I zero;
    plane_steps(in, most, low, high, scale, zero);
    store_f(to.scales + p, scale);
    store_lanes(to.zeros + p, zero);
  }
}

// By what values are multiplied for a scale: see `inverse_scale`.
static inline F inverse_scales(F scale) {
  const I nan = sra_i<31>(sub_i(set_i(INFINITE), and_i(bits(scale), set_i(0x7fffffff))));
  const F usable = from_bits(or_i(and_i(nan, bits(set_f(1))), and_i(bits(scale), sub_i(set_i(-1), nan))));
  return div_f(set_f(1), usable);
}

// The codes of a vector of positions from p on. Behind the last column of a group they are 0, which adds nothing.
static void plane_codes(const Weight& w, const Input& in, const Planes& x, const PlaneCodes& to, int64_t p) {
  const int64_t packed = w.at.packed();
  const bool ready = in.type == I8, bounded = in.mode != DYNAMIC;
  const I byte = set_i(255), zero = load_i(to.zeros + p), top = set_i(127), bottom = set_i(-128), ones = set_i(0x01010101);
  const F inverse = inverse_scales(load_f(to.scales + p)), largest = set_f(1e6f), least = set_f(-1e6f);
  const auto code = [&](int64_t column) {
    if (column < 0) return set_i(0);
    const F v = load_f(x.x + column + p);
    if (ready) return round_i(v);
    if (!bounded) return round_i(mul_f(v, inverse));
    return max_i(min_i(add_i(round_i(max_f(min_f(mul_f(v, inverse), largest), least)), zero), top), bottom);
  };
  for (int64_t k = 0, fold = 0; k < packed; fold++) {
    I sum = set_i(0);
    for (const int64_t end = k + w.fold; k < end; k += 4) {
      const int64_t* column = x.columns + k;
      const I low = or_i(and_i(code(column[0]), byte), shl_i<8>(and_i(code(column[1]), byte)));
      const I word = or_i(or_i(low, shl_i<16>(and_i(code(column[2]), byte))), shl_i<24>(code(column[3])));
      sum = dot(sum, ones, word);
      store_lanes(to.words + k / 4 * x.positions + p, word);
    }
    store_lanes(to.sums + fold * x.positions + p, sum);
  }
}

// What the sums of a row of the weight need from it.
struct PlaneRow {
  const uint8_t* codes;  // 4 bytes of every 128
  int64_t parameters;    // index of its first scale and zero point; 32 from group to group
  int64_t sums;          // the same of its sums
  PlaneRow() = default;
  PlaneRow(const Weight& w, int64_t n)
      : codes(w.data + n / COLUMNS * (w.at.packed() / (w.element == INT8 ? 4 : 8) * 128) + n % COLUMNS * 4),
        parameters(n / COLUMNS * w.at.groups * COLUMNS + n % COLUMNS),
        sums(n / COLUMNS * w.folds() * COLUMNS + n % COLUMNS) {}
};

template <Element E, int R, int H>
static inline __attribute__((always_inline)) void
plane_sweep(const uint8_t* (&codes)[R], const int32_t* q, int64_t positions, int64_t steps, I (&acc)[R][H]) {
  for (int64_t s = 0; s < steps; s++, q += (E == INT8 ? 1 : 2) * positions) {
    uint32_t word[R];
    for (int r = 0; r < R; r++) __builtin_memcpy(&word[r], codes[r], 4), codes[r] += 128;
    I x[H];
    for (int h = 0; h < H; h++) x[h] = load_i(q + h * LANES);
    for (int r = 0; r < R; r++) {
      const uint32_t first = E == INT8 ? word[r] ^ (SIGNED_CODES ? 0x80808080u : 0) : word[r] & 0x0f0f0f0fu;
      for (int h = 0; h < H; h++) acc[r][h] = dot(acc[r][h], set_i((int32_t)first), x[h]);
    }
    if constexpr (E != INT8) {
      for (int h = 0; h < H; h++) x[h] = load_i(q + positions + h * LANES);
      for (int r = 0; r < R; r++)
        for (int h = 0; h < H; h++) acc[r][h] = dot(acc[r][h], set_i((int32_t)(word[r] >> 4 & 0x0f0f0f0fu)), x[h]);
    }
  }
}

// The results of R rows of the weight from n on at H vectors of positions from p on, without bias, to `results`.
template <Element E, int R, int H>
static void __attribute__((noinline))
plane_tile(const Weight& w, const Planes& x, const PlaneCodes& c, int64_t n, int64_t p, float* results) {
  const int signed_offset = SIGNED_CODES && E == INT8 ? 128 : 0;
  const int64_t steps = w.fold / (E == INT8 ? 4 : 8), folds_per_group = w.at.block * w.at.blocks / w.fold;
  const bool grouped = w.at.groups > 1;
  PlaneRow row[R];
  const uint8_t* codes[R];
  F sum[R][H], added[R][H];  // added: zero points of the scale's type times sums of x
  for (int r = 0; r < R; r++) {
    row[r] = PlaneRow(w, n + r), codes[r] = row[r].codes;
    for (int h = 0; h < H; h++) sum[r][h] = added[r][h] = set_f(0);
  }
  for (int64_t g = 0, f = 0; g < w.at.groups; g++) {
    const int64_t counted = w.at.k - g * w.at.group < w.at.group ? w.at.k - g * w.at.group : w.at.group;
    I total[H];  // of codes of x in this group
    for (int h = 0; h < H; h++) total[h] = set_i(0);
    for (int64_t i = 0; i < folds_per_group; i++, f++) {
      I acc[R][H];
      for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) acc[r][h] = set_i(0);
      plane_sweep<E, R, H>(codes, c.words + f * (w.fold / 4) * x.positions + p, x.positions, steps, acc);
      const int32_t* sums = c.sums + f * x.positions + p;
      for (int h = 0; h < H; h++) total[h] = add_i(total[h], load_i(sums + h * LANES));
      for (int r = 0; r < R; r++) {
        const int64_t at = row[r].parameters + g * COLUMNS;
        const I zero = set_i((w.zero ? w.zero[at] : w.offset) - signed_offset);
        const F scale = set_f(grouped ? one_scale(w, at) : 1.0f);
        for (int h = 0; h < H; h++) {
          I v = sub_i(acc[r][h], mul_i(zero, load_i(sums + h * LANES)));
          if (w.sums) v = sub_i(v, mul_i(load_i(c.zeros + p + h * LANES), set_i(w.sums[row[r].sums + f * COLUMNS])));
          sum[r][h] = fma_f(to_f(v), scale, sum[r][h]);
        }
      }
    }
    if (!w.added) continue;
    for (int r = 0; r < R; r++) {
      float zero;
      widen((const char*)w.added + (row[r].parameters + g * COLUMNS) * type_size(w.scale_type), w.scale_type, 1, &zero);
      for (int h = 0; h < H; h++) {
        const I centered = sub_i(total[h], mul_i(load_i(c.zeros + p + h * LANES), set_i((int32_t)counted)));
        added[r][h] = fma_f(set_f(zero), to_f(centered), added[r][h]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    const F scale = set_f(grouped ? 1.0f : one_scale(w, row[r].parameters));
    for (int h = 0; h < H; h++) {
      F v = mul_f(sum[r][h], scale);
      if (w.added) v = add_f(v, added[r][h]);
      store_f(results + r * x.positions + p + h * LANES, mul_f(v, load_f(c.scales + p + h * LANES)));
    }
  }
}

template <Element E, int R>
static void plane_rows(const Weight& w, const Planes& x, const PlaneCodes& c, int64_t n, float* results) {
  int64_t p = 0;
  const int64_t end = x.positions / LANES * LANES;
  for (; p + PLANE_VECTORS * LANES <= end; p += PLANE_VECTORS * LANES) plane_tile<E, R, PLANE_VECTORS>(w, x, c, n, p, results);
  for (; p < end; p += LANES) plane_tile<E, R, 1>(w, x, c, n, p, results);
}

// One row of results, of which `step` - `width` behind each line are none: side by side, with bias, rounded.
static void finish_plane(const Planes& x, const Output& out, int64_t n, float* results) {
  const int64_t count = x.lines * x.width;
  if (x.width < x.step)
    for (int64_t line = 1; line < x.lines; line++)
      __builtin_memmove(results + line * x.width, results + line * x.step, (size_t)x.width * 4);
  alignas(64) float bias[COLUMNS];
  float value = 0;
  if (out.bias) widen((const char*)out.bias + n * type_size(out.bias_type), out.bias_type, 1, &value);
  for (int i = 0; i < COLUMNS; i++) bias[i] = value;
  for (int64_t i = 0; i < count; i += COLUMNS) finish_row(out, n, x.first + i, x.first + count, bias, results + i);
}

// A window of one channel: a code is used once, so that it stays a word.

// Codes less their zero point, within these bounds.
static inline void code_bounds(I zero, F& low, F& high) {
  low = sub_f(set_f(-128), to_f(zero)), high = sub_f(set_f(127), to_f(zero));
}

// 1.5 * 2^23 leaves the nearest whole number in the low bits of a sum.
constexpr float ROUNDING = 12582912.0f;

// Add the product of the code of v and a number of the weight.
template <bool BOUNDED>
static inline __attribute__((always_inline)) I add_code(I acc, F v, F inverse, F low, F high, I number) {
  F code = mul_f(v, inverse);
  if (BOUNDED) code = max_f(min_f(code, high), low);
  return dot_words(acc, bits(add_f(code, set_f(ROUNDING))), number);
}

template <bool BOUNDED, int H>
static void __attribute__((noinline))
channel_tile(const Planes& x, const PlaneCodes& c, int64_t n, int64_t p, float* results) {
  const int32_t* number = x.own->numbers + n;
  F inverse[H], low[H], high[H];
  I acc[H];
  for (int h = 0; h < H; h++) {
    inverse[h] = inverse_scales(load_f(c.scales + p + h * LANES));
    acc[h] = set_i(0);
    if (BOUNDED) code_bounds(load_i(c.zeros + p + h * LANES), low[h], high[h]);
  }
  for (int64_t i = 0; i < x.kh; i++)
    for (int64_t j = 0; j < x.kw; j++, number += x.own->step) {
      const float* from = x.x + x.down[i] + x.across[j] + p;
      for (int h = 0; h < H; h++)
        acc[h] = add_code<BOUNDED>(acc[h], load_f(from + h * LANES), inverse[h], low[h], high[h], set_i(*number));
    }
  for (int h = 0; h < H; h++) {
    const F scaled = mul_f(to_f(acc[h]), set_f(x.own->scales[n]));
    store_f(results + p + h * LANES, mul_f(scaled, load_f(c.scales + p + h * LANES)));
  }
}

// The same for float x.
template <int H>
static void __attribute__((noinline)) channel_floats(const Planes& x, int64_t n, int64_t p, float* results) {
  const float* number = (const float*)x.own->numbers + n;
  F acc[H];
  for (int h = 0; h < H; h++) acc[h] = set_f(0);
  for (int64_t i = 0; i < x.kh; i++)
    for (int64_t j = 0; j < x.kw; j++, number += x.own->step) {
      const float* from = x.x + x.down[i] + x.across[j] + p;
      for (int h = 0; h < H; h++) acc[h] = fma_f(load_f(from + h * LANES), set_f(*number), acc[h]);
    }
  for (int h = 0; h < H; h++) store_f(results + p + h * LANES, acc[h]);
}

template <int H>
static void plane_channels(const Planes& x, Mode mode, const PlaneCodes& c, int64_t n, int64_t p) {
  if (mode == DIGITS) channel_floats<H>(x, n, p, c.results);
  else (mode == DYNAMIC ? channel_tile<false, H> : channel_tile<true, H>)(x, c, n, p, c.results);
}

static void channel_row(const Planes& x, Mode mode, const PlaneCodes& c, int64_t n) {
  int64_t p = 0;
  for (; p + PLANE_VECTORS * LANES <= x.positions; p += PLANE_VECTORS * LANES) plane_channels<PLANE_VECTORS>(x, mode, c, n, p);
  for (; p < x.positions; p += LANES) plane_channels<1>(x, mode, c, n, p);
}

static void plane_product(const Weight& w, const Input& in, const Output& out, const Planes& x, const PlaneCodes& c) {
  if (in.mode != DIGITS) plane_scales(in, x, c);
  if (!x.own)
    for (int64_t p = 0; p < x.positions; p += LANES) plane_codes(w, in, x, c, p);
  for (int64_t n = x.row; n < x.row + x.rows;) {
    const int here = x.own || x.row + x.rows - n < PLANE_ROWS ? 1 : PLANE_ROWS;
    const bool byte = w.element == INT8;
    if (x.own) channel_row(x, in.mode, c, n);
    else if (here > 1) (byte ? plane_rows<INT8, PLANE_ROWS> : plane_rows<INT4, PLANE_ROWS>)(w, x, c, n, c.results);
    else (byte ? plane_rows<INT8, 1> : plane_rows<INT4, 1>)(w, x, c, n, c.results);
    for (int r = 0; r < here; r++) finish_plane(x, out, n + r, c.results + r * x.positions);
    n += here;
  }
}
