#include "core.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fp8.h"
#include "panels.h"

namespace qcore_cpu {
namespace {

constexpr int64_t PANEL_BYTES = 768 << 10;    // digits that stay in L2 while all columns pass
constexpr int64_t KEPT_BYTES = 16 << 20;      // scratch that a thread keeps between calls
constexpr int64_t KEPT_OF_PART = 1 << 20;     // of that for parts of a call
constexpr int64_t SERIAL_WORK = 1 << 16;      // products that are not worth another thread

struct Free {
  void operator()(char* p) const { std::free(p); }
};

struct Kept {
  std::unique_ptr<char, Free> data;
  int64_t size = 0;
};
// That of a whole call, and those of its parts that the same thread computes.
constexpr int KEPT = 3;
thread_local Kept kept[KEPT];
thread_local int taken = 0;

char* allocate(int64_t size) { return static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(round_up(size, 64)))); }

// How rows become blocks: as even as can be, with at most `most` rows each.
struct Blocks {
  int64_t rows;
  int size;
  int64_t count() const { return ceil_div(rows, size); }
  int in(int64_t block) const { return static_cast<int>(std::min<int64_t>(size, rows - block * size)); }
};
Blocks blocks_of(int64_t rows, int most) {
  return {rows, even_rows(rows, most)};
}

// Every block of rows times every block of columns. A thread takes neighbouring columns, whose weights it packed, and
// for them the rows of one panel, which stay in its L2 cache.
template <class Product>
void all_tiles(const Pool& pool, int64_t columns, int64_t packed, const Blocks& blocks, int64_t bytes_of_block,
               const Product& product) {
  const int64_t count = blocks.count();
  int64_t panel = std::max<int64_t>(1, PANEL_BYTES / std::max<int64_t>(1, bytes_of_block));
  const int64_t wanted = ceil_div(4 * static_cast<int64_t>(pool.threads), columns);  // panels, to have work for all
  if (pool.threads > 1 && wanted > 1) panel = std::min(panel, ceil_div(count, wanted));
  const int64_t panels = ceil_div(count, panel);
  const int64_t work = std::min(panel, count) * blocks.size * packed * COLUMNS;
  each(pool, panels * columns, std::max<int64_t>(1, SERIAL_WORK / work), [&](int64_t unit) {
    const int64_t from = unit / columns * panel, to = std::min(count, from + panel);
    for (int64_t i = from; i < to; i++) product(unit % columns, i);
  });
}

