// Steps of programs (program.h), over the threads of torch's pool where they are large enough.
#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace qcore_cpu {
namespace {

constexpr int64_t RUN = 1024;      // numbers that are loaded at a time
constexpr int64_t GRAIN = 16384;   // numbers for which another thread is worth it

struct OutOfRange : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Type type_of(const Place& p) { return static_cast<Type>(p.type); }

// The offset, in elements, of the first element of row `index` over all dimensions but the last.
int64_t offset_of(int64_t index, int dims, const int64_t* sizes, const int64_t* strides) {
  int64_t offset = 0;
  for (int d = dims - 2; d >= 0; d--) offset += index % sizes[d] * strides[d], index /= sizes[d];
  return offset;
}

int64_t rows_of(int dims, const int64_t* sizes) {
  int64_t rows = 1;
  for (int d = 0; d < dims - 1; d++) rows *= sizes[d];
  return rows;
}

int64_t integer_at(const char* from, Type type, int64_t i) {
  if (type == I64) return reinterpret_cast<const int64_t*>(from)[i];
  if (type == I32) return reinterpret_cast<const int32_t*>(from)[i];
  return reinterpret_cast<const uint8_t*>(from)[i] != 0;
}

void store_integer(char* to, Type type, int64_t i, int64_t value) {
  if (type == I64) reinterpret_cast<int64_t*>(to)[i] = value;
  else if (type == I32) reinterpret_cast<int32_t*>(to)[i] = static_cast<int32_t>(value);
  else reinterpret_cast<uint8_t*>(to)[i] = value != 0;
}

// As torch, sums and products wrap around: they are those of unsigned numbers.
int64_t integer_result(Operation op, int64_t a, int64_t b, int64_t c, int64_t alpha) {
  const auto wrapped = [](uint64_t v) { return static_cast<int64_t>(v); };
  const uint64_t x = a, y = b, scaled = static_cast<uint64_t>(alpha) * y;
  switch (op) {
    case ADD: return wrapped(x + scaled);
    case SUB: return wrapped(x - scaled);
    case MUL: return wrapped(x * y);
    case MAXIMUM: return std::max(a, b);
    case MINIMUM: return std::min(a, b);
    case EQ: return a == b;
    case NE: return a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case AND: return a && b;
    case OR: return a || b;
    case XOR: return !a != !b;
    case NOT: return !a;
    case WHERE: return a ? b : c;
    case NEG: return wrapped(0 - x);
    case ABS: return a < 0 ? wrapped(0 - x) : a;
    default: return a;  // IDENTITY; Python asks for no other
  }
}

// Elements `from` to `from + count` of row `row`, of integers.
void integers(const Elementwise& s, const Frame& f, int64_t row, int64_t from, int64_t count) {
  const int64_t inner = s.sizes[s.dims - 1];
  int64_t first[OPERANDS];  // where the row begins
  for (int o = 0; o < s.count; o++) first[o] = offset_of(row, s.dims, s.sizes, s.operands[o].strides);
  const auto value = [&](int o, int64_t i) -> int64_t {
    const Operand& one = s.operands[o];
    if (one.at.slot < 0) return one.whole;
    return integer_at(f.at(one.at), type_of(one.at), first[o] + (from + i) * one.strides[s.dims - 1]);
  };
  for (int64_t i = 0; i < count; i++) {
    const int64_t a = value(0, i), b = s.count > 1 ? value(1, i) : 0, c = s.count > 2 ? value(2, i) : 0;
    const int64_t y = integer_result(static_cast<Operation>(s.operation), a, b, c, s.whole_alpha);
    store_integer(f.at(s.to), type_of(s.to), row * inner + from + i, y);
  }
}

// Elements `from` to `from + count` of `rows` rows from `row` on, of floats: all elements of a row if there are several.
void floats(const Elementwise& s, const Frame& f, int64_t row, int64_t rows, int64_t from, int64_t count) {
  alignas(64) float values[OPERANDS][RUN];
  const Elements& use = *f.kernels.elements;
  for (int o = 0; o < s.count; o++) {
    const Operand& one = s.operands[o];
    if (one.at.slot < 0) {
      std::fill_n(values[o], rows * count, static_cast<float>(one.number));
      continue;
    }
    const int64_t stride = one.strides[s.dims - 1];
    const Type type = type_of(one.at);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = offset_of(row + r, s.dims, s.sizes, one.strides) + from * stride;
      use.load(f.at(one.at) + at * type_size(type), type, stride, count, values[o] + r * count);
    }
  }
  use.apply(static_cast<Operation>(s.operation), values[0], values[1], values[2], rows * count,
            static_cast<float>(s.alpha));
  const int64_t to = row * s.sizes[s.dims - 1] + from;
  use.store(values[0], type_of(s.to), rows * count, f.at(s.to) + to * type_size(type_of(s.to)));
}

