// Many rows of float x: codes become numbers, scales and zero points included, once per block of 32 columns and part of K,
// and meet all rows of a panel there. No folds and no digits: sums stay in float32.
//
// A word is what one lane of a dot product takes: a float32 number, or a pair of bfloat16 where the processor multiplies
// such pairs (`PAIRS`). x: [rows][packed] of either type, the 8 columns of a step in the order 0 2 4 6 1 3 5 7 (4-bit
// codes) or 4 in the order 0 1 2 3 (8-bit): the order in which two codes of each lane become neighbours.

constexpr int PANEL_PART = 512;                   // packed columns at a time: 32 or 64 KiB of numbers, in L1 and L2
constexpr int PANEL_VECTORS = COLUMNS / LANES;    // of a word of all 32 columns

#ifdef QCORE_PAIRS
static inline F dot_word(F acc, F numbers, uint32_t x, bool pairs) {
  if (!pairs) return fma_f(numbers, from_bits(set_i((int32_t)x)), acc);
  return _mm512_dpbf16_ps(acc, (__m512bh)bits(numbers), (__m512bh)set_i((int32_t)x));
}
#else
static inline F dot_word(F acc, F numbers, uint32_t x, bool) { return fma_f(numbers, from_bits(set_i((int32_t)x)), acc); }
#endif

// Two numbers of each column as a pair of bfloat16, `first` in the low half: whole ones of up to 8 bits as they are, others
// rounded half to even. A NaN among them has to be one that is_quiet. `converted`: the processor rounds them rightly.
template <bool WHOLE>
static inline I bf16_pair(F first, F second, [[maybe_unused]] bool converted) {
#ifdef QCORE_BF16_CONVERSION
  if (!WHOLE && converted) return converted_pairs(first, second);
#endif
  if constexpr (WHOLE) return bf16_words(bits(first), bits(second));
  return bf16_words(rounded_bits(first), rounded_bits(second));
}

// Whether sums over parts of K have scales of their own, of x or of the weight, beside numbers that are codes. Where neither
// demands it, that is faster for fp8, whose codes become bfloat16 at once, and fewer than SCALED_ROWS rows.
constexpr int64_t SCALED_GROUP = 128, SCALED_ROWS = 128;
static inline bool has_scaled_parts(const Weight& w, const Output& out, int64_t rows) {
  if (out.factors) return w.at.groups > 1 || out.factor_groups > 1;
  const bool large = w.at.groups > 1 && w.at.group >= SCALED_GROUP && w.at.group % 8 == 0;
  return large && w.element == FLOAT8 && rows < SCALED_ROWS && has_exact_codes(w);
}

// Whether the numbers of a panel are codes less their zero points, or fp8, which bfloat16 holds exactly, and sums are scaled.
static inline bool has_whole_numbers(const Weight& w) { return w.at.groups == 1 && has_exact_codes(w); }

