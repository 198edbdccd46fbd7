// Convolutions: codes of whole images, or of windows by the largest magnitude, or the extremes, of each.

// The sum of codes: of vectors, and of what is no whole vector.
struct CodeSum {
  I lanes = set_i(0);
#ifdef QCORE_PARTS
  void store(I q, int8_t* codes) {  // 4 * LANES codes
    lanes = dot(lanes, set_bytes(1), q);
    store_i(codes, q);
  }
  void store(I q, int8_t* codes, int64_t count) {  // so many, and 0 behind them
    lanes = dot(lanes, set_bytes(1), q);
    store_part_64(codes, q, count);
  }
  void add(const int8_t* codes, int64_t count) {
    for (int64_t i = 0; i < count; i += 4 * LANES) lanes = dot(lanes, set_bytes(1), load_part_64(codes + i, count - i));
  }
#else
  int32_t rest = 0;
  void add(const int8_t* codes, int64_t count) {  // a multiple of 4 * LANES
    for (int64_t i = 0; i < count; i += 4 * LANES) lanes = dot(lanes, set_i(0x01010101), load_i(codes + i));
  }
  int32_t all() const { return sum_i(lanes) + rest; }
#endif
};

// Where values lie: the scale was made for their largest magnitude, or for their extremes, so that rounding can lead one
// beyond the codes; or it is a given one.
enum Range : int { WITHIN, BETWEEN, ANYWHERE };

template <Type TYPE, Range RANGE>
static inline __attribute__((always_inline)) void
run_codes(const char* x, int64_t count, float inverse, int32_t zero, int8_t* codes, CodeSum& sum) {
  const F f = set_f(inverse), most = set_f(1e6f);
#ifdef QCORE_PARTS  // narrowed by saturation, which takes care of bounds
  const I zeros = set_words((int16_t)zero);
  // What is below int32 becomes its least number.
  const auto rounded = [&](F v) { return RANGE == ANYWHERE ? round_i(min_f(mul_f(v, f), most)) : round_i(mul_f(v, f)); };
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    const uint16_t* words = (const uint16_t*)x + i;
    if constexpr (TYPE == BF16 && RANGE == WITHIN) {
      sum.store(bf16_to_codes(load_i(words), load_i(words + 2 * LANES), f), codes + i);
    } else if constexpr (TYPE == BF16 && RANGE == BETWEEN) {
      sum.store(bf16_to_codes(load_i(words), load_i(words + 2 * LANES), f, zeros), codes + i);
    } else {
      const auto whole = [&](int64_t at) { return rounded(widen_f(x, at, TYPE)); };
      const I first = whole(i), second = whole(i + LANES), third = whole(i + 2 * LANES);
      sum.store(four_to_codes(first, second, third, whole(i + 3 * LANES), zeros), codes + i);
    }
  }
  const int64_t left = count - i;
  if (!left) return;
  const uint16_t* words = (const uint16_t*)x + i;
  if constexpr (TYPE == BF16 && RANGE == WITHIN) {
    if (left <= 2 * LANES) sum.store(bf16_to_codes(load_part_32(words, left), f), codes + i, left);
    else sum.store(bf16_to_codes(load_i(words), load_part_32(words + 2 * LANES, left - 2 * LANES), f), codes + i, left);
  } else if constexpr (TYPE == BF16 && RANGE == BETWEEN) {
    const I q = left <= 2 * LANES
        ? bf16_to_codes(load_part_32(words, left), f, zeros)
        : bf16_to_codes(load_i(words), load_part_32(words + 2 * LANES, left - 2 * LANES), f, zeros);
    sum.store(part_of_64(q, left), codes + i, left);
  } else {
    const auto part = [&](int64_t at) {
      return left > at ? rounded(widen_part_f(x, i + at, TYPE, left - at)) : set_i(0);
    };
    const I q = four_to_codes(part(0), part(LANES), part(2 * LANES), part(3 * LANES), zeros);
    sum.store(part_of_64(q, left), codes + i, left);
  }
