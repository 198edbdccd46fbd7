// torch.ops.qcore_cpu.*: the kernels as ops on torch's stable ABI, so that one library serves torch 2.10 and newer.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "conv.h"
#include "core.h"

namespace {

using namespace qcore_cpu;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error("qcore_cpu: " + message); }

void check(bool right, const char* message) {
  if (!right) fail(message);
}

const Kernels& kernels() {
  static const Kernels* const found = [] {
    const char* asked = std::getenv("QCORE_CPU_ISA");
    const Kernels* k = kernels_for(asked);
    if (!k) fail(std::string("QCORE_CPU_ISA=") + asked + " is not one of: " + kernel_names());
    return k;
  }();
  return *found;
}

void parallel(int64_t begin, int64_t end, int64_t grain, void (*task)(int64_t, int64_t, void*), void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, task, context));
}

Pool pool() {
  uint32_t threads = 1;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return {static_cast<int>(threads), parallel};
}

Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return F32;
    case ScalarType::BFloat16: return BF16;
    case ScalarType::Half: return F16;
    case ScalarType::Char: return I8;
    case ScalarType::Byte: return E8M0;
    default: fail("a tensor has a dtype other than float32, bfloat16, float16, int8 and uint8");
  }
}

ScalarType scalar_type(int64_t type) {
  switch (type) {
    case F32: return ScalarType::Float;
    case BF16: return ScalarType::BFloat16;
    case F16: return ScalarType::Half;
    case I8: return ScalarType::Char;
    default: fail("no such type of results");
  }
}

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType type) {
  int64_t size[4], stride[4], all = 1;
  const auto n = static_cast<int64_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), size);
  for (int64_t i = n - 1; i >= 0; i--) stride[i] = all, all *= size[i] ? size[i] : 1;
  AtenTensorHandle handle;
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(n, size, stride, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <class T>
const T* data(const Maybe& t) {
  return t ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

// The weight of one expert, or the only one.
struct Parts {
  const Tensor& data;
  const Tensor& scale;
  const Maybe& zero;
  const Maybe& added;
  const Maybe& sums;
  const Maybe& table;
  const Maybe& factor;
};

Weight weight_of(const Parts& p, int64_t n, int64_t k, int64_t group, int64_t element, Mode mode, bool divides) {
  Weight w{};
  w.n = n;
  w.at = geometry(k, group);
  w.element = static_cast<Element>(element);
  w.data = static_cast<const uint8_t*>(p.data.data_ptr());
  w.scale = p.scale.data_ptr();
  w.scale_type = type_of(p.scale);
  w.factor = w.divisor = 1.0f;
  if (p.factor) (divides ? w.divisor : w.factor) = *data<float>(p.factor);
  w.zero = data<uint8_t>(p.zero);
  w.added = p.added ? p.added->data_ptr() : nullptr;
  w.sums = data<int32_t>(p.sums);
  w.offset = element == INT4 ? 8 : 128;
  if (element == TABLE4) {  // halves of whole numbers: fp4
    const float* values = data<float>(p.table);
    w.offset = 12;
    w.factor *= 0.5f;
    for (int i = 0; i < 16; i++) w.whole[i] = static_cast<uint8_t>(static_cast<int>(2.0f * values[i]) + w.offset);
  } else {
    w.table = data<float>(p.table);
  }
  w.fold = fold_of(w.at, mode);
  const int64_t blocks = (n + COLUMNS - 1) / COLUMNS;
  const int64_t bytes = blocks * w.at.packed() * COLUMNS / (element == INT8 || element == FLOAT8 ? 1 : 2);
  check(p.data.numel() % (bytes ? bytes : 1) == 0 && p.data.numel() >= bytes, "the packed weight has another size");
  return w;
}

Input input_of(const Tensor& x, int64_t rows, int64_t k, int64_t mode, double scale, int64_t zero, const Maybe& scales,
               const Maybe& zeros) {
  Input in{};
  in.x = x.data_ptr();
  in.type = type_of(x);
  in.rows = rows;
  in.stride = k;
  in.mode = static_cast<Mode>(mode);
  in.scale = static_cast<float>(scale);
  in.zero = static_cast<int32_t>(zero);
  in.scales = data<float>(scales);
  in.zeros = data<int32_t>(zeros);
  return in;
}

Output output_of(const Tensor& y, int64_t n, const Maybe& bias, double scale, int64_t zero, const Maybe& scales,
                 const Maybe& zeros) {
  Output out{};
  out.y = y.data_ptr();
  out.type = type_of(y);
  out.stride = n;
  if (bias) out.bias = bias->data_ptr(), out.bias_type = type_of(*bias);
  out.scale = static_cast<float>(scale);
  out.zero = static_cast<int32_t>(zero);
  out.scales = data<float>(scales);
  out.zeros = data<int32_t>(zeros);
  return out;
}

Tensor linear_op(Tensor x, Tensor packed, Tensor scale, Maybe zero, Maybe added, Maybe sums, Maybe table, Maybe factor,
                 Maybe bias, Maybe x_scale, Maybe x_zero, Maybe out_scale, Maybe out_zero, int64_t n, int64_t k,
                 int64_t group, int64_t element, int64_t mode, bool divides, double given_scale, int64_t given_zero,
                 double result_scale, int64_t result_zero, int64_t result) {
  const int64_t rows = x.numel() / k;
  Tensor y = empty({rows, n}, scalar_type(result));
  const Weight w = weight_of({packed, scale, zero, added, sums, table, factor}, n, k, group, element,
                             static_cast<Mode>(mode), divides);
  const Input in = input_of(x, rows, k, mode, given_scale, given_zero, x_scale, x_zero);
  const Output out = output_of(y, n, bias, result_scale, result_zero, out_scale, out_zero);
  check(linear(kernels(), pool(), w, in, out), "out of memory");
  return y;
}

Tensor grouped_linear_op(Tensor x, Tensor packed, Tensor scale, Maybe zero, Maybe added, Maybe sums, Maybe table,
                         Maybe factor, Maybe bias, Tensor offsets, int64_t n, int64_t k, int64_t group, int64_t element,
                         int64_t mode, bool divides, double given_scale, int64_t given_zero, int64_t result) {
  const int64_t rows = x.numel() / k, experts = offsets.numel();
  Tensor y = empty({rows, n}, scalar_type(result));
  const Type type = static_cast<Type>(result);
  const int64_t size = type == F32 ? 4 : 2;
  const Pool threads = pool();
  const int32_t* ends = static_cast<const int32_t*>(offsets.data_ptr());
  const int64_t blocks = (n + COLUMNS - 1) / COLUMNS;
  const Weight first = weight_of({packed, scale, zero, added, sums, table, factor}, n, k, group, element,
                                 static_cast<Mode>(mode), divides);
  const int64_t parameters = blocks * first.at.groups * COLUMNS;
  const int64_t scale_size = first.scale_type == F32 ? 4 : first.scale_type == E8M0 ? 1 : 2;
  const int64_t bytes = blocks * first.at.packed() * COLUMNS / (element == INT8 || element == FLOAT8 ? 1 : 2);
  int64_t start = 0;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t end = ends[e];
    check(end >= start && end <= rows, "offsets must ascend within the rows of x");
    if (end == start) continue;
    Weight w = first;
    w.data += e * bytes;
    w.scale = static_cast<const char*>(w.scale) + e * parameters * scale_size;
    if (w.zero) w.zero += e * parameters;
    if (w.added) w.added = static_cast<const char*>(w.added) + e * parameters * scale_size;
    if (w.sums) w.sums += e * blocks * w.folds() * COLUMNS;
    if (factor && factor->numel() > 1) {
      const float own = data<float>(factor)[e];
      if (divides) w.divisor = own;
      else w.factor = element == TABLE4 ? 0.5f * own : own;
    }
    Input in = input_of(x, end - start, k, mode, given_scale, given_zero, std::nullopt, std::nullopt);
    in.x = static_cast<const char*>(in.x) + start * k * (in.type == F32 ? 4 : in.type == I8 ? 1 : 2);
    Output out = output_of(y, n, bias, 1.0, 0, std::nullopt, std::nullopt);
    out.y = static_cast<char*>(out.y) + start * n * size;
    if (out.bias) out.bias = static_cast<const char*>(out.bias) + e * n * (out.bias_type == F32 ? 4 : 2);
    check(linear(kernels(), threads, w, in, out), "out of memory");
    start = end;
  }
  std::memset(static_cast<char*>(y.data_ptr()) + start * n * size, 0, static_cast<size_t>((rows - start) * n * size));
  return y;
}

Tensor conv2d_op(Tensor x, Tensor packed, Tensor scale, Maybe zero, Maybe added, Maybe sums, Maybe table, Maybe factor,
                 Maybe bias, int64_t channels, int64_t n, int64_t groups, int64_t group, int64_t element, int64_t mode,
                 bool divides, double given_scale, int64_t given_zero, double result_scale, int64_t result_zero,
                 int64_t result, int64_t kh, int64_t kw, int64_t sh, int64_t sw, int64_t ph, int64_t pw, int64_t dh,
                 int64_t dw) {
  const auto sizes = x.sizes();  // (batch, height, width, channels)
  Image image{};
  image.batch = sizes[0], image.height = sizes[1], image.width = sizes[2], image.channels = channels;
  image.kh = kh, image.kw = kw, image.sh = sh, image.sw = sw, image.ph = ph, image.pw = pw, image.dh = dh, image.dw = dw;
  image.groups = groups;
  check(sizes[3] == channels, "x has another number of channels");
  check(image.out_height() > 0 && image.out_width() > 0, "the image is smaller than the kernel");
  Tensor y = empty({image.batch, image.out_height(), image.out_width(), n}, scalar_type(result));
  const int64_t k = kh * kw * (channels / groups), each = n / groups;
  Weight w = weight_of({packed, scale, zero, added, sums, table, factor}, each, k, group, element,
                       static_cast<Mode>(mode), divides);
  const Input in = input_of(x, 0, channels, mode, given_scale, given_zero, std::nullopt, std::nullopt);
  const Output out = output_of(y, n, bias, result_scale, result_zero, std::nullopt, std::nullopt);
  check(convolve(kernels(), pool(), w, image, in, out), "out of memory");
  return y;
}

Tensor embedding_op(Tensor indices, Tensor codes, Tensor scale, Maybe zero, Maybe added, Maybe values, Maybe factor,
                    int64_t v, int64_t k, int64_t group, int64_t element, bool divides, int64_t result) {
  const int64_t count = indices.numel();
  Tensor y = empty({count, k}, scalar_type(result));
  Table t{};
  t.v = v, t.k = k, t.group = std::min(group, k);
  t.element = static_cast<Element>(element);
  t.data = static_cast<const uint8_t*>(codes.data_ptr());
  t.row_bytes = codes.numel() / (v ? v : 1);
  t.scale = scale.data_ptr(), t.scale_type = type_of(scale);
  t.factor = t.divisor = 1.0f;
  if (factor) (divides ? t.divisor : t.factor) = *data<float>(factor);
  t.zero = data<int8_t>(zero);
  t.added = added ? added->data_ptr() : nullptr;
  t.table = data<float>(values);
  t.out = static_cast<Type>(result);
  const bool wide = indices.scalar_type() == ScalarType::Long;
  const void* at = indices.data_ptr();
  const auto index = [&](int64_t i) -> int64_t {
    return wide ? static_cast<const int64_t*>(at)[i] : static_cast<const int32_t*>(at)[i];
  };
  for (int64_t i = 0; i < count; i++) check(index(i) >= 0 && index(i) < v, "an index is outside the table");
  const int64_t size = t.out == F32 ? 4 : 2;
  const Kernels& k_ = kernels();
  const auto gather = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (i + 2 < end) {  // the row after the next is on its way
        for (int64_t b = 0; b < t.row_bytes; b += 64) __builtin_prefetch(t.data + index(i + 2) * t.row_bytes + b);
      }
      k_.lookup(t, index(i), static_cast<char*>(y.data_ptr()) + i * k * size);
    }
  };
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, 16384 / (k ? k : 1)), gather);
  return y;
}

