// Many rows of bfloat16 x on AMX: panel.inl with its pairs of numbers in tiles. Sums stay in float32 tiles for a part of K.

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

// Add the sums of a part for rows from `row` on, times their scales.
static inline void add_scaled(const ScaledPart& part, int64_t row, int rows, const float* own, float* sums) {
  F scale[COLUMNS / LANES];
  for (int h = 0; h < COLUMNS / LANES; h++) scale[h] = load_f(part.scale + h * LANES);
  for (int r = 0; r < rows; r++) {
    const F factor = set_f(part.factor(row + r));
    for (int h = 0; h < COLUMNS / LANES; h++) {
      float* to = sums + r * COLUMNS + h * LANES;
      store_f(to, fma_f(load_f(own + r * COLUMNS + h * LANES), mul_f(scale[h], factor), load_f(to)));
    }
  }
}

// As panel_product.
static void amx_panel(const Weight& w, const Output& out, const void* x, int64_t row_step, int64_t nb, int64_t blocks,
                      int64_t rows, int64_t row0, char* scratch) {
  alignas(64) float own[AMX_ROWS * COLUMNS];  // sums of a part that has scales
  int shape[3] = {0, 0, 0};  // the tiles that are configured: rows of the upper and lower ones, columns of x
  panel_parts<true>(w, out, nb, blocks, rows, row0, scratch, [&](const char* words, int64_t from, int64_t count, float* sums,
                                                                    const ScaledPart* part) {
    const I* numbers = (const I*)words;
    for (int64_t r = 0; r < rows; r += AMX_ROWS) {
      const int here = (int)(rows - r < AMX_ROWS ? rows - r : AMX_ROWS);
      const int upper = here < 16 ? here : 16, lower = here - upper;
      int64_t k = 0;
      while (k < count) {  // whole tiles of 32 columns, then what is left: a multiple of 8
        const int wide = count - k >= 32 ? 32 : 8;
        const int64_t end = wide == 32 ? count / 32 * 32 : count;
        if (shape[0] != upper || shape[1] != lower || shape[2] != wide) {
          TileConfig config{};
          config.palette = 1;
          for (int t = 0; t < 4; t++) config.rows[t] = (uint8_t)(t < 2 ? upper : lower), config.bytes[t] = 64;
          config.rows[4] = (uint8_t)upper, config.rows[5] = (uint8_t)lower;
          config.bytes[4] = config.bytes[5] = (uint16_t)(wide * 2);
          for (int t = 6; t < 8; t++) config.rows[t] = (uint8_t)(wide / 2), config.bytes[t] = 64;
          if (!lower) config.bytes[2] = config.bytes[3] = config.bytes[5] = 0;
          amx_configure(config);
          shape[0] = upper, shape[1] = lower, shape[2] = wide;
        }
        float* y = part ? own : sums + r * COLUMNS;
        if (part && !k) {
          amx_zero<0>(), amx_zero<1>();
          if (lower) amx_zero<2>(), amx_zero<3>();  // of a tile without rows it is no instruction
        } else {
          amx_load<0>(y, COLUMNS * 4);
          amx_load<1>(y + 16, COLUMNS * 4);
          if (lower) amx_load<2>(y + 16 * COLUMNS, COLUMNS * 4), amx_load<3>(y + 16 * COLUMNS + 16, COLUMNS * 4);
        }
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
      if (part) add_scaled(*part, r, here, own, sums + r * COLUMNS);
    }
  });
  amx_release();
}
