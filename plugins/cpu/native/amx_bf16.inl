// Many rows of bfloat16 x on AMX: codes become bfloat16 numbers, scales and zero points included, once per block of 32
// columns and part of K, and meet all rows of a panel there. No folds: sums stay in float32 tiles for the whole part.
//
// x: [rows][packed] bfloat16, the 8 columns of a step in the order 0 2 4 6 1 3 5 7 (4-bit codes) or 4 in the order
// 0 1 2 3 (8-bit): the order in which two codes of each lane become a pair.

constexpr int BF16_PART = 512;  // packed columns at a time: 32 KiB of numbers, in L1 and L2

#ifdef QCORE_AMX_EMULATED
template <int C, int A, int B> static void amx_dot_bf16() {  // TDPBF16PS: pairs of bfloat16, sums in float32
  for (int m = 0; m < amx_config.rows[C]; m++)
    for (int k = 0; k < amx_config.bytes[A] / 4; k++)
      for (int n = 0; n < amx_config.bytes[C] / 4; n++) {
        float sum;
        __builtin_memcpy(&sum, &amx_tiles[C][m][4 * n], 4);
        for (int i = 0; i < 2; i++) {
          uint16_t a, b;
          __builtin_memcpy(&a, &amx_tiles[A][m][4 * k + 2 * i], 2);
          __builtin_memcpy(&b, &amx_tiles[B][k][4 * n + 2 * i], 2);
          const uint32_t wide_a = (uint32_t)a << 16, wide_b = (uint32_t)b << 16;
          float x, w;
          __builtin_memcpy(&x, &wide_a, 4);
          __builtin_memcpy(&w, &wide_b, 4);
          sum = __builtin_fmaf(x, w, sum);
        }
        __builtin_memcpy(&amx_tiles[C][m][4 * n], &sum, 4);
      }
}
#else
template <int C, int A, int B> static inline void amx_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

// Two numbers of each of 16 columns as a pair of bfloat16, `first` in the low half.
static inline I bf16_pair(F first, F second) { return or_i(bf16_words(first), shl_i<16>(bf16_words(second))); }

// Codes of packed columns from..from + count of block nb as numbers: [count / 2][32 columns] pairs.
static void bf16_numbers(const Weight& w, int64_t nb, int64_t from, int64_t count, I* to) {
  const bool four = w.element == INT4 || w.element == HALVES4 || w.element == FLOAT4;
  const int64_t step = four ? 8 : 4, group = w.at.block * w.at.blocks;
  const uint8_t* codes = w.data + nb * (w.at.packed() / step) * 128 + from / step * 128;
  alignas(64) float table[16];
  for (int i = 0; i < 16; i++)
    table[i] = w.element == HALVES4 ? (float)((int)w.whole[i] - w.offset) : w.element == FLOAT4 ? w.table[i] : (float)i;
  const Numbers numbers = numbers16(table);
  const I byte = set_i(255);
  int64_t known = -1;
  F scale[2] = {set_f(1), set_f(1)}, shift[2] = {set_f(0), set_f(0)};
  for (int64_t k = from; k < from + count; k += step, codes += 128) {
    if (k / group != known) {  // scale, and what is added: the zero point or the offset of codes times the scale
      known = k / group;
      for (int h = 0; h < 2; h++) {
        const int64_t at = (nb * w.at.groups + known) * COLUMNS + h * LANES;
        scale[h] = scales_f(w, at);
        const bool integer = w.element == INT4 || w.element == INT8;
        if (w.zero) shift[h] = to_f(bytes_i(w.zero + at));
        else shift[h] = set_f(integer ? (float)w.offset : 0.0f);
      }
    }
    for (int h = 0; h < 2; h++) {
      I v = load_i(codes + 64 * h);
      F added = set_f(0);
      if (w.added) added = widen_f(w.added, (nb * w.at.groups + known) * COLUMNS + h * LANES, w.scale_type);
      const auto number = [&](F code) { return fma_f(sub_f(code, shift[h]), scale[h], added); };
      for (int64_t pair = 0; pair < step / 2; pair++) {
        F first, second;
        if (four) {  // bits 4 * pair and 4 * pair + 16
          first = pick(numbers, v), second = pick(numbers, shr_i<16>(v));
          v = shr_i<4>(v);
        } else if (w.element == FLOAT8) {
          first = gather(w.table, and_i(v, byte)), second = gather(w.table, and_i(shr_i<8>(v), byte));
          v = shr_i<16>(v);
        } else {
          first = to_f(and_i(v, byte)), second = to_f(and_i(shr_i<8>(v), byte));
          v = shr_i<16>(v);
        }
        to[((k - from) / 2 + pair) * 2 + h] = bf16_pair(number(first), number(second));
      }
    }
  }
}