void run(const Elementwise& s, const Frame& f) {
  const int64_t inner = s.sizes[s.dims - 1], all = rows_of(s.dims, s.sizes);
  const int64_t together = s.integers ? 1 : std::max<int64_t>(1, RUN / inner), runs = ceil_div(inner, RUN);
  const int64_t size = std::min(inner, RUN) * together;
  each(f.pool, ceil_div(all, together) * runs, std::max<int64_t>(1, GRAIN / size), [&](int64_t i) {
    const int64_t row = i / runs * together, from = i % runs * RUN, count = std::min(RUN, inner - from);
    if (s.integers) integers(s, f, row, from, count);
    else floats(s, f, row, std::min(together, all - row), from, count);
  });
}

void run(const Copy& s, const Frame& f) {
  const int last = s.dims - 1, above = std::max(0, s.dims - 2);
  const int64_t inner = s.sizes[last], size = s.size, lines = s.dims > 1 ? s.sizes[above] : 1;
  const int64_t step = s.from_strides[last] * size, to_step = s.to_strides[last] * size;
  const int64_t line = s.from_strides[above] * size, to_line = s.to_strides[above] * size;
  each(f.pool, rows_of(s.dims, s.sizes) / lines, std::max<int64_t>(1, GRAIN / (inner * lines)), [&](int64_t plane) {
    const char* from = f.at(s.from) + offset_of(plane * lines, s.dims, s.sizes, s.from_strides) * size;
    char* to = f.at(s.to) + offset_of(plane * lines, s.dims, s.sizes, s.to_strides) * size;
    for (int64_t l = 0; l < lines; l++, from += line, to += to_line) {
      if (step == size && to_step == size) {
        std::memcpy(to, from, inner * size);
      } else if (size == 2) {
        for (int64_t i = 0; i < inner; i++) std::memcpy(to + i * to_step, from + i * step, 2);
      } else if (size == 4) {
        for (int64_t i = 0; i < inner; i++) std::memcpy(to + i * to_step, from + i * step, 4);
      } else {
        for (int64_t i = 0; i < inner; i++) std::memcpy(to + i * to_step, from + i * step, size);
      }
    }
  });
}

void run(const NormStep& s, const Frame& f) {
  Norm norm{};
  norm.x = type_of(s.x), norm.weight_type = type_of(s.weight), norm.bias_type = type_of(s.bias);
  norm.result = type_of(s.y), norm.n = s.n, norm.eps = static_cast<float>(s.eps), norm.centred = s.centred;
  each(f.pool, s.rows, std::max<int64_t>(1, GRAIN / s.n), [&](int64_t row) {
    const Scratch scratch(8 * s.n);
    if (!scratch.data) throw std::bad_alloc();
    f.kernels.elements->norm(norm, f.at(s.x) + row * s.n * type_size(norm.x), f.at(s.weight), f.at(s.bias),
                             f.at(s.y) + row * s.n * type_size(norm.result), reinterpret_cast<float*>(scratch.data));
  });
}