#else
  const F least = set_f(-1e6f);
  const I z = set_i(zero), high = set_i(127), low = set_i(-128);
  const auto code = [&](F v) {
    if (TYPE == I8) return round_i(v);
    if (RANGE == WITHIN) return round_i(mul_f(v, f));
    return max_i(min_i(add_i(round_i(max_f(min_f(mul_f(v, f), most), least)), z), high), low);
  };
  int64_t i = 0;
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
#endif
}

static inline void copy_codes(const int8_t* from, int64_t count, int8_t* codes, CodeSum& sum) {
  int64_t i = 0;
#ifdef QCORE_PARTS
  for (; i + 4 * LANES <= count; i += 4 * LANES) sum.store(load_i(from + i), codes + i);
  if (i < count) sum.store(load_part_64(from + i, count - i), codes + i, count - i);
#else
  for (; i < count; i++) codes[i] = from[i], sum.rest += from[i];
#endif
}

// The sums of LANES of them.
static inline void sums_of(const CodeSum (&sums)[LANES], int32_t* to) {
#ifdef QCORE_PARTS
  F all[LANES];
  for (int i = 0; i < LANES; i++) all[i] = from_bits(sums[i].lanes);
  store_i(to, sums_i(all));
#else
  for (int i = 0; i < LANES; i++) to[i] = sums[i].all();
#endif
}

template <Type TYPE>
static void all_codes(const Runs& x, float inverse, int32_t zero, int8_t* codes, int32_t* sums) {
  const char* from = (const char*)x.x;
  alignas(64) int32_t some[LANES];
  for (int64_t first = 0; first < x.runs; first += LANES) {
    const int64_t here = x.runs - first < LANES ? x.runs - first : LANES;
    CodeSum own[LANES];
    for (int64_t r = 0; r < here; r++, from += x.step * type_size(TYPE), codes += x.count) {
      if (TYPE == I8) copy_codes((const int8_t*)from, x.count, codes, own[r]);
      else run_codes<TYPE, ANYWHERE>(from, x.count, inverse, zero, codes, own[r]);
    }
    sums_of(own, some);
    __builtin_memcpy(sums + first, some, (size_t)here * 4);
  }
}

static void group_sums(const Weight& w, const int8_t* q, int64_t step, int64_t rows, const int32_t* zeros, const GroupSums& to) {
  const int64_t group = w.at.group;
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int32_t counted = (int32_t)(w.at.k - g * group < group ? w.at.k - g * group : group);
    for (int64_t first = 0; first < rows; first += LANES) {
      const int64_t at = g * to.step + first;
      CodeSum own[LANES];
      for (int64_t r = 0; r < LANES && first + r < rows; r++) own[r].add(q + (first + r) * step + g * group, group);
      sums_of(own, to.sums + at);
      const I sums = load_i(to.sums + at);
      store_lanes(to.begin + at, mul_i(sums, set_i(-read_offset(w))));
      if (!w.added) continue;
      store_f(to.totals + at, to_f(zeros ? sub_i(sums, mul_i(load_i(zeros + first), set_i(counted))) : sums));
    }
  }
}

static void quantize_runs(const Runs& x, float inverse, int32_t zero, int8_t* codes, int32_t* sums) {
  if (x.type == I8) all_codes<I8>(x, inverse, zero, codes, sums);
  else if (x.type == F32) all_codes<F32>(x, inverse, zero, codes, sums);
  else if (x.type == BF16) all_codes<BF16>(x, inverse, zero, codes, sums);
  else all_codes<F16>(x, inverse, zero, codes, sums);
}

// Where pixels lie side by side, windows that overlap and have one scale share codes; a copy of fewer would take
// longer.
constexpr int64_t FEWEST_READY = 64;

