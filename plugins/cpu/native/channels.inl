// Depthwise convolutions of images whose channels lie side by side: channels are lanes, and nothing is copied.

static void channel_numbers(const Weight& w, int64_t step, int32_t* to, float* scales, char* scratch) {
  for (int64_t nb = 0; nb < ceil_div(w.n, COLUMNS); nb++) {
    // With `scales` codes less their zero points, else scaled.
    panel_numbers<false, true>(w, scales, nb, 0, w.at.packed(), scratch);
    const float* numbers = (const float*)scratch;
    for (int64_t k = 0; k < w.at.k; k++) {
      const int64_t packed = k / w.at.group * w.at.block * w.at.blocks + k % w.at.group;
      for (int c = 0; c < COLUMNS; c += LANES) {
        const F number = load_f(numbers + packed * COLUMNS + c);
        store_lanes(to + k * step + nb * COLUMNS + c, scales ? and_i(round_i(number), set_i(0xffff)) : bits(number));
      }
    }
    if (!scales) continue;
    for (int c = 0; c < COLUMNS; c += LANES) store_f(scales + nb * COLUMNS + c, scales_f(w, nb * COLUMNS + c));
  }
}

// A tap of the windows of one line that lies within the image.
struct Tap {
  int64_t offset;         // bytes from the window's first column in the image's first line
  int64_t column;         // of the window
  const int32_t* number;  // of the first channel
};

// How x becomes codes at some windows.
template <int V>
struct Codes {
  F own[V], inverse[V], low[V], high[V];
};

// Sums of V neighbouring windows, `step` bytes apart, in LANES channels from `first` on. INSIDE: all columns of the windows are in
// the image; else there is one, `left` columns from its edge.
template <Type TYPE, Mode MODE, bool INSIDE, int V>
static inline __attribute__((always_inline)) void
channel_sums(const Image& image, const Tap* taps, int count, const char* window, int64_t step, int64_t left,
             int64_t first, const Codes<V>& codes, F (&sums)[V]) {
  constexpr bool FLOATS = MODE == DIGITS;
  I acc[V];
  for (int v = 0; v < V; v++) acc[v] = set_i(0), sums[v] = set_f(0);
  for (int t = 0; t < count; t++) {
    if (!INSIDE && (left + taps[t].column < 0 || left + taps[t].column >= image.width)) continue;
    const char* x = window + taps[t].offset;
    const I number = load_i(taps[t].number + first);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const F value = widen_f(x + v * step, 0, TYPE);
      if (FLOATS) sums[v] = fma_f(value, from_bits(number), sums[v]);
      else acc[v] = add_code<MODE != DYNAMIC>(acc[v], value, codes.inverse[v], codes.low[v], codes.high[v], number);
    }
  }
  for (int v = 0; !FLOATS && v < V; v++) sums[v] = to_f(acc[v]);
}

// LANES channels from `first` on of a line of results.
template <Type TYPE, Mode MODE>
struct ChannelVector {
  static constexpr bool FLOATS = MODE == DIGITS;
  const Input& in;
  const Output& out;
  const Image& image;
  const Tap* taps;
  int count;
  const char* x;  // of the image
  int64_t row, first;
  I* stacks;  // of a line with its padding; of AFFINE three such lines
  F scale;
  alignas(64) float bias[LANES];

  int64_t stack_step() const { return image.width + 2 * image.pw; }

  // 1. The largest magnitudes of pixels above each other; of AFFINE also their least and largest values.
  void stack() {
    const int64_t pixel = image.channels * type_size(TYPE);
    const I all_but_sign = set_i(0x7fffffff);
    for (int64_t u = 0; u < image.width; u++) {
      I most = set_i(0);
      F low = set_f(0), high = set_f(0);
      for (int t = 0; t < count && !taps[t].column; t++) {
        const F value = widen_f(x + taps[t].offset + u * pixel, first, TYPE);
        most = max_i(most, and_i(bits(value), all_but_sign));
        if (MODE == AFFINE) low = min_f(value, low), high = max_f(value, high);
      }
      I* to = stacks + image.pw + u;
      *to = most;
      if (MODE == AFFINE) to[stack_step()] = bits(low), to[2 * stack_step()] = bits(high);
    }
  }