// One row of bfloat16 x to packed columns, in the order above.
static void bf16_row(const Weight& w, const uint16_t* x, uint16_t* to) {
  const bool four = w.element == INT4 || w.element == HALVES4 || w.element == FLOAT4;
  const __m128i order = pair_order();
  for (int64_t b = 0; b < w.at.groups * w.at.blocks; b++) {
    const Span span = block_columns(w.at, b);
    uint16_t* here = to + b * w.at.block;
    __builtin_memset(here, 0, (size_t)w.at.block * 2);
    __builtin_memcpy(here, x + span.from, (size_t)span.count * 2);
    if (!four) continue;
    for (int64_t i = 0; i < w.at.block; i += 8) {
      const __m128i v = _mm_loadu_si128((const __m128i*)(here + i));
      _mm_storeu_si128((__m128i*)(here + i), _mm_shuffle_epi8(v, order));
    }
  }
}

// All `rows` rows of x (row_step bytes apart) times block nb, finished and stored from row0 on. `scratch`: BF16_PART *
// 64 bytes for numbers, then rows * 128 bytes for sums. No number of x may be one that is not finite.
static void bf16_product(const Weight& w, const Output& out, const uint16_t* x, int64_t row_step, int64_t nb,
                          int64_t rows, int64_t row0, char* scratch) {
  I* numbers = (I*)scratch;
  float* sums = (float*)(scratch + BF16_PART * 64);
  const int64_t packed = w.at.packed();
  __builtin_memset(sums, 0, (size_t)rows * COLUMNS * 4);
  for (int64_t from = 0; from < packed; from += BF16_PART) {
    const int64_t count = packed - from < BF16_PART ? packed - from : BF16_PART;
    bf16_numbers(w, nb, from, count, numbers);
    for (int64_t r = 0; r < rows; r += AMX_ROWS) {
      const int here = (int)(rows - r < AMX_ROWS ? rows - r : AMX_ROWS);
      const int upper = here < 16 ? here : 16, lower = here - upper;
      int64_t k = 0;
      while (k < count) {  // whole tiles of 32 columns, then what is left: a multiple of 8
        const int wide = count - k >= 32 ? 32 : 8;
        const int64_t end = wide == 32 ? count / 32 * 32 : count;
        TileConfig config{};
        config.palette = 1;
        for (int t = 0; t < 4; t++) config.rows[t] = (uint8_t)(t < 2 ? upper : lower), config.bytes[t] = 64;
        config.rows[4] = (uint8_t)upper, config.rows[5] = (uint8_t)lower;
        config.bytes[4] = config.bytes[5] = (uint16_t)(wide * 2);
        for (int t = 6; t < 8; t++) config.rows[t] = (uint8_t)(wide / 2), config.bytes[t] = 64;
        if (!lower) config.bytes[2] = config.bytes[3] = config.bytes[5] = 0;
        amx_configure(config);
        float* y = sums + r * COLUMNS;
        amx_load<0>(y, COLUMNS * 4);
        amx_load<1>(y + 16, COLUMNS * 4);
        if (lower) amx_load<2>(y + 16 * COLUMNS, COLUMNS * 4), amx_load<3>(y + 16 * COLUMNS + 16, COLUMNS * 4);
        for (; k < end; k += wide) {
          const char* a = (const char*)x + r * row_step + (from + k) * 2;
          const I* b = numbers + k;  // k / 2 pairs of 2 vectors
          amx_load<6>(b, 128);
          amx_load<4>(a, row_step);
          amx_dot_bf16<0, 4, 6>();
          amx_load<7>(b + 1, 128);
          amx_dot_bf16<1, 4, 7>();
          if (lower) {
            amx_load<5>(a + 16 * row_step, row_step);
            amx_dot_bf16<2, 5, 6>();
            amx_dot_bf16<3, 5, 7>();
          }
        }
        amx_store<0>(y, COLUMNS * 4);
        amx_store<1>(y + 16, COLUMNS * 4);
        if (lower) amx_store<2>(y + 16 * COLUMNS, COLUMNS * 4), amx_store<3>(y + 16 * COLUMNS + 16, COLUMNS * 4);
      }
    }
  }
  amx_release();
  alignas(64) float bias[COLUMNS];
  read_bias(out, nb * COLUMNS, w.n, COLUMNS, bias);
  for (int64_t r = 0; r < rows; r++) finish_row(out, row0 + r, nb * COLUMNS, w.n, COLUMNS, bias, sums + r * COLUMNS);
}
