// Float x meets numbers: codes of any element become floats in registers.

constexpr int FLOAT_ROWS = 8;
// Vectors of columns beside R rows, so that there are as many accumulators as multiply-adds on their way, and registers.
template <int R> constexpr int FLOAT_VECTORS = LANES == 16 ? 2 : R > 4 ? 1 : R > 2 || LANES < 8 ? 2 : 4;

// The number in the lower or upper word of each lane.
static inline F lower_word_f(I v) { return from_bits(shl_i<16>(v)); }
static inline F upper_word_f(I v) { return from_bits(and_i(v, set_i((int32_t)0xffff0000))); }
// The upper words of each lane of two vectors, those of `even` below those of `odd`.
static inline I bf16_words(I even, I odd) { return or_i(shr_i<16>(even), and_i(odd, set_i((int32_t)0xffff0000))); }

// k of the nibble at 4 * j bits of a 32-bit lane.
constexpr int NIBBLE_COLUMN[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// The number of an fp8 code in the upper 8 bits of each lane, of MANTISSA bits; gathering 8 numbers takes twice as long.
template <int MANTISSA>
static inline F fp8_f(I top) {
  constexpr int BIAS = MANTISSA == 3 ? 7 : 15, PLACE = 23 - MANTISSA;
  constexpr int32_t ONE = 1 << 23, LARGEST = (MANTISSA == 3 ? 0x7e : 0x7b) << PLACE;
  const I magnitude = and_i(sra_i<24 - PLACE>(top), set_i(0x7f << PLACE));
  // 1. Subnormal ones get the least exponent, and lose the leading 1 that comes with it.
  const I small = sra_i<31>(sub_i(magnitude, set_i(ONE)));
  const I normal = add_i(or_i(magnitude, and_i(small, set_i(ONE))), set_i((127 - BIAS) << 23));
  const F number = sub_f(from_bits(normal), from_bits(and_i(small, set_i((128 - BIAS) << 23))));
  // 2. Inf and NaN: exponents of ones; e4m3 has no Inf.
  const I special = and_i(sra_i<31>(sub_i(set_i(LARGEST), magnitude)), set_i(MANTISSA == 3 ? 0x7fc00000 : 0x7f800000));
  return from_bits(or_i(or_i(bits(number), special), and_i(top, set_i((int32_t)0x80000000))));
}

// Of the table of FLOAT8, for a code in the low 8 bits of each lane.
static inline __attribute__((always_inline)) F number_of_8(const float* table, Formula formula, I v) {
  if (formula == E4M3) return fp8_f<3>(shl_i<24>(v));
  if (formula == E5M2) return fp8_f<2>(shl_i<24>(v));
  return gather(table, and_i(v, set_i(255)));
}

// The numbers of codes of element E in the low bits of each lane, less the zero points of their columns.
template <Element E>
struct Decoder {
  static constexpr bool FOUR = E != INT8 && E != FLOAT8;
  alignas(64) float whole[E == HALVES4 ? 16 : 1];  // `Numbers` may be its address
  Numbers numbers;
  const float* table;
  Formula formula;
  explicit inline Decoder(const Weight& w) : whole(), numbers(), table(w.table), formula(w.formula) {
    if constexpr (E == FLOAT4) {
      numbers = numbers16(w.table);
    } else if constexpr (E == HALVES4) {
      for (int i = 0; i < 16; i++) whole[i] = (float)((int)w.whole[i] - w.offset);
      numbers = numbers16(whole);
    }
  }
  inline __attribute__((always_inline)) F operator()(I v, I zero) const {
    if constexpr (E == INT4 || E == INT8) return to_f(sub_i(and_i(v, set_i(E == INT4 ? 15 : 255)), zero));
    if constexpr (FOUR) return pick(numbers, v);
    return number_of_8(table, formula, v);
  }
};

// WORDS: of fp8, four codes of a lane become words at once.
template <Element E, int R, bool WORDS>
static void __attribute__((noinline))
float_tile(const Weight& w, const Output& out, const float* x, int64_t nb, int first, int rows, int64_t row0) {
  constexpr int H = FLOAT_VECTORS<R>;
  constexpr int BYTES = LANES * 4;
  constexpr bool FOUR = Decoder<E>::FOUR;
  constexpr int STEP = FOUR ? 8 : 4;  // columns of x in 128 bytes of codes
  const uint8_t* codes = w.data + nb * (w.at.packed() / STEP) * 128 + first * BYTES;
  const bool grouped = w.at.groups > 1;
  const Decoder<E> number_of(w);
#ifdef QCORE_CODE_WORDS
  CodeWords words{};
  if constexpr (WORDS) words = code_words(w.table);
#endif
  const float* totals = x + w.at.packed() * rows;  // [groups][rows]
  F sum[R][H];
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) sum[r][h] = set_f(0);
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int64_t parameters = (nb * w.at.groups + g) * COLUMNS + first * LANES;
    F scale[H];
    I zero[H];
    for (int h = 0; h < H; h++) {
      scale[h] = grouped ? scales_f(w, parameters + h * LANES) : set_f(1);
      zero[h] = w.zero ? bytes_i(w.zero + parameters + h * LANES) : set_i(w.offset);
    }
    for (int64_t b = 0; b < w.at.blocks; b++) {
      // A block at a time, so that rounding errors of a long sum stay small.
      F acc[R][H];
      for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) acc[r][h] = set_f(0);
      for (int64_t i = 0; i < w.at.block; i += STEP, codes += 128, x += STEP * rows) {
        I v[H];
        for (int h = 0; h < H; h++) {
          prefetch(codes + 2048 + BYTES * h);
          v[h] = load_i(codes + BYTES * h);
        }
        [[maybe_unused]] I word[2][H];
#ifdef QCORE_CODE_WORDS
        if constexpr (WORDS) for (int h = 0; h < H; h++) words_by_bytes(words, v[h], word[0][h], word[1][h]);
#endif
#pragma GCC unroll 8
        for (int j = 0; j < STEP; j++) {
          F value[H];
          for (int h = 0; h < H; h++) {
            if constexpr (WORDS) {
              value[h] = j < 2 ? lower_word_f(word[j % 2][h]) : upper_word_f(word[j % 2][h]);
              continue;
            }
            value[h] = number_of(v[h], zero[h]);
            if constexpr (FOUR) v[h] = shr_i<4>(v[h]);
            else v[h] = shr_i<8>(v[h]);
          }
          const float* here = x + (FOUR ? NIBBLE_COLUMN[j] : j) * rows;
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            for (int h = 0; h < H; h++) acc[r][h] = fma_f(value[h], set_f(here[r]), acc[r][h]);
        }
      }
      for (int r = 0; r < R; r++)
        for (int h = 0; h < H; h++)
          sum[r][h] = grouped ? fma_f(acc[r][h], scale[h], sum[r][h]) : add_f(sum[r][h], acc[r][h]);
    }
    if (w.added && grouped) {
      for (int h = 0; h < H; h++) {
        const F added = widen_f(w.added, parameters + h * LANES, w.scale_type);
        for (int r = 0; r < R; r++) sum[r][h] = fma_f(added, set_f(totals[g * rows + r]), sum[r][h]);
      }
    }
  }
  alignas(64) float bias[COLUMNS];
  const int64_t column = nb * COLUMNS + first * LANES;
  if (column >= w.n) return;
  read_bias(out, column, w.n, H * LANES, bias);
  for (int r = 0; r < R; r++) {
    F v[H];  // a copy: sums of which there are references would lie in memory
    for (int h = 0; h < H; h++) v[h] = sum[r][h];
    apply_channels(w, nb, first, totals[r], v);
    finish_vectors(out, row0 + r, column, w.n, bias, v);
  }
}