void run(const Rope& s, const Frame& f) {
  const Rotated form{type_of(s.x), type_of(s.cos), type_of(s.y), s.width};
  const int64_t size = s.width * type_size(form.result), sizes[4] = {s.sizes[0], s.sizes[1], s.sizes[2], 1};
  each(f.pool, s.sizes[0] * s.sizes[1] * s.sizes[2], std::max<int64_t>(1, GRAIN / s.width), [&](int64_t row) {
    const auto at = [&](const Place& p, const int64_t* strides) {
      return f.at(p) + offset_of(row, 4, sizes, strides) * type_size(type_of(p));
    };
    f.kernels.elements->rope(form, at(s.x, s.x_strides), at(s.cos, s.cos_strides), at(s.sin, s.sin_strides),
                             f.at(s.y) + row * size);
  });
}

constexpr int64_t LONG = 512;  // positions that are worth a task of their own

void run(const Attention& s, const Frame& f) {
  const int64_t group = s.heads / s.kv_heads, rows = group * s.rows;
  const int64_t pairs = s.batch * s.kv_heads;
  const int64_t wanted = f.pool.threads > pairs ? ceil_div(f.pool.threads, pairs) : 1;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, s.positions / LONG));
  const int64_t width = rows * (s.v_width + 2);  // floats of one part: sums, largest scores, totals
  const Scratch partial(4 * pairs * parts * width);
  if (!partial.data) throw std::bad_alloc();
  float* sums = reinterpret_cast<float*>(partial.data);
  const Elements& use = *f.kernels.elements;
  const Type type = type_of(s.q);
  const int64_t size = type_size(type);
  const int64_t numbers = std::max<int64_t>(1, s.positions / parts * s.width);  // of keys, for a task
  each(f.pool, pairs * parts, std::max<int64_t>(1, GRAIN / numbers), [&](int64_t task) {
    const int64_t part = task % parts, kv = task / parts % s.kv_heads, b = task / parts / s.kv_heads;
    const int64_t needed = rows * s.width + ATTENDED * (rows + std::max(s.width, s.v_width));
    const Scratch scratch(4 * needed + 16 * rows);
    if (!scratch.data) throw std::bad_alloc();
    int64_t *limits = reinterpret_cast<int64_t*>(scratch.data), *mask_rows = limits + rows;
    float *q = reinterpret_cast<float*>(mask_rows + rows), scale = static_cast<float>(s.scale);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t head = kv * group + r / s.rows, row = r % s.rows;
      const int64_t at = b * s.q_strides[0] + head * s.q_strides[1] + row * s.q_strides[2];
      use.load(f.at(s.q) + at * size, type, 1, s.width, q + r * s.width);
      for (int64_t i = 0; i < s.width; i++) q[r * s.width + i] *= scale;
      limits[r] = s.causal ? std::min(row + 1, s.positions) : s.positions;
      const int64_t of_mask = b * s.mask_strides[0] + head * s.mask_strides[1] + row * s.mask_strides[2];
      mask_rows[r] = of_mask * type_size(type_of(s.mask));
    }
    Attended a{};
    a.q = q, a.rows = rows, a.width = s.width, a.v_width = s.v_width, a.type = type;
    a.k = f.at(s.k) + (b * s.k_strides[0] + kv * s.k_strides[1]) * size, a.k_step = s.k_strides[2] * size;
    a.v = f.at(s.v) + (b * s.v_strides[0] + kv * s.v_strides[1]) * size, a.v_step = s.v_strides[2] * size;
    a.mask = f.at(s.mask), a.mask_type = type_of(s.mask), a.mask_rows = mask_rows;
    a.mask_step = a.mask ? s.mask_strides[3] * type_size(a.mask_type) : 0;
    a.limits = limits;
    const int64_t step = ceil_div(s.positions, parts);
    a.begin = part * step, a.end = std::min(s.positions, a.begin + step);
    a.out = sums + task * width, a.largest = a.out + rows * s.v_width, a.total = a.largest + rows;
    a.scores = q + rows * s.width;
    use.attend(a);
  });
  for (int64_t i = 0; i < pairs * rows; i++) {
    const int64_t pair = i / rows, r = i % rows;
    float* first = sums + pair * parts * width;
    const auto largest_of = [&](int64_t p) { return first[p * width + rows * s.v_width + r]; };
    float largest = largest_of(0), total = 0;
    for (int64_t p = 1; p < parts; p++) {
      const float one = largest_of(p);
      largest = one > largest || one != one ? one : largest;
    }
    float* out = first + r * s.v_width;
    for (int64_t p = 0; p < parts; p++) {
      const float* part = first + p * width;
      const float own = part[rows * s.v_width + r];
      const float factor = own == largest ? 1.0f : own == -INFINITY ? 0.0f : std::exp(own - largest);
      total += factor * part[rows * (s.v_width + 1) + r];
      for (int64_t j = 0; j < s.v_width; j++) {
        const float value = factor == 0 ? 0.0f : factor * part[r * s.v_width + j];
        out[j] = p ? out[j] + value : value;
      }
    }
    // A row that sees nothing is 0, as in torch.
    for (int64_t j = 0; j < s.v_width; j++) out[j] = largest == -INFINITY ? 0.0f : out[j] / total;
    const int64_t row = (pair * group + r / s.rows) * s.rows + r % s.rows;
    use.store(out, type_of(s.y), s.v_width, f.at(s.y) + row * s.v_width * type_size(type_of(s.y)));
  }
}

