// Functions for ctypes, which need no dispatcher of torch: instruction sets, and `linear` for calls that run at once.
#include "host.h"

#include <cstdlib>
#include <string>

#include "abi.h"

namespace qcore_cpu {
namespace {

void parallel(int64_t begin, int64_t end, int64_t grain, void (*task)(int64_t, int64_t, void*), void* context) {
  ok(torch_parallel_for(begin, end, grain, task, context));
}

// What all calls of one kernel have in common. qcore_cpu/direct.py keeps it as bytes.
struct Form {
  Weight weight;  // without pointers
  Mode mode;
  Type x, result;
  float scale, result_scale;
  int32_t zero, result_zero;
  bool float_zeros, divides;
};

}  // namespace

const Kernels& kernels() {
  static const Kernels* const found = [] {
    const char* asked = std::getenv("QCORE_CPU_ISA");
    const Kernels* k = kernels_for(asked);
    if (!k) fail(std::string("QCORE_CPU_ISA=") + asked + " is not one of: " + kernel_names());
    return k;
  }();
  return *found;
}

Pool pool() {
  uint32_t threads = 1;
  ok(torch_get_num_threads(&threads));
  return {static_cast<int>(threads), parallel};
}

}  // namespace qcore_cpu

// For `qcore doctor` and tests.
QCORE_EXPORT const char* qcore_cpu_isas() { return qcore_cpu::kernel_names(); }
QCORE_EXPORT const char* qcore_cpu_isa() {
  const qcore_cpu::Kernels* found = qcore_cpu::kernels_for(std::getenv("QCORE_CPU_ISA"));
  return found ? found->name : nullptr;
}

QCORE_EXPORT int64_t qcore_cpu_form_size() { return sizeof(qcore_cpu::Form); }

// Describe a kernel in `form`, of so many bytes. `float_zeros`: zero points have the scale's type; `divides`: the global scale
// divides the others.
QCORE_EXPORT void qcore_cpu_form(void* form, int64_t n, int64_t k, int64_t group, int element, int mode, int x, int result,
                                 int float_zeros, int divides, double scale, int64_t zero, double result_scale,
                                 int64_t result_zero) {
  using namespace qcore_cpu;
  Form made{};
  made.weight.n = n;
  made.weight.at = geometry(k, group);
  made.weight.element = static_cast<Element>(element);
  made.mode = static_cast<Mode>(mode);
  made.weight.fold = fold_of(made.weight.at, made.mode);
  made.x = static_cast<Type>(x), made.result = static_cast<Type>(result);
  made.scale = static_cast<float>(scale), made.zero = static_cast<int32_t>(zero);
  made.result_scale = static_cast<float>(result_scale), made.result_zero = static_cast<int32_t>(result_zero);
  made.float_zeros = float_zeros, made.divides = divides;
  std::memcpy(form, &made, sizeof made);
}

namespace qcore_cpu {

namespace {

// The layer that a form describes, with what a call has given. False if the codes are too few.
bool make_layer(const Form& made, const LinearArguments& g, Layer& layer) {
  Weight& w = layer.w = made.weight;
  w.data = g.codes;
  w.scale = g.scale, w.scale_type = g.scale_type;
  if (made.float_zeros) w.added = g.zero;
  else w.zero = static_cast<const uint8_t*>(g.zero);
  w.sums = g.sums;
  w.factor = w.divisor = 1.0f;
  if (g.factor) (made.divides ? w.divisor : w.factor) = *g.factor;
  set_table(w, g.table);
  Output& out = layer.out = {};
  out.y = g.y, out.type = made.result, out.stride = w.n;
  out.bias = g.bias, out.bias_type = g.bias_type;
  out.scale = made.result_scale, out.zero = made.result_zero;
  return g.size >= code_bytes(w);
}

}  // namespace

bool linear_of(const void* const* forms, const LinearArguments* given, int count) {
  Layer layers[MOST_BESIDE];
  for (int i = 0; i < count; i++)
    if (!make_layer(*static_cast<const Form*>(forms[i]), given[i], layers[i])) return false;
  const Form& first = *static_cast<const Form*>(forms[0]);
  Input in{};
  in.x = given->x, in.type = first.x, in.rows = given->rows, in.stride = first.weight.at.k;
  in.mode = first.mode, in.scale = first.scale, in.zero = first.zero;
  return linear(kernels(), pool(), layers, count, in);
}

int64_t columns_of(const void* form) { return static_cast<const Form*>(form)->weight.n; }

bool reads_alike(const void* form, const void* other) {
  const Form &a = *static_cast<const Form*>(form), &b = *static_cast<const Form*>(other);
  const bool same_rows = a.mode == b.mode && a.x == b.x && a.scale == b.scale && a.zero == b.zero;
  const Geometry &at = a.weight.at, &to = b.weight.at;  // by these the blocks follow
  return same_rows && at.k == to.k && at.group == to.group && a.weight.element == b.weight.element;
}

}  // namespace qcore_cpu

// y (rows, n) = x (rows, k) times a weight of integer codes, which have `size` bytes. Null: no zero points, no bias. Returns
// 0, or 1 if it failed: memory ran out, or the codes are fewer than the form says.
QCORE_EXPORT int qcore_cpu_linear(const void* form, const void* x, int64_t rows, const void* codes, int64_t size,
                                  const void* scale, int scale_type, const void* zero, const void* bias, int bias_type,
                                  void* y) {
  using namespace qcore_cpu;
  LinearArguments given{};
  given.x = x, given.rows = rows, given.y = y;
  given.codes = static_cast<const uint8_t*>(codes), given.size = size;
  given.scale = scale, given.scale_type = static_cast<Type>(scale_type), given.zero = zero;
  given.bias = bias, given.bias_type = static_cast<Type>(bias_type);
  try {
    return !linear_of(&form, &given, 1);
  } catch (...) {  // an exception must not pass through ctypes
    return 1;
  }
}