// All columns of a block, for the number of rows that it has.
template <Element E, int R, bool WORDS = false>
static void float_tiles(const Weight& w, const Output& out, const float* x, int64_t nb, int rows, int count, int64_t row0) {
  if constexpr (R <= FLOAT_ROWS) {
    if (count != R) return float_tiles<E, R + 1, WORDS>(w, out, x, nb, rows, count, row0);
    for (int first = 0; first < COLUMNS / LANES; first += FLOAT_VECTORS<R>)
      float_tile<E, R, WORDS>(w, out, x, nb, first, rows, row0);
  }
}

static void float_product(const Weight& w, const Output& out, const float* x, int64_t nb, int rows, int count,
                          int64_t row0) {
  auto run = w.element == FLOAT4 ? float_tiles<FLOAT4, 1> : float_tiles<FLOAT8, 1>;
#ifdef QCORE_CODE_WORDS
  if (w.element == FLOAT8 && w.formula != TABLE) run = float_tiles<FLOAT8, 1, true>;
#endif
#ifdef QCORE_WORD_SUMS  // see FLOATS_FROM_4
  if (w.element == INT4) run = float_tiles<INT4, 1>;
  else if (w.element == INT8) run = float_tiles<INT8, 1>;
  else if (w.element == HALVES4) run = float_tiles<HALVES4, 1>;
#endif
  run(w, out, x, nb, rows, count, row0);
}

