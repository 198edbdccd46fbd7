// Depthwise convolutions of images whose channels lie side by side: channels are lanes, and nothing is copied. For int8
// activations see channel_groups.inl.

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

// LANES channels from `first` on of a line of results, of float x.
template <Type TYPE>
struct ChannelVector {
  const Output& out;
  const Image& image;
  const Tap* taps;
  int count;
  const char* x;  // of the image
  int64_t row, first;
  alignas(64) float bias[LANES];

  // V neighbouring windows. INSIDE: all their columns are in the image; else there is one, of which some are not.
  template <int V, bool INSIDE>
  inline __attribute__((always_inline)) void windows(int64_t v0) {
    const int64_t size = type_size(TYPE), pixel = image.channels * size, step = image.sw * pixel;
    const int64_t left = v0 * image.sw - image.pw;
    const char* window = x + left * pixel + first * size;
    F sums[V];
    for (int v = 0; v < V; v++) sums[v] = set_f(0);
    for (int t = 0; t < count; t++) {
      if (!INSIDE && (left + taps[t].column < 0 || left + taps[t].column >= image.width)) continue;
      const char* from = window + taps[t].offset;
      const F number = load_f((const float*)taps[t].number + first);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[v] = fma_f(widen_f(from + v * step, 0, TYPE), number, sums[v]);
    }
    for (int v = 0; v < V; v++) {
      F result[1] = {sums[v]};
      finish_vectors(out, row + v0 + v, first, image.channels, bias, result);
    }
  }

  void run() {
    constexpr int V = 4;
    const int64_t width = image.out_width(), wide = (image.kw - 1) * image.dw;
    const auto inside = [&](int64_t v) { return v * image.sw >= image.pw && v * image.sw - image.pw + wide < image.width; };
    for (int64_t v = 0; v < width;) {
      if (v + V <= width && inside(v) && inside(v + V - 1)) windows<V, true>(v), v += V;
      else if (inside(v)) windows<1, true>(v++);
      else windows<1, false>(v++);
    }
  }
};

template <Type TYPE>
static void channel_vectors(const Output& out, const Image& image, const Tap* taps, int count, const char* x, int64_t row) {
  for (int64_t c = 0; c < image.channels; c += LANES) {  // the last ones once more, where they are no whole vector
    const int64_t first = c + LANES <= image.channels ? c : image.channels - LANES;
    ChannelVector<TYPE> vector{out, image, taps, count, x, row, first, {}};
    read_bias(out, first, image.channels, LANES, vector.bias);
    vector.run();
  }
}

static void channel_lines(const Input& in, const Output& out, const Image& image, const ChannelNumbers& w, int64_t b,
                          int64_t line, int64_t lines, char* scratch) {
  const int64_t pixel = image.channels * type_size(in.type), row = image.width * pixel;
  const int64_t first_row = (b * image.out_height() + line) * image.out_width();
  const char* x = (const char*)in.x + b * image.height * row;
  if (in.mode != DIGITS && lines > 1) return depthwise_lines(in, out, image, w, x, first_row, line, lines, scratch);
  if (in.mode != DIGITS) return parts_for<1>(in.type, in.mode, w.size)(in, out, image, w, x, first_row, line, scratch);
  Tap taps[MOST_TAPS];
  int count = 0;
  for (int64_t j = 0; j < image.kw; j++)
    for (int64_t i = 0; i < image.kh; i++) {
      const int64_t h = line * image.sh + i * image.dh - image.ph;
      if (h < 0 || h >= image.height) continue;
      taps[count++] = {h * row + j * image.dw * pixel, j * image.dw, w.numbers + (i * image.kw + j) * w.step};
    }
  const auto run = in.type == F32 ? channel_vectors<F32> : in.type == BF16 ? channel_vectors<BF16> : channel_vectors<F16>;
  run(out, image, taps, count, x, first_row);
}