// Codes of packed columns from..from + count of block nb as words: [count or count / 2][32 columns]. IN_ORDER: column by
// column, else 4-bit codes in the order above. ZEROS: columns have zero points of their own, which are subtracted one by one.
template <bool PAIRS, bool IN_ORDER, bool WHOLE, bool ZEROS>
static void panel_words(const Weight& w, int64_t nb, int64_t from, int64_t count, char* to) {
  const bool four = w.element == INT4 || w.element == HALVES4 || w.element == FLOAT4;
  const bool integer = w.element == INT4 || w.element == INT8;
  const int64_t step = four ? 8 : 4, group = w.at.block * w.at.blocks;
  const uint8_t* codes = w.data + nb * (w.at.packed() / step) * 128 + from / step * 128;
  alignas(64) float table[16];
  for (int i = 0; i < 16; i++) {
    table[i] = w.element == HALVES4 ? (float)((int)w.whole[i] - w.offset) : w.element == FLOAT4 ? w.table[i] : (float)i;
    if (integer && !ZEROS) table[i] -= (float)w.offset;
  }
  const Numbers numbers = numbers16(table);
  const I byte = set_i(255), offset = set_i(w.offset);
  const auto number_of = [&](I v) {  // of the code in the low bits of each lane
    if (four) return pick(numbers, v);
    if (w.element == FLOAT8) return number_of_8(w.table, w.formula, v);
    return to_f(ZEROS ? and_i(v, byte) : sub_i(and_i(v, byte), offset));
  };
#ifdef QCORE_CODE_WORDS
  const bool fp8 = w.element == FLOAT8 && w.formula != TABLE;
  const CodeWords code_table = fp8 ? code_words(w.table) : CodeWords{};
#endif
  const ScaleVectors scales(w);
  int64_t known = -1;
  bool converted = false;  // whether the processor rounds all numbers of the group rightly
  F scale[PANEL_VECTORS], shift[PANEL_VECTORS], added[PANEL_VECTORS];
  for (int64_t k = from; k < from + count; k += step, codes += 128) {
    if (k / group != known) {  // scale, and what is subtracted before or added after it: zero points
      known = k / group;
      converted = w.element == INT4 || w.element == INT8;
      for (int h = 0; h < PANEL_VECTORS; h++) {
        const int64_t at = (nb * w.at.groups + known) * COLUMNS + h * LANES;
        scale[h] = quiet(scales(at));
        shift[h] = w.zero ? to_f(bytes_i(w.zero + at)) : set_f(integer ? (float)w.offset : 0.0f);
        added[h] = w.added ? quiet(widen_f(w.added, at, w.scale_type)) : set_f(0);
#ifdef QCORE_BF16_CONVERSION
        converted = converted && all_moderate(scale[h]) && all_moderate(added[h]);
#endif
      }
    }
    for (int h = 0; h < PANEL_VECTORS; h++) {
      const I v = load_i(codes + LANES * 4 * h);
      const auto finished = [&](F code) {
        if (ZEROS) code = sub_f(code, shift[h]);
        return WHOLE ? code : fma_f(code, scale[h], added[h]);
      };
      const auto put = [&](int64_t pair, F first, F second) {
        const int64_t word = (k - from) / 2 + pair;
        if constexpr (PAIRS) {
          const I pairs = bf16_pair<WHOLE>(first, second, converted);
          __builtin_memcpy(to + (word * PANEL_VECTORS + h) * LANES * 4, &pairs, LANES * 4);
        } else {
          float* here = (float*)to + (2 * word * PANEL_VECTORS + h) * LANES;
          store_f(here, first);
          store_f(here + COLUMNS, second);
        }
      };
      if (four && IN_ORDER) {  // codes 0 to 3 at bits 0, 8, 16 and 24; 4 to 7 at 4 bits above
        put(0, finished(number_of(v)), finished(number_of(shr_i<8>(v))));
        put(1, finished(number_of(shr_i<16>(v))), finished(number_of(shr_i<24>(v))));
        put(2, finished(number_of(shr_i<4>(v))), finished(number_of(shr_i<12>(v))));
        put(3, finished(number_of(shr_i<20>(v))), finished(number_of(shr_i<28>(v))));
      } else if (four) {  // codes at bits 4 * pair and 4 * pair + 16
        put(0, finished(number_of(v)), finished(number_of(shr_i<16>(v))));
        put(1, finished(number_of(shr_i<4>(v))), finished(number_of(shr_i<20>(v))));
        put(2, finished(number_of(shr_i<8>(v))), finished(number_of(shr_i<24>(v))));
        put(3, finished(number_of(shr_i<12>(v))), finished(number_of(shr_i<28>(v))));
#ifdef QCORE_CODE_WORDS
      } else if (fp8) {
        I even, odd;
        words_by_bytes(code_table, v, even, odd);
        put(0, finished(lower_word_f(even)), finished(lower_word_f(odd)));
        put(1, finished(upper_word_f(even)), finished(upper_word_f(odd)));
#endif
      } else {
        put(0, finished(number_of(v)), finished(number_of(shr_i<8>(v))));
        put(1, finished(number_of(shr_i<16>(v))), finished(number_of(shr_i<24>(v))));
      }
    }
  }
}

template <bool PAIRS, bool IN_ORDER = false>
static void panel_numbers(const Weight& w, bool whole, int64_t nb, int64_t from, int64_t count, char* to) {
  auto words = whole ? panel_words<PAIRS, IN_ORDER, true, false> : panel_words<PAIRS, IN_ORDER, false, false>;
  if (w.zero) words = whole ? panel_words<PAIRS, IN_ORDER, true, true> : panel_words<PAIRS, IN_ORDER, false, true>;
  words(w, nb, from, count, to);
}