// Codes of columns from..from + count of a row of a table, one byte each; `from` is even.
static inline void table_codes(const Table& t, const uint8_t* row, int64_t from, int count, int8_t* to) {
  if (t.element == INT8 || t.element == FLOAT8) {
    __builtin_memcpy(to, row + from, (size_t)count);
    return;
  }
  const uint8_t* pairs = row + from / 2;
  const int flip = t.element == INT4 ? 8 : 0;  // sign of a 4-bit number
  for (int i = 0; i < (count + 1) / 2; i++) {
    to[2 * i] = (int8_t)(((pairs[i] & 15) ^ flip) - flip);
    to[2 * i + 1] = (int8_t)(((pairs[i] >> 4) ^ flip) - flip);
  }
}

// One row of an embedding: codes of LOOKUP columns at a time, then group by group.
constexpr int LOOKUP = 256;

// Scales of a row's groups from..from + count as float32, without NaN other than that of arithmetic.
constexpr int64_t ROW_SCALES = 64;
static inline void row_scales(const Weight& scales, int64_t from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_f(to + i, quiet(scales_f(scales, from + i)));
  for (; i < count; i++) to[i] = quiet(one_scale(scales, from + i));
}

// The numbers of LANES codes of 8 bits, less their zero point.
template <bool ZEROS>
static inline __attribute__((always_inline)) F byte_numbers(const Table& t, const int8_t* codes, I zero) {
  if (t.table) return number_of_8(t.table, t.formula, bytes_i((const uint8_t*)codes));
  const I v = signed_bytes_i(codes);
  return to_f(ZEROS ? sub_i(v, zero) : v);
}

// Codes of 8 bits in groups of whole vectors: the usual tables.
template <Type OUT, bool ZEROS>
static void lookup_bytes_of(const Table& given, const Weight& scales, int64_t row, void* y) {
  const Table t = given;  // a copy, which no store to y may change: what it says stays in registers
  const int8_t* codes = (const int8_t*)t.data + row * t.row_bytes;
  const int64_t groups = (t.k + t.group - 1) / t.group;
#ifdef QCORE_CODE_WORDS
  const bool fp8 = t.element == FLOAT8 && t.formula != TABLE;
  const CodeWords words = fp8 ? code_words(t.table) : CodeWords{};
#endif
  float some[ROW_SCALES];
  for (int64_t g = 0; g < groups; g++) {
    const int64_t at = row * groups + g, end = (g + 1) * t.group < t.k ? (g + 1) * t.group : t.k;
    if (g % ROW_SCALES == 0) row_scales(scales, at, groups - g < ROW_SCALES ? groups - g : ROW_SCALES, some);
    const F scale = set_f(some[g % ROW_SCALES]);
    const I zero = set_i(ZEROS && t.zero ? t.zero[at] : 0);
    float added = 0;
    if (ZEROS && t.added) {
      widen((const char*)t.added + at * type_size(t.scale_type), t.scale_type, 1, &added);
      added = quiet(added);
    }
    const auto value = [&](int64_t i) {
      const F v = mul_f(byte_numbers<ZEROS>(t, codes + i, zero), scale);
      return ZEROS && t.added ? add_f(v, set_f(added)) : v;
    };
    int64_t i = g * t.group;
#ifdef QCORE_CODE_WORDS
    if constexpr (OUT != F16 && !ZEROS) {
      for (; fp8 && i < end; i += 2 * LANES) {
        const I word = words_at(words, (const uint8_t*)codes + i);
        const F even = mul_f(lower_word_f(word), scale), odd = mul_f(upper_word_f(word), scale);
        if (OUT == F32) store_pairs_f((float*)y + i, even, odd);
        else store_i((uint16_t*)y + i, bf16_words(rounded_bits(even), rounded_bits(odd)));
      }
    }
#endif
#ifdef QCORE_BF16_CONVERSION
    if (OUT == BF16 && !t.table && !t.added && all_normal_or_zero(scale))
      for (; i < end; i += 2 * LANES) store_converted((uint16_t*)y + i, value(i), value(i + LANES));
#endif
    for (; i < end; i += 2 * LANES) {
#ifdef QCORE_UPPER_WORDS
      if constexpr (OUT == BF16) {
        store_upper_words((uint16_t*)y + i, rounded_bits(value(i)), rounded_bits(value(i + LANES)));
        continue;
      }
#endif
      store_result(y, i, OUT, value(i));
      store_result(y, i + LANES, OUT, value(i + LANES));
    }
  }
}

