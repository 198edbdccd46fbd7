#include "conv.h"

#include <algorithm>
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

// Whether windows can be multiplied where they lie, or as rows of codes side by side.
bool has_windows(const Weight& w, const Image& image, const Input& in) {
  const int64_t own = image.channels / image.groups;
  const bool even = own % (w.element == INT4 ? 8 : 4) == 0;
  return (w.element == INT4 || w.element == INT8) && w.at.groups == 1 && w.fold == w.at.packed() && even &&
         (in.mode == STATIC || in.mode == DYNAMIC);
}

// Multiply the windows of `width` results, the first of which has the number `row0`: `windows` gives those from one on. Sums and
// scales of the windows are those of the line.
template <class From>
void multiply_rows(const Kernels& kernels, const Weight& w, const Output& out, int64_t width, int64_t row0,
                   const From& windows) {
  const int rows = even_rows(width, kernels.window_rows);
  for (int64_t nb = 0; nb < ceil_div(w.n, COLUMNS); nb++)
    for (int64_t v = 0; v < width; v += rows)
      kernels.window_product(w, out, windows(v), nb, static_cast<int>(std::min<int64_t>(rows, width - v)), row0 + v);
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
    const int64_t b = line / height, h = line % height - image.ph;
    const auto fill = [&](int64_t from, int64_t count) {  // padding
      std::memset(q + (line * width + from) * own, in.zero, static_cast<size_t>(count * own));
      std::fill_n(pixel_sums + line * width + from, count, static_cast<int32_t>(own) * in.zero);
    };
    if (h < 0 || h >= image.height) return fill(0, width);
    fill(0, image.pw), fill(image.pw + image.width, image.pw);
    const Runs pixels{first_of(b, h), in.type, own, image.width, image.channels, nullptr, 0};
    const int64_t first = line * width + image.pw;
    kernels.quantize_runs(pixels, inverse, in.zero, true, q + first * own, pixel_sums + first);
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
    multiply_rows(kernels, w, out, ow, line * ow, [&](int64_t v) {
      return Windows{q + (top + v * image.sw) * own, image.sw * own, offsets.data(), runs, beside * own, window_sums.data() + v,
                     scales.data() + v, in.zero};
    });
  });
  return true;
}

// A line of results whose windows become rows of codes `step` apart, by the largest magnitude of their pixels.
struct CodeLine {
  const Kernels& kernels;
  const Image& image;
  const Input& in;
  int64_t group, step;
  const int32_t* pixels;  // largest magnitude of each pixel, in this group's channels

