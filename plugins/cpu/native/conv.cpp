#include "conv.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace qcore_cpu {
namespace {

struct Window {
  const Image* image;
  int64_t group;       // of channels
  int8_t padding;      // the code of 0, for an image of codes
};

// The receptive field of one output position as a row in (kh, kw, channel) order.
const void* window_row(const Input& in, int64_t index, void* scratch) {
  const Window& window = *static_cast<const Window*>(in.context);
  const Image& image = *window.image;
  const int64_t size = type_size(in.type), own = image.channels / image.groups, run = own * size;
  const int64_t ow = index % image.out_width(), oh = index / image.out_width() % image.out_height();
  const int64_t b = index / image.out_width() / image.out_height();
  const char* x = static_cast<const char*>(in.x) + window.group * run;
  if (image.kh == 1 && image.kw == 1 && !image.ph && !image.pw) {
    return x + ((b * image.height + oh * image.sh) * image.width + ow * image.sw) * image.channels * size;
  }
  char* to = static_cast<char*>(scratch);
  const int64_t left = ow * image.sw - image.pw;
  const bool inside = left >= 0 && left + image.kw <= image.width && image.dw == 1 && image.groups == 1;
  for (int64_t i = 0; i < image.kh; i++) {
    const int64_t h = oh * image.sh + i * image.dh - image.ph;
    if (inside && h >= 0 && h < image.height) {  // neighbouring pixels lie side by side
      std::memcpy(to, x + ((b * image.height + h) * image.width + left) * run, static_cast<size_t>(image.kw * run));
      to += image.kw * run;
      continue;
    }
    for (int64_t j = 0; j < image.kw; j++, to += run) {
      const int64_t v = ow * image.sw + j * image.dw - image.pw;
      if (h < 0 || h >= image.height || v < 0 || v >= image.width) {
        std::memset(to, in.type == I8 ? window.padding : 0, static_cast<size_t>(run));
      } else {
        std::memcpy(to, x + ((b * image.height + h) * image.width + v) * image.channels * size, static_cast<size_t>(run));
      }
    }
  }
  return scratch;
}

bool is_even(const Weight& w, const Image& image) {
  return image.channels / image.groups % (w.element == INT4 ? 8 : 4) == 0;
}

// Whether windows can be multiplied where they lie, or as rows of codes side by side. Groups of columns do so too if only the
// last one has padding.
bool has_windows(const Weight& w, const Image& image, const Input& in) {
  const bool integer = w.element == INT4 || w.element == INT8, dynamic = in.mode == DYNAMIC || in.mode == AFFINE;
  const bool whole = w.at.groups == 1 ? w.fold == w.at.packed() : w.at.group % 32 == 0 && w.fold == w.at.group;
  return integer && whole && ((in.mode == STATIC && is_even(w, image)) || (dynamic && in.type != I8));
}

// Rows of codes side by side. They lie an odd number of cache lines apart, so that they do not share one set of the cache.
struct CodeRows {
  explicit CodeRows(const Weight& w) : step((round_up(w.at.packed(), 64) / 64 | 1) * 64) {}
  int64_t step;
  static int64_t padded(int64_t rows) { return round_up(rows, VECTOR) + VECTOR; }
  // Bytes for the codes, for zero points, scales and sums, and for what weights in groups need.
  int64_t bytes(const Weight& w, int64_t rows) const {
    const int64_t parts = w.at.groups > 1 ? (w.added ? 3 : 2) * w.at.groups : 0;
    return rows * step + (3 + parts) * padded(rows) * 4;
  }
  // Codes behind the last column are 0: they add nothing.
  void clear_ends(const Weight& w, int8_t* q, int64_t rows) const {
    const int64_t behind = w.at.packed() - w.at.k;
    for (int64_t r = 0; behind && r < rows; r++) std::memset(q + r * step + w.at.k, 0, static_cast<size_t>(behind));
  }
  static constexpr int64_t VECTOR = 16;
};

// Multiply the windows of `count` results, the first of which has the number `row0`.
void multiply_rows(const Kernels& kernels, const Weight& w, const Output& out, const Windows& windows, int64_t count,
                   int64_t row0) {
  for (int64_t nb = 0; nb < ceil_div(w.n, COLUMNS); nb++) kernels.window_product(w, out, windows, nb, count, row0);
}

// The same for rows of codes. `parts`: memory for what weights in groups need.
void multiply_codes(const Kernels& kernels, const Weight& w, const Output& out, const CodeRows& rows, const int8_t* q,
                    const int32_t* sums, const float* scales, const int32_t* zeros, int32_t* parts, int64_t count,
                    int64_t row0) {
  const int64_t none = 0, all = CodeRows::padded(count) * w.at.groups;
  const GroupSums groups{CodeRows::padded(count), parts, parts + all, reinterpret_cast<float*>(parts + 2 * all)};
  const bool several = w.at.groups > 1;
  if (several) kernels.group_sums(w, q, rows.step, count, zeros, groups);
  const int64_t run = w.at.k % (w.element == INT4 ? 8 : 4) ? w.at.packed() : w.at.k;
  const Windows windows{q, rows.step, &none, 1, run, sums, scales, zeros, several ? &groups : nullptr};
  multiply_rows(kernels, w, out, windows, count, row0);
}

// Windows of one line of results in an image of codes as rows side by side, some at a time. `taps`: offsets of runs of `run`
// codes, window by window `step` codes apart. False if memory ran out.
bool multiply_gathered(const Kernels& kernels, const Weight& w, const Output& out, const Windows& x, int64_t count,
                       int64_t row0) {
  constexpr int64_t MOST = 96;
  const CodeRows rows(w);
  const Scratch codes(rows.bytes(w, MOST));
  if (!codes.data) return false;
  int8_t* q = reinterpret_cast<int8_t*>(codes.data);
  rows.clear_ends(w, q, std::min(count, MOST));
  int32_t* parts = reinterpret_cast<int32_t*>(q + MOST * rows.step);
  for (int64_t first = 0; first < count; first += MOST) {
    const int64_t here = std::min(MOST, count - first);
    for (int64_t r = 0; r < here; r++)
      for (int64_t t = 0; t < x.count; t++)
        std::memcpy(q + r * rows.step + t * x.run, x.x + (first + r) * x.step + x.taps[t], static_cast<size_t>(x.run));
    multiply_codes(kernels, w, out, rows, q, x.sums + first, x.scales + first, x.zeros + first, parts, here, row0 + first);
  }
  return true;
}

// Static scale: the image becomes codes once, with its padding; windows are read from there.
bool static_windows(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                    const Output& out, int64_t group) {
  const int64_t own = image.channels / image.groups, ow = image.out_width(), oh = image.out_height();
  const int64_t height = image.height + 2 * image.ph, width = image.width + 2 * image.pw;
  const int64_t lines = image.batch * height, size = type_size(in.type);
  const Scratch codes(lines * width * own + 64), sums(lines * width * 4);
  if (!codes.data || !sums.data) return false;
  int8_t* q = reinterpret_cast<int8_t*>(codes.data);
  int32_t* pixel_sums = reinterpret_cast<int32_t*>(sums.data);
  const float inverse = inverse_scale(in.scale);
  std::vector<char> spoiled(static_cast<size_t>(lines), 0);  // lines that hold NaN
  const auto first_of = [&](int64_t b, int64_t h) {  // pixel of a line of x
    return static_cast<const char*>(in.x) + ((b * image.height + h) * image.width * image.channels + group * own) * size;
  };
  each(pool, lines, std::max<int64_t>(1, (1 << 14) / (width * own)), [&](int64_t line) {
    if (image.kh == 1 && line % height % image.sh) return;  // of no window
    const int64_t b = line / height, h = line % height - image.ph;
    const auto fill = [&](int64_t from, int64_t count) {  // padding
      std::memset(q + (line * width + from) * own, in.zero, static_cast<size_t>(count * own));
      std::fill_n(pixel_sums + line * width + from, count, static_cast<int32_t>(own) * in.zero);
    };
    if (h < 0 || h >= image.height) return fill(0, width);
    fill(0, image.pw), fill(image.pw + image.width, image.pw);
    const Runs pixels{first_of(b, h), in.type, own, image.width, image.channels};
    const int64_t first = line * width + image.pw;
    kernels.quantize_runs(pixels, inverse, in.zero, q + first * own, pixel_sums + first);
    if (in.type == I8) return;
    int32_t largest = 0;  // of the line; between the pixels of a channel group lie others
    if (image.groups == 1) largest = kernels.magnitude(first_of(b, h), in.type, image.width * own);
    else for (int64_t v = 0; v < image.width; v++)
      largest = std::max(largest, kernels.magnitude(first_of(b, h) + v * image.channels * size, in.type, own));
    if (largest > INFINITE) spoiled[static_cast<size_t>(line)] = 1;
  });
  for (char s : spoiled) if (s) return false;  // rare: the other way marks the rows
  const int64_t beside = image.dw == 1 ? image.kw : 1, runs = image.kh * image.kw / beside;  // pixels that lie side by side
  std::vector<int64_t> offsets(static_cast<size_t>(runs));
  for (int64_t r = 0; r < runs; r++) {
    const int64_t t = r * beside;
    offsets[static_cast<size_t>(r)] = (t / image.kw * image.dh * width + t % image.kw * image.dw) * own;
  }
  const std::vector<float> scales(static_cast<size_t>(ow), in.scale);
  const std::vector<int32_t> zeros(static_cast<size_t>(ow), in.zero);
  std::atomic<bool> enough{true};
  each(pool, image.batch * oh, std::max<int64_t>(1, (1 << 16) / (ow * w.at.k * w.n + 1)), [&](int64_t line) {
    const int64_t top = (line / oh * height + line % oh * image.sh) * width;  // pixel of the first window
    std::vector<int32_t> below(static_cast<size_t>(width), 0), window_sums(static_cast<size_t>(ow), 0);
    for (int64_t i = 0; i < image.kh; i++) {  // one above the other, then side by side
      const int32_t* from = pixel_sums + top + i * image.dh * width;
      for (int64_t u = 0; u < width; u++) below[static_cast<size_t>(u)] += from[u];
    }
    for (int64_t j = 0; j < image.kw; j++) {
      const int32_t* from = below.data() + j * image.dw;
      for (int64_t v = 0; v < ow; v++) window_sums[static_cast<size_t>(v)] += from[v * image.sw];
    }
    const Windows windows{q + top * own, image.sw * own, offsets.data(), runs, beside * own, window_sums.data(),
                          scales.data(), zeros.data(), nullptr};
    if (w.at.groups == 1) multiply_rows(kernels, w, out, windows, ow, line * ow);
    else if (!multiply_gathered(kernels, w, out, windows, ow, line * ow)) enough = false;
  });
  return enough;
}

// A scale per window: windows become rows of codes, parts of a line or several short lines of results at a time.
bool dynamic_windows(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& given, const Input& in,
                     const Output& out, int64_t group) {
  constexpr int64_t MOST_ROWS = 96, MOST_BYTES = 512 << 10;  // of codes, which stay in L2 while all columns pass
  constexpr int64_t VECTOR = CodeRows::VECTOR;
  Image image = given;
  const bool alone = is_pixelwise(image), few = has_side_by_side_rows(image);
  if (alone && image.sh == 1 && image.sw == 1) {
    image.width *= image.batch * image.height;
    image.batch = image.height = 1;
  }
  const int64_t own = image.channels / image.groups, ow = image.out_width(), lines = image.batch * image.out_height();
  const int64_t rows_of_pixels = image.batch * image.height, size = type_size(in.type);
  const bool affine = in.mode == AFFINE;
  const Scratch largest(alone || few ? 64 : (affine ? 2 : 1) * rows_of_pixels * image.width * 4);
  if (!largest.data) return false;
  int32_t* map = alone || few ? nullptr : reinterpret_cast<int32_t*>(largest.data);
  const char* x = static_cast<const char*>(in.x) + group * own * size;
  if (map) each(pool, rows_of_pixels, std::max<int64_t>(1, (1 << 14) / (own * image.width)), [&](int64_t row) {
    const int64_t pixel = row * image.width;
    const Runs pixels{x + pixel * image.channels * size, in.type, own, image.width, image.channels};
    if (affine) kernels.extremes(pixels, map + pixel, map + rows_of_pixels * image.width + pixel);
    else kernels.magnitudes(pixels, map + pixel);
  });
  // 1. How many windows a thread takes at a time: those that are multiplied together, and more, as the weight is read
  //    for each such part; fewer where threads would have none.
  const CodeRows of_codes(w);
  const int64_t step = of_codes.step;
  int64_t most = std::min(MOST_ROWS, MOST_BYTES / step);
  if (pool.threads > 1) most = std::min(most, lines * ow / (4 * pool.threads));
  most = std::max<int64_t>(1, most / kernels.window_rows) * kernels.window_rows;
  const int64_t together = std::max<int64_t>(1, std::min(lines, most / ow));
  const int64_t part = ow > most ? most : ow, parts = ceil_div(ow, part);  // of a line
  const int64_t units = ceil_div(lines, together) * parts, rows = together * part, padded = CodeRows::padded(rows);
  const int64_t line_words = image.width + 2 * image.pw + VECTOR;
  const int64_t words = 3 * round_up(part, VECTOR) + (few ? 2 * image.channels : 1) * line_words + 2 * VECTOR;
  std::vector<char> failed(static_cast<size_t>(units), 0);
  each(pool, units, std::max<int64_t>(1, (1 << 16) / (rows * w.at.k * w.n + 1)), [&](int64_t unit) {
    const int64_t line = unit / parts * together, from = unit % parts * part;
    const int64_t here = std::min(together, lines - line), width = std::min(part, ow - from);
    const Scratch codes(of_codes.bytes(w, rows) + words * 4);
    if (!codes.data) {
      failed[static_cast<size_t>(unit)] = 1;
      return;
    }
    // 2. Codes. Scales and sums are written in whole vectors, whose rest the next line overwrites.
    int8_t* q = reinterpret_cast<int8_t*>(codes.data);
    float* scales = reinterpret_cast<float*>(codes.data + rows * step);
    int32_t *zeros = reinterpret_cast<int32_t*>(scales + padded), *sums = zeros + padded, *scratch = sums + padded;
    of_codes.clear_ends(w, q, here * width);
    for (int64_t l = 0; l < here; l++) {
      const int64_t row = l * width;
      const WindowCodes to{q + row * step, step, scales + row, zeros + row, sums + row, scratch};
      kernels.window_codes(in, image, map, group, line + l, from, width, to);
    }
    // 3. Products.
    multiply_codes(kernels, w, out, of_codes, q, sums, scales, affine ? zeros : nullptr, scratch + words, here * width,
                   line * ow + from);
  });
  return std::find(failed.begin(), failed.end(), 1) == failed.end();
}

// Whether an image of floats can be multiplied where it lies, window by window.
bool has_float_windows(const Kernels& kernels, const Weight& w, const Image& image, const Input& in) {
  const bool four = w.element == INT4 || w.element == HALVES4 || w.element == FLOAT4;
  const bool whole = w.at.packed() == w.at.k && image.channels / image.groups % (four ? 8 : 4) == 0;
  return in.mode == DIGITS && kernels.float_windows && whole && in.rows >= kernels.float_panel.from;
}

// The image with its padding, of one channel group, as bfloat16 or float32; where it is so already, nothing is copied.
struct FloatImage {
  FloatImage(const Kernels& kernels, const Pool& pool, const Image& image, const Input& in, int64_t group, bool pairs)
      : own(image.channels / image.groups), height(image.height + 2 * image.ph), width(image.width + 2 * image.pw),
        size(pairs ? 2 : 4), ready(!image.ph && !image.pw && in.type == (pairs ? BF16 : F32)),
        copy(ready ? 0 : image.batch * height * width * own * size) {
    const int64_t from_size = type_size(in.type);
    const char* x = static_cast<const char*>(in.x) + group * own * from_size;
    pixel = (ready ? image.channels : own) * size;
    data = ready ? x : copy.data;
    if (ready || !copy.data) return;
    each(pool, image.batch * height, std::max<int64_t>(1, (1 << 14) / (width * own)), [&](int64_t line) {
      const int64_t b = line / height, h = line % height - image.ph;
      char* to = copy.data + line * width * pixel;
      for (int64_t v = -image.pw; v < image.width + image.pw; v++, to += pixel) {
        const char* from = x + ((b * image.height + h) * image.width + v) * image.channels * from_size;
        if (h < 0 || h >= image.height || v < 0 || v >= image.width) std::memset(to, 0, static_cast<size_t>(pixel));
        else if (pairs) std::memcpy(to, from, static_cast<size_t>(pixel));
        else kernels.widen(from, in.type, own, reinterpret_cast<float*>(to));
      }
    });
  }
  int64_t own, height, width, size;
  bool ready;
  Scratch copy;
  int64_t pixel;     // bytes from pixel to pixel
  const char* data;  // null if memory ran out
};

// Float x: numbers of a part of the codes meet the windows of some lines, where they lie.
bool float_windows(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                   const Output& out, int64_t group) {
  constexpr int64_t ROWS = 1024;  // windows that meet the same numbers: sums of 128 KiB
  const bool pairs = in.type == BF16 && kernels.bf16_windows;
  const FloatImage x(kernels, pool, image, in, group, pairs);
  if (!x.data) return false;
  const int64_t ow = image.out_width(), oh = image.out_height(), lines = image.batch * oh, taps = image.kh * image.kw;
  std::vector<int64_t> starts(static_cast<size_t>(lines)), offsets(static_cast<size_t>(taps));
  for (int64_t l = 0; l < lines; l++)
    starts[static_cast<size_t>(l)] = (l / oh * x.height + l % oh * image.sh) * x.width * x.pixel;
  for (int64_t t = 0; t < taps; t++)
    offsets[static_cast<size_t>(t)] = (t / image.kw * image.dh * x.width + t % image.kw * image.dw) * x.pixel;
  const int64_t columns = ceil_div(w.n, COLUMNS), wanted = pool.threads < 2 ? 1 : ceil_div(2 * pool.threads, columns);
  const int64_t together = ceil_div(lines, std::min(lines, std::max(wanted, ceil_div(lines * ow, ROWS))));
  const int64_t sets = ceil_div(lines, together);
  std::vector<char> failed(static_cast<size_t>(sets * columns), 0);
  each(pool, sets * columns, 1, [&](int64_t unit) {
    const int64_t line = unit / columns * together, here = std::min(together, lines - line);
    const Scratch own((FLOAT_WINDOW_WORDS + here * ow) * COLUMNS * 4);
    if (!own.data) {
      failed[static_cast<size_t>(unit)] = 1;
      return;
    }
    const FloatWindows windows{x.data, starts.data() + line, here, ow, image.sw * x.pixel, line * ow, offsets.data(), taps, x.own};
    (pairs ? kernels.bf16_windows : kernels.float_windows)(w, out, windows, unit % columns, own.data);
  });
  return std::find(failed.begin(), failed.end(), 1) == failed.end();
}

}  // namespace

bool convolve(const Kernels& kernels, const Pool& pool, const Weight& first, const Image& image, const Input& given,
              const Output& result) {
  for (int64_t g = 0; g < image.groups; g++) {
    const Weight w = nth_weight(first, g);
    const Window window{&image, g, static_cast<int8_t>(given.zero)};
    Input in = given;
    in.rows = image.batch * image.out_height() * image.out_width();
    in.row = window_row;
    in.context = &window;
    Output out = result;
    out.y = static_cast<char*>(out.y) + g * w.n * type_size(out.type);
    out.bias = nth(out.bias, out.bias_type, w.n, g);
    const bool windows = has_windows(w, image, given);
    if (windows && given.mode == STATIC && static_windows(kernels, pool, w, image, given, out, g)) continue;
    if (has_float_windows(kernels, w, image, in) && float_windows(kernels, pool, w, image, in, out, g)) continue;
    if (windows && given.mode != STATIC && dynamic_windows(kernels, pool, w, image, given, out, g)) continue;
    if (!linear(kernels, pool, w, in, out)) return false;
  }
  return true;
}

}  // namespace qcore_cpu