void run(const IndexCopy& s, const Frame& f) {
  const auto at = [&](int64_t i) { return integer_at(f.at(s.index), type_of(s.index), i); };
  for (int64_t i = 0; i < s.count; i++) {  // before anything is written
    if (at(i) < 0 || at(i) >= s.size) throw OutOfRange("an index of index_copy is out of range");
  }
  for (int64_t o = 0; o < s.outer; o++) {
    for (int64_t i = 0; i < s.count; i++) {
      std::memcpy(f.at(s.x) + (o * s.size + at(i)) * s.inner, f.at(s.source) + (o * s.count + i) * s.inner, s.inner);
    }
  }
}

void run(const EmbeddingStep& s, const Frame& f) {
  Table t{};
  t.v = s.v, t.k = s.k, t.group = std::min(s.group, s.k), t.element = static_cast<Element>(s.element);
  t.data = reinterpret_cast<const uint8_t*>(f.at(s.codes)), t.row_bytes = s.row_bytes;
  t.scale = f.at(s.scale), t.scale_type = type_of(s.scale);
  t.factor = t.divisor = 1.0f;
  if (const char* factor = f.at(s.factor)) (s.divides ? t.divisor : t.factor) = *reinterpret_cast<const float*>(factor);
  if (s.float_zeros) t.added = f.at(s.zero);
  else t.zero = reinterpret_cast<const int8_t*>(f.at(s.zero));
  t.table = reinterpret_cast<const float*>(f.at(s.table));
  t.out = type_of(s.y);
  const bool wide = type_of(s.indices) == I64;
  if (!embed(f.kernels, f.pool, t, f.at(s.indices), wide, s.count, f.at(s.y))) {
    throw OutOfRange("an index is outside the table");
  }
}

LinearArguments arguments_of(const LinearStep& s, const Frame& f) {
  const auto floats = [&](const Place& p) { return reinterpret_cast<const float*>(f.at(p)); };
  LinearArguments g{};
  g.x = f.at(s.x), g.rows = s.rows, g.y = f.at(s.y);
  g.codes = reinterpret_cast<const uint8_t*>(f.at(s.codes)), g.size = s.size;
  g.scale = f.at(s.scale), g.scale_type = type_of(s.scale), g.zero = f.at(s.zero);
  g.sums = reinterpret_cast<const int32_t*>(f.at(s.sums)), g.table = floats(s.table), g.factor = floats(s.factor);
  g.bias = f.at(s.bias), g.bias_type = type_of(s.bias);
  return g;
}

// The first of `count` steps, which is a linear layer, with those behind it that may run beside it. Returns how many.
int64_t run_layers(const Step* steps, int64_t count, const Frame& f) {
  const void* forms[MOST_BESIDE];
  LinearArguments given[MOST_BESIDE];
  int n = 0;
  for (; n < std::min<int64_t>(count, MOST_BESIDE) && steps[n].layer && (!n || steps[n].layer->beside); n++) {
    forms[n] = steps[n].layer->form.data();
    given[n] = arguments_of(steps[n].layer->step, f);
  }
  if (!linear_of(forms, given, n)) throw std::bad_alloc();
  return n;
}