#ifdef QCORE_BF16_CONVERSION
// INT4 in groups of whole vectors, without float zero points, as bfloat16: the 16 results of a group in one register, with
// nothing else between groups. Returns false if a scale is so small or large that the processor may round wrongly.
static bool lookup_int4_bf16(const Table& t, const Weight& scales, int64_t row, uint16_t* y) {
  if (t.k % t.group || t.group % (2 * LANES) || t.added) return false;
  const int64_t group = t.group, groups = t.k / group;
  const uint8_t* codes = t.data + row * t.row_bytes;
  const F numbers = to_f(sub_i(xor_i(lane_numbers(), set_i(8)), set_i(8)));
  alignas(64) float some[ROW_SCALES];
  for (int64_t from = 0; from < groups; from += ROW_SCALES) {
    const int64_t here = groups - from < ROW_SCALES ? groups - from : ROW_SCALES;
    row_scales(scales, row * groups + from, here, some);
    for (int64_t g = here; g % LANES; g++) some[g] = 0;
    bool convertible = true;  // checked before the groups, whose loop then has no branches
    for (int64_t g = 0; g < here; g += LANES) convertible &= all_normal_or_zero(load_f(some + g));
    if (!convertible) return false;
    const int8_t* zero = t.zero ? t.zero + row * groups + from : nullptr;
    for (int64_t g = 0; g < here; g++) {
      const F whole = zero ? sub_f(numbers, set_f((float)zero[g])) : numbers;
      const Words sixteen = converted_words(mul_f(whole, set_f(some[g])));
      for (int64_t i = 0; i < group; i += 2 * LANES, codes += LANES, y += 2 * LANES) store_words_of(sixteen, codes, y);
    }
  }
  return true;
}
#endif

// 4-bit codes: the 16 results of a group are computed once, and looked up. Groups begin at whole bytes. A vector may run over
// into the next group, which overwrites it, but not over the row.
template <Type OUT, bool ZEROS>
static void lookup_nibbles(const Table& t, const Weight& scales, int64_t row, void* y) {
  constexpr int SIZE = OUT == F32 ? 4 : 2;
  const uint8_t* codes = t.data + row * t.row_bytes;
  const int64_t groups = (t.k + t.group - 1) / t.group;
  alignas(64) float numbers[16];
  alignas(64) char results[16 * SIZE];
  for (int i = 0; i < 16; i++) numbers[i] = t.element == INT4 ? (float)((i ^ 8) - 8) : t.table[i];
  float some[ROW_SCALES];
  for (int64_t g = 0; g < groups; g++) {
    const int64_t at = row * groups + g, end = (g + 1) * t.group < t.k ? (g + 1) * t.group : t.k;
    if (g % ROW_SCALES == 0) row_scales(scales, at, groups - g < ROW_SCALES ? groups - g : ROW_SCALES, some);
    const float scale = some[g % ROW_SCALES];
    float added = 0;
    if (ZEROS && t.added) {
      widen((const char*)t.added + at * type_size(t.scale_type), t.scale_type, 1, &added);
      added = quiet(added);
    }
    const auto value = [&](int i) {
      F v = load_f(numbers + i);
      if (ZEROS && t.zero) v = sub_f(v, set_f((float)t.zero[at]));
      v = mul_f(v, set_f(scale));
      return ZEROS && t.added ? add_f(v, set_f(added)) : v;
    };
    int64_t i = g * t.group;
#ifdef QCORE_UPPER_WORDS
    if constexpr (OUT == BF16) {  // in registers
      const Words sixteen = upper_words(rounded_bits(value(0)));
      for (; i < end && i + 32 <= t.k; i += 32) store_words_of(sixteen, codes + i / 2, (uint16_t*)y + i);
      if (i >= end) continue;
    }
#endif
    for (int j = 0; j < 16; j += LANES) store_result(results, j, OUT, value(j));
    if constexpr (OUT == F32) {
      const Numbers sixteen = numbers16((const float*)results);
      for (; i < end && i + 2 * LANES <= t.k; i += 2 * LANES) {
        const I pairs = bytes_i(codes + i / 2);
        store_pairs_f((float*)y + i, pick(sixteen, pairs), pick(sixteen, shr_i<4>(pairs)));
      }
    }
#ifdef QCORE_WORDS
    if constexpr (OUT != F32) {
      const Words sixteen = words16((const uint16_t*)results);
      for (; i < end && i + 32 <= t.k; i += 32) store_words_of(sixteen, codes + i / 2, (uint16_t*)y + i);
    }
#endif
    for (; i < end; i++) {
      const int code = codes[i / 2] >> (i % 2 ? 4 : 0) & 15;
      __builtin_memcpy((char*)y + i * SIZE, results + code * SIZE, SIZE);
    }
  }
}