// Windows of one line, of which this is the first pixel.
struct WindowLine {
  const Image& image;
  const char* x;           // of the image and group
  int64_t own, top, type_bytes;
  int64_t begin, end;      // rows of the windows that are no padding
  bool beside;             // whether a window's pixels of one row lie side by side
  WindowLine(const Image& image, const Input& in, int64_t group, int64_t line)
      : image(image), own(image.channels / image.groups), top(line % image.out_height() * image.sh - image.ph),
        type_bytes(type_size(in.type)), begin(0), end(image.kh), beside(image.dw == 1 && image.groups == 1) {
    const int64_t before = line / image.out_height() * image.height * image.width;  // pixels of other images
    x = (const char*)in.x + (before * image.channels + group * own) * type_bytes;
    while (begin < end && !has(begin)) begin++;
    while (begin < end && !has(end - 1)) end--;
  }
  int64_t row(int64_t i) const { return top + i * image.dh; }
  bool has(int64_t i) const { return row(i) >= 0 && row(i) < image.height; }
  const char* pixel(int64_t i, int64_t u) const {
    return x + (row(i) * image.width + u) * image.channels * type_bytes;
  }
  // The largest magnitudes of windows from `from` on. `map`: of this image's pixels; `below`: memory for those of
  // pixels above one another.
  void largest(const int32_t* map, int64_t from, int64_t count, int32_t* below, int32_t* to) const {
    const int64_t left = from * image.sw - image.pw, span = (count - 1) * image.sw + (image.kw - 1) * image.dw + 1;
    const int64_t first = left < 0 ? -left : 0, last = left + span > image.width ? image.width - left : span;
    for (int64_t u = 0; u < span; u++) below[u] = 0;
    for (int64_t i = begin; i < end; i++) {
      const int32_t* pixels = map + row(i) * image.width + left;
      for (int64_t u = first; u < last; u++) below[u] = below[u] > pixels[u] ? below[u] : pixels[u];
    }
    for (int64_t v = 0; v < count; v++) to[v] = below[v * image.sw];
    for (int64_t j = 1; j < image.kw; j++) {
      const int32_t* beside = below + j * image.dw;
      if (image.sw == 1) for (int64_t v = 0; v < count; v++) to[v] = to[v] > beside[v] ? to[v] : beside[v];
      else for (int64_t v = 0; v < count; v++) to[v] = to[v] > beside[v * image.sw] ? to[v] : beside[v * image.sw];
    }
  }
  // The same, where rows lie side by side, without a map: of values above one another first. AFFINE: `to` for positive values,
  // `negative` for others. `above`: memory for those, and as many more.
  template <Type TYPE, bool AFFINES>
  void largest_side_by_side(int64_t from, int64_t count, int32_t* above, int32_t* to, int32_t* negative) const {
    const int64_t left = from * image.sw - image.pw, span = (count - 1) * image.sw + image.kw, values = span * own;
    const int64_t first = left < 0 ? -left * own : 0, last = left + span > image.width ? (image.width - left) * own : values;
    const int64_t stored = ceil_div(values, LANES) * LANES + LANES;
    int32_t* low = above + stored;
    for (int64_t u = 0; u < stored * (AFFINES ? 2 : 1); u += LANES) store_lanes(above + u, set_i(0));
    const I sign = set_i((int32_t)0x80000000), all_but_sign = set_i(0x7fffffff);
    const auto include = [&](F v, int64_t at) {
      const I b = bits(v);
      store_lanes(above + at, max_i(load_i(above + at), AFFINES ? b : and_i(b, all_but_sign)));
      if (AFFINES) store_lanes(low + at, max_i(load_i(low + at), add_i(b, sign)));
    };
    for (int64_t i = begin; i < end && first < last; i++) {
      const char* x = pixel(i, left);
      int64_t u = first;
      for (; u + LANES <= last; u += LANES) include(widen_f(x, u, TYPE), u);
      if (u == last) continue;
      alignas(64) float rest[LANES] = {0};
      widen(x + u * type_bytes, TYPE, last - u, rest);
      include(load_f(rest), u);
    }
    const int64_t run = image.kw * own, step = image.sw * own;
    largest_of_runs(above, run, step, count, to);
    if (AFFINES) largest_of_runs(low, run, step, count, negative);
  }
  // Whether a window lies in the image, and its rows can be read at a stretch.
  bool is_inside(int64_t v) const {
    const int64_t left = v * image.sw - image.pw;
    return beside && left >= 0 && left + image.kw <= image.width;
  }
  // The codes of window v, of which a part may be padding; returns how many are.
  template <Type TYPE, Range RANGE>
  int64_t codes(int64_t v, float inverse, int32_t zero, int8_t* to, CodeSum& sum) const {
    const int64_t left = v * image.sw - image.pw, run = image.kw * own;
    const int64_t first = left < 0 ? -left : 0, last = left + image.kw > image.width ? image.width - left : image.kw;
    __builtin_memset(to, zero, (size_t)(image.kh * run));
    int64_t covered = 0;
    for (int64_t i = begin; i < end; i++) {
      int8_t* here = to + i * run;
      if (beside) {
        if (first < last) {
          run_codes<TYPE, RANGE>(pixel(i, left + first), (last - first) * own, inverse, zero, here + first * own, sum);
          covered += (last - first) * own;
        }
        continue;
      }
      for (int64_t j = 0, u = left; j < image.kw; j++, u += image.dw)
        if (u >= 0 && u < image.width) {
          run_codes<TYPE, RANGE>(pixel(i, u), own, inverse, zero, here + j * own, sum);
          covered += own;
        }
    }
    return image.kh * run - covered;
  }
};

