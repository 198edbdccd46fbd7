// Runs products of the library without torch, on an emulated processor or with emulated AMX tiles: reads problems from a
// file, writes results to another. ./driver ISA IN OUT; the form of IN is that of tests/helpers/cpu_driver.py.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "conv.h"

using namespace qcore_cpu;

namespace {

FILE* in_file;

int64_t number() {
  int64_t v;
  if (std::fread(&v, 8, 1, in_file) != 1) std::exit(4);
  return v;
}

std::vector<char> bytes() {  // a length, then as many bytes
  std::vector<char> data(static_cast<size_t>(number()) + 64);
  if (data.size() > 64 && std::fread(data.data(), data.size() - 64, 1, in_file) != 1) std::exit(4);
  return data;
}

void serial(int64_t begin, int64_t end, int64_t, void (*task)(int64_t, int64_t, void*), void* context) {
  task(begin, end, context);
}

}  // namespace

int main(int, char** argv) {
  const Kernels* kernels = kernels_for(argv[1]);
  if (!kernels) {
    std::printf("%s is not one of: %s\n", argv[1], kernel_names());
    return 3;
  }
  in_file = std::fopen(argv[2], "rb");
  FILE* out_file = std::fopen(argv[3], "wb");
  for (int64_t left = number(); left > 0; left--) {
    Weight w{};
    w.n = number();
    const int64_t k = number(), group = number();
    w.at = geometry(k, group);
    w.element = static_cast<Element>(number());
    const Mode mode = static_cast<Mode>(number());
    w.fold = fold_of(w.at, mode);
    w.offset = static_cast<int>(number());
    w.scale_type = static_cast<Type>(number());
    w.factor = w.element == HALVES4 ? 0.5f : 1.0f;
    w.divisor = 1.0f;
    Input in{};
    in.type = static_cast<Type>(number());
    in.rows = number();
    in.stride = k;
    in.mode = mode;
    in.zero = static_cast<int32_t>(number());
    Image image{};  // of `rows` lines, 3 x 3 windows; without channels, x is rows of a linear layer
    image.batch = image.groups = image.sh = image.sw = image.ph = image.pw = image.dh = image.dw = 1;
    image.kh = image.kw = 3;
    image.height = in.rows;
    image.channels = number();
    image.width = number();
    // Of planes (channels, lines, width). 0: x is (lines, width, channels), as below 0: minus the channels in each group, as lanes.
    const int64_t groups = number();
    in.scale = static_cast<float>(number()) / 1000.0f;  // comes as a whole number
    if (groups) image.groups = groups < 0 ? image.channels / -groups : groups;
    Output out{};
    out.type = in.type == I8 ? F32 : in.type;
    out.stride = w.n;
    const std::vector<char> x = bytes(), data = bytes(), scale = bytes(), zero = bytes(), added = bytes(), sums = bytes();
    const std::vector<char> table = bytes();
    const auto present = [](const std::vector<char>& v) { return v.size() > 64 ? v.data() : nullptr; };
    in.x = x.data(), w.data = reinterpret_cast<const uint8_t*>(data.data()), w.scale = scale.data();
    w.zero = reinterpret_cast<const uint8_t*>(present(zero));
    w.added = present(added);
    w.sums = reinterpret_cast<const int32_t*>(present(sums));
    w.table = reinterpret_cast<const float*>(present(table));
    if (w.element == HALVES4) {
      for (int i = 0; i < 16; i++) w.whole[i] = static_cast<uint8_t>(static_cast<int>(2.0f * w.table[i]) + w.offset);
    }
    const int64_t results = image.channels ? image.height * image.width : in.rows;
    std::vector<char> y(static_cast<size_t>(results * w.n * type_size(out.type)));
    out.y = y.data();
    const Pool pool{1, serial};
    const auto image_of = groups < 0 ? convolve_channels : groups ? convolve_planes : convolve;
    if (!(image.channels ? image_of(*kernels, pool, w, image, in, out) : linear(*kernels, pool, w, in, out))) return 5;
    std::fwrite(y.data(), y.size(), 1, out_file);
  }
  std::fclose(out_file);
  return 0;
}