// Whether a layer reads the x of the one before, as the same rows, and writes nowhere that this reads or writes: memory is
// given again once the results in it are not used any more.
bool runs_beside(const LinearLayer& before, const LinearLayer& layer) {
  const LinearStep &a = before.step, &b = layer.step;
  const int64_t a_size = columns_of(before.form.data()), b_size = columns_of(layer.form.data());
  const auto apart = [](const Place& p, int64_t p_bytes, const Place& q, int64_t q_bytes) {
    return p.slot < 0 || p.slot != q.slot || p.offset + p_bytes <= q.offset || q.offset + q_bytes <= p.offset;
  };
  const auto bytes = [](const Place& p, int64_t count) { return count * type_size(type_of(p)); };
  const int64_t written = bytes(a.y, a.rows * a_size), writes = bytes(b.y, b.rows * b_size);
  const bool same_x = a.x.slot == b.x.slot && a.x.offset == b.x.offset && a.x.type == b.x.type && a.rows == b.rows;
  return same_x && reads_alike(before.form.data(), layer.form.data()) && apart(a.y, written, b.y, writes) &&
         apart(a.bias, bytes(a.bias, a_size), b.y, writes) && apart(b.bias, bytes(b.bias, b_size), a.y, written);
}

}  // namespace
}  // namespace qcore_cpu

using qcore_cpu::Program;

QCORE_EXPORT Program* qcore_cpu_program() {
  try {
    return new Program;
  } catch (...) {
    return nullptr;
  }
}
QCORE_EXPORT void qcore_cpu_program_free(Program* program) { delete program; }

// Append a step; 0, or 1 if memory ran out.
#define QCORE_STEP(name, kind)                                                                      \
  QCORE_EXPORT int qcore_cpu_step_##name(Program* program, const qcore_cpu::kind* step) {           \
    try {                                                                                           \
      program->steps.push_back({[s = *step](const qcore_cpu::Frame& f) { qcore_cpu::run(s, f); }, nullptr}); \
      return 0;                                                                                     \
    } catch (...) {                                                                                 \
      return 1;                                                                                     \
    }                                                                                               \
  }
QCORE_STEP(elementwise, Elementwise)
QCORE_STEP(copy, Copy)
QCORE_STEP(norm, NormStep)
QCORE_STEP(rope, Rope)
QCORE_STEP(attention, Attention)
QCORE_STEP(index_copy, IndexCopy)
QCORE_STEP(embedding, EmbeddingStep)

// `form`: of `qcore_cpu_form`; it is copied.
QCORE_EXPORT int qcore_cpu_step_linear(Program* program, const qcore_cpu::LinearStep* step, const char* form) {
  using namespace qcore_cpu;
  try {
    auto layer = std::make_unique<LinearLayer>();
    layer->step = *step;
    layer->form.assign(form, form + qcore_cpu_form_size());
    layer->beside = false;
    for (size_t i = program->steps.size(); i-- > 0;) {  // all that run together with the step before
      const LinearLayer* before = program->steps[i].layer.get();
      layer->beside = before && runs_beside(*before, *layer);
      if (!layer->beside || !before->beside) break;
    }
    program->steps.push_back({nullptr, std::move(layer)});
    return 0;
  } catch (...) {
    return 1;
  }
}

// Run steps `first` to `last` - 1 on the memory at `bases`. 0; 1: memory ran out; 2: an index is out of range.
QCORE_EXPORT int qcore_cpu_program_run(const Program* program, int64_t first, int64_t last, char* const* bases) {
  using namespace qcore_cpu;
  try {
    const Frame frame{bases, kernels(), pool()};
    for (int64_t i = first; i < last;) {
      const Step& step = program->steps[i];
      if (step.run) step.run(frame), i++;
      else i += run_layers(&step, last - i, frame);
    }
    return 0;
  } catch (const OutOfRange&) {
    return 2;
  } catch (...) {
    return 1;
  }
}