// Rows of x from `first` on, before `end`, as rows of digits, which are the same for all of `count` layers.
bool by_digits(const Kernels& kernels, const Pool& pool, const Layer* layers, int count, const Input& in, int64_t first,
               int64_t end) {
  const Weight& w = layers->w;
  int64_t columns = 0;
  for (int i = 0; i < count; i++) columns += layers[i].columns();
  if (!columns) return true;
  const int digits = in.mode != DIGITS ? 1 : in.type == F32 ? 3 : 2;
  const Product& product = kernels.many.run && in.rows * digits >= kernels.many.from ? kernels.many : kernels.product;
  const int64_t packed = w.at.packed(), folds = w.folds();
  const int most = std::max(1, product.digit_rows / digits);
  // Row by row, rows are no power of two apart, so that they do not share one set of the cache.
  const int64_t digit_row = product.together ? packed : round_up(packed, 64) + 64;
  const int64_t scales = in.mode == DIGITS ? packed / w.at.block : 1;
  const auto bytes_of = [&](int rows) {
    return round_up(digit_row * rows * digits, 64) + round_up((scales + folds + 2 * folds * digits + 1) * rows * 4, 64);
  };
  const int64_t step = std::max<int64_t>(1, SCRATCH_BYTES / bytes_of(most)) * most;  // rows at a time
  bool enough = true;
  for (int64_t row0 = first; row0 < end && enough; row0 += step) {
    const Blocks blocks = blocks_of(std::min(step, end - row0), most);
    const int64_t size = bytes_of(blocks.size);
    const Scratch scratch(size * blocks.count());
    if (!scratch.data) return false;
    std::vector<SpikeList> spikes(static_cast<size_t>(blocks.count()), SpikeList{nullptr, 0, 0, false});
    const auto rows_of = [&](int64_t block) {
      char* p = scratch.data + block * size;
      Rows rows;
      rows.q = reinterpret_cast<int8_t*>(p);
      rows.k_step = product.together ? product.together * blocks.size * digits : 4;
      rows.row_step = product.together ? product.together : digit_row;
      rows.scale = reinterpret_cast<float*>(p + round_up(digit_row * blocks.size * digits, 64));
      rows.total = rows.scale + scales * blocks.size;
      rows.sum = reinterpret_cast<int32_t*>(rows.total + folds * blocks.size);
      rows.begin = rows.sum + folds * blocks.size * digits;
      rows.zero = rows.begin + folds * blocks.size * digits;
      rows.spikes = &spikes[static_cast<size_t>(block)];
      return rows;
    };
    each(pool, blocks.count(), std::max<int64_t>(1, (1 << 14) / (blocks.size * packed)), [&](int64_t block) {
      std::unique_ptr<char, Free> copy;
      if (in.row) copy.reset(static_cast<char*>(std::malloc(static_cast<size_t>(w.at.k * 4 + 64))));
      if (in.row && !copy) {
        spikes[static_cast<size_t>(block)].failed = true;
        return;
      }
      for (int r = 0; r < blocks.in(block); r++) {
        const int64_t index = row0 + block * blocks.size + r;
        kernels.quantize(w, in, row_of(in, index, copy.get()), index, r, blocks.size, digits, rows_of(block));
      }
    });
    for (const SpikeList& list : spikes) enough = enough && !list.failed;
    if (enough) {
      all_tiles(pool, columns, packed, blocks, size, [&](int64_t nb, int64_t block) {
        const Layer* layer = layers;
        for (; nb >= layer->columns(); layer++) nb -= layer->columns();
        const Rows rows = rows_of(block);
        product.run(layer->w, in, layer->out, rows, nb, blocks.size, blocks.in(block), digits, row0 + block * blocks.size);
      });
    }
    for (const SpikeList& list : spikes) std::free(list.items);
  }
  return enough;
}

// A row of floats in slot `r` of `rows`: packed columns, and sums per group.
void spread(const Weight& w, const float* values, float* to, float* sums, int64_t rows, int r) {
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int64_t from = g * w.at.group, end = std::min(w.at.k, from + w.at.group), wide = w.at.blocks * w.at.block;
    float sum = 0;
    for (int64_t start = from; start < end; start += LARGEST_BLOCK) {  // in parts, for the sake of rounding
      float part = 0;
      for (int64_t i = start; i < std::min(end, start + LARGEST_BLOCK); i++) part += values[i];
      sum += part;
    }
    sums[g * rows + r] = sum;
    for (int64_t i = 0; i < wide; i++) to[(g * wide + i) * rows + r] = from + i < end ? values[from + i] : 0.0f;
  }
}

