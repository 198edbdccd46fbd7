// Many rows on AMX: tiles of 16 x 64 bytes. A holds digits of 16 rows of x, B codes of 16 columns of the weight, as they
// are packed: 16 steps of 4 columns of x. Four accumulators: 32 digit rows times 32 columns.
//
// QCORE_AMX_EMULATED: the tile instructions in C++, by Intel's description of them, to test this file on any processor.

constexpr int AMX_ROWS = 32;
constexpr int AMX_FROM = 12;  // digit rows from which tiles are faster than vectors

struct alignas(64) TileConfig {
  uint8_t palette, start;
  uint8_t reserved[14];
  uint16_t bytes[16];  // of a row
  uint8_t rows[16];
};

#ifdef QCORE_AMX_EMULATED
static thread_local TileConfig amx_config;
static thread_local uint8_t amx_tiles[8][16][64];
static void amx_configure(const TileConfig& c) { amx_config = c; __builtin_memset(amx_tiles, 0, sizeof amx_tiles); }
static void amx_release() {}
template <int T> static void amx_zero() {
  if (!amx_config.rows[T] || !amx_config.bytes[T]) __builtin_trap();  // as the processor
  __builtin_memset(amx_tiles[T], 0, sizeof amx_tiles[T]);
}
template <int T> static void amx_load(const void* p, int64_t stride) {
  amx_zero<T>();
  for (int i = 0; i < amx_config.rows[T]; i++) __builtin_memcpy(amx_tiles[T][i], (const char*)p + i * stride, amx_config.bytes[T]);
}
template <int T> static void amx_store(void* p, int64_t stride) {
  for (int i = 0; i < amx_config.rows[T]; i++) __builtin_memcpy((char*)p + i * stride, amx_tiles[T][i], amx_config.bytes[T]);
}
// TDPBSUD: signed bytes of A times unsigned bytes of B; TDPBSSD: SIGNED ones.
template <int C, int A, int B, bool SIGNED> static void amx_dot() {
  for (int m = 0; m < amx_config.rows[C]; m++)
    for (int k = 0; k < amx_config.bytes[A] / 4; k++)
      for (int n = 0; n < amx_config.bytes[C] / 4; n++) {
        int32_t sum;
        __builtin_memcpy(&sum, &amx_tiles[C][m][4 * n], 4);
        for (int i = 0; i < 4; i++) {
          const uint8_t code = amx_tiles[B][k][4 * n + i];
          sum += (int8_t)amx_tiles[A][m][4 * k + i] * (SIGNED ? (int8_t)code : code);
        }
        __builtin_memcpy(&amx_tiles[C][m][4 * n], &sum, 4);
      }
}
#else
// In assembly, because GCC's intrinsics are macros that do not take a template's number of a tile.
static inline void amx_configure(const TileConfig& c) { __asm__ volatile("ldtilecfg %0" ::"m"(c)); }
static inline void amx_release() { __asm__ volatile("tilerelease"); }
template <int T> static inline void amx_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> static inline void amx_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> static inline void amx_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B, bool SIGNED> static inline void amx_dot() {
  if constexpr (SIGNED) __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  else __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

// Steps of 4 columns in one tile: as many as divide a fold, an even number for codes that lie in pairs of steps.
static int tile_steps(int64_t fold, bool four) {
  for (int steps = 16; steps > 1; steps--)
    if (fold / 4 % steps == 0 && !(four && steps % 2)) return steps;
  return 1;
}

// Tiles 0 to 3: accumulators (rows x columns: 0 1 over 2 3), 4 and 5: x, 6 and 7: codes.
static void amx_tiles_for(int upper, int lower, int steps) {
  TileConfig config{};
  config.palette = 1;
  for (int t = 0; t < 4; t++) config.rows[t] = (uint8_t)(t < 2 ? upper : lower), config.bytes[t] = 64;
  config.rows[4] = (uint8_t)upper, config.rows[5] = (uint8_t)lower;
  config.bytes[4] = config.bytes[5] = (uint16_t)(steps * 4);
  for (int t = 6; t < 8; t++) config.rows[t] = (uint8_t)steps, config.bytes[t] = 64;
  if (!lower) config.bytes[2] = config.bytes[3] = config.bytes[5] = 0;
  amx_configure(config);
}

// H: vectors of columns; the tiles of a second one are left alone where there is none.
template <int H = 2>
static inline void amx_begin(int lower) {
  amx_zero<0>();
  if (H > 1) amx_zero<1>();
  if (lower) amx_zero<2>();
  if (lower && H > 1) amx_zero<3>();
}

// Rows at q, `row_step` bytes apart, times the bytes b of one tile's steps.
template <bool SIGNED, int H = 2>
static inline void amx_step(const int8_t* q, int64_t row_step, const uint8_t* b, int lower) {
  amx_load<6>(b, 128);
  amx_load<4>(q, row_step);
  amx_dot<0, 4, 6, SIGNED>();
  if constexpr (H > 1) {
    amx_load<7>(b + 64, 128);
    amx_dot<1, 4, 7, SIGNED>();
  }
  if (lower) {
    amx_load<5>(q + 16 * row_step, row_step);
    amx_dot<2, 5, 6, SIGNED>();
    if constexpr (H > 1) amx_dot<3, 5, 7, SIGNED>();
  }
}

template <int H = 2>
static inline void amx_end(int32_t (&acc)[AMX_ROWS][COLUMNS], int lower) {
  amx_store<0>(&acc[0][0], COLUMNS * 4);
  if (H > 1) amx_store<1>(&acc[0][16], COLUMNS * 4);
  if (lower) {
    amx_store<2>(&acc[16][0], COLUMNS * 4);
    if (H > 1) amx_store<3>(&acc[16][16], COLUMNS * 4);
  }
}

// Codes of 4 bits as bytes of one tile's steps, to L1; returns where the next ones begin. SIGNED: less their offset.
template <Element E, bool SIGNED>
static inline const uint8_t* amx_bytes(const uint8_t* codes, int steps, I table, int32_t offset, uint8_t* to) {
  const I mask = nibble_mask(), less = _mm512_set1_epi8((int8_t)offset);
  for (int s = 0; s < steps; s += 2, codes += 128) {
    prefetch(codes + 2048);
    prefetch(codes + 2048 + 64);
    for (int h = 0; h < 2; h++) {
      const I v = load_i(codes + 64 * h);
      I low = low_nibbles(v, mask), high = high_nibbles(v, mask);
      if constexpr (E == HALVES4) low = lookup_bytes(table, low), high = lookup_bytes(table, high);
      if constexpr (SIGNED) low = _mm512_sub_epi8(low, less), high = _mm512_sub_epi8(high, less);
      _mm512_store_si512(to + s * 128 + 64 * h, low);
      _mm512_store_si512(to + (s + 1) * 128 + 64 * h, high);
    }
  }
  return codes;
}

// ZEROS: there are zero points of any kind. 4-bit codes without them are multiplied as signed numbers, which need no sums of
// x; others less their offset or zero point.
template <Element E, int D, bool ZEROS>
static void amx_tile(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows, int count,
                     int64_t row0) {
  constexpr bool FOUR = E != INT8, SIGNED = FOUR && !ZEROS;
  const int64_t fold = w.fold, folds_per_group = w.at.block * w.at.blocks / fold, folds = w.folds();
  const int steps = tile_steps(fold, FOUR), digit_rows = count * D;
  const int upper = digit_rows < 16 ? digit_rows : 16, lower = digit_rows - upper;
  const bool grouped = w.at.groups > 1, zeroed = ZEROS && w.sums && in.mode != DIGITS;
  const uint8_t* codes = w.data + nb * (w.at.packed() / (FOUR ? 8 : 4)) * 128;
  const I table = E == HALVES4 ? table_bytes(w.whole) : nibble_mask();
  const ScaleVectors scales(w);
  alignas(64) uint8_t decoded[16 * 128];
  alignas(64) int32_t acc[2][AMX_ROWS][COLUMNS];  // of one fold, and of the one before
  alignas(64) float sum[AMX_ROWS / D][COLUMNS];
  __builtin_memset(sum, 0, sizeof sum);
  amx_tiles_for(upper, lower, steps);
  // 1. Products of fold f. Codes of 4 bits become bytes in L1 first, 16 steps of 128 bytes at most.
  const auto multiply = [&](int64_t f) {
    amx_begin(lower);
    for (int64_t k4 = 0; k4 < fold / 4; k4 += steps) {
      const uint8_t* b = codes;
      if constexpr (FOUR) {
        codes = amx_bytes<E, SIGNED>(codes, steps, table, w.offset, decoded);
        b = decoded;
      } else {
        codes += steps * 128;
      }
      amx_step<SIGNED>(x.q + f * fold + k4 * 4, x.row_step, b, lower);
    }
  };
  // 2. Fold f: offset or zero points, digits to one number, scales. In the same order as `tile`, for the same bits.
  const auto finish = [&](int64_t f) {
    const int64_t parameters = (nb * w.at.groups + f / folds_per_group) * COLUMNS;
    const int32_t *sums = x.sum + f * rows * D, *begin = x.begin + f * rows * D;
    const int32_t(*part)[COLUMNS] = acc[f % 2];
    F scale[2] = {set_f(1), set_f(1)};
    I zero[2] = {set_i(w.offset), set_i(w.offset)};
    for (int h = 0; h < 2; h++) {
      if (grouped) scale[h] = scales(parameters + h * LANES);
      if (ZEROS && w.zero) zero[h] = bytes_i(w.zero + parameters + h * LANES);
    }
    for (int r = 0; r < count; r++) {
      for (int h = 0; h < 2; h++) {
        I c[D];
        for (int d = 0; d < D; d++) {
          c[d] = load_i(&part[r * D + d][h * 16]);
          if constexpr (ZEROS) c[d] = sub_i(c[d], mul_i(zero[h], set_i(sums[r * D + d])));
          else if constexpr (!SIGNED) c[d] = add_i(c[d], set_i(begin[r * D + d]));
        }
        float* at = &sum[r][h * 16];
        F v;
        if constexpr (D == 1) {
          if (zeroed) c[0] = sub_i(c[0], mul_i(load_i(w.sums + (nb * folds + f) * COLUMNS + h * 16), set_i(x.zero[r])));
          v = to_f(c[0]);
          v = grouped ? fma_f(v, scale[h], load_f(at)) : add_f(load_f(at), v);
        } else {
          v = to_f(add_i(c[0], shl_i<8>(c[1])));
          if constexpr (D == 3) v = fma_f(to_f(c[2]), set_f(65536.0f), v);
          const F step = set_f(x.scale[f * rows + r]);
          v = fma_f(v, grouped ? mul_f(scale[h], step) : step, load_f(at));
        }
        if (ZEROS && w.added && grouped) {
          const F added = widen_f(w.added, parameters + h * LANES, w.scale_type);
          v = fma_f(added, set_f(x.total[f * rows + r]), v);
        }
        store_f(at, v);
      }
    }
  };
  // Tiles compute a fold while vectors finish the one before.
  for (int64_t f = 0; f < folds; f++) {
    multiply(f);
    if (f) finish(f - 1);
    amx_end(acc[f % 2], lower);
  }
  finish(folds - 1);
  amx_release();
  alignas(64) float bias[COLUMNS];
  read_bias(out, nb * COLUMNS, w.n, COLUMNS, bias);
  for (int r = 0; r < count; r++) {
    F v[2] = {load_f(sum[r]), load_f(sum[r] + LANES)};
    finish_sums(w, out, x, nb, 0, rows, r, row0, D == 1, bias, v);
  }
}

template <Element E>
static void amx_of(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows, int count,
                   int digits, int64_t row0) {
  const bool zeros = w.zero || w.added || w.sums;
  auto run = zeros ? amx_tile<E, 1, true> : amx_tile<E, 1, false>;
  if (digits == 2) run = zeros ? amx_tile<E, 2, true> : amx_tile<E, 2, false>;
  else if (digits == 3) run = zeros ? amx_tile<E, 3, true> : amx_tile<E, 3, false>;
  run(w, in, out, x, nb, rows, count, row0);
}

static void amx_product(const Weight& w, const Input& in, const Output& out, const Rows& x, int64_t nb, int rows,
                        int count, int digits, int64_t row0) {
  if (w.element == INT4) amx_of<INT4>(w, in, out, x, nb, rows, count, digits, row0);
  else if (w.element == INT8) amx_of<INT8>(w, in, out, x, nb, rows, count, digits, row0);
  else amx_of<HALVES4>(w, in, out, x, nb, rows, count, digits, row0);
}

// Windows of a convolution, which lie at a constant step: up to AMX_ROWS of them.
constexpr int AMX_LEAST_STEPS = 8;  // of a tile, below which vectors are faster

// H: vectors of columns, of which a short last block has one.
template <Element E, int H, bool ZEROS>
static void amx_window_tiles(const Weight& w, const Output& out, const Windows& x, int64_t nb, int64_t count,
                             int64_t row0) {
  constexpr bool FOUR = E != INT8;
  const int steps = tile_steps(x.run, FOUR), most = even_rows(count, AMX_ROWS);
  const uint8_t* block = w.data + nb * (w.at.packed() / (FOUR ? 8 : 4)) * 128;
  alignas(64) uint8_t decoded[16 * 128];
  alignas(64) int32_t acc[2][AMX_ROWS][COLUMNS];  // of some rows, and of those before
  const WindowEnd<H, ZEROS> end(w, out, x, nb * COLUMNS);
  const auto multiply = [&](const int8_t* q, int lower) {
    const uint8_t* codes = block;
    amx_begin<H>(lower);
    for (int64_t t = 0; t < x.count; t++)
      for (int64_t k = 0; k < x.run; k += steps * 4) {
        const uint8_t* b = FOUR ? decoded : codes;
        if constexpr (FOUR) codes = amx_bytes<E, false>(codes, steps, nibble_mask(), 0, decoded);
        else codes += steps * 128;
        amx_step<false, H>(q + x.taps[t] + k, x.step, b, lower);
      }
  };
  const auto finish = [&](int64_t first, int64_t last, const int32_t (&part)[AMX_ROWS][COLUMNS]) {
    end.template rows<true>((const I*)part, COLUMNS / LANES, first, last - first, 0, row0);
  };
  // Tiles compute some rows while vectors finish those before. They are configured once, and for fewer rows at the end.
  int rows = 0;
  int64_t r = 0;
  for (int b = 0; r < count; r += rows, b++) {
    const int before = rows;
    rows = (int)(count - r < most ? count - r : most);
    const int upper = rows < 16 ? rows : 16, lower = rows - upper;
    if (rows != before) amx_tiles_for(upper, lower, steps);
    multiply(x.x + r * x.step, lower);
    if (b) finish(r - before, r, acc[(b - 1) % 2]);
    amx_end<H>(acc[b % 2], lower);
    if (r + rows == count) amx_release(), finish(r, count, acc[b % 2]);
  }
}

template <Element E, int H>
static void amx_windows_of(const Weight& w, const Output& out, const Windows& x, int64_t nb, int64_t count,
                           int64_t row0) {
  (has_zeros(w) ? amx_window_tiles<E, H, true> : amx_window_tiles<E, H, false>)(w, out, x, nb, count, row0);
}

// Weights in groups: rows of codes as those of linear layers.
static void amx_groups(const Weight& w, const Output& out, const Windows& x, int64_t nb, int64_t count, int64_t row0) {
  const int most = even_rows(count, AMX_ROWS), slots = (int)x.groups->step;
  SpikeList none{};
  Input in{};
  in.mode = AFFINE;
  for (int64_t r = 0; r < count; r += most) {
    const int here = (int)(count - r < most ? count - r : most);
    const Rows rows{(int8_t*)x.x + r * x.step, 4, x.step, (float*)x.scales + r, x.groups->sums + r, x.groups->begin + r,
                    x.groups->totals + r, (int32_t*)x.zeros + (x.zeros ? r : 0), &none};
    amx_product(w, in, out, rows, nb, slots, here, 1, row0 + r);
  }
}

static void amx_window_product(const Weight& w, const Output& out, const Windows& x, int64_t nb, int64_t count,
                               int64_t row0) {
  const bool four = w.element == INT4, one = w.n - nb * COLUMNS <= LANES;
  if (x.groups && count >= AMX_FROM) return amx_groups(w, out, x, nb, count, row0);
  if (x.groups || count < AMX_FROM || tile_steps(x.run, four) < AMX_LEAST_STEPS) return window_product(w, out, x, nb, count, row0);
  if (one) (four ? amx_windows_of<INT4, 1> : amx_windows_of<INT8, 1>)(w, out, x, nb, count, row0);
  else (four ? amx_windows_of<INT4, 2> : amx_windows_of<INT8, 2>)(w, out, x, nb, count, row0);
}