// One row of x to packed columns, in the order above.
template <bool PAIRS>
static void panel_row(const Weight& w, const void* x, Type type, void* to) {
  constexpr int SIZE = PAIRS ? 2 : 4;
  const bool four = w.element == INT4 || w.element == HALVES4 || w.element == FLOAT4;
  alignas(64) char values[LARGEST_BLOCK * SIZE];
  for (int64_t b = 0; b < w.at.groups * w.at.blocks; b++) {
    const Span span = block_columns(w.at, b);
    char* here = (char*)to + b * w.at.block * SIZE;
    const char* from = (const char*)x + span.from * type_size(type);
    const bool whole = PAIRS && span.count == w.at.block;  // read where it is
    if (!whole) {
      if constexpr (PAIRS) __builtin_memcpy(values, from, (size_t)span.count * 2);
      else widen(from, type, span.count, (float*)values);
      __builtin_memset(values + span.count * SIZE, 0, (size_t)(w.at.block - span.count) * SIZE);
      from = values;
    }
    if (!four) {
      __builtin_memcpy(here, from, (size_t)w.at.block * SIZE);
      continue;
    }
    for (int64_t i = 0; i < w.at.block; i += 8) {
#ifdef QCORE_PAIR_ORDER
      if constexpr (PAIRS) {
        const __m128i eight = _mm_loadu_si128((const __m128i*)(from + i * 2));
        _mm_storeu_si128((__m128i*)(here + i * 2), _mm_shuffle_epi8(eight, pair_order()));
        continue;
      }
#endif
      for (int j = 0; j < 8; j++) __builtin_memcpy(here + (i + j) * SIZE, from + (i + 2 * (j % 4) + j / 4) * SIZE, SIZE);
    }
  }
}

// The part of K from packed column `from` on that has one scale of x, and one of the weight for each column.
struct ScaledPart {
  int64_t end;
  const float* factors;  // of rows, `step` apart, or null
  int64_t step;
  float factor(int64_t row) const { return factors ? factors[row * step] : 1.0f; }
  alignas(64) float scale[COLUMNS];
  ScaledPart(const Weight& w, const Output& out, int64_t nb, int64_t row0, int64_t from) : factors(nullptr), step(out.factor_groups) {
    const int64_t wide = w.at.block * w.at.blocks, group = from / wide;
    end = (group + 1) * wide;
    if (out.factors) {
      const int64_t k = group * w.at.group + from % wide, factor = k / out.factor_group;
      const int64_t left = out.factor_group - k % out.factor_group;  // of the columns of x with this scale
      if (from + left < end) end = from + left;
      factors = out.factors + row0 * step + (factor < step ? factor : step - 1);  // padding has any
    }
    for (int c = 0; c < COLUMNS; c += LANES) store_f(scale + c, scales_f(w, (nb * w.at.groups + group) * COLUMNS + c));
  }
};

// R rows times the columns from vector `first` on: `words` products are added to sums [rows][32], times the scales of a part,
// if that has some, for rows from `row` on.
template <bool PAIRS, int R>
static void __attribute__((noinline))
panel_tile(const char* numbers, int64_t words, const char* x, int64_t row_step, int first, float* sums, const ScaledPart* part,
           int64_t row) {
  constexpr int H = TILE_COLUMNS / LANES;
  F acc[R][H];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) acc[r][h] = set_f(0);
  const float* column = (const float*)numbers + first * LANES;
  for (int64_t i = 0; i < words; i++, column += COLUMNS, x += 4) {
    F n[H];
    for (int h = 0; h < H; h++) n[h] = load_f(column + h * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      uint32_t word;
      __builtin_memcpy(&word, x + r * row_step, 4);
      for (int h = 0; h < H; h++) acc[r][h] = dot_word(acc[r][h], n[h], word, PAIRS);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const F factor = set_f(part ? part->factor(row + r) : 1.0f);
    for (int h = 0; h < H; h++) {
      float* here = sums + r * COLUMNS + (first + h) * LANES;
      if (part) store_f(here, fma_f(acc[r][h], mul_f(load_f(part->scale + (first + h) * LANES), factor), load_f(here)));
      else store_f(here, add_f(load_f(here), acc[r][h]));
    }
  }
}

