// Activations of fp8: x becomes codes once; then the ways of float x multiply them, exactly.
#include "fp8.h"

#include <algorithm>

#include "panels.h"

namespace qcore_cpu {
namespace {

// Whether codes of x meet the weight as pairs of bfloat16, which holds both, and sums are scaled. Parts of K with one scale of x
// and of the weight have to be whole steps of codes.
bool takes_panel(const Kernels& kernels, const Weight& w, const Input& in, int64_t group) {
  const auto even = [](int64_t columns, int64_t groups) { return groups == 1 || columns % 8 == 0; };
  return kernels.bf16_panel.run && in.rows >= kernels.bf16_panel.fp8 && has_exact_codes(w) &&
         even(w.at.group, w.at.groups) && even(group, ceil_div(w.at.k, group));
}

}  // namespace

bool by_fp8(const Kernels& kernels, const Pool& pool, const Layer* layers, int count, const Input& in) {
  const int64_t k = layers->w.at.k, group = in.zero > 0 ? std::min<int64_t>(in.zero, k) : k, groups = ceil_div(k, group);
  bool panel = true;
  for (int i = 0; i < count; i++) panel = panel && takes_panel(kernels, layers[i].w, in, group);
  const int64_t size = panel ? 2 : 4, most = std::max<int64_t>(32, SCRATCH_BYTES / (k * size));
  for (int64_t row0 = 0; row0 < in.rows; row0 += most) {
    const int64_t rows = std::min(most, in.rows - row0);
    const Scratch codes(rows * k * size), scales(panel ? rows * groups * 4 : 64);
    if (!codes.data || !scales.data) return false;
    float* factors = reinterpret_cast<float*>(scales.data);
    each(pool, rows, std::max<int64_t>(1, (1 << 14) / k), [&](int64_t r) {
      kernels.fp8_row(row_of(in, row0 + r, nullptr), in.type, k, group, in.scale, codes.data + r * k * size,
                      panel ? factors + r * groups : nullptr);
    });
    Input given = in;
    given.x = codes.data, given.rows = rows, given.stride = k;
    given.type = panel ? BF16 : F32, given.mode = DIGITS;
    for (int i = 0; i < count; i++) {
      Layer layer = layers[i];
      Output& out = layer.out;
      out.y = static_cast<char*>(out.y) + row0 * out.stride * type_size(out.type);
      if (out.scales) out.scales += row0, out.zeros += row0;
      if (panel) out.factors = factors, out.factor_groups = groups, out.factor_group = group;
      if (!layer.w.n) continue;
      if (!(panel ? by_panel(kernels.bf16_panel, pool, layer.w, given, out) : linear(kernels, pool, &layer, 1, given))) return false;
    }
  }
  return true;
}

}  // namespace qcore_cpu
