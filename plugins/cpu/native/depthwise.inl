// Depthwise convolutions with a given scale on images whose channels lie side by side: channels are lanes, as in
// channel_groups.inl, which has what is said here for one line. A part of some lines of results is made together: each
// value becomes a code once, and codes of four lines of a column lie in a lane, as four numbers of the weight do.

template <Type TYPE>
struct DepthwisePart {
  static constexpr int V = 4;
  const Input& in;
  const Output& out;
  const Image& image;
  const ChannelNumbers& w;
  const char* x;  // of the image
  int64_t row, top, lines, v0, count, first, columns;
  I* values;   // [rows][columns]: codes of this line and the next three
  I* numbers;  // of the weight
  I start;     // of sums

  // 1. The weight, four numbers of a column in a word; false if they do not fit bytes.
  bool arrange() {
    I* to = numbers;
    I sum = set_i(0), most = set_i(0);
    for (int64_t j = 0; j < image.kw; j++)
      for (int64_t i = 0; i < image.kh; i += 4) {
        I word = set_i(0);
        for (int64_t k = 3; k >= 0; k--) {
          word = shl_i<8>(word);
          if (i + k >= image.kh) continue;
          const I number = sra_i<16>(shl_i<16>(load_i(w.numbers + ((i + k) * image.kw + j) * w.step + first)));
          sum = add_i(sum, number), word = or_i(word, and_i(number, set_i(255)));
          most = max_i(most, max_i(number, sub_i(set_i(-1), number)));
        }
        *to++ = word;
      }
    start = mul_i(sum, set_i(-CODE_OFFSET - in.zero));
    return largest_i(most) < 128;
  }

  // 2. Codes of values and of padding, from the last line to the first; false if there is NaN.
  bool read() const {
    const int64_t pixel = image.channels * type_size(TYPE), line = image.width * pixel;
    const int64_t below = rows_of_part(image, lines), left = v0 * image.sw - image.pw;
    const F inverse = inverse_scales(set_f(in.scale));
    F low, high;
    code_bounds(set_i(in.zero), low, high);
    I most = set_i(0);
    for (int64_t u = 0; u < columns; u++) {
      const bool inside = left + u >= 0 && left + u < image.width;
      const int64_t from = !inside ? below : top < 0 ? -top : 0;
      const int64_t to = !inside ? below : image.height - top < below ? image.height - top : below;
      const char* at = x + (top * image.width + left + u) * pixel + first * type_size(TYPE);
      I* column = values + u;
      I codes = set_i(0);
      for (int64_t r = below - 1; r >= 0; r--) {
        const F value = r >= from && r < to ? widen_f(at + r * line, 0, TYPE) : set_f(0);
        most = max_i(most, and_i(bits(value), set_i(0x7fffffff)));
        const F code = max_f(min_f(mul_f(value, inverse), high), low);
        const I word = add_i(bits(add_f(code, set_f(ROUNDING + CODE_OFFSET))), set_i(in.zero));
        codes = or_i(shl_i<8>(codes), and_i(word, set_i(255)));
        column[r * columns] = codes;
      }
    }
    return largest_i(most) <= INFINITE;
  }

  // 3. Products of N windows from v on.
  template <int N>
  inline __attribute__((always_inline)) void windows(const I* line, int64_t here, int64_t v) const {
    F own[N];
    I acc[N];
    for (int n = 0; n < N; n++) own[n] = set_f(in.scale), acc[n] = start;
    const I* number = numbers;
    for (int64_t j = 0; j < image.kw; j++)
      for (int64_t i = 0; i < image.kh; i += 4, number++) {
        const I* from = line + i * columns + v * image.sw + j * image.dw;
        const I four = *number;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[n] = dot(acc[n], from[n * image.sw], four);
      }
    channel_results<TYPE, N>(out, w, here + v, first, own, acc);
  }

  // Where there is NaN, or the weight does not fit bytes, lines are made as others are.
  void line_of_any(int64_t l) const {
    const int64_t results = row + l * image.out_width();
    const ChannelPart<TYPE, STATIC, 1> part{in,    out,   image, w,       x,          results, top + l * image.sh, v0,
                                            count, first, columns, (F*)values, values + image.kh * columns};
    part.run();
  }

  void run() {
    const bool usual = arrange() && read();
    for (int64_t l = 0; l < lines; l++) {
      if (!usual) {
        line_of_any(l);
        continue;
      }
      const I* line = values + l * image.sh * columns;
      const int64_t here = row + l * image.out_width() + v0;
      int64_t v = 0;
      for (; v + V <= count; v += V) windows<V>(line, here, v);
      if (v < count && count >= V) windows<V>(line, here, count - V);  // some of them once more
      else for (; v < count; v++) windows<1>(line, here, v);
    }
  }
};

// Parts of some lines, for each all channels; the last ones once more, where they are no whole vector.
template <Type TYPE>
static void depthwise_parts(const Input& in, const Output& out, const Image& image, const ChannelNumbers& w,
                            const char* x, int64_t row, int64_t line, int64_t lines, char* scratch) {
  const int64_t most = windows_in_part(image, type_size(TYPE)), width = image.out_width();
  const int64_t rows = rows_of_part(image, lines) + 2;  // and what ChannelPart needs beside a line's values
  for (int64_t v = 0; v < width; v += most) {
    const int64_t count = width - v < most ? width - v : most;
    const int64_t columns = columns_of_part(image, count), top = line * image.sh - image.ph;
    I *values = (I*)scratch, *numbers = values + rows * columns;
    for (int64_t c = 0; c < image.channels; c += LANES) {
      const int64_t first = c + LANES <= image.channels ? c : image.channels - LANES;
      DepthwisePart<TYPE> part{in, out,   image, w,       x,      row,     top,
                               lines, v,  count, first, columns, values, numbers, set_i(0)};
      part.run();
    }
  }
}

static void depthwise_lines(const Input& in, const Output& out, const Image& image, const ChannelNumbers& w,
                            const char* x, int64_t row, int64_t line, int64_t lines, char* scratch) {
  const auto run = in.type == F32    ? depthwise_parts<F32>
                   : in.type == BF16 ? depthwise_parts<BF16>
                                     : depthwise_parts<F16>;
  run(in, out, image, w, x, row, line, lines, scratch);
}