// x as float32 (float tables), or as pairs of bfloat16.
bool by_floats(const Kernels& kernels, const Pool& pool, const Weight& w, const Input& in, const Output& out, bool pairs) {
  const int64_t packed = w.at.packed();
  const int most = pairs ? kernels.pair_rows : kernels.float_rows;
  const auto bytes_of = [&](int rows) { return round_up((packed * (pairs ? 2 : 4) + w.at.groups * 4) * rows, 64); };
  const int64_t step = std::max<int64_t>(1, SCRATCH_BYTES / bytes_of(most)) * most;
  // What is added per group is multiplied by sums of x. With Inf in x it may be Inf of the other sign than the codes'
  // part, where the weight times Inf is Inf. Rows of digits take Inf out and multiply it by the weight.
  const bool apart = (w.element == INT4 || w.element == INT8) && (w.added || (pairs && w.zero));
  std::vector<char> infinite(static_cast<size_t>(apart ? in.rows : 0), 0);
  for (int64_t row0 = 0; row0 < in.rows; row0 += step) {
    const Blocks blocks = blocks_of(std::min(step, in.rows - row0), most);
    const int64_t size = bytes_of(blocks.size), count = blocks.count(), n = blocks.size;
    const Scratch scratch(size * count);
    std::vector<char> failed(static_cast<size_t>(count), 0);
    if (!scratch.data) return false;
    each(pool, count, std::max<int64_t>(1, (1 << 14) / (n * packed)), [&](int64_t block) {
      std::unique_ptr<char, Free> copy(static_cast<char*>(std::malloc(static_cast<size_t>(w.at.k * 8 + 64))));
      if (!copy) {
        failed[static_cast<size_t>(block)] = 1;
        return;
      }
      float* values = reinterpret_cast<float*>(copy.get());
      char* to = scratch.data + block * size;
      float* sums = reinterpret_cast<float*>(to + packed * n * (pairs ? 2 : 4));
      for (int r = 0; r < blocks.in(block); r++) {
        const void* x = row_of(in, row0 + block * n + r, values + w.at.k);
        if (pairs) {
          kernels.pair_row(w, static_cast<const uint16_t*>(x), reinterpret_cast<uint32_t*>(to), sums, r, blocks.size);
        } else {
          kernels.widen(x, in.type, w.at.k, values);
          spread(w, values, reinterpret_cast<float*>(to), sums, n, r);
        }
        for (int64_t g = 0; apart && g < w.at.groups; g++) {
          if (!std::isfinite(sums[g * n + r])) infinite[static_cast<size_t>(row0 + block * n + r)] = 1;
        }
      }
    });
    for (char f : failed) if (f) return false;
    all_tiles(pool, ceil_div(w.n, COLUMNS), packed, blocks, size, [&](int64_t nb, int64_t block) {
      const char* x = scratch.data + block * size;
      const int64_t row = row0 + block * n;
      if (pairs) {
        const float* sums = reinterpret_cast<const float*>(x + packed * n * 2);
        kernels.pair_product(w, out, reinterpret_cast<const uint32_t*>(x), sums, nb, blocks.size, blocks.in(block), row);
      } else {
        kernels.float_product(w, out, reinterpret_cast<const float*>(x), nb, blocks.size, blocks.in(block), row);
      }
    });
  }
  for (size_t row = 0; row < infinite.size(); row++) {
    const int64_t at = static_cast<int64_t>(row);
    const Layer layer{w, out};
    if (infinite[row] && !by_digits(kernels, pool, &layer, 1, in, at, at + 1)) return false;
  }
  return true;
}

// What is left of a thread's part, on a cache line of its own.
struct alignas(64) Part {
  std::atomic<int64_t> next;
  int64_t end;
};
struct Parts {
  static constexpr int MOST = 128;
  Part all[MOST];
  int64_t count, step;
  void (*task)(int64_t, int64_t, void*);
  void* context;
  void take_from(Part& part) {
    while (part.next.load(std::memory_order_relaxed) < part.end) {
      const int64_t from = part.next.fetch_add(step, std::memory_order_relaxed);
      if (from < part.end) task(from, std::min(from + step, part.end), context);
    }
  }
};

}  // namespace

void share_out(const Pool& pool, int64_t count, int64_t grain, void (*task)(int64_t, int64_t, void*), void* context) {
  constexpr int64_t STEPS = 16;  // that a part is taken in, at most: what taking costs, and what is left at the end
  Parts parts;
  const int64_t threads = std::min<int64_t>(pool.threads, ceil_div(count, grain));
  parts.count = std::min<int64_t>(threads, Parts::MOST);
  parts.step = std::max(grain, ceil_div(count, parts.count * STEPS));
  parts.task = task, parts.context = context;
  for (int64_t i = 0; i < parts.count; i++) {
    parts.all[i].next.store(count * i / parts.count, std::memory_order_relaxed);
    parts.all[i].end = count * (i + 1) / parts.count;
  }
  const auto run = [](int64_t begin, int64_t end, void* of) {
    Parts& shared = *static_cast<Parts*>(of);
    for (int64_t own = begin; own < end; own++)
      for (int64_t i = 0; i < shared.count; i++) shared.take_from(shared.all[(own + i) % shared.count]);
  };
  pool.run(0, threads, 1, run, &parts);
}