// PIXELS: windows are pixels. RANGE: BETWEEN if they have zero points.
template <Type TYPE, bool PIXELS, Range RANGE>
static void line_codes(const WindowLine& line, int64_t from, int64_t count, const float* inverse, const int32_t* most,
                       const WindowCodes& to) {
  const Image& image = line.image;
  const int64_t run = PIXELS ? line.own : image.kw * line.own, k = PIXELS ? run : image.kh * run;
  const int64_t kept = image.kw > image.sw ? image.kw - image.sw : 0;
  const int64_t ready = line.beside && kept * line.own >= FEWEST_READY ? kept * line.own : 0;
  const int64_t shift = image.sw * line.own, above = line.begin * run, below = (image.kh - line.end) * run;
  const int64_t pixel = image.channels * line.type_bytes, step = image.sw * pixel, row = image.dh * image.width * pixel;
  const int64_t rows = PIXELS ? 1 : line.end - line.begin;
  const char* x = line.pixel(line.begin, from * image.sw - image.pw);
  int8_t* q = to.q;
  CodeSum sums[LANES];
  alignas(64) int32_t padded[LANES] = {0};  // codes of padding, which are the zero point
  bool usual = false;  // whether the window before was inside
  for (int64_t v = 0; v < count; v++, x += step, q += to.step) {
    const int32_t zero = RANGE == BETWEEN ? to.zeros[v] : 0;
    const bool same = usual && inverse[v] == inverse[v - 1] && (RANGE == WITHIN || zero == to.zeros[v - 1]);
    CodeSum sum;
    int64_t none = 0;
    usual = false;
    if (most[v] >= INFINITE) {  // NaN, whatever the codes are; those of such values would have sums beyond int32
      __builtin_memset(q, 0, (size_t)k);
    } else if (PIXELS) {
      run_codes<TYPE, RANGE>(x, run, inverse[v], zero, q, sum);
    } else if (line.is_inside(from + v)) {
      usual = true;
      if (above) __builtin_memset(q, zero, (size_t)above);
      if (below) __builtin_memset(q + k - below, zero, (size_t)below);
      none = above + below;
      int8_t* here = q + above;
      const char* values = x;
      const int64_t copied = same ? ready : 0;
      for (int64_t i = 0; i < rows; i++, here += run, values += row) {
        if (copied) copy_codes(here - to.step + shift, copied, here, sum);
        run_codes<TYPE, RANGE>(values + copied * line.type_bytes, run - copied, inverse[v], zero, here + copied, sum);
      }
    } else {
      none = line.template codes<TYPE, RANGE>(from + v, inverse[v], zero, q, sum);
    }
    sums[v % LANES] = sum;
    if (RANGE == BETWEEN && !PIXELS) padded[v % LANES] = (int32_t)none;
    if (v % LANES != LANES - 1 && v + 1 != count) continue;
    const int64_t first = v / LANES * LANES;
    sums_of(sums, to.sums + first);
    if (RANGE == BETWEEN && !PIXELS)
      store_lanes(to.sums + first, add_i(load_i(to.sums + first), mul_i(load_i(padded), load_i(to.zeros + first))));
  }
}

