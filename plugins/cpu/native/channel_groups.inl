// Convolutions of int8 activations with 1, 4, 8 or 16 channels in each group, as many in as out, on images whose channels
// lie side by side: channels are lanes. Of a part of a line of results, small enough for the L1 cache, the values that
// windows read are widened once; then each window's codes are used at once, so that they stay in registers.
//
// The codes of a vector become bytes by one shuffle: each block of 4 lanes holds the 4 codes of its own channels in every
// lane. Where a group has more than 4 channels, its blocks meet the others' codes as vectors are rotated, for which the
// numbers of the weight are arranged.

// What `dot` takes first: codes of x, unsigned but on Arm. They have their zero point, whose product is subtracted from the
// start.
constexpr int CODE_OFFSET = SIGNED_CODES ? 0 : 128;

// Words of the weight for `to` [taps][S / 4][step], their sums over each window for `sums`, and scales; see ChannelNumbers.
static void group_numbers(const Weight& w, int size, int64_t step, int32_t* to, int32_t* sums, float* scales,
                          char* scratch) {
  const int blocks = size / 4;
  const int64_t taps = w.at.k / size;
  for (int64_t nb = 0; nb < ceil_div(w.n, COLUMNS); nb++) {
    panel_numbers<false, true>(w, scales, nb, 0, w.at.packed(), scratch);
    for (int c = 0; c < COLUMNS; c += LANES) {
      const float* numbers = (const float*)scratch + c;
      const int64_t column = nb * COLUMNS + c;
      I sum = set_i(0);
      for (int64_t t = 0; t < taps; t++)
        for (int b = 0; b < blocks; b++) {
          I word = set_i(0);
          for (int i = 3; i >= 0; i--) {
            const I number = round_i(load_f(numbers + (t * size + b * 4 + i) * COLUMNS));
            sum = add_i(sum, number);
            word = or_i(shl_i<8>(word), and_i(number, set_i(255)));
          }
          alignas(64) int32_t words[LANES];
          store_lanes(words, word);
          for (int lane = 0; lane < LANES; lane += 4) {
            const int own = (int)((column + lane) / 4 % blocks), turns = (b - own + blocks) % blocks;
            __builtin_memcpy(to + (t * blocks + turns) * step + column + lane, words + lane, 16);
          }
        }
      store_lanes(sums + column, sum);
      store_f(scales + column, scales_f(w, column));
    }
  }
}

// LANES results from channel `first` on of N rows from `row` on.
template <Type TYPE, int N>
static inline __attribute__((always_inline)) void
channel_results(const Output& out, const ChannelNumbers& w, int64_t row, int64_t first, const F (&own)[N],
                const I (&acc)[N]) {
  const F scale = load_f(w.scales + first), bias = out.bias ? widen_f(out.bias, first, out.bias_type) : set_f(0);
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) {
    F result[1] = {mul_f(mul_f(to_f(acc[n]), scale), own[n])};
    if (out.bias) result[0] = add_f(result[0], bias);
    const int64_t here = row + n;
    if (out.type != TYPE) {
      finish_part<1>(out, here, first, LANES, result);
      continue;
    }
    char* y = (char*)out.y + (here * out.stride + first) * type_size(TYPE);
#ifdef QCORE_PARTS
    store_some<1>(y, 0, TYPE, LANES, result);
#else
    store_result(y, 0, TYPE, result[0]);
#endif
  }
}

// LANES channels from `first` on of `count` windows of a line of results, from window v0 on.
template <Type TYPE, Mode MODE, int S>
struct ChannelPart {
  static constexpr int V = 4, BLOCKS = S > 4 ? S / 4 : 1;  // windows together
  const Input& in;
  const Output& out;
  const Image& image;
  const ChannelNumbers& w;
  const char* x;  // of the image
  int64_t row, top, v0, count, first, columns;
  F* buffer;  // [kernel height][columns], or what is read from the image itself: floats without padding
  I* stacks;  // [columns], and as many again for AFFINE

  // Where floats lie: bytes from column to column, and from line to line.
  struct Values {
    const char* at;
    int64_t column, line;
  };