Scratch::Scratch(int64_t size) : own(taken == KEPT || size > (taken ? KEPT_OF_PART : KEPT_BYTES)) {
  if (own) {
    data = allocate(size);
    return;
  }
  Kept& mine = kept[taken++];
  if (mine.size < size) {
    mine.size = round_up(size, 1 << 16);
    mine.data.reset();
    mine.data.reset(allocate(mine.size));
    if (!mine.data) mine.size = 0;
  }
  data = mine.data.get();
}

Scratch::~Scratch() {
  if (own) std::free(data);
  else taken--;  // the last one made goes first
}

Geometry geometry(int64_t k, int64_t group) {
  Geometry at;
  at.k = k;
  at.group = std::min(group, k);
  at.groups = ceil_div(k, at.group);
  // Blocks as large as can be, unless smaller ones leave less padding; a multiple of 16 columns is quantized at once.
  const int64_t fewest = ceil_div(at.group, LARGEST_BLOCK);
  int64_t least = INT64_MAX;
  for (int64_t blocks = fewest; blocks <= 2 * fewest; blocks++) {
    for (const int64_t unit : {16, 8}) {
      const int64_t block = round_up(ceil_div(at.group, blocks), unit);
      const int64_t cost = blocks * block + (block % 16 ? at.group / 8 : 0);
      if (cost < least) least = cost, at.blocks = blocks, at.block = block;
    }
  }
  return at;
}

namespace {

// The 256 numbers of fp8 with `mantissa` bits: e4m3 without Inf (3), e5m2 (2).
std::vector<float> fp8_numbers(int mantissa) {
  const int bias = mantissa == 3 ? 7 : 15;
  std::vector<float> numbers;
  for (int code = 0; code < 256; code++) {
    const int exponent = (code & 0x7f) >> mantissa, rest = code & ((1 << mantissa) - 1);
    float number = exponent ? std::ldexp(static_cast<float>(rest + (1 << mantissa)), exponent - bias - mantissa)
                            : std::ldexp(static_cast<float>(rest), 1 - bias - mantissa);
    if (mantissa == 3 && (code & 0x7f) == 0x7f) number = NAN;
    if (mantissa == 2 && exponent == 31) number = rest ? NAN : INFINITY;
    numbers.push_back(code & 0x80 ? -number : number);
  }
  return numbers;
}

bool same_numbers(const float* a, const std::vector<float>& b) {
  bool same = true;
  for (size_t i = 0; i < b.size(); i++) same &= (a[i] == b[i]) | ((a[i] != a[i]) & (b[i] != b[i]));
  return same;
}

}  // namespace

Formula formula_of(const float* table) {
  static const std::vector<float> e4m3 = fp8_numbers(3), e5m2 = fp8_numbers(2);
  return same_numbers(table, e4m3) ? E4M3 : same_numbers(table, e5m2) ? E5M2 : TABLE;
}

void set_table(Weight& w, const float* table) {
  constexpr int HALVES_OFFSET = 12;
  w.offset = w.element == INT4 ? 8 : w.element == HALVES4 ? HALVES_OFFSET : 128;
  w.table = table;
  if (w.element == FLOAT8) w.formula = formula_of(table);
  if (w.element != HALVES4) return;
  w.factor *= 0.5f;
  for (int i = 0; i < 16; i++) w.whole[i] = static_cast<uint8_t>(static_cast<int>(2.0f * table[i]) + w.offset);
  w.table = nullptr;
}

