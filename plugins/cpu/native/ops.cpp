// torch.ops.qcore_cpu.*: the kernels as ops on torch's stable C interface (abi.h).
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "abi.h"
#include "conv.h"
#include "core.h"
#include "host.h"
#include "pages.h"
#include "transpose.h"

namespace qcore_cpu {
namespace {

void check(bool right, const char* message) {
  if (!right) fail(message);
}

Type type_of(const Tensor& t) {
  const int32_t dtype = t.dtype();
  if (dtype == aoti_torch_dtype_float32()) return F32;
  if (dtype == aoti_torch_dtype_bfloat16()) return BF16;
  if (dtype == aoti_torch_dtype_float16()) return F16;
  if (dtype == aoti_torch_dtype_int8()) return I8;
  if (dtype == aoti_torch_dtype_uint8()) return E8M0;
  fail("a tensor has a dtype other than float32, bfloat16, float16, int8 and uint8");
}

int32_t dtype_of(int64_t type) {
  switch (type) {
    case F32: return aoti_torch_dtype_float32();
    case BF16: return aoti_torch_dtype_bfloat16();
    case F16: return aoti_torch_dtype_float16();
    case I8: return aoti_torch_dtype_int8();
    default: fail("no such type of results");
  }
}

Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t all = 1;
  for (size_t i = sizes.size(); i-- > 0;) strides[i] = all, all *= std::max<int64_t>(1, sizes[i]);
  AtenTensorOpaque* made = nullptr;
  const auto dims = static_cast<int64_t>(sizes.size());
  ok(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// The tensors of a packed weight, in the order that every op has them in.
struct Parts {
  explicit Parts(Arguments& a)
      : data(a.tensor()), scale(a.tensor()), zero(a.maybe_tensor()), added(a.maybe_tensor()), sums(a.maybe_tensor()),
        table(a.maybe_tensor()), factor(a.maybe_tensor()) {}
  Tensor data, scale, zero, added, sums, table, factor;

  Weight weight(int64_t n, int64_t k, int64_t group, int64_t element, int64_t mode, bool divides) const {
    Weight w{};
    w.n = n;
    w.at = geometry(k, group);
    w.element = static_cast<Element>(element);
    w.data = data.data<uint8_t>();
    w.scale = scale.data();
    w.scale_type = type_of(scale);
    w.factor = w.divisor = 1.0f;
    if (factor) (divides ? w.divisor : w.factor) = *factor.data<float>();
    w.zero = zero.data<uint8_t>();
    w.added = added.data();
    w.sums = sums.data<int32_t>();
    set_table(w, table.data<float>());
    w.fold = fold_of(w.at, static_cast<Mode>(mode));
    check(data.numel() >= code_bytes(w), "the packed weight is smaller than its shape says");
    return w;
  }
};

// n, k, group, element, mode and divides follow each other in the schemas.
struct Form {
  explicit Form(Arguments& a)
      : n(a.integer()), k(a.integer()), group(a.integer()), element(a.integer()), mode(a.integer()), divides(a.boolean()) {}
  int64_t n, k, group, element, mode;
  bool divides;
};

Input input_of(const Tensor& x, int64_t rows, int64_t k, int64_t mode, double scale, int64_t zero) {
  Input in{};
  in.x = x.data();
  in.type = type_of(x);
  in.rows = rows;
  in.stride = k;
  in.mode = static_cast<Mode>(mode);
  in.scale = static_cast<float>(scale);
  in.zero = static_cast<int32_t>(zero);
  return in;
}

Output output_of(const Tensor& y, int64_t n, const Tensor& bias, double scale, int64_t zero) {
  Output out{};
  out.y = y.data();
  out.type = type_of(y);
  out.stride = n;
  if (bias) out.bias = bias.data(), out.bias_type = type_of(bias);
  out.scale = static_cast<float>(scale);
  out.zero = static_cast<int32_t>(zero);
  return out;
}

Tensor linear_op(Arguments& a) {
  const Tensor x = a.tensor();
  const Parts parts(a);
  const Tensor bias = a.maybe_tensor(), x_scale = a.maybe_tensor(), x_zero = a.maybe_tensor();
  const Tensor out_scale = a.maybe_tensor(), out_zero = a.maybe_tensor();
  const Form form(a);
  const double given_scale = a.number();
  const int64_t given_zero = a.integer();
  const double result_scale = a.number();
  const int64_t result_zero = a.integer(), result = a.integer();
  const int64_t rows = x.numel() / form.k;
  Tensor y = empty({rows, form.n}, dtype_of(result));
  const Weight w = parts.weight(form.n, form.k, form.group, form.element, form.mode, form.divides);
  Input in = input_of(x, rows, form.k, form.mode, given_scale, given_zero);
  in.scales = x_scale.data<float>(), in.zeros = x_zero.data<int32_t>();
  Output out = output_of(y, form.n, bias, result_scale, result_zero);
  out.scales = out_scale.data<float>(), out.zeros = out_zero.data<int32_t>();
  check(linear(kernels(), pool(), w, in, out), "out of memory");
  return y;
}

Tensor grouped_linear_op(Arguments& a) {
  const Tensor x = a.tensor();
  const Parts parts(a);
  const Tensor bias = a.maybe_tensor(), offsets = a.tensor();
  const Form form(a);
  const double given_scale = a.number();
  const int64_t given_zero = a.integer(), result = a.integer();
  const int64_t rows = x.numel() / form.k, experts = offsets.numel(), n = form.n;
  Tensor y = empty({rows, n}, dtype_of(result));
  const Pool threads = pool();
  const int32_t* ends = offsets.data<int32_t>();
  const Weight first = parts.weight(n, form.k, form.group, form.element, form.mode, form.divides);
  check(parts.data.numel() >= experts * code_bytes(first), "there are fewer packed experts than offsets");
  const Input all = input_of(x, rows, form.k, form.mode, given_scale, given_zero);
  const Output whole = output_of(y, n, bias, 1.0, 0);
  const int64_t size = type_size(whole.type);
  int64_t start = 0;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t end = ends[e];
    check(end >= start && end <= rows, "offsets must ascend within the rows of x");
    if (end == start) continue;
    Weight w = nth_weight(first, e);
    if (parts.factor && parts.factor.numel() > 1) {
      const float own = parts.factor.data<float>()[e];
      (form.divides ? w.divisor : w.factor) = own * (!form.divides && form.element == HALVES4 ? 0.5f : 1.0f);
    }
    Input in = all;
    in.rows = end - start;
    in.x = nth(in.x, in.type, form.k, start);
    Output out = whole;
    out.y = static_cast<char*>(out.y) + start * n * size;
    out.bias = nth(out.bias, out.bias_type, n, e);
    check(linear(kernels(), threads, w, in, out), "out of memory");
    start = end;
  }
  std::memset(static_cast<char*>(whole.y) + start * n * size, 0, static_cast<size_t>((rows - start) * n * size));
  return y;
}

// A convolution. x is (batch, height, width, channels), or (batch, channels, height, width) for `convolve_planes`; all but
// `convolve` take one weight, whatever the groups.
template <decltype(&convolve) RUN>
Tensor conv2d_op(Arguments& a) {
  constexpr bool PLANES = RUN == convolve_planes, PARTS = RUN == convolve;
  const Tensor x = a.tensor();
  const Parts parts(a);
  const Tensor bias = a.maybe_tensor();
  const int64_t channels = a.integer(), n = a.integer(), groups = a.integer(), group = a.integer();
  const int64_t element = a.integer(), mode = a.integer();
  const bool divides = a.boolean();
  const double given_scale = a.number();
  const int64_t given_zero = a.integer();
  const double result_scale = a.number();
  const int64_t result_zero = a.integer(), result = a.integer();
  constexpr int SIDE = PLANES ? 2 : 1;  // the dimension of the height
  Image image{};
  image.batch = x.size(0), image.height = x.size(SIDE), image.width = x.size(SIDE + 1), image.channels = channels;
  image.groups = groups;
  for (int64_t* side : {&image.kh, &image.kw, &image.sh, &image.sw, &image.ph, &image.pw, &image.dh, &image.dw})
    *side = a.integer();
  const int64_t oh = image.out_height(), ow = image.out_width();
  check(x.size(PLANES ? 1 : 3) == channels, "x has another number of channels");
  check(oh > 0 && ow > 0, "the image is smaller than the kernel");
  if (RUN == convolve_channels) {
    const int64_t size = channels / groups;
    const bool few = size == 1 || (mode != DIGITS && size % 4 == 0 && (size & (size - 1)) == 0 && size <= kernels().group_lanes);
    check(n == channels && few && channels >= FEWEST_CHANNELS, "no convolution of few channels in a group, as many in as out");
    check(image.kh * image.kw <= MOST_TAPS && x.dtype() != aoti_torch_dtype_int8(), "too many taps, or x is int8");
  }
  check(!PLANES || mode != DIGITS || channels == groups, "float x in planes has one channel in each group");
  const std::vector<int64_t> sizes = PLANES ? std::vector<int64_t>{image.batch, n, oh, ow} : std::vector<int64_t>{image.batch, oh, ow, n};
  Tensor y = empty(sizes, dtype_of(result));
  const int64_t k = image.kh * image.kw * (channels / groups);
  const Weight w = parts.weight(PARTS ? n / groups : n, k, group, element, mode, divides);
  const Input in = input_of(x, 0, channels, mode, given_scale, given_zero);
  const Output out = output_of(y, n, bias, result_scale, result_zero);
  check(RUN(kernels(), pool(), w, image, in, out), "out of memory");
  return y;
}

Tensor embedding_op(Arguments& a) {
  const Tensor indices = a.tensor(), codes = a.tensor(), scale = a.tensor(), zero = a.maybe_tensor();
  const Tensor added = a.maybe_tensor(), values = a.maybe_tensor(), factor = a.maybe_tensor();
  const int64_t v = a.integer(), k = a.integer(), group = a.integer(), element = a.integer();
  const bool divides = a.boolean();
  const int64_t result = a.integer(), count = indices.numel();
  std::vector<int64_t> sizes(indices.sizes(), indices.sizes() + indices.dim());
  sizes.push_back(k);
  Tensor y = empty(sizes, dtype_of(result));
  Table t{};
  t.v = v, t.k = k, t.group = std::min(group, k);
  t.element = static_cast<Element>(element);
  t.data = codes.data<uint8_t>();
  t.row_bytes = codes.numel() / std::max<int64_t>(1, v);
  t.scale = scale.data(), t.scale_type = type_of(scale);
  t.factor = t.divisor = 1.0f;
  if (factor) (divides ? t.divisor : t.factor) = *factor.data<float>();
  t.zero = zero.data<int8_t>();
  t.added = added.data();
  t.table = values.data<float>();
  if (t.element == FLOAT8) t.formula = formula_of(t.table);
  t.out = static_cast<Type>(result);
  const bool wide = indices.dtype() == aoti_torch_dtype_int64();
  check(embed(kernels(), pool(), t, indices.data(), wide, count, y.data()), "an index is outside the table");
  return y;
}

Tensor pack_op(Arguments& a) {
  const Tensor codes = a.tensor();
  const int64_t group = a.integer(), bits = a.integer(), offset = a.integer();
  const int64_t n = codes.size(0);
  const Geometry at = geometry(codes.size(1), group);
  Tensor packed = empty({ceil_div(n, COLUMNS), at.packed() / (bits == 4 ? 8 : 4), 128}, aoti_torch_dtype_uint8());
  want_huge_pages(packed.data(), packed.numel());
  pack(pool(), codes.data<uint8_t>(), packed.data<uint8_t>(), n, at, static_cast<int>(bits), static_cast<int>(offset));
  return packed;
}

Tensor unpack_op(Arguments& a) {
  const Tensor packed = a.tensor();
  const int64_t n = a.integer(), k = a.integer(), group = a.integer(), bits = a.integer(), offset = a.integer();
  Tensor codes = empty({n, k}, aoti_torch_dtype_uint8());
  unpack(pool(), packed.data<uint8_t>(), codes.data<uint8_t>(), n, geometry(k, group), static_cast<int>(bits),
         static_cast<int>(offset));
  return codes;
}

Tensor transposed_op(Arguments& a) {
  const Tensor x = a.tensor();
  const int32_t dtype = x.dtype();
  const int64_t size = dtype == aoti_torch_dtype_float32() ? 4 : 2;
  check(size == 4 || dtype == aoti_torch_dtype_bfloat16() || dtype == aoti_torch_dtype_float16(), "x has no such dtype");
  check(x.dim() == 3, "x has other than three dimensions");
  Tensor y = empty({x.size(0), x.size(2), x.size(1)}, dtype);
  transpose(pool(), x.data(), y.data(), x.size(0), x.size(1), x.size(2), size);
  return y;
}

template <Tensor (*OP)(Arguments&)>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  stack[0] = reinterpret_cast<StableIValue>(OP(arguments).release());
}

#define QCORE_WEIGHT \
  "Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? added, Tensor? sums, Tensor? table, Tensor? factor, "
#define QCORE_FORM "int n, int k, int group, int element, int mode, bool divides, float given_scale, int given_zero, "
#define QCORE_CONV \
  "Tensor? bias, int channels, int n, int groups, int group, int element, int mode, bool divides, float given_scale, " \
  "int given_zero, float result_scale, int result_zero, int result, int kh, int kw, int sh, int sw, int ph, int pw, " \
  "int dh, int dw) -> Tensor"

struct Op {
  const char* name;
  const char* schema;
  BoxedKernel kernel;
};
constexpr Op OPS[] = {
    {"linear",
     "linear(" QCORE_WEIGHT
     "Tensor? bias, Tensor? x_scale, Tensor? x_zero, Tensor? out_scale, Tensor? out_zero, " QCORE_FORM
     "float result_scale, int result_zero, int result) -> Tensor",
     boxed<linear_op>},
    {"grouped_linear",
     "grouped_linear(" QCORE_WEIGHT "Tensor? bias, Tensor offsets, " QCORE_FORM "int result) -> Tensor",
     boxed<grouped_linear_op>},
    {"conv2d", "conv2d(" QCORE_WEIGHT QCORE_CONV, boxed<conv2d_op<convolve>>},
    {"conv2d_planes", "conv2d_planes(" QCORE_WEIGHT QCORE_CONV, boxed<conv2d_op<convolve_planes>>},
    {"conv2d_channels", "conv2d_channels(" QCORE_WEIGHT QCORE_CONV, boxed<conv2d_op<convolve_channels>>},
    {"embedding",
     "embedding(Tensor indices, Tensor codes, Tensor scale, Tensor? zero, Tensor? added, Tensor? values, "
     "Tensor? factor, int v, int k, int group, int element, bool divides, int result) -> Tensor",
     boxed<embedding_op>},
    {"pack", "pack(Tensor codes, int group, int bits, int offset) -> Tensor", boxed<pack_op>},
    {"unpack", "unpack(Tensor packed, int n, int k, int group, int bits, int offset) -> Tensor", boxed<unpack_op>},
    {"transposed", "transposed(Tensor x) -> Tensor", boxed<transposed_op>},
};

// When the library is loaded. The two registries are kept for the life of the process, as torch keeps its own.
const bool registered = [] {
  TorchLibraryOpaque *definitions = nullptr, *kernels = nullptr;
  ok(aoti_torch_library_init_fragment("qcore_cpu", "ops.cpp", __LINE__, &definitions));
  ok(aoti_torch_library_init_impl("qcore_cpu", "CPU", "ops.cpp", __LINE__, &kernels));
  for (const Op& op : OPS) {
    ok(aoti_torch_library_def(definitions, op.schema));
    ok(torch_library_impl(kernels, op.name, op.kernel, TORCH_VERSION));
  }
  return true;
}();

}  // namespace
}  // namespace qcore_cpu
