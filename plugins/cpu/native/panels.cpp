#include "panels.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace qcore_cpu {
namespace {

constexpr int64_t PANEL_OF_ROWS = 512;     // rows at a time: a part of their columns stays in L2
constexpr int64_t PANEL_SUMS = 512 << 10;  // bytes of their sums
constexpr int64_t PANEL_UNITS = 4;         // for each thread: with more, panels are read more often; with fewer, threads idle at the end

// Rows are no power of two apart, so that they do not share one set of the cache.
int64_t bytes_of_row(const Panel& panel, const Weight& w) { return round_up(w.at.packed() * panel.x_size, 64) + 64; }
int64_t bytes_of_sums(int64_t rows) { return rows * COLUMNS * 4; }

// Whether a row has few different numbers, which bfloat16 does not hold: rounded alike in all columns, their errors would
// add up.
bool rounds_alike(const Weight& w) { return w.at.groups == 1 && !has_exact_codes(w); }

}  // namespace

const Panel& panel_of(const Kernels& kernels, const Weight& w, const Input& in) {
  const bool narrow = in.type == BF16 && kernels.bf16_panel.run && !rounds_alike(w);
  return narrow ? kernels.bf16_panel : kernels.float_panel;
}

// Float x as it is, a panel of rows at a time, for which a thread makes numbers of its columns' codes.
bool by_panel(const Panel& panel, const Pool& pool, const Weight& w, const Input& in, const Output& out) {
  const int64_t columns = ceil_div(w.n, COLUMNS), row = bytes_of_row(panel, w);
  const int64_t step = row + (in.row ? round_up(w.at.k * 4, 64) : 0);  // behind a row, where it is gathered
  const int64_t most = std::max<int64_t>(32, SCRATCH_BYTES / step / 32 * 32);
  for (int64_t row0 = 0; row0 < in.rows; row0 += most) {
    const int64_t rows = std::min(most, in.rows - row0);
    const Scratch scratch(rows * step);
    if (!scratch.data) return false;
    each(pool, rows, std::max<int64_t>(1, (1 << 15) / w.at.packed()), [&](int64_t r) {
      char* to = scratch.data + r * step;
      panel.row(w, row_of(in, row0 + r, to + row), in.type, to);
    });
    const int64_t panels = ceil_div(rows, PANEL_OF_ROWS), size = round_up(ceil_div(rows, panels), 32);
    // Blocks of columns that share the cached part of a panel: as many as leave each thread some units of work.
    const int64_t fair = pool.threads < 2 ? columns : ceil_div(columns * panels, PANEL_UNITS * pool.threads);
    const int64_t beside = std::max<int64_t>(1, std::min(fair, PANEL_SUMS / bytes_of_sums(size)));
    const int64_t sets = ceil_div(columns, beside);
    std::vector<char> failed(static_cast<size_t>(sets * panels), 0);
    each(pool, sets * panels, 1, [&](int64_t unit) {
      const int64_t nb = unit / panels * beside, first = unit % panels * size;
      const int64_t blocks = std::min(beside, columns - nb), here = std::min(size, rows - first);
      if (here <= 0) return;
      const Scratch own(panel.scratch + blocks * bytes_of_sums(here));
      if (!own.data) failed[static_cast<size_t>(unit)] = 1;
      else panel.run(w, out, scratch.data + first * step, step, nb, blocks, here, row0 + first, own.data);
    });
    if (std::find(failed.begin(), failed.end(), 1) != failed.end()) return false;
  }
  return true;
}

// A thread gathers as many rows as stay in its cache and takes all columns.
bool by_gathered_panels(const Panel& panel, const Pool& pool, const Weight& w, const Input& in, const Output& out) {
  constexpr int64_t CACHED = 1 << 19, FEWEST = 48;
  const int64_t columns = ceil_div(w.n, COLUMNS), step = bytes_of_row(panel, w);
  const int64_t share = round_up(ceil_div(in.rows, pool.threads), FEWEST);
  const int64_t most = std::min(share, std::max(FEWEST, CACHED / step / FEWEST * FEWEST)), panels = ceil_div(in.rows, most);
  if (panels < pool.threads && panels < columns) return by_panel(panel, pool, w, in, out);  // few rows, many columns
  std::vector<char> failed(static_cast<size_t>(panels), 0);
  each(pool, panels, 1, [&](int64_t index) {
    const int64_t row0 = index * most, rows = std::min(most, in.rows - row0);
    const Scratch own(panel.scratch + bytes_of_sums(rows) + rows * step + w.at.k * 4 + 64);
    if (!own.data) {
      failed[static_cast<size_t>(index)] = 1;
      return;
    }
    char* x = own.data + panel.scratch + bytes_of_sums(rows);
    for (int64_t r = 0; r < rows; r++) panel.row(w, row_of(in, row0 + r, x + rows * step), in.type, x + r * step);
    for (int64_t nb = 0; nb < columns; nb++) panel.run(w, out, x, step, nb, 1, rows, row0, own.data);
  });
  return std::find(failed.begin(), failed.end(), 1) == failed.end();
}

}  // namespace qcore_cpu