int64_t fold_of(const Geometry& at, Mode mode) {
  if (mode == DIGITS || mode == FP8) return at.block;
  // All blocks of a group, or the most that int32 holds and that divide it.
  int64_t blocks = std::min(at.blocks, LARGEST_FOLD / at.block);
  while (at.blocks % blocks) blocks--;
  return blocks * at.block;
}

Weight nth_weight(const Weight& first, int64_t index) {
  const int64_t columns = ceil_div(first.n, COLUMNS) * COLUMNS, parameters = columns * first.at.groups;
  Weight w = first;
  w.data += index * code_bytes(first);
  w.scale = nth(w.scale, w.scale_type, parameters, index);
  if (w.zero) w.zero += index * parameters;
  w.added = nth(w.added, w.scale_type, parameters, index);
  if (w.sums) w.sums += index * columns * w.folds();
  return w;
}

namespace {

enum class Way { DIGITS, PAIRS, FLOATS, PANEL, GATHERED_PANELS };

// How rows of x meet a weight of this kind.
Way way_of(const Kernels& kernels, const Weight& w, const Input& in) {
  const bool table = w.element == FLOAT4 || w.element == FLOAT8;
  const Panel& panel = panel_of(kernels, w, in);
  if (in.mode == DIGITS && in.row && in.rows >= panel.from) return Way::GATHERED_PANELS;
  if (in.mode == DIGITS && !in.row) {
    const bool is_short = w.at.groups > 1 && w.at.group <= 64;
    const int least = table ? (w.element == FLOAT8 ? panel.fp8 : panel.table)
                            : panel.integers[w.element != INT8 ? 0 : is_short ? 2 : 1];
    if (least && in.rows >= least) return Way::PANEL;
  }
  const int from = kernels.floats_from[w.element == INT8][in.type == F32];
  if (table || (in.mode == DIGITS && from && in.rows >= from)) return Way::FLOATS;
  const bool bf16 = in.mode == DIGITS && in.type == BF16 && w.element != INT8;
  return kernels.pair_product && bf16 && in.rows > 1 ? Way::PAIRS : Way::DIGITS;
}

}  // namespace

bool linear(const Kernels& kernels, const Pool& pool, const Layer* layers, int count, const Input& in) {
  if (!in.rows) return true;
  if (in.mode == FP8) return by_fp8(kernels, pool, layers, count, in);
  const Way way = way_of(kernels, layers->w, in);
  if (way == Way::DIGITS) return by_digits(kernels, pool, layers, count, in, 0, in.rows);
  for (int i = 0; i < count; i++) {
    const Weight& w = layers[i].w;
    const Output& out = layers[i].out;
    bool done = true;
    if (!w.n) continue;
    if (way == Way::PANEL) done = by_panel(panel_of(kernels, w, in), pool, w, in, out);
    else if (way == Way::GATHERED_PANELS) done = by_gathered_panels(panel_of(kernels, w, in), pool, w, in, out);
    else done = by_floats(kernels, pool, w, in, out, way == Way::PAIRS);
    if (!done) return false;
  }
  return true;
}

bool embed(const Kernels& kernels, const Pool& pool, const Table& t, const void* indices, bool wide, int64_t count,
           void* y) {
  const auto index = [&](int64_t i) -> int64_t {
    return wide ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
  };
  for (int64_t i = 0; i < count; i++) if (index(i) < 0 || index(i) >= t.v) return false;
  char* to = static_cast<char*>(y);
  const int64_t size = t.k * type_size(t.out), scale_bytes = ceil_div(t.k, t.group) * type_size(t.scale_type);
  const char* scales = static_cast<const char*>(t.scale);
  each(pool, count, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, t.k)), [&](int64_t i) {
    if (i + 2 < count) {  // the row after the next is on its way
      const int64_t row = index(i + 2);
      for (int64_t b = 0; b < t.row_bytes; b += 64) __builtin_prefetch(t.data + row * t.row_bytes + b);
      for (int64_t b = 0; b < scale_bytes; b += 64) __builtin_prefetch(scales + row * scale_bytes + b);
    }
    kernels.lookup(t, index(i), to + i * size);
  });
  return true;
}

