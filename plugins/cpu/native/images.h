// What kernels of convolutions of few channels need; see planes.inl and channels.inl.
#pragma once
#include "problem.h"

namespace qcore_cpu {

// Images, (batch, height, width, channels) or (batch, channels, height, width), contiguous, and a convolution.
struct Image {
  int64_t batch, height, width, channels, groups;
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;  // kernel, stride, padding, dilation
  int64_t out_height() const { return (height + 2 * ph - dh * (kh - 1) - 1) / sh + 1; }
  int64_t out_width() const { return (width + 2 * pw - dw * (kw - 1) - 1) / sw + 1; }
};

// Whether windows are pixels.
static inline bool is_pixelwise(const Image& x) { return x.kh == 1 && x.kw == 1 && !x.ph && !x.pw; }
// Whether the values of windows are compared where those of a row lie side by side, not pixel by pixel: with fewer channels than
// that, there are more pixels, and vectors of theirs that are not full, than windows.
static inline bool has_side_by_side_rows(const Image& x) {
  return !is_pixelwise(x) && x.dw == 1 && x.groups == 1 && x.channels < 8;
}

constexpr int FEWEST_CHANNELS = 16;  // lanes of the widest vectors
constexpr int64_t MOST_TAPS = 512;   // of a depthwise convolution with kernels of its own

// Numbers of a depthwise convolution's weight, [taps][step], step a multiple of 32: codes less their zero points, as words, with
// `scales`; for float x floats, with null. Of groups of `size` channels, 4 to 16, [taps][size / 4][step], four codes less their zero
// points in each word, of which channel c has those of the channels 4 * ((c / 4 + i) % (size / 4)) on of its group in number i;
// `sums`: of a channel's codes.
struct ChannelNumbers {
  const int32_t* numbers;
  int64_t step;
  const float* scales;
  int size;
  const int32_t* sums;
};
constexpr int64_t LARGEST_GROUP = 16;

// Windows of a part of a line, and columns of the image that they read: values of `size` bytes that stay in L1.
static inline int64_t windows_in_part(const Image& image, int size) {
  const int64_t bytes = image.kh * image.sw * image.channels * size, most = (16 << 10) / bytes / 4 * 4, width = image.out_width();
  const int64_t parts = ceil_div(width, most < 12 ? 12 : most);
  return ceil_div(ceil_div(width, parts), 4) * 4;
}
static inline int64_t columns_of_part(const Image& image, int64_t windows) {
  return (windows - 1) * image.sw + (image.kw - 1) * image.dw + 1;
}
// Lines of results of a depthwise convolution that are made together, at most; see depthwise.inl. One where they share
// no values, or with a kernel of one line.
static inline int64_t lines_of_part(const Image& image, Mode mode, int size) {
  const bool several = mode == STATIC && size == 1 && image.dh == 1 && image.kh > image.sh;
  return several && image.kh * image.kw <= MOST_TAPS ? 8 : 1;
}
static inline int64_t rows_of_part(const Image& image, int64_t lines) {
  return (lines - 1) * image.sh + (image.kh - 1) * image.dh + 1;
}
// Vectors of the weight for a part, and of all that it needs.
static inline int64_t numbers_of_part(const Image& image) { return image.kw * ((image.kh + 3) / 4); }
static inline int64_t vectors_of_part(const Image& image, int64_t lines, int64_t windows) {
  return (rows_of_part(image, lines) + 2) * columns_of_part(image, windows) + numbers_of_part(image);
}

// Lines of results of one channel group, whose windows read planes of floats; see planes.inl. A line of results is `width` of
// every `step` positions.
constexpr int MOST_PLANE_ROWS = 4;     // rows of the weight whose results are made together
constexpr int PLANE_POSITIONS = 64;    // positions that are computed together, at most; `positions` is a multiple of 16
struct Planes {
  const float* x;          // [channels][phases][plane]; values behind the last one are read, and ignored
  int64_t channels, channel, plane, phases;  // their number, values of one, values of a phase, phases of one line
  const int64_t *down, *across;  // where the values of a line, or a column, of the windows begin in a channel: both added
  int64_t kh, kw;
  const int64_t* columns;  // [packed]: the same for each packed column, in x; below 0 for none
  int64_t positions, lines, width, step;
  int64_t first;           // number of the first result in a row of results
  int64_t row, rows;       // of the weight
  const ChannelNumbers* own;  // if the group has one channel and few results, or null
};

// Memory for their codes: largest magnitudes [channel] and [phases][plane], of pixels and of those above each other; words
// [packed / 4][positions], sums of codes [folds][positions], scales and zero points [positions], and results [MOST_PLANE_ROWS][positions].
struct PlaneCodes {
  int32_t *pixels, *stacks, *words, *sums;
  float* scales;
  int32_t* zeros;
  float* results;
};

}  // namespace qcore_cpu