using PanelTile = void (*)(const char*, int64_t, const char*, int64_t, int, float*, const ScaledPart*, int64_t);

template <bool PAIRS, int R>
static PanelTile choose_panel(int count) {
  if constexpr (R > PANEL_ROWS) return nullptr;
  else return count == R ? panel_tile<PAIRS, R> : choose_panel<PAIRS, R + 1>(count);
}

// Sums of `rows` rows, [rows][32], `scaled` if they need it, finished and stored from row0 on.
static void finish_panel(const Weight& w, const Output& out, bool scaled, int64_t nb, int64_t rows, int64_t row0,
                         float* sums) {
  alignas(64) float bias[COLUMNS], scale[COLUMNS];
  read_bias(out, nb * COLUMNS, w.n, COLUMNS, bias);
  for (int c = 0; scaled && c < COLUMNS; c += LANES) store_f(scale + c, scales_f(w, nb * COLUMNS + c));
  for (int64_t r = 0; r < rows; r++) {
    float* values = sums + r * COLUMNS;
    const F factor = set_f(out.factors && scaled ? out.factors[row0 + r] : 1.0f);
    for (int c = 0; scaled && c < COLUMNS; c += LANES)
      store_f(values + c, mul_f(mul_f(load_f(values + c), load_f(scale + c)), factor));
    finish_row(out, row0 + r, nb * COLUMNS, w.n, bias, values);
  }
}

// All `rows` rows of x (row_step bytes apart) times `blocks` blocks from nb on, finished and stored from row0 on. `scratch`:
// PANEL_PART * 128 bytes for numbers, then rows * 128 bytes for the sums of each block. A part of K of all blocks comes
// before the next: that part of x stays in L2 meanwhile.
// `part(numbers, from, count, sums, scaled)` adds the products of one part with its numbers, times its scales if it has some, to
// the sums of their block.
template <bool PAIRS, class Part>
static inline void panel_parts(const Weight& w, const Output& out, int64_t nb, int64_t blocks, int64_t rows, int64_t row0,
                               char* scratch, const Part& part) {
  float* sums = (float*)(scratch + PANEL_PART * 128);
  const int64_t packed = w.at.packed(), size = rows * COLUMNS;
  const bool apart = has_scaled_parts(w, out, rows), whole = apart || has_whole_numbers(w);
  __builtin_memset(sums, 0, (size_t)(blocks * size) * 4);
  for (int64_t from = 0; from < packed; from += PANEL_PART) {
    const int64_t count = packed - from < PANEL_PART ? packed - from : PANEL_PART;
    for (int64_t b = 0; b < blocks; b++) {
      panel_numbers<PAIRS>(w, whole, nb + b, from, count, scratch);  // in the cache
      if (!apart) {
        part(scratch, from, count, sums + b * size, nullptr);
        continue;
      }
      for (int64_t k = from, end; k < from + count; k = end) {
        const ScaledPart scaled(w, out, nb + b, row0, k);
        end = scaled.end < from + count ? scaled.end : from + count;
        part(scratch + (k - from) * COLUMNS * (PAIRS ? 2 : 4), k, end - k, sums + b * size, &scaled);
      }
    }
  }
  for (int64_t b = 0; b < blocks; b++) finish_panel(w, out, whole && !apart, nb + b, rows, row0, sums + b * size);
}

template <bool PAIRS>
static void panel_product(const Weight& w, const Output& out, const void* x, int64_t row_step, int64_t nb, int64_t blocks,
                          int64_t rows, int64_t row0, char* scratch) {
  const int most = even_rows(rows, PANEL_ROWS);
  panel_parts<PAIRS>(w, out, nb, blocks, rows, row0, scratch, [&](const char* numbers, int64_t from, int64_t count, float* sums,
                                                                           const ScaledPart* part) {
    for (int64_t r = 0; r < rows; r += most) {  // every row meets the numbers; a sum of a part stays in registers
      const PanelTile run = choose_panel<PAIRS, 1>((int)(rows - r < most ? rows - r : most));
      const char* here = (const char*)x + r * row_step + from * (PAIRS ? 2 : 4);
      for (int first = 0; first < PANEL_VECTORS; first += TILE_COLUMNS / LANES)
        run(numbers, PAIRS ? count / 2 : count, here, row_step, first, sums + r * COLUMNS, part, r);
    }
  });
}