  void fill(int64_t line, int8_t* q, float* scales, int32_t* sums) const {
    const int64_t own = image.channels / image.groups, ow = image.out_width(), oh = image.out_height();
    const int64_t size = type_size(in.type), k = image.kh * image.kw * own;
    const char* x = static_cast<const char*>(in.x) + group * own * size;
    const int64_t b = line / oh, top = line % oh * image.sh - image.ph;
    std::vector<int32_t> below(static_cast<size_t>(image.width + 2 * image.pw), 0);  // largest of pixels above one another
    for (int64_t i = 0, h = top; i < image.kh; i++, h += image.dh) {
      if (h < 0 || h >= image.height) continue;
      int32_t* most = below.data() + image.pw;
      const int32_t* from = pixels + (b * image.height + h) * image.width;
      for (int64_t u = 0; u < image.width; u++) most[u] = std::max(most[u], from[u]);
    }
    const auto present = [&](int64_t i) { return top + i * image.dh >= 0 && top + i * image.dh < image.height; };
    int64_t begin = 0, end = image.kh;  // rows of the windows that are no padding
    while (begin < end && !present(begin)) begin++;
    while (begin < end && !present(end - 1)) end--;
    int32_t before = INFINITE;  // `most` of the window before, if that was inside
    for (int64_t v = 0; v < ow; v++) {
      const int64_t left = v * image.sw - image.pw;
      int32_t most = 0;
      for (int64_t j = 0; j < image.kw; j++) most = std::max(most, below[static_cast<size_t>(v * image.sw + j * image.dw)]);
      const float scale = symmetric_scale(most), inverse = inverse_scale(scale);
      const auto codes_of = [&](int64_t h, int64_t u, int64_t count, int64_t runs, int8_t* to, int64_t ready) {
        const char* from = x + ((b * image.height + h) * image.width + u) * image.channels * size;
        const int8_t* codes = ready ? to - step + image.sw * own : nullptr;
        const Runs pixels{from, in.type, count * own, runs, image.dh * image.width * image.channels, codes, ready * own};
        return kernels.quantize_runs(pixels, inverse, 0, false, to, nullptr);
      };
      scales[v] = scale, sums[v] = 0;
      int8_t* to = q + v * step;
      if (most >= INFINITE) {  // NaN, whatever the codes are; those of such values would have sums beyond int32
        std::memset(to, 0, static_cast<size_t>(k));
        before = INFINITE;
        continue;
      }
      const bool inside = image.dw == 1 && image.groups == 1 && left >= 0 && left + image.kw <= image.width;
      if (inside) {  // neighbours lie side by side, in the image and among the codes
        const int64_t run = image.kw * own;
        std::memset(to, 0, static_cast<size_t>(begin * run));
        std::memset(to + end * run, 0, static_cast<size_t>((image.kh - end) * run));
        // The largest value is often that of the window before, and then the codes of pixels in both are the same.
        const int64_t ready = most == before ? std::max<int64_t>(0, image.kw - image.sw) : 0;
        if (begin < end) sums[v] = codes_of(top + begin * image.dh, left, image.kw, end - begin, to + begin * run, ready);
        before = most;
        continue;
      }
      before = INFINITE;
      for (int64_t i = 0, h = top; i < image.kh; i++, h += image.dh) {
        for (int64_t j = 0, u = left; j < image.kw; j++, u += image.dw, to += own) {
          const bool padding = h < 0 || h >= image.height || u < 0 || u >= image.width;
          if (padding) std::memset(to, 0, static_cast<size_t>(own));
          else sums[v] += codes_of(h, u, 1, 1, to, 0);
        }
      }
    }
  }
};

// A scale per window: windows become rows of codes, those of several lines of results at a time if these are short.
bool dynamic_windows(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                     const Output& out, int64_t group) {
  const int64_t own = image.channels / image.groups, ow = image.out_width(), lines = image.batch * image.out_height();
  const int64_t pixels = image.batch * image.height * image.width, size = type_size(in.type);
  const Scratch largest(pixels * 4);
  if (!largest.data) return false;
  int32_t* map = reinterpret_cast<int32_t*>(largest.data);
  const char* x = static_cast<const char*>(in.x) + group * own * size;
  each(pool, pixels, std::max<int64_t>(1, (1 << 14) / own), [&](int64_t pixel) {
    map[pixel] = kernels.magnitude(x + pixel * image.channels * size, in.type, own);
  });
  const int64_t step = w.at.k + 64;  // not a power of two, so that rows do not share one set of the cache
  const CodeLine codes_of{kernels, image, in, group, step, map};
  const int64_t together = std::max<int64_t>(1, std::min(kernels.window_rows / ow, lines / (4 * pool.threads)));
  const int64_t units = ceil_div(lines, together), none = 0;
  std::vector<char> failed(static_cast<size_t>(units), 0);
  each(pool, units, std::max<int64_t>(1, (1 << 16) / (together * ow * w.at.k * w.n + 1)), [&](int64_t unit) {
    const int64_t first = unit * together, here = std::min(together, lines - first), rows = here * ow;
    const Scratch codes(rows * (step + 8) + 64);
    if (!codes.data) {
      failed[static_cast<size_t>(unit)] = 1;
      return;
    }
    int8_t* q = reinterpret_cast<int8_t*>(codes.data);
    float* scales = reinterpret_cast<float*>(codes.data + round_up(rows * step, 64));
    int32_t* sums = reinterpret_cast<int32_t*>(scales + rows);
    for (int64_t l = 0; l < here; l++) codes_of.fill(first + l, q + l * ow * step, scales + l * ow, sums + l * ow);
    multiply_rows(kernels, w, out, rows, first * ow, [&](int64_t v) {
      return Windows{q + v * step, step, &none, 1, w.at.k, sums + v, scales + v, 0};
    });
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
    if (windows && given.mode == DYNAMIC && dynamic_windows(kernels, pool, w, image, given, out, g)) continue;
    if (!linear(kernels, pool, w, in, out)) return false;
  }
  return true;
}

}  // namespace qcore_cpu
