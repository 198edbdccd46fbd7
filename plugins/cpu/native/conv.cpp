#include "conv.h"

#include <algorithm>
#include <cstring>

namespace qcore_cpu {
namespace {

struct Window {
  const Image* image;
  int64_t group;       // of channels
  int8_t padding;      // the code of 0, for an image of codes
};

int64_t bytes_of(Type type) { return type == F32 ? 4 : type == I8 ? 1 : 2; }

// The receptive field of one output position as a row in (kh, kw, channel) order.
const void* window_row(const Input& in, int64_t index, void* scratch) {
  const Window& window = *static_cast<const Window*>(in.context);
  const Image& image = *window.image;
  const int64_t size = bytes_of(in.type), own = image.channels / image.groups, run = own * size;
  const int64_t ow = index % image.out_width(), oh = index / image.out_width() % image.out_height();
  const int64_t b = index / image.out_width() / image.out_height();
  const char* x = static_cast<const char*>(in.x) + window.group * run;
  if (image.kh == 1 && image.kw == 1 && !image.ph && !image.pw) {
    return x + ((b * image.height + oh * image.sh) * image.width + ow * image.sw) * image.channels * size;
  }
  char* to = static_cast<char*>(scratch);
  for (int64_t i = 0; i < image.kh; i++) {
    const int64_t h = oh * image.sh + i * image.dh - image.ph;
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

int64_t scale_bytes(Type type) { return type == F32 ? 4 : type == E8M0 ? 1 : 2; }

}  // namespace

bool convolve(const Kernels& kernels, const Pool& pool, const Weight& first, const Image& image, const Input& given,
              const Output& result) {
  const int64_t blocks = (first.n + COLUMNS - 1) / COLUMNS, parameters = blocks * first.at.groups * COLUMNS;
  const bool narrow = first.element == INT8 || first.element == FLOAT8;
  const int64_t bytes = blocks * first.at.packed() * COLUMNS / (narrow ? 1 : 2);
  for (int64_t g = 0; g < image.groups; g++) {
    Weight w = first;
    w.data += g * bytes;
    w.scale = static_cast<const char*>(w.scale) + g * parameters * scale_bytes(w.scale_type);
    if (w.zero) w.zero += g * parameters;
    if (w.added) w.added = static_cast<const char*>(w.added) + g * parameters * scale_bytes(w.scale_type);
    if (w.sums) w.sums += g * blocks * w.folds() * COLUMNS;
    const Window window{&image, g, static_cast<int8_t>(given.zero)};
    Input in = given;
    in.rows = image.batch * image.out_height() * image.out_width();
    in.row = window_row;
    in.context = &window;
    Output out = result;
    out.y = static_cast<char*>(out.y) + g * w.n * bytes_of(out.type);
    if (out.bias) out.bias = static_cast<const char*>(out.bias) + g * w.n * bytes_of(out.bias_type);
    if (!linear(kernels, pool, w, in, out)) return false;
  }
  return true;
}

}  // namespace qcore_cpu