// R windows times the columns from vector `first` on, as `panel_tile`; `words` of each of `count` taps.
template <bool PAIRS, int R>
static void __attribute__((noinline))
float_window_tile(const char* numbers, int64_t words, const char* x, int64_t step, const int64_t* taps, int64_t count,
                  int first, float* sums) {
  constexpr int H = TILE_COLUMNS / LANES;
  F acc[R][H];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) acc[r][h] = set_f(0);
  const float* column = (const float*)numbers + first * LANES;
  for (int64_t t = 0; t < count; t++) {
    const char* here = x + taps[t];
    for (int64_t i = 0; i < words; i++, column += COLUMNS, here += 4) {
      F n[H];
      for (int h = 0; h < H; h++) n[h] = load_f(column + h * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        uint32_t word;
        __builtin_memcpy(&word, here + r * step, 4);
        for (int h = 0; h < H; h++) acc[r][h] = dot_word(acc[r][h], n[h], word, PAIRS);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    for (int h = 0; h < H; h++) {
      float* here = sums + r * COLUMNS + (first + h) * LANES;
      store_f(here, add_f(load_f(here), acc[r][h]));
    }
}

using FloatWindowTile = void (*)(const char*, int64_t, const char*, int64_t, const int64_t*, int64_t, int, float*);

template <bool PAIRS, int R>
static FloatWindowTile choose_float_window(int count) {
  if constexpr (R > PANEL_ROWS) return nullptr;
  else return count == R ? float_window_tile<PAIRS, R> : choose_float_window<PAIRS, R + 1>(count);
}

// The windows of some lines of an image times block nb, finished and stored. `scratch`: FLOAT_WINDOW_WORDS words of all
// columns, then a sum of each window and column.
template <bool PAIRS>
static void float_windows(const Weight& w, const Output& out, const FloatWindows& x, int64_t nb, char* scratch) {
  constexpr int SIZE = PAIRS ? 2 : 4;
  float* sums = (float*)(scratch + FLOAT_WINDOW_WORDS * COLUMNS * 4);
  const int64_t words = x.run * SIZE / 4, rows = x.lines * x.width;
  const int most = even_rows(x.width, PANEL_ROWS);
  __builtin_memset(sums, 0, (size_t)rows * COLUMNS * 4);
  // 1. Numbers of some whole taps, of as many as fit, or of a part of one.
  const int64_t piece = words < FLOAT_WINDOW_WORDS ? words : FLOAT_WINDOW_WORDS, fit = FLOAT_WINDOW_WORDS / piece;
  const int64_t together = ceil_div(x.count, ceil_div(x.count, fit));
  for (int64_t tap = 0; tap < x.count; tap += together) {
    const int64_t taps = x.count - tap < together ? x.count - tap : together;
    for (int64_t from = 0; from < words; from += piece) {
      const int64_t here = words - from < piece ? words - from : piece;
      panel_numbers<PAIRS, true>(w, has_whole_numbers(w), nb, tap * x.run + from * 4 / SIZE, taps * here * 4 / SIZE, scratch);
      // 2. Every window meets them.
      for (int64_t line = 0; line < x.lines; line++)
        for (int64_t v = 0; v < x.width; v += most) {
          const auto run = choose_float_window<PAIRS, 1>((int)(x.width - v < most ? x.width - v : most));
          const char* window = x.x + x.starts[line] + v * x.step + from * 4;
          for (int first = 0; first < PANEL_VECTORS; first += TILE_COLUMNS / LANES)
            run(scratch, here, window, x.step, x.taps + tap, taps, first, sums + (line * x.width + v) * COLUMNS);
        }
    }
  }
  finish_panel(w, out, has_whole_numbers(w), nb, rows, x.row0, sums);
}