  // 1. Values as floats, and the largest magnitudes of those above each other in each group; of AFFINE those of positive
  //    and of negative ones.
  Values read() const {
    const int64_t pixel = image.channels * type_size(TYPE), left = v0 * image.sw - image.pw;
    const int64_t begin = left < 0 ? (-left < columns ? -left : columns) : 0, rest = image.width - left;
    const int64_t end = rest < begin ? begin : rest < columns ? rest : columns;
    int64_t from = 0, to = image.kh;  // rows of the image
    while (from < to && top + from * image.dh < 0) from++;
    while (from < to && top + (to - 1) * image.dh >= image.height) to--;
    const bool ready = TYPE == F32 && begin == 0 && end == columns && from == 0 && to == image.kh;
    const auto clear = [&](int64_t u, int64_t last) {
      for (; u < last; u++) {
        for (int64_t i = 0; i < image.kh; i++) buffer[i * columns + u] = set_f(0);
        stacks[u] = set_i(0);
        if (MODE == AFFINE) stacks[columns + u] = set_i(0);
      }
    };
    clear(0, begin), clear(end, columns);
    for (int64_t i = 0; i < image.kh; i++)
      if (i < from || i >= to) for (int64_t u = begin; u < end; u++) buffer[i * columns + u] = set_f(0);
    const int64_t below = image.dh * image.width * pixel;
    const char* column = x + ((top + from * image.dh) * image.width + left + begin) * pixel + first * type_size(TYPE);
    const I sign = set_i((int32_t)0x80000000), all_but_sign = set_i(0x7fffffff);
    const Values own{ready ? column : (const char*)buffer, ready ? pixel : (int64_t)sizeof(F),
                     ready ? below : columns * (int64_t)sizeof(F)};
    // The next part of the last line, or what follows that line: too few values at a stretch for the processor to see where they
    // lead.
    const int64_t ahead = count * image.sw * pixel;
    for (int64_t u = begin; u < end; u++, column += pixel) {
      I most = set_i(0), under = set_i(0);
      const char* at = column;
      for (int64_t i = from; i < to; i++, at += below) {
        const F value = widen_f(at, 0, TYPE);
        if (!ready) buffer[i * columns + u] = value;
        most = max_i(most, MODE == AFFINE ? bits(value) : and_i(bits(value), all_but_sign));
        if (MODE == AFFINE) under = max_i(under, add_i(bits(value), sign));  // the other sign
      }
      prefetch(at - below + ahead);
      stacks[u] = largest_in_groups<S>(most);
      if (MODE == AFFINE) stacks[columns + u] = largest_in_groups<S>(under);
    }
    return own;
  }

