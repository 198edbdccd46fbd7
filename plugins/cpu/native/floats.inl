// Weights that are tables of floats (fp8, nf4, ...): codes become floats in registers and meet x in float32.

constexpr int FLOAT_ROWS = LANES == 16 ? 8 : 4;

// k of the nibble at 4 * j bits of a 32-bit lane.
constexpr int NIBBLE_COLUMN[8] = {0, 4, 1, 5, 2, 6, 3, 7};

template <int R, bool FOUR>
static void __attribute__((noinline))
float_tile(const Weight& w, const Output& out, const float* x, int64_t nb, int first, int rows, int64_t row0) {
  constexpr int H = LANES == 16 ? 2 : 1;
  constexpr int BYTES = LANES * 4;
  constexpr int STEP = FOUR ? 8 : 4;  // columns of x in 128 bytes of codes
  const uint8_t* codes = w.data + nb * (w.at.packed() / STEP) * 128 + first * BYTES;
  const bool grouped = w.at.groups > 1;
  const Numbers numbers = numbers16(w.table);
  const I byte = set_i(255);
  const float* totals = x + w.at.packed() * rows;  // [groups][rows]
  F sum[R][H];
  for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) sum[r][h] = set_f(0);
  for (int64_t g = 0; g < w.at.groups; g++) {
    const int64_t parameters = (nb * w.at.groups + g) * COLUMNS + first * LANES;
    F scale[H];
    for (int h = 0; h < H; h++) scale[h] = grouped ? scales_f(w, parameters + h * LANES) : set_f(1);
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
#pragma GCC unroll 8
        for (int j = 0; j < STEP; j++) {
          F value[H];
          for (int h = 0; h < H; h++) {
            if constexpr (FOUR) {
              value[h] = pick(numbers, v[h]);
              v[h] = shr_i<4>(v[h]);
            } else {
              value[h] = gather(w.table, and_i(v[h], byte));
              v[h] = shr_i<8>(v[h]);
            }
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
  alignas(64) float bias[COLUMNS], values[COLUMNS];
  const int64_t column = nb * COLUMNS + first * LANES;
  if (column >= w.n) return;
  read_bias(out, column, w.n, H * LANES, bias);
  for (int r = 0; r < R; r++) {
    for (int h = 0; h < H; h++) {
      F v = sum[r][h];
      const int64_t at = nb * w.at.groups * COLUMNS + (first + h) * LANES;
      if (!grouped) {
        v = mul_f(v, scales_f(w, at));
        if (w.added) v = fma_f(widen_f(w.added, at, w.scale_type), set_f(totals[r]), v);
      }
      store_f(values + h * LANES, v);
    }
    finish_row(out, row0 + r, column, w.n, H * LANES, bias, values);
  }
}

using FloatTile = void (*)(const Weight&, const Output&, const float*, int64_t, int, int, int64_t);

template <bool FOUR, int R>
static FloatTile choose_float(int count) {
  if constexpr (R > FLOAT_ROWS) return nullptr;
  else return count == R ? float_tile<R, FOUR> : choose_float<FOUR, R + 1>(count);
}

static void float_product(const Weight& w, const Output& out, const float* x, int64_t nb, int rows, int count,
                          int64_t row0) {
  const FloatTile run = w.element == FLOAT4 ? choose_float<true, 1>(count) : choose_float<false, 1>(count);
  for (int first = 0; first < COLUMNS / LANES; first += LANES == 16 ? 2 : 1) run(w, out, x, nb, first, rows, row0);
}

// Rows of an embedding.
static void lookup(const Table& t, int64_t row, void* y) {
  const uint8_t* codes = t.data + row * t.row_bytes;
  const int64_t groups = (t.k + t.group - 1) / t.group;
  const bool four = t.element == INT4 || t.element == FLOAT4;
  Weight scales{};
  scales.scale = t.scale, scales.scale_type = t.scale_type, scales.factor = t.factor, scales.divisor = t.divisor;
  const int size = type_size(t.out);
  alignas(64) float values[LARGEST_BLOCK + LANES];
  for (int64_t g = 0; g < groups; g++) {
    const float scale = one_scale(scales, row * groups + g);
    const int32_t zero = t.zero ? t.zero[row * groups + g] : 0;
    float added = 0;
    if (t.added) widen((const char*)t.added + (row * groups + g) * type_size(t.scale_type), t.scale_type, 1, &added);
    const int64_t end = (g + 1) * t.group < t.k ? (g + 1) * t.group : t.k;
    for (int64_t k = g * t.group; k < end; k += LARGEST_BLOCK) {
      const int count = (int)(end - k < LARGEST_BLOCK ? end - k : LARGEST_BLOCK);
      alignas(64) int8_t part[LARGEST_BLOCK + LANES];
      if (four) {
        for (int i = 0; i < count; i++) {
          const int code = codes[(k + i) / 2] >> ((k + i) % 2 * 4) & 15;
          part[i] = (int8_t)(t.element == INT4 ? (code ^ 8) - 8 : code);
        }
      } else {
        __builtin_memcpy(part, codes + k, (size_t)count);
      }
      for (int i = 0; i < count; i += LANES) {
        F v;
        if (t.table) v = gather(t.table, and_i(bytes_i((const uint8_t*)part + i), set_i(255)));
        else v = to_f(sub_i(signed_bytes_i(part + i), set_i(zero)));
        v = mul_f(v, set_f(scale));
        store_f(values + i, t.added ? add_f(v, set_f(added)) : v);
      }
      char* to = (char*)y + k * size;
      int i = 0;
      for (; i + LANES <= count; i += LANES) store_result(to, i, t.out, load_f(values + i));
      if (i < count) {
        alignas(64) char rounded[LANES * 4];
        store_result(rounded, 0, t.out, load_f(values + i));
        __builtin_memcpy(to + i * size, rounded, (size_t)(count - i) * size);
      }
    }
  }
}
