// What one call of a kernel needs, as plain data: the same bytes for every instruction set.
#pragma once
#include <cstdint>

namespace qcore_cpu {

// Element types of x, scales, bias and results; the last three in programs only (B8: bool).
enum Type : int { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, E8M0 = 4, I64 = 5, I32 = 6, B8 = 7 };

// Functions here are static: files of several instruction sets use them, and the linker must not choose among copies.
static inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The largest number of rows in a block, of as many as are needed and as even as can be, with at most `most` rows each.
static inline int even_rows(int64_t rows, int most) { return (int)ceil_div(rows, ceil_div(rows, most)); }
static inline constexpr int type_size(Type type) {
  return type == I64 ? 8 : type == F32 || type == I32 ? 4 : type == BF16 || type == F16 ? 2 : 1;
}

// How a packed weight is read.
//   INT4: codes + 8, two to a byte; INT8: codes + 128; HALVES4: a 4-bit code that indexes 16 whole numbers (fp4 times 2);
//   FLOAT4, FLOAT8: a 4- or 8-bit code that indexes a table of floats.
enum Element : int { INT4 = 0, INT8 = 1, HALVES4 = 2, FLOAT4 = 3, FLOAT8 = 4 };

// What gives the same numbers as the table of FLOAT8: that of fp8 without Inf, with Inf, or the table alone does.
enum Formula : int { TABLE = 0, E4M3 = 1, E5M2 = 2 };

constexpr int COLUMNS = 32;     // output features of a packed block
constexpr int LARGEST_BLOCK = 128;  // elements of x that share a scale, at most
constexpr int64_t LARGEST_FOLD = 16384;  // codes summed in int32: 255 * 128 * 16384 < 2^31

// Where column k of a weight lies among the packed ones: groups are padded to whole blocks of a multiple of 8 columns.
struct Geometry {
  int64_t k, group;      // columns, columns per group (k if there is one group per channel)
  int64_t groups;        // ceil(k / group)
  int64_t block, blocks; // packed columns of a block, blocks per group
  int64_t packed() const { return groups * blocks * block; }
};

// Weight (n, k). data: [ceil(n / 32)][packed / 8 or / 4][128 bytes]. Byte j of a step is of column j / 4:
//   4 bits: low nibble k = j % 4, high nibble k = 4 + j % 4; 8 bits: k = j % 4.
// scale, zero, added, sums: [ceil(n / 32)][groups (folds for sums)][32].
struct Weight {
  int64_t n;
  Geometry at;
  Element element;
  const uint8_t* data;
  const void* scale;
  Type scale_type;
  float factor;             // multiplies every scale: of a table of whole numbers, or a global scale
  float divisor;            // divides every scale, before factor; 1 for none
  const uint8_t* zero;      // z + offset of the codes, or null
  const void* added;        // float zero points of the scale's type, or null
  const int32_t* sums;      // of (code - zero) over each fold, or null
  const float* table;       // FLOAT4: 16, FLOAT8: 256 values; null otherwise
  Formula formula;          // of the table
  uint8_t whole[16];        // HALVES4: value + offset
  int offset;               // what was added to codes: 8, 128, or that of `whole`
  int64_t fold;             // packed columns that are summed up in int32
  int64_t folds() const { return at.packed() / fold; }
};

// Whether bfloat16 holds codes less their zero points.
static inline bool has_exact_codes(const Weight& w) {
  const bool whole = w.element == INT4 || w.element == INT8 || w.element == HALVES4;
  return !w.added && (whole || (w.element == FLOAT8 && w.formula != TABLE));
}

// How x becomes rows of int8 digits.
enum Mode : int {
  DIGITS = 0,   // float activations: 2 digits (bf16, fp16) or 3 (fp32) per block
  DYNAMIC = 1,  // int8 per token, symmetric
  AFFINE = 2,   // int8 per token with zero point
  STATIC = 3,   // int8 with one given scale and zero point
  TOKEN = 4,    // int8 with given scale and zero point per token
  FP8 = 5,      // e4m3, one scale per token or `zero` columns of it (0: all of them), or a given one (`scale` not 0)
};

struct Input {
  const void* x;
  Type type;                 // I8: x holds codes (modes STATIC and TOKEN)
  int64_t rows, stride;      // stride: elements from row to row; columns are contiguous
  // Where row `index` lies; it may write the row to `scratch` (k elements). Null: at x + index * stride.
  const void* (*row)(const Input&, int64_t index, void* scratch);
  const void* context;       // of `row`
  Mode mode;
  float scale;
  int32_t zero;
  const float* scales;       // TOKEN
  const int32_t* zeros;      // TOKEN
};

// The scale of symmetric int8 activations whose largest magnitude has these bits: 1 for zeros, NaN if one is not finite.
constexpr int32_t INFINITE = 0x7f800000;
static inline float usable_scale(float scale) {
  constexpr float SMALLEST = 1.17549435e-38f;  // normal number of float32
  return scale == 0 ? 1.0f : scale < SMALLEST ? SMALLEST : scale;
}
static inline float symmetric_scale(int32_t magnitude) {
  if (magnitude >= INFINITE) return __builtin_nanf("");
  float largest;
  __builtin_memcpy(&largest, &magnitude, 4);
  return usable_scale(largest / 127.0f);
}
// By what values are multiplied for a scale. By the reciprocal: the contract allows either of two codes next to a tie.
static inline float inverse_scale(float scale) { return scale == scale ? 1.0f / scale : 1.0f; }

struct Output {
  void* y;
  Type type;
  int64_t stride;            // elements from row to row
  const void* bias;
  Type bias_type;
  float scale;               // I8: of the result
  int32_t zero;
  const float* scales;       // I8 per token, or null
  const int32_t* zeros;
  // Panels of codes of x: what sums of a row over `factor_group` columns of x are multiplied by, [rows][factor_groups]. Or null.
  const float* factors;
  int64_t factor_groups, factor_group;
};

// An element of x that is far above its block: multiplied in float, so that it takes no digits from the others.
struct Spike {
  int32_t row;    // within the row block
  int32_t k;      // packed column
  float value;
};

struct SpikeList {
  Spike* items;
  int64_t count, capacity;
  bool failed;  // no memory for one
};

// One block of rows as digits.
//   q: packed columns of one digit row lie together in runs of 4 (8 for matrix products of Arm), at k / run * k_step +
//   digit row * row_step: interleaved by rows, so that a tile reads on and on, or row by row, as AMX loads them;
//   scale: DIGITS [packed / block][rows], else [rows];
//   sum: [folds][rows][digits]; begin: minus the offset of the codes times that, with which accumulators start; total: [folds][rows], the (unscaled) sum of a fold for added zero points
struct Rows {
  int8_t* q;
  int64_t k_step, row_step;
  float* scale;
  int32_t *sum, *begin;
  float* total;
  int32_t* zero;    // [rows], modes with zero points
  SpikeList* spikes;
};

// Products of digits.
struct Product {
  int from;        // digit rows from which on it is used
  int digit_rows;  // int8 rows of a tile
  int together;    // packed columns of a digit row that lie together; 0: all, row by row
  // A block of `count` rows (of `rows` slots) times 32 columns, finished and stored: rows from `row0` on.
  void (*run)(const Weight&, const Input&, const Output&, const Rows&, int64_t nb, int rows, int count, int digits,
              int64_t row0);
};

// Products of float x with numbers that a thread makes of its columns' codes; see panel.inl.
struct Panel {
  // Rows from which on it is used. Products without it decode all codes once more for each block of rows.
  int from;         // of rows that are gathered; for the others 0: never
  int table;        // for tables of floats of 4 bits
  int fp8;          // and of 8 bits
  int integers[3];  // for integer codes of 4 bits, of 8, and of 8 in groups of up to 64
  int x_size;       // bytes of a packed column of x
  int64_t scratch;  // bytes for numbers; 128 more for each row and block of columns
  void (*row)(const Weight&, const void* x, Type type, void* to);
  // Rows from row0 on, `row_step` bytes apart in x, times `blocks` blocks of columns from nb on.
  void (*run)(const Weight&, const Output&, const void* x, int64_t row_step, int64_t nb, int64_t blocks, int64_t rows,
              int64_t row0, char* scratch);
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  Product product, many;  // `many`: for many rows; its `run` may be null
  // Quantize the row at `x`, the input's number `row`, into slot `r` of a block of `rows` rows.
  void (*quantize)(const Weight&, const Input&, const void* x, int64_t row, int r, int rows, int digits, const Rows&);
  // Any element: x as float32 [packed][rows] times 32 columns.
  void (*float_product)(const Weight&, const Output&, const float* x, int64_t nb, int rows, int count, int64_t row0);
  int float_rows;
  // Rows of float x from which on that is faster than digits, for [4, 8 bits][2, 3 digits]; 0: never.
  int floats_from[2][2];
  // bf16 x and 4-bit weights on dot products of bf16 pairs, or null: x as pairs [packed / 8][4][rows] of 32 bits,
  // sums [groups][rows] of x for zero points.
  void (*pair_product)(const Weight&, const Output&, const uint32_t* x, const float* sums, int64_t nb, int rows,
                       int count, int64_t row0);
  int pair_rows;
  // One row of bf16 x as such pairs, into slot `r` of `rows`.
  void (*pair_row)(const Weight&, const uint16_t* x, uint32_t* to, float* sums, int r, int rows);
  // Many rows of bf16 x on products of bf16 pairs, whose `run` may be null; of other float x.
  Panel bf16_panel, float_panel;
  // Runs of values as codes round(x * inverse) + zero, side by side, and the sum of each run. Codes (I8) are copied.
  void (*quantize_runs)(const struct Runs& x, float inverse, int32_t zero, int8_t* codes, int32_t* sums);
  // The largest magnitude of `count` values, as the bits of a float; NaN is above all.
  int32_t (*magnitude)(const void* x, Type type, int64_t count);
  // The largest magnitude of each run, likewise.
  void (*magnitudes)(const struct Runs& x, int32_t* to);
  // The largest magnitudes of the positive, and of the negative values of each run, likewise.
  void (*extremes)(const struct Runs& x, int32_t* high, int32_t* low);
  // `count` windows of a line of results as codes, each with a scale of its own, from window `from` on. `map`: the
  // largest magnitudes of all images' pixels in this channel group, or null for a kernel of one pixel without padding
  // and where rows lie side by side; for AFFINE, of positive and then of negative values.
  void (*window_codes)(const Input&, const struct Image&, const int32_t* map, int64_t group, int64_t line, int64_t from,
                       int64_t count, const struct WindowCodes&);
  // A convolution's windows times 32 columns, where the weight has one scale per channel: see Windows. `window_rows`:
  // how many are multiplied together.
  int window_rows;
  void (*window_product)(const Weight&, const Output&, const struct Windows&, int64_t nb, int64_t count, int64_t row0);
  // What these need of `rows` rows of codes at q, `step` bytes apart, for a weight in groups.
  void (*group_sums)(const Weight&, const int8_t* q, int64_t step, int64_t rows, const int32_t* zeros, const struct GroupSums& to);
  // The same for float x: windows of bfloat16 where `bf16_panel` serves, of float32. Null: rows are gathered for the panels.
  void (*bf16_windows)(const Weight&, const Output&, const struct FloatWindows&, int64_t nb, char* scratch);
  void (*float_windows)(const Weight&, const Output&, const struct FloatWindows&, int64_t nb, char* scratch);
  // Lines of results of a channel group, int8 x: see Planes.
  void (*plane_product)(const Weight&, const Input&, const Output&, const struct Planes&, const struct PlaneCodes&);
  // Numbers for `to` [taps][step] and `scales`, which are null for float x. `scratch`: 128 bytes for each packed column.
  void (*channel_numbers)(const Weight&, int64_t step, int32_t* to, float* scales, char* scratch);
  // The same for groups of `size` channels, and their sums; `group_lanes`: the largest such size.
  void (*group_numbers)(const Weight&, int size, int64_t step, int32_t* to, int32_t* sums, float* scales, char* scratch);
  int group_lanes;
  // Lines of results of a depthwise convolution, or one of such groups, (width, channels). At most `lines_of_part` of
  // them; `scratch`: `vectors_of_part` of 64 bytes.
  void (*channel_lines)(const Input&, const Output&, const struct Image&, const struct ChannelNumbers&, int64_t b,
                        int64_t line, int64_t lines, char* scratch);
  // A row of x as e4m3: codes as bfloat16, which holds them, and scales of `group` columns each; or, without `scales`, codes times
  // scales as float32. `given`: the scale, or 0.
  void (*fp8_row)(const void* x, Type type, int64_t k, int64_t group, float given, void* to, float* scales);
  // Every `step`-th value, `count` of them.
  void (*take_every)(const float* from, int64_t step, int64_t count, float* to);
  // Convert `count` values to float32.
  void (*widen)(const void* from, Type type, int64_t count, float* to);
  // One row of an embedding: codes of `k` columns with scales per group.
  void (*lookup)(const struct Table&, int64_t row, void* y);
  // What programs compute beside products.
  const struct Elements* elements;
};

// Runs of `count` values, `step` of them from run to run.
struct Runs {
  const void* x;
  Type type;
  int64_t count, runs, step;
};

// Rows of codes, `step` bytes apart, with their scales, zero points (AFFINE) and sums, of which there is room for whole
// vectors. `scratch`: three such arrays of words, then a word for each pixel of a padded line, with few channels two for each value.
struct WindowCodes {
  int8_t* q;
  int64_t step;
  float* scales;
  int32_t *zeros, *sums, *scratch;
};

// Rows of codes in an image of codes: row r begins at x + r * step and is the runs at `taps`.
struct Windows {
  const int8_t* x;
  int64_t step;
  const int64_t* taps;   // offsets in bytes
  int64_t count, run;    // taps, codes of each: a multiple of 4, or of 8 for 4-bit weights
  const int32_t* sums;   // of the codes of each row; for weights in groups see GroupSums
  const float* scales;   // of each row
  const int32_t* zeros;  // of each row, or null where there are none
  const struct GroupSums* groups;  // where the weight has several groups, else null
};

// Weights in groups: rows of codes lie in one run, each group with its padding. What each group's sums need, [groups][step]:
// the sum of the codes of a row, minus the offset of the weight's codes times that, and, for added zero points, the sum
// less the row's zero points.
struct GroupSums {
  int64_t step;  // at least the number of rows
  int32_t *sums, *begin;
  float* totals;
};

// Windows of some lines of results in an image of floats: those of line l begin at x + starts[l] + v * step.
constexpr int64_t FLOAT_WINDOW_WORDS = 384;  // numbers or pairs of them at a time for 32 columns: 48 KiB, in L2
struct FloatWindows {
  const char* x;
  const int64_t* starts;  // offsets in bytes, as all here
  int64_t lines, width, step, row0;
  const int64_t* taps;
  int64_t count, run;     // taps, elements of each: a multiple of 4, or of 8 for 4-bit weights
};

// A table (v, k) in the layout PLAIN: row by row, 4-bit codes in pairs, even column low; scale, zero: [v][groups].
struct Table {
  int64_t v, k, group;
  Element element;           // INT4, INT8, FLOAT4, FLOAT8
  const uint8_t* data;
  int64_t row_bytes;
  const void* scale;
  Type scale_type;
  float factor, divisor;
  const int8_t* zero;
  const void* added;
  const float* table;
  Formula formula;           // of the table of FLOAT8
  Type out;
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512vnni_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amxint8_kernels();
const Kernels* neon_kernels();
const Kernels* neondot_kernels();
const Kernels* neoni8mm_kernels();

}  // namespace qcore_cpu
