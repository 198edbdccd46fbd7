// bf16 x and 4-bit weights on vdpbf16ps: vpermw turns four codes of each lane into bf16 numbers, two products per lane.
// The 16 numbers, codes less their offset, are whole and exact in bf16.

constexpr int PAIR_ROWS = 8;

template <int R>
static void __attribute__((noinline))
pair_tile(const Weight& w, const Output& out, const uint32_t* x, const float* sums, int64_t nb, int rows,
          int64_t row0) {
  const uint8_t* codes = w.data + nb * (w.at.packed() / 8) * 128;
  alignas(64) uint16_t numbers[32];
  for (int i = 0; i < 32; i++) {
    const float number = (float)((w.element == HALVES4 ? w.whole[i & 15] : i & 15) - w.offset);
    uint32_t bits_of;
    __builtin_memcpy(&bits_of, &number, 4);
    numbers[i] = (uint16_t)(bits_of >> 16);
  }
  const __m512i table = _mm512_load_si512(numbers);
  const bool grouped = w.at.groups > 1;
  const ScaleVectors scales(w);
  F sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = set_f(0);
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int64_t parameters = (nb * w.at.groups + g) * COLUMNS;
    F scale[2] = {set_f(1), set_f(1)};
    if (grouped) scale[0] = scales(parameters), scale[1] = scales(parameters + LANES);
    for (int64_t b = 0; b < w.at.blocks; b++) {
      F acc[R][2];
      for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = set_f(0);
      for (int64_t i = 0; i < w.at.block; i += 8, codes += 128, x += 4 * rows) {
        prefetch(codes + 2048);
        prefetch(codes + 2048 + 64);
        const __m512i v0 = load_i(codes), v1 = load_i(codes + 64);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          // vpermw takes the low 5 bits of each word; the table repeats after 16 entries, so bit 4 may be anything.
          const __m512bh w0 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v0, 4 * j), table);
          const __m512bh w1 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v1, 4 * j), table);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[j * rows + r]);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, pair);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, pair);
          }
        }
      }
      for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++)
          sum[r][h] = grouped ? fma_f(acc[r][h], scale[h], sum[r][h]) : add_f(sum[r][h], acc[r][h]);
    }
    for (int h = 0; h < 2; h++) {
      // Zero points: (code - z) * s = (code - offset) * s - (z - offset) * s, the second times the sum of x.
      F shift = set_f(0);
      if (w.zero) {
        const I z = sub_i(set_i(w.offset), bytes_i(w.zero + parameters + h * LANES));
        shift = grouped ? mul_f(to_f(z), scale[h]) : to_f(z);
      } else if (w.added && grouped) {
        shift = widen_f(w.added, parameters + h * LANES, w.scale_type);
      } else {
        continue;
      }
      for (int r = 0; r < R; r++) sum[r][h] = fma_f(shift, set_f(sums[g * rows + r]), sum[r][h]);
    }
  }
  alignas(64) float bias[COLUMNS];
  const int64_t column = nb * COLUMNS;
  read_bias(out, column, w.n, COLUMNS, bias);
  for (int r = 0; r < R; r++) {
    F v[2] = {sum[r][0], sum[r][1]};  // a copy: sums of which there are references would lie in memory
    apply_channels(w, nb, 0, sums[r], v);
    finish_vectors(out, row0 + r, column, w.n, bias, v);
  }
}

// x [packed] of one row, bfloat16, as pairs in slot r of `rows`: the words of 8 columns are what one step multiplies.
static void pair_row(const Weight& w, const uint16_t* x, uint32_t* to, float* sums, int r, int rows) {
  const Geometry& at = w.at;
  const __m128i order = pair_order();
  const int64_t blocks = at.groups * at.blocks;
  float sum = 0;
  for (int64_t b = 0; b < blocks; b++) {
    const Span span = block_columns(at, b);
    alignas(64) uint16_t part[LARGEST_BLOCK + 32];
    const uint16_t* from = x + span.from;
    if (span.count < at.block) {
      __builtin_memset(part, 0, sizeof part);
      __builtin_memcpy(part, from, (size_t)span.count * 2);
      from = part;
    }
    for (int64_t i = 0; i < at.block; i += 8) {
      alignas(16) uint32_t words[4];
      _mm_store_si128((__m128i*)words, _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(from + i)), order));
      uint32_t* here = to + (b * at.block + i) / 8 * 4 * rows + r;
      here[0] = words[0], here[rows] = words[1], here[2 * rows] = words[2], here[3 * rows] = words[3];
    }
    if (w.zero || w.added) {
      F total = set_f(0);
      int64_t i = 0;
      for (; i + LANES <= at.block; i += LANES) total = add_f(total, bf16_f(from + i));
      alignas(64) uint16_t rest[LANES] = {0};
      if (i < at.block) {
        __builtin_memcpy(rest, from + i, (size_t)(at.block - i) * 2);
        total = add_f(total, bf16_f(rest));
      }
      sum += _mm512_reduce_add_ps(total);
    }
    if ((b + 1) % at.blocks == 0) sums[b / at.blocks * rows + r] = sum, sum = 0;
  }
}

using PairTile = void (*)(const Weight&, const Output&, const uint32_t*, const float*, int64_t, int, int64_t);

template <int R>
static PairTile choose_pairs(int count) {
  if constexpr (R > PAIR_ROWS) return nullptr;
  else return count == R ? pair_tile<R> : choose_pairs<R + 1>(count);
}

static void pair_product(const Weight& w, const Output& out, const uint32_t* x, const float* sums, int64_t nb, int rows,
                         int count, int64_t row0) {
  choose_pairs<1>(count)(w, out, x, sums, nb, rows, row0);
}
