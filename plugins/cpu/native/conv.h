// 2-D convolutions as products over im2col rows that are never stored as a whole.
#pragma once
#include "core.h"
#include "images.h"

namespace qcore_cpu {

// `w` is the weight of the first channel group, (n / groups, kh * kw * channels / groups); the others follow it.
// `in.x` and `in.type` are the image's; false if memory ran out.
bool convolve(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
              const Output& out);

// The same for few channels in a group, and int8 activations; float ones if each group has one channel, fewer than four results
// and at most MOST_TAPS taps. x is (batch, channels, height, width), as is the result; `w` is the whole weight
// (n, kh * kw * channels / groups).
bool convolve_planes(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                     const Output& out);

// The same where groups have one channel, or for int8 activations 4, 8 or 16 if the instruction set's vectors hold so many, and as
// many results, whose codes less their zero points fit int8; in the format of `convolve`, for scales per window (mode
// DYNAMIC), given ones and float x; there are at least FEWEST_CHANNELS.
bool convolve_channels(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                       const Output& out);

}  // namespace qcore_cpu