template <Type TYPE, Range RANGE>
static void line_codes_of(bool pixels, const WindowLine& line, int64_t from, int64_t count, const float* inverse,
                          const int32_t* most, const WindowCodes& to) {
  (pixels ? line_codes<TYPE, true, RANGE> : line_codes<TYPE, false, RANGE>)(line, from, count, inverse, most, to);
}

template <Range RANGE>
static void line_codes_as(Type type, bool pixels, const WindowLine& line, int64_t from, int64_t count,
                          const float* inverse, const int32_t* most, const WindowCodes& to) {
  if (type == F32) line_codes_of<F32, RANGE>(pixels, line, from, count, inverse, most, to);
  else if (type == BF16) line_codes_of<BF16, RANGE>(pixels, line, from, count, inverse, most, to);
  else line_codes_of<F16, RANGE>(pixels, line, from, count, inverse, most, to);
}

template <bool AFFINES>
static void side_by_side(Type type, const WindowLine& line, int64_t from, int64_t count, int32_t* above, int32_t* to,
                         int32_t* negative) {
  if (type == F32) line.template largest_side_by_side<F32, AFFINES>(from, count, above, to, negative);
  else if (type == BF16) line.template largest_side_by_side<BF16, AFFINES>(from, count, above, to, negative);
  else line.template largest_side_by_side<F16, AFFINES>(from, count, above, to, negative);
}

// Windows from `from` on of a line of results; the image's largest magnitudes, or null where windows are pixels.
static void window_codes(const Input& in, const Image& image, const int32_t* map, int64_t group, int64_t number,
                         int64_t from, int64_t count, const WindowCodes& to) {
  const WindowLine line(image, in, group, number);
  const bool affine = in.mode == AFFINE;
  const int64_t padded = ceil_div(count, LANES) * LANES, every = image.batch * image.height * image.width;
  int32_t *most = to.scratch, *low = most + 2 * padded, *below = low + padded;
  float* inverse = (float*)(most + padded);
  const int64_t pixels = number / image.out_height() * image.height * image.width;  // of images before this one
  if (has_side_by_side_rows(image)) {
    (affine ? side_by_side<true> : side_by_side<false>)(in.type, line, from, count, below, most, low);
  } else if (map) {
    line.largest(map + pixels, from, count, below, most);
    if (affine) line.largest(map + every + pixels, from, count, below, low);
  } else {
    const Runs runs{line.pixel(0, from * image.sw), in.type, line.own, count, image.sw * image.channels};
    if (affine) extremes(runs, most, low);
    else magnitudes(runs, most);
  }
  for (int64_t v = count; v % LANES; v++) most[v] = low[v] = 0;
  for (int64_t v = 0; affine && v < count; v += LANES) {
    const I above = load_i(most + v), under = load_i(low + v), largest = max_i(above, under);
    F scale;
    I zero;
    plane_steps(in, largest, from_bits(or_i(under, set_i((int32_t)0x80000000))), from_bits(above), scale, zero);
    store_f(to.scales + v, scale);
    store_f(inverse + v, inverse_scales(scale));
    store_lanes(to.zeros + v, zero);
    store_lanes(most + v, largest);
  }
  for (int64_t v = 0; !affine && v < count; v += LANES) {
    F scale, factor;
    dynamic_steps(load_i(most + v), scale, factor);
    store_f(to.scales + v, scale);
    store_f(inverse + v, factor);
  }
  (affine ? line_codes_as<BETWEEN> : line_codes_as<WITHIN>)(in.type, is_pixelwise(image), line, from, count, inverse, most, to);
}