  // 2. The scale of each window. 3. Codes, each used at once, and products.
  template <int V, bool INSIDE>
  inline __attribute__((always_inline)) void windows(int64_t v0) {
    const int64_t size = type_size(TYPE), pixel = image.channels * size, wide = (image.kw - 1) * image.dw;
    Codes<V> codes;
    for (int v = 0; !FLOATS && v < V; v++) {
      const I* column = stacks + (v0 + v) * image.sw;
      I most = column[0], zero;
      for (int64_t j = image.dw; j <= wide; j += image.dw) most = max_i(most, column[j]);
      F low = set_f(0), high = set_f(0);
      for (int64_t j = 0; MODE == AFFINE && j <= wide; j += image.dw) {
        low = min_f(from_bits(column[stack_step() + j]), low);
        high = max_f(from_bits(column[2 * stack_step() + j]), high);
      }
      plane_steps(in, most, low, high, codes.own[v], zero);
      codes.inverse[v] = inverse_scales(codes.own[v]);
      if (MODE != DYNAMIC) code_bounds(zero, codes.low[v], codes.high[v]);
    }
    const int64_t left = v0 * image.sw - image.pw;
    F sums[V];
    channel_sums<TYPE, MODE, INSIDE, V>(image, taps, count, x + left * pixel + first * size, image.sw * pixel, left, first, codes, sums);
    for (int v = 0; v < V; v++) {
      F result[1] = {FLOATS ? sums[v] : mul_f(mul_f(sums[v], scale), codes.own[v])};
      finish_vectors(out, row + v0 + v, first, image.channels, bias, result);
    }
  }

  void run() {
    constexpr int V = 4;
    if (!FLOATS) stack();
    const int64_t width = image.out_width(), wide = (image.kw - 1) * image.dw;
    const auto inside = [&](int64_t v) { return v * image.sw >= image.pw && v * image.sw - image.pw + wide < image.width; };
    for (int64_t v = 0; v < width;) {
      if (v + V <= width && inside(v) && inside(v + V - 1)) windows<V, true>(v), v += V;
      else if (inside(v)) windows<1, true>(v++);
      else windows<1, false>(v++);
    }
  }
};

template <Type TYPE, Mode MODE>
static void channel_vectors(const Input& in, const Output& out, const Image& image, const ChannelNumbers& w, const Tap* taps, int count,
                            const char* x, int64_t row, I* stacks) {
  for (int64_t c = 0; c < image.channels; c += LANES) {  // the last ones once more, where they are no whole vector
    const int64_t first = c + LANES <= image.channels ? c : image.channels - LANES;
    ChannelVector<TYPE, MODE> vector{in, out, image, taps, count, x, row, first, stacks, set_f(1), {}};
    if (MODE != DIGITS) vector.scale = load_f(w.scales + first);
    read_bias(out, first, image.channels, LANES, vector.bias);
    vector.run();
  }
}

using ChannelVectors = void (*)(const Input&, const Output&, const Image&, const ChannelNumbers&, const Tap*, int, const char*, int64_t, I*);

template <Type TYPE>
static ChannelVectors channels_of(Mode mode) {
  return mode == DIGITS ? channel_vectors<TYPE, DIGITS> : mode == DYNAMIC ? channel_vectors<TYPE, DYNAMIC>
         : mode == STATIC ? channel_vectors<TYPE, STATIC> : channel_vectors<TYPE, AFFINE>;
}

static void channel_line(const Input& in, const Output& out, const Image& image, const ChannelNumbers& w, int64_t b, int64_t line,
                         char* scratch) {
  Tap taps[MOST_TAPS];
  int count = 0;
  const int64_t pixel = image.channels * type_size(in.type), row = image.width * pixel;
  const char* x = (const char*)in.x + b * image.height * row;
  for (int64_t j = 0; j < image.kw; j++)  // column by column, as magnitudes are taken
    for (int64_t i = 0; i < image.kh; i++) {
      const int64_t h = line * image.sh + i * image.dh - image.ph;
      if (h < 0 || h >= image.height) continue;
      taps[count++] = {h * row + j * image.dw * pixel, j * image.dw, w.numbers + (i * image.kw + j) * w.step};
    }
  I* stacks = (I*)scratch;
  const int64_t step = image.width + 2 * image.pw, end = (in.mode == AFFINE ? 3 : 1) * step;
  for (int64_t start = 0; start < end; start += step)
    for (int64_t u = 0; u < image.pw; u++) stacks[start + u] = stacks[start + image.pw + image.width + u] = set_i(0);
  const int64_t first_row = (b * image.out_height() + line) * image.out_width();
  const auto run = in.type == F32 ? channels_of<F32>(in.mode) : in.type == BF16 ? channels_of<BF16>(in.mode) : channels_of<F16>(in.mode);
  run(in, out, image, w, taps, count, x, first_row, stacks);
}
