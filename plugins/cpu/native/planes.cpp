// Convolutions of few channels, on images whose channels lie in planes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "conv.h"

namespace qcore_cpu {
namespace {

constexpr int64_t PART_BYTES = 192 << 10;  // planes and codes of a part, in L2
constexpr int64_t PART_WORK = 1 << 16;     // products that are worth another thread

// What the windows of a group read, cut by the phases of the stride, so that neighbouring windows read neighbours: the phase
// (i, j) holds every sh-th line from i on and every sw-th column from j on of the image with its padding.
struct Phases {
  explicit Phases(const Image& image)
      : down(std::min(image.sh, (image.kh - 1) * image.dh + 1)), across(std::min(image.sw, (image.kw - 1) * image.dw + 1)),
        below((image.kh - 1) * image.dh / image.sh), step(image.out_width() + (image.kw - 1) * image.dw / image.sw) {}
  int64_t down, across;  // phases
  int64_t below;         // lines of a phase beyond those of the results
  int64_t step;          // values of a line
  int64_t lines(int64_t results) const { return results + below; }
  int64_t plane(int64_t results) const { return lines(results) * step; }
};

// Where the lines, the columns and the packed columns of windows begin; see Planes.
struct Places {
  Places(const Weight& w, const Image& image, const Phases& phases, int64_t lines) : columns(static_cast<size_t>(w.at.packed()), -1) {
    const int64_t plane = phases.plane(lines), own = image.channels / image.groups, per_group = w.at.block * w.at.blocks;
    for (int64_t i = 0; i < image.kh * image.dh; i += image.dh)
      down.push_back(i % image.sh * phases.across * plane + i / image.sh * phases.step);
    for (int64_t j = 0; j < image.kw * image.dw; j += image.dw) across.push_back(j % image.sw * plane + j / image.sw);
    for (int64_t k = 0; k < w.at.k; k++) {
      const int64_t tap = k / own, at = k / w.at.group * per_group + k % w.at.group;
      columns[static_cast<size_t>(at)] = k % own * phases.down * phases.across * plane +
                                         down[static_cast<size_t>(tap / image.kw)] + across[static_cast<size_t>(tap % image.kw)];
    }
  }
  std::vector<int64_t> columns, down, across;
};

// The phases of one channel for the results' lines `first` and those that follow.
void fill_phases(const Kernels& kernels, const Image& image, const Phases& phases, const Input& in, const char* plane,
                 int64_t first, int64_t lines, float* line, float* to) {
  const float padding = in.type == I8 ? static_cast<float>(in.zero) : 0.0f;
  for (int64_t a = 0; a < phases.down; a++) {
    for (int64_t y = 0; y < phases.lines(lines); y++) {
      const int64_t h = (first + y) * image.sh + a - image.ph;
      const bool outside = h < 0 || h >= image.height;
      const char* from = plane + h * image.width * type_size(in.type);
      const float* values = line;
      if (in.type == F32) values = reinterpret_cast<const float*>(from);
      else if (!outside && image.sw > 1) kernels.widen(from, in.type, image.width, line);
      for (int64_t b = 0; b < phases.across; b++) {
        float* row = to + (a * phases.across + b) * phases.plane(lines) + y * phases.step;
        // Values u with 0 <= u * sw + b - pw < width are of the image.
        const int64_t left = image.pw - b, begin = std::min(phases.step, left > 0 ? ceil_div(left, image.sw) : 0);
        const int64_t present = image.width + left;
        const int64_t end = outside ? begin : std::max(begin, std::min(phases.step, present > 0 ? ceil_div(present, image.sw) : 0));
        std::fill(row, row + begin, padding);
        if (begin < end) {
          const int64_t v = begin * image.sw - left;
          if (image.sw == 1) kernels.widen(from + v * type_size(in.type), in.type, end - begin, row + begin);
          else kernels.take_every(values + v, image.sw, end - begin, row + begin);
        }
        std::fill(row + end, row + phases.step, padding);
      }
    }
  }
}

// Numbers of the weight of a convolution of groups of `size` channels, if it has kernels of its own.
struct OwnNumbers {
  OwnNumbers(const Kernels& kernels, const Weight& w, const Input& in, int size, bool wanted)
      : step(round_up(w.n, COLUMNS)), floats(in.mode == DIGITS),
        memory(wanted ? (step * (w.at.k + 2) + w.at.packed() * COLUMNS) * 4 : 0) {
    if (!wanted || !memory.data) return;
    int32_t* to = reinterpret_cast<int32_t*>(memory.data);
    float* scales = reinterpret_cast<float*>(to + step * w.at.k);
    int32_t* sums = reinterpret_cast<int32_t*>(scales + step);
    char* scratch = reinterpret_cast<char*>(sums + step);
    if (size > 1) kernels.group_numbers(w, size, step, to, sums, scales, scratch);
    else kernels.channel_numbers(w, step, to, floats ? nullptr : scales, scratch);
    numbers = {to, step, floats ? nullptr : scales, size, sums};
  }
  int64_t step;
  bool floats;
  Scratch memory;
  ChannelNumbers numbers{};
};

}  // namespace

bool convolve_channels(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                       const Output& out) {
  const int size = static_cast<int>(image.channels / image.groups);
  const OwnNumbers own(kernels, w, in, size, true);
  if (!own.numbers.numbers) return false;
  const int64_t oh = image.out_height();
  int64_t together = std::min(oh, lines_of_part(image, in.mode, size));  // lines
  if (pool.threads > 1) together = std::max<int64_t>(1, std::min(together, image.batch * oh / (4 * pool.threads)));
  const int64_t parts = ceil_div(oh, together), units = image.batch * parts;
  together = ceil_div(oh, parts);
  const int64_t work = together * image.out_width() * image.channels * (image.kh * image.kw + 8);
  const int64_t vectors = vectors_of_part(image, together, windows_in_part(image, type_size(in.type)));
  std::vector<char> failed(static_cast<size_t>(units), 0);
  each(pool, units, std::max<int64_t>(1, PART_WORK / (work + 1)), [&](int64_t unit) {
    const int64_t line = unit % parts * together, here = std::min(together, oh - line);
    const Scratch scratch(vectors * 64);
    if (!scratch.data) failed[static_cast<size_t>(unit)] = 1;
    else if (here > 0) kernels.channel_lines(in, out, image, own.numbers, unit / parts, line, here, scratch.data);
  });
  return std::find(failed.begin(), failed.end(), 1) == failed.end();
}

bool convolve_planes(const Kernels& kernels, const Pool& pool, const Weight& w, const Image& image, const Input& in,
                     const Output& out) {
  const int64_t oh = image.out_height(), ow = image.out_width(), own = image.channels / image.groups;
  const int64_t rows = w.n / image.groups, packed = w.at.packed();
  const bool exact = in.mode == DIGITS || (in.type != I8 && w.at.groups == 1 && has_exact_codes(w));
  const bool alone = own == 1 && rows < 4 && exact && w.at.k <= MOST_TAPS;
  const OwnNumbers numbers(kernels, w, in, 1, alone);
  if (alone ? !numbers.numbers.numbers : in.mode == DIGITS) return false;
  const Phases phases(image);
  // 1. Parts: lines of one group's results whose planes and codes stay in L2; more of them if threads would have none.
  const int64_t count = own * phases.down * phases.across;
  const int64_t bytes = phases.step * (packed + 4 * (count + 2 * count / own + w.folds() + 2 + MOST_PLANE_ROWS));
  int64_t lines = std::min(oh, std::max<int64_t>(1, PART_BYTES / bytes - phases.below * count * 4 * phases.step / bytes));
  const int64_t images = image.batch * image.groups;
  if (pool.threads > 1 && images * ceil_div(oh, lines) < 4 * pool.threads)
    lines = std::max<int64_t>(1, std::min(lines, oh * images / (4 * pool.threads)));
  const int64_t parts = ceil_div(oh, lines);
  lines = ceil_div(oh, parts);
  const Places places(w, image, phases, lines);
  // 2. Scratch: planes with room for a vector behind the last, codes, sums, scales, zero points, results, a line.
  const int64_t positions = round_up((lines - 1) * phases.step + ow, PLANE_POSITIONS / 4);
  const int64_t channel = phases.down * phases.across * phases.plane(lines), behind = PLANE_POSITIONS + phases.step;
  const int64_t floats = round_up(own * channel + behind, 16), magnitudes = round_up(channel + behind, 16);
  const int64_t words = positions * (packed / 4 + w.folds() + 2 + MOST_PLANE_ROWS);
  std::vector<char> failed(static_cast<size_t>(images * parts), 0);
  const int64_t work = lines * ow * w.at.k * (rows + 4);
  each(pool, images * parts, std::max<int64_t>(1, PART_WORK / (work + 1)), [&](int64_t unit) {
    const int64_t b = unit / parts / image.groups, group = unit / parts % image.groups, first = unit % parts * lines;
    const int64_t here = std::min(lines, oh - first);
    const Scratch scratch((floats + 2 * magnitudes + words + 2 * PLANE_POSITIONS + round_up(image.width, 16)) * 4);
    if (!scratch.data) {
      failed[static_cast<size_t>(unit)] = 1;
      return;
    }
    float* x = reinterpret_cast<float*>(scratch.data);
    PlaneCodes codes{};
    codes.pixels = reinterpret_cast<int32_t*>(x + floats);
    codes.stacks = codes.pixels + magnitudes;
    codes.words = codes.stacks + magnitudes;
    codes.sums = codes.words + packed / 4 * positions;
    codes.scales = reinterpret_cast<float*>(codes.sums + w.folds() * positions);
    codes.zeros = reinterpret_cast<int32_t*>(codes.scales + positions);
    codes.results = reinterpret_cast<float*>(codes.zeros + positions);
    float* line = codes.results + MOST_PLANE_ROWS * positions + 2 * PLANE_POSITIONS;
    const int64_t plane = image.height * image.width * type_size(in.type);
    const char* from = static_cast<const char*>(in.x) + (b * image.channels + group * own) * plane;
    for (int64_t c = 0; c < own; c++) {
      float* to = x + c * channel;
      // As many lines as the others have, for the same places of columns; the last part ignores what lies beyond the image.
      fill_phases(kernels, image, phases, in, from + c * plane, first, lines, line, to);
    }
    std::fill(x + own * channel, x + floats, 0.0f);
    Output own_out = out;
    own_out.y = static_cast<char*>(out.y) + b * w.n * oh * ow * type_size(out.type);
    own_out.stride = oh * ow;
    const Planes planes{x, own, channel, phases.plane(lines), phases.across, places.down.data(), places.across.data(), image.kh, image.kw,
                        places.columns.data(), positions, here, ow, phases.step, first * ow, group * rows, rows,
                        alone ? &numbers.numbers : nullptr};
    kernels.plane_product(w, in, own_out, planes, codes);
  });
  return std::find(failed.begin(), failed.end(), 1) == failed.end();
}

}  // namespace qcore_cpu
