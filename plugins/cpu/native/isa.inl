// One instruction set: QCORE_ISA is its namespace, QCORE_VECTOR its vector header. Everything has internal linkage or
// lives in that namespace, so that the linker never takes code of one set for another. No header of the C++ library is
// used by it, for the same reason.
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "elements.h"
#include "images.h"
#include "problem.h"

namespace qcore_cpu {
namespace QCORE_ISA {
namespace {
#include QCORE_VECTOR
#if !defined(__aarch64__) || !defined(QCORE_NEON)
static inline I invert_top(I codes) { return codes; }
constexpr int DIGIT_RUN = 4;  // packed columns of a digit row that lie together
#endif
#include "rows.inl"
#include "finish.inl"
#include "tile.inl"
#include "floats.inl"
#include "windows.inl"
#include "panel.inl"
#include "planes.inl"
#include "magnitudes.inl"
#include "codes.inl"
#include "channel_groups.inl"
#include "depthwise.inl"
#include "channels.inl"
#include "fp8.inl"
#include "elements.inl"
#ifdef QCORE_PAIRS
#include "pairs.inl"
#endif
#ifdef QCORE_AMX
#include "amx.inl"
#include "amx_bf16.inl"
#endif
}  // namespace
}  // namespace QCORE_ISA
}  // namespace qcore_cpu

#define QCORE_TEXT_(x) #x
#define QCORE_TEXT(x) QCORE_TEXT_(x)
#define QCORE_JOIN_(a, b) a##b
#define QCORE_JOIN(a, b) QCORE_JOIN_(a, b)

const qcore_cpu::Kernels* qcore_cpu::QCORE_JOIN(QCORE_ISA, _kernels)() {
  using namespace qcore_cpu::QCORE_ISA;
  static constexpr Kernels kernels = {
      QCORE_TEXT(QCORE_ISA), {0, DIGIT_ROWS, DIGIT_RUN, product},
#ifdef QCORE_AMX
      {AMX_FROM, AMX_ROWS, 0, amx_product},
#else
      {0, 0, 0, nullptr},
#endif
      quantize, float_product, FLOAT_ROWS,
#ifdef QCORE_WORD_SUMS
      {{FLOATS_FROM_4[0], FLOATS_FROM_4[1]}, {FLOATS_FROM_8[0], FLOATS_FROM_8[1]}},
#else
      {},
#endif
#ifdef QCORE_PAIRS
      pair_product, PAIR_ROWS, pair_row,
#else
      nullptr, 0, nullptr,
#endif
#if defined(QCORE_AMX)
      {16, 9, 9, {16, 16, 16}, 2, PANEL_PART * 128, panel_row<true>, amx_panel},
#elif defined(QCORE_PAIRS)
      {16, 9, 7, {96, 128, 48}, 2, PANEL_PART * 128, panel_row<true>, panel_product<true>},
#else
      {0, 0, 0, {0, 0, 0}, 0, 0, nullptr, nullptr},
#endif
      {16, 16, LANES == 16 ? 9 : 16, {FLOAT_PANEL_FROM, FLOAT_PANEL_FROM, FLOAT_PANEL_FROM}, 4, PANEL_PART * 128, panel_row<false>, panel_product<false>},
      quantize_runs, magnitude, magnitudes, extremes, window_codes,
#if defined(QCORE_AMX)
      AMX_ROWS, amx_window_product, group_sums, nullptr, nullptr,
#elif defined(QCORE_PAIRS)
      DIGIT_ROWS, window_product, group_sums, float_windows<true>, float_windows<false>,
#else
      DIGIT_ROWS, window_product, group_sums, nullptr, float_windows<false>,
#endif
      plane_product, channel_numbers, group_numbers, LANES, channel_lines, fp8_row, take_every, widen, lookup,
      &ELEMENTS,
  };
  return &kernels;
}