Tensor pack_op(Tensor codes, int64_t group, int64_t bits, int64_t offset) {
  const auto sizes = codes.sizes();
  const int64_t n = sizes[0], k = sizes[1], blocks = (n + COLUMNS - 1) / COLUMNS;
  const Geometry at = geometry(k, group);
  Tensor packed = empty({blocks, at.packed() / (bits == 4 ? 8 : 4), 128}, ScalarType::Byte);
  pack(pool(), static_cast<const uint8_t*>(codes.data_ptr()), static_cast<uint8_t*>(packed.data_ptr()), n, at,
       static_cast<int>(bits), static_cast<int>(offset));
  return packed;
}

Tensor unpack_op(Tensor packed, int64_t n, int64_t k, int64_t group, int64_t bits, int64_t offset) {
  Tensor codes = empty({n, k}, ScalarType::Byte);
  unpack(pool(), static_cast<const uint8_t*>(packed.data_ptr()), static_cast<uint8_t*>(codes.data_ptr()), n,
         geometry(k, group), static_cast<int>(bits), static_cast<int>(offset));
  return codes;
}

}  // namespace

STABLE_TORCH_LIBRARY(qcore_cpu, m) {
  m.def(
      "linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? added, Tensor? sums, Tensor? table, "
      "Tensor? factor, Tensor? bias, Tensor? x_scale, Tensor? x_zero, Tensor? out_scale, Tensor? out_zero, int n, "
      "int k, int group, int element, int mode, bool divides, float given_scale, int given_zero, float result_scale, "
      "int result_zero, int result) -> Tensor");
  m.def(
      "grouped_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? added, Tensor? sums, Tensor? table, "
      "Tensor? factor, Tensor? bias, Tensor offsets, int n, int k, int group, int element, int mode, bool divides, "
      "float given_scale, int given_zero, int result) -> Tensor");
  m.def(
      "conv2d(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? added, Tensor? sums, Tensor? table, "
      "Tensor? factor, Tensor? bias, int channels, int n, int groups, int group, int element, int mode, bool divides, "
      "float given_scale, int given_zero, float result_scale, int result_zero, int result, int kh, int kw, int sh, "
      "int sw, int ph, int pw, int dh, int dw) -> Tensor");
  m.def(
      "embedding(Tensor indices, Tensor codes, Tensor scale, Tensor? zero, Tensor? added, Tensor? values, "
      "Tensor? factor, int v, int k, int group, int element, bool divides, int result) -> Tensor");
  m.def("pack(Tensor codes, int group, int bits, int offset) -> Tensor");
  m.def("unpack(Tensor packed, int n, int k, int group, int bits, int offset) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(qcore_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_op));
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear_op));
  m.impl("conv2d", TORCH_BOX(&conv2d_op));
  m.impl("embedding", TORCH_BOX(&embedding_op));
  m.impl("pack", TORCH_BOX(&pack_op));
  m.impl("unpack", TORCH_BOX(&unpack_op));
}

#define QCORE_EXPORT extern "C" __attribute__((visibility("default")))
// For `qcore doctor` and tests, without torch's dispatcher.
QCORE_EXPORT const char* qcore_cpu_isas() { return kernel_names(); }
QCORE_EXPORT const char* qcore_cpu_isa() {
  const Kernels* k = kernels_for(std::getenv("QCORE_CPU_ISA"));
  return k ? k->name : nullptr;
}