  // 2. The scale of each window. 3. Codes, each used at once, and products.
  template <int N>
  inline __attribute__((always_inline)) void windows(const Values& values, int64_t v) const {
    const int64_t wide = (image.kw - 1) * image.dw;
    F own[N];
    Codes<N> codes;
    I acc[N];
    const I sums = S > 1 ? load_i(w.sums + first) : set_i(0);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const I* column = stacks + (v + n) * image.sw;
      I most = column[0], under = set_i(0), zero = set_i(0);
      for (int64_t j = image.dw; j <= wide; j += image.dw) most = max_i(most, column[j]);
      for (int64_t j = 0; MODE == AFFINE && j <= wide; j += image.dw) under = max_i(under, column[columns + j]);
      if (MODE == DYNAMIC) {
        dynamic_steps(most, own[n], codes.inverse[n]);
      } else if (MODE == AFFINE) {
        affine_steps(most, under, own[n], codes.inverse[n], zero);
      } else {
        plane_steps(in, most, from_bits(most), from_bits(most), own[n], zero);
        codes.inverse[n] = inverse_scales(own[n]);
      }
      if (MODE != DYNAMIC) code_bounds(zero, codes.low[n], codes.high[n]);
      codes.zero[n] = zero;
      acc[n] = S == 1 ? set_i(0) : mul_i(sums, sub_i(set_i(-CODE_OFFSET), zero));
    }
    multiply<N>(values, v, codes, acc);
    channel_results<TYPE, N>(out, w, row + v0 + v, first, own, acc);
  }

  // How values become codes.
  template <int N>
  struct Codes {
    F inverse[N], low[N], high[N];
    I zero[N];  // added to whole numbers: with it before, ties would be rounded to odd codes
  };

  template <int N>
  inline __attribute__((always_inline)) void
  multiply(const Values& values, int64_t v, const Codes<N>& codes, I (&sums)[N]) const {
    I acc[N];
    for (int n = 0; n < N; n++) acc[n] = sums[n];
    const int64_t step = image.sw * values.column;
    for (int64_t j = 0; j < image.kw; j++) {
      const char* from = values.at + (v * image.sw + j * image.dw) * values.column;
      const int32_t* number = w.numbers + j * BLOCKS * w.step + first;
      for (int64_t i = 0; i < image.kh; i++, from += values.line, number += image.kw * BLOCKS * w.step) {
        I numbers[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) numbers[b] = load_i(number + b * w.step);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
          F code = mul_f(load_f((const float*)(from + n * step)), codes.inverse[n]);
          if (MODE != DYNAMIC) code = max_f(min_f(code, codes.high[n]), codes.low[n]);
          const I word = bits(add_f(code, set_f(S == 1 ? ROUNDING : ROUNDING + CODE_OFFSET)));
          if constexpr (S == 1) {
            acc[n] = dot_words(acc[n], word, numbers[0]);
          } else {
            const I bytes = low_bytes_in_blocks(MODE == DYNAMIC ? word : add_i(word, codes.zero[n]));
            acc[n] = dot(acc[n], bytes, numbers[0]);
            if constexpr (BLOCKS > 1) acc[n] = dot(acc[n], rotated_blocks<BLOCKS, 1>(bytes), numbers[1]);
            if constexpr (BLOCKS > 2) {
              acc[n] = dot(acc[n], rotated_blocks<BLOCKS, 2>(bytes), numbers[2]);
              acc[n] = dot(acc[n], rotated_blocks<BLOCKS, 3>(bytes), numbers[3]);
            }
          }
        }
      }
    }
    for (int n = 0; n < N; n++) sums[n] = acc[n];
  }

  void run() const {
    const Values values = read();
    int64_t v = 0;
    for (; v + V <= count; v += V) windows<V>(values, v);
    if (v < count && count >= V) return windows<V>(values, count - V);  // some of them once more
    for (; v < count; v++) windows<1>(values, v);
  }
};

// Parts of a line, for each all channels; the last ones once more, where they are no whole vector.
template <Type TYPE, Mode MODE, int S>
static void channel_parts(const Input& in, const Output& out, const Image& image, const ChannelNumbers& w, const char* x,
                          int64_t row, int64_t line, char* scratch) {
  const int64_t most = windows_in_part(image, type_size(TYPE)), width = image.out_width();
  for (int64_t v = 0; v < width; v += most) {
    const int64_t count = width - v < most ? width - v : most;
    const int64_t columns = columns_of_part(image, count);
    for (int64_t c = 0; c < image.channels; c += LANES) {
      const int64_t first = c + LANES <= image.channels ? c : image.channels - LANES;
      const ChannelPart<TYPE, MODE, S> part{in, out, image, w, x, row, line * image.sh - image.ph, v, count, first, columns,
                                            (F*)scratch, (I*)scratch + image.kh * columns};
      part.run();
    }
  }
}

using ChannelParts = void (*)(const Input&, const Output&, const Image&, const ChannelNumbers&, const char*, int64_t,
                              int64_t, char*);

template <Type TYPE, int S>
static ChannelParts parts_of(Mode mode) {
  if (mode == AFFINE) return channel_parts<TYPE, AFFINE, S>;
  return mode == DYNAMIC ? channel_parts<TYPE, DYNAMIC, S> : channel_parts<TYPE, STATIC, S>;
}

template <int S>
static ChannelParts parts_for(Type type, Mode mode, int size) {
  if constexpr (S > LANES) return nullptr;
  else if (size > S) return parts_for<S == 1 ? 4 : 2 * S>(type, mode, size);
  else return type == F32 ? parts_of<F32, S>(mode) : type == BF16 ? parts_of<BF16, S>(mode) : parts_of<F16, S>(mode);
}