template <bool ZEROS>
static void lookup_nibbles_to(const Table& t, const Weight& scales, int64_t row, void* y) {
  if (t.out == F32) return lookup_nibbles<F32, ZEROS>(t, scales, row, y);
  return (t.out == BF16 ? lookup_nibbles<BF16, ZEROS> : lookup_nibbles<F16, ZEROS>)(t, scales, row, y);
}

template <bool ZEROS>
static void lookup_bytes(const Table& t, const Weight& scales, int64_t row, void* y) {
  if (t.out == F32) return lookup_bytes_of<F32, ZEROS>(t, scales, row, y);
  return (t.out == BF16 ? lookup_bytes_of<BF16, ZEROS> : lookup_bytes_of<F16, ZEROS>)(t, scales, row, y);
}

static void lookup(const Table& t, int64_t row, void* y) {
  const uint8_t* codes = t.data + row * t.row_bytes;
  const int64_t groups = (t.k + t.group - 1) / t.group;
  Weight scales{};
  scales.scale = t.scale, scales.scale_type = t.scale_type, scales.factor = t.factor, scales.divisor = t.divisor;
#ifdef QCORE_BF16_CONVERSION
  if (t.element == INT4 && t.out == BF16 && lookup_int4_bf16(t, scales, row, (uint16_t*)y)) return;
#endif
  if ((t.element == INT4 || t.element == FLOAT4) && (t.group % 2 == 0 || groups == 1)) {
    if (t.zero || t.added) return lookup_nibbles_to<true>(t, scales, row, y);
    return lookup_nibbles_to<false>(t, scales, row, y);
  }
  const bool whole = t.k % (2 * LANES) == 0 && (t.group % (2 * LANES) == 0 || groups == 1);
  if ((t.element == INT8 || t.element == FLOAT8) && whole)
    return (t.zero || t.added ? lookup_bytes<true> : lookup_bytes<false>)(t, scales, row, y);
  const int size = type_size(t.out);
  alignas(64) int8_t part[LOOKUP + 2 * LANES];
  alignas(64) float values[LOOKUP + LANES];
  // Where groups end at vectors, results go straight to y; else through `values`, where a group may run over its end.
  const bool direct = t.group % LANES == 0 || groups == 1;
  int64_t group = -1, end = 0;
  F scale = set_f(0), added = set_f(0);
  I zero = set_i(0);
  for (int64_t from = 0; from < t.k; from += LOOKUP) {
    const int count = (int)(t.k - from < LOOKUP ? t.k - from : LOOKUP);
    char* to = (char*)y + from * size;
    table_codes(t, codes, from, count, part);
    for (int i = 0; i < count;) {
      if (from + i == end) {  // the next group
        group++;
        end = (group + 1) * t.group < t.k ? (group + 1) * t.group : t.k;
        const int64_t at = row * groups + group;
        scale = set_f(one_scale(scales, at));
        if (t.zero) zero = set_i(t.zero[at]);
        if (t.added) {
          float one;
          widen((const char*)t.added + at * type_size(t.scale_type), t.scale_type, 1, &one);
          added = set_f(one);
        }
      }
      const int stop = (int)(end - from < count ? end - from : count);
      for (; i < stop; i += LANES) {  // may run over into the next group, which overwrites it
        F v;
        if (t.element == FLOAT8) v = byte_numbers<false>(t, part + i, zero);
        else if (t.table) v = gather(t.table, and_i(bytes_i((const uint8_t*)part + i), set_i(255)));
        else v = to_f(sub_i(signed_bytes_i(part + i), zero));
        v = mul_f(v, scale);
        if (t.added) v = add_f(v, added);
        if (direct && i + LANES <= count) store_result(to, i, t.out, v);
        else store_f(values + i, v);
      }
      i = stop;
    }
    int i = 0;
    for (; i + LANES <= count; i += LANES)
      if (!direct) store_result(to, i, t.out, load_f(values + i));
    if (i < count) {
      alignas(64) char rounded[LANES * 4];
      store_result(rounded, 0, t.out, load_f(values + i));
      __builtin_memcpy(to + i * size, rounded, (size_t)(count - i) * size);
    }
  }
}
