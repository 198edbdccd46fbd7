// 2-D convolutions as products over im2col rows that are never stored as a whole.
#pragma once
#include "core.h"

namespace qcore_cpu {

// x is (batch, height, width, channels), contiguous.
struct Image {
  int64_t batch, height, width, channels, groups;
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;  // kernel, stride, padding, dilation
  int64_t out_height() const { return (height + 2 * ph - dh * (kh - 1) - 1) / sh + 1; }
  int64_t out_width() const { return (width + 2 * pw - dw * (kw - 1) - 1) / sw + 1; }
};

// `w` is the weight of the first channel group, (n / groups, kh * kw * channels / groups); the others follow it.
// `in.x` and `in.type` are the image's; false if memory ran out.
bool convolve(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
              const Output& out);

// The same of int8 activations for few channels in a group: x is (batch, channels, height, width), as is the result; `w` is
// the whole weight (n, kh * kw * channels / groups).
bool convolve_planes(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                     const Output& out);

}  // namespace qcore_cpu