namespace {

// Eight bytes at once: stored ones from codes (or back, with the negative offset), each modulo 256, or 16 if bits is 4.
struct Shift {
  uint64_t low, high, mask;
  Shift(int bits, int offset) : mask(bits == 4 ? 0x0f0f0f0f0f0f0f0full : ~0ull) {
    const uint64_t each = static_cast<uint8_t>(offset) * 0x0101010101010101ull;
    low = each & 0x7f7f7f7f7f7f7f7full;
    high = each & 0x8080808080808080ull;
  }
  // The top bits are added apart, without a carry into the next byte.
  uint64_t operator()(uint64_t codes) const {
    return (((codes & 0x7f7f7f7f7f7f7f7full) + low) ^ ((codes & 0x8080808080808080ull) ^ high)) & mask;
  }
};

// Calls run(column, packed column, how many) for every eight packed columns of a row, fewer where a group ends.
template <class Run>
void eights(const Geometry& at, const Run& run) {
  const int64_t wide = at.blocks * at.block;
  for (int64_t group = 0; group < at.groups; group++) {
    const int64_t first = group * at.group, size = std::min(at.group, at.k - first);
    for (int64_t inside = 0; inside < wide; inside += 8) {
      run(first + inside, group * wide + inside, std::max<int64_t>(0, std::min<int64_t>(8, size - inside)));
    }
  }
}

void copy(void* to, const void* from, int64_t count) {
  if (count == 8) std::memcpy(to, from, 8);  // an instruction, not a call
  else std::memcpy(to, from, static_cast<size_t>(count));
}

int64_t grain(const Geometry& at) { return std::max<int64_t>(1, (1 << 15) / (at.packed() * COLUMNS)); }

}  // namespace

// One row of 32 after the other: eight codes are one word of four bytes of a step (4 bits), or of two steps (8 bits).
void pack(const Pool& pool, const uint8_t* codes, uint8_t* data, int64_t n, const Geometry& at, int bits, int offset) {
  const int64_t bytes = at.packed() * COLUMNS * bits / 8;
  const Shift shift(bits, offset);
  each(pool, ceil_div(n, COLUMNS), grain(at), [&](int64_t nb) {
    for (int64_t column = 0; column < COLUMNS; column++) {
      const int64_t row = nb * COLUMNS + column;
      uint8_t* to = data + nb * bytes + column * 4;
      eights(at, [&](int64_t k, int64_t packed, int64_t count) {
        uint64_t word = 0;
        if (row < n) copy(&word, codes + row * at.k + k, count);
        word = shift(word);
        if (bits == 4) word |= word >> 28;
        uint8_t* step = to + packed * bits * 4;
        std::memcpy(step, &word, 4);
        if (bits == 8) std::memcpy(step + 128, reinterpret_cast<const char*>(&word) + 4, 4);
      });
    }
  });
}

void unpack(const Pool& pool, const uint8_t* data, uint8_t* codes, int64_t n, const Geometry& at, int bits, int offset) {
  const int64_t bytes = at.packed() * COLUMNS * bits / 8;
  const Shift shift(bits, -offset);
  each(pool, ceil_div(n, COLUMNS), grain(at), [&](int64_t nb) {
    for (int64_t row = nb * COLUMNS; row < std::min(n, (nb + 1) * COLUMNS); row++) {
      const uint8_t* from = data + nb * bytes + row % COLUMNS * 4;
      eights(at, [&](int64_t k, int64_t packed, int64_t count) {
        const uint8_t* step = from + packed * bits * 4;
        uint64_t word = 0;
        std::memcpy(&word, step, 4);
        if (bits == 8) std::memcpy(reinterpret_cast<char*>(&word) + 4, step + 128, 4);
        word = shift(bits == 4 ? word | word << 28 : word);
        copy(codes + row * at.k + k, &word, count);
      });
    }
  });
}

}  // namespace qcore_cpu
