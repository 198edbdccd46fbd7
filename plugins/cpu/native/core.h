// The kernels' driver: rows to digits, digits times columns, over the threads of a pool.
#pragma once
#include "problem.h"

namespace qcore_cpu {

// torch's own threads, or one thread where there is no torch.
struct Pool {
  int threads;
  void (*run)(int64_t begin, int64_t end, int64_t grain, void (*task)(int64_t, int64_t, void*), void* context);
};

// Memory of the calling thread, 64-byte aligned; null if there is none. Small ones are kept for the next call.
class Scratch {
 public:
  explicit Scratch(int64_t size);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data;

 private:
  bool own;
};

// Bytes of rows of digits or numbers that exist at a time.
constexpr int64_t SCRATCH_BYTES = 32 << 20;

// Row `index` of x, gathered to `scratch` if it is no row of a matrix.
inline const void* row_of(const Input& in, int64_t index, void* scratch) {
  if (in.row) return in.row(in, index, scratch);
  return static_cast<const char*>(in.x) + index * in.stride * type_size(in.type);
}

// Run task(begin, end, context) over parts of 0..count, of at least `grain`, on the pool's threads. Each thread begins with
// neighbouring ones, the same in every call with these numbers; those that are done take from the others, as threads
// that share a core, or a machine with others, are not equally fast.
void share_out(const Pool& pool, int64_t count, int64_t grain, void (*task)(int64_t, int64_t, void*), void* context);

// The same for task(i) of every i.
template <class Task>
void each(const Pool& pool, int64_t count, int64_t grain, const Task& task) {
  const auto call = [](int64_t begin, int64_t end, void* context) {
    const Task& run = *static_cast<const Task*>(context);
    for (int64_t i = begin; i < end; i++) run(i);
  };
  if (count <= grain || pool.threads < 2) call(0, count, const_cast<Task*>(&task));
  else share_out(pool, count, grain, call, const_cast<Task*>(&task));
}

inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Bytes of the codes of one weight.
inline int64_t code_bytes(const Weight& w) {
  return ceil_div(w.n, COLUMNS) * w.at.packed() * COLUMNS / (w.element == INT8 || w.element == FLOAT8 ? 1 : 2);
}
// Weight number `index` of several of one form that lie one after the other, of which `first` is the first.
Weight nth_weight(const Weight& first, int64_t index);
// The same for vectors of n elements.
inline const void* nth(const void* first, Type type, int64_t n, int64_t index) {
  return first ? static_cast<const char*>(first) + index * n * type_size(type) : nullptr;
}

// Whether the 256 numbers of a table are those of an fp8 type.
Formula formula_of(const float* table);
Geometry geometry(int64_t k, int64_t group);
// The numbers that codes stand for, where they are no integers; fp4 (HALVES4) becomes halves of whole numbers. `factor` and
// `divisor` of the weight are set before.
void set_table(Weight& w, const float* table);
int64_t fold_of(const Geometry& at, Mode mode);

// A weight, and where its results go.
struct Layer {
  Weight w;
  Output out;
  int64_t columns() const { return ceil_div(w.n, COLUMNS); }
};
// y = x * W^T + bias of `count` layers that read the same x. They share its digits: their weights have the same geometry and
// element, from which the offset follows, and with the mode the fold. False if memory ran out.
bool linear(const Kernels& kernels, const Pool& pool, const Layer* layers, int count, const Input& in);
inline bool linear(const Kernels& kernels, const Pool& pool, const Weight& w, const Input& in, const Output& out) {
  const Layer layer{w, out};
  return linear(kernels, pool, &layer, 1, in);
}

// Rows `indices` (int64 if `wide`, else int32) of a table, one after the other, to y. False, and nothing is written, if one
// is outside the table.
bool embed(const Kernels& kernels, const Pool& pool, const Table& t, const void* indices, bool wide, int64_t count,
           void* y);

// Codes (n, k), one byte each, to and from packed ones: stored = (code + offset) modulo 256, or modulo 16 if bits is 4.
void pack(const Pool& pool, const uint8_t* codes, uint8_t* data, int64_t n, const Geometry& at, int bits, int offset);
void unpack(const Pool& pool, const uint8_t* data, uint8_t* codes, int64_t n, const Geometry& at, int bits, int offset);

// The best instruction set of this processor, or a lower one by name (null or empty: the best). Null: there is no such
// one, or the processor lacks it.
const Kernels* kernels_for(const char* name);
// The names of those that this processor has, best first, separated by spaces.
const char* kernel_names();

}  // namespace qcore_cpu
