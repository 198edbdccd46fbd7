// From sums to results: scales, zero points, bias, rounding.

// In place, as all vector registers are the caller's: a call amid sums would spill them.
static inline __attribute__((always_inline)) F scales_f(const Weight& w, int64_t i) {
  F s;
  if (w.scale_type == E8M0) {
    // 2^(b - 127): the exponent of a float; 2^-127, b = 0, is the subnormal number with the highest bit of the mantissa.
    // b = 255 is NaN.
    const I b = bytes_i((const uint8_t*)w.scale + i);
    s = from_bits(max_i(add_i(shl_i<23>(b), shl_i<22>(shr_i<8>(add_i(b, set_i(1))))), set_i(0x00400000)));
  } else {
    s = widen_f(w.scale, i, w.scale_type);
  }
  if (w.divisor != 1.0f) s = div_f(s, set_f(w.divisor));
  if (w.factor != 1.0f) s = mul_f(s, set_f(w.factor));
  return s;
}

// The same where many are read: what all have in common is looked at once.
struct ScaleVectors {
  const Weight& w;
  const void* at;
  Type type;
  bool plain;
  explicit inline ScaleVectors(const Weight& weight)
      : w(weight), at(weight.scale), type(weight.scale_type),
        plain(weight.scale_type != E8M0 && weight.divisor == 1.0f && weight.factor == 1.0f) {}
  inline __attribute__((always_inline)) F operator()(int64_t i) const { return plain ? widen_f(at, i, type) : scales_f(w, i); }
};

// v with the NaN of arithmetic in place of others, signaling ones as well: rounding as below keeps that one a NaN.
static inline F quiet(F v) {
  const I magnitude = and_i(bits(v), set_i(0x7fffffff));
  const I quiet_bit = and_i(sra_i<31>(sub_i(set_i(INFINITE), magnitude)), set_i(0x00400000));
  const I sign = and_i(bits(v), set_i((int32_t)0x80000000));
  return from_bits(or_i(or_i(min_i(magnitude, set_i(INFINITE)), quiet_bit), sign));
}
static inline float quiet(float v) { return v == v ? v : __builtin_copysignf(__builtin_nanf(""), v); }
// Its bits, of which the upper half is bfloat16, rounded half to even.
static inline I rounded_bits(F v) {
  return add_i(bits(v), add_i(and_i(shr_i<16>(bits(v)), set_i(1)), set_i(0x7fff)));
}

// bfloat16 in the low half of each lane, rounded half to even: vcvtneps2bf16 would flush denormals. NaN, quiet after any
// arithmetic, is kept from running over into the sign.
static inline I bf16_words(F v) {
  const I magnitude = min_i(and_i(bits(v), set_i(0x7fffffff)), set_i(0x7fc00000));
  const I odd = and_i(shr_i<16>(magnitude), set_i(1));
  const I rounded = add_i(magnitude, add_i(odd, set_i(0x7fff)));
  return shr_i<16>(or_i(rounded, and_i(bits(v), set_i((int32_t)0x80000000))));
}

static inline void store_result(void* y, int64_t i, Type type, F v) {
  if (type == F32) store_f((float*)y + i, v);
  else if (type == BF16) store_words((uint16_t*)y + i, bf16_words(v));
  else store_fp16((uint16_t*)y + i, v);
}

#ifdef QCORE_UPPER_WORDS
static inline void store_bf16(uint16_t* p, F a, F b) {
#ifdef QCORE_BF16_CONVERSION
  if (!any_unusual(a, b)) return store_converted(p, a, b);
#endif
  store_upper_words(p, rounded_bits(quiet(a)), rounded_bits(quiet(b)));
}
#endif

// Two vectors of results.
static inline void store_two(void* y, int64_t i, Type type, F a, F b) {
#ifdef QCORE_UPPER_WORDS
  if (type == BF16) return store_bf16((uint16_t*)y + i, a, b);
#endif
  store_result(y, i, type, a);
  store_result(y, i + LANES, type, b);
}

template <int H>
static inline __attribute__((always_inline)) void store_vectors(void* y, int64_t i, Type type, const F (&v)[H]) {
  for (int h = 0; h + 1 < H; h += 2) store_two(y, i + h * LANES, type, v[h], v[h + 1]);
  if (H % 2) store_result(y, i + (H - 1) * LANES, type, v[H - 1]);
}

#ifdef QCORE_PARTS
// The first `here` results, at least one, of H vectors: the end of a row.
template <int H>
static inline __attribute__((always_inline)) void
store_some(void* y, int64_t i, Type type, int64_t here, const F (&v)[H]) {
  for (int h = 0; h < H && here > h * LANES; h++) {
    const int64_t at = i + h * LANES, left = here - h * LANES;
    if (type == F32) store_part_f((float*)y + at, v[h], left);
    else if (type == F16) store_part_fp16((uint16_t*)y + at, v[h], left);
#ifdef QCORE_BF16_CONVERSION
    else if (!any_unusual(v[h])) store_part_converted((uint16_t*)y + at, v[h], left);
#endif
    else store_part_of_words((uint16_t*)y + at, bf16_words(v[h]), left);
  }
}
#endif

// Codes, and results at the end of a row, of which `here` are stored.
template <int H>
static void __attribute__((noinline))
finish_part(const Output& out, int64_t row, int64_t column, int64_t here, const F (&v)[H]) {
  char* y = (char*)out.y + row * out.stride * type_size(out.type);
  if (out.type == I8) {
    const float scale = out.scales ? out.scales[row] : out.scale;
    const I zero = set_i(out.zeros ? out.zeros[row] : out.zero);
    alignas(64) int8_t codes[COLUMNS];
    for (int h = 0; h < H; h++) {
      const F q = max_f(min_f(div_f(v[h], set_f(scale)), set_f(1e6f)), set_f(-1e6f));
      narrow_i(codes + h * LANES, add_i(round_i(q), zero));
    }
#ifdef QCORE_PARTS  // a copy of any length is a call
    store_part_64(y + column, load_part_64(codes, H * LANES), here);
  } else {
    store_some(y, column, out.type, here, v);
#else
    __builtin_memcpy(y + column, codes, (size_t)here);
  } else {
    alignas(64) char rounded[COLUMNS * 4];
    const int size = type_size(out.type);
    store_vectors<H>(rounded, 0, out.type, v);
    __builtin_memcpy(y + column * size, rounded, (size_t)here * size);
#endif
  }
}

// Bias, rounding and bounds for H vectors of results of one row, in registers: they are stored while the next row is summed.
template <int H>
static inline __attribute__((always_inline)) void
finish_vectors(const Output& out, int64_t row, int64_t column, int64_t n, const float* bias, F (&v)[H]) {
  if (out.bias)
    for (int h = 0; h < H; h++) v[h] = add_f(v[h], load_f(bias + h * LANES));
  const bool whole = n - column >= H * LANES;
  if (out.type != I8 && whole) store_vectors<H>((char*)out.y + row * out.stride * type_size(out.type), column, out.type, v);
  else finish_part<H>(out, row, column, whole ? H * LANES : n - column, v);
}

// The same for all columns of a block, in memory.
static inline void finish_row(const Output& out, int64_t row, int64_t column, int64_t n, const float* bias,
                              const float* values) {
  F v[COLUMNS / LANES];
  for (int h = 0; h < COLUMNS / LANES; h++) v[h] = load_f(values + h * LANES);
  finish_vectors(out, row, column, n, bias, v);
}

static inline void read_bias(const Output& out, int64_t column, int64_t n, int columns, float* bias) {
  int64_t here = n - column < columns ? n - column : columns;
  if (!out.bias || here < 0) here = 0;
  if (here) widen((const char*)out.bias + column * type_size(out.bias_type), out.bias_type, here, bias);
  for (int64_t i = here; i < columns; i++) bias[i] = 0;
}

static inline float one_scale(const Weight& w, int64_t i) {
  float s;
  if (w.scale_type == F32) {
    s = ((const float*)w.scale)[i];
  } else if (w.scale_type == E8M0) {
    const uint32_t b = ((const uint8_t*)w.scale)[i], u = b == 255 ? 0x7fc00000 : b ? b << 23 : 0x00400000;  // as scales_f
    __builtin_memcpy(&s, &u, 4);
  } else if (w.scale_type == BF16) {
    const uint32_t u = (uint32_t)((const uint16_t*)w.scale)[i] << 16;
    __builtin_memcpy(&s, &u, 4);
  } else {
    widen((const uint16_t*)w.scale + i, F16, 1, &s);
  }
  if (w.divisor != 1.0f) s /= w.divisor;
  return w.factor != 1.0f ? s * w.factor : s;
}

// Scales per channel, and float zero points times `total`, the sum of x, on vectors of sums of one row from vector `first` of
// block nb on. For weights in groups they are in the sums already.
template <int H>
static inline __attribute__((always_inline)) void
apply_channels(const Weight& w, int64_t nb, int first, float total, F (&v)[H]) {
  if (w.at.groups > 1) return;
  for (int h = 0; h < H; h++) {
    const int64_t at = nb * COLUMNS + (first + h) * LANES;
    v[h] = mul_f(v[h], scales_f(w, at));
    if (w.added) v[h] = fma_f(widen_f(w.added, at, w.scale_type), set_f(total), v[h]);
  }
}

// The numbers of H vectors of columns, from vector `first` of block nb on, in packed column k of the weight.
template <int H>
static inline void weights_at(const Weight& w, int64_t nb, int first, int64_t k, F (&weight)[H]) {
  const bool byte = w.element == INT8;
  const int per_word = byte ? 4 : 8, shift = 8 * (int)(k % 4) + (!byte && k % 8 > 3 ? 4 : 0);
  const uint8_t* words = w.data + (nb * (w.at.packed() / per_word) + k / per_word) * 128 + first * LANES * 4;
  const int64_t group = k / (w.at.block * w.at.blocks), at = (nb * w.at.groups + group) * COLUMNS + first * LANES;
  for (int h = 0; h < H; h++) {
    I code = and_i(shr_any_i(load_i(words + h * LANES * 4), shift), set_i(byte ? 255 : 15));
    if (w.element == HALVES4) code = and_i(lookup_bytes(table_bytes(w.whole), code), set_i(255));
    code = sub_i(code, w.zero ? bytes_i(w.zero + at + h * LANES) : set_i(w.offset));
    weight[h] = mul_f(to_f(code), scales_f(w, at + h * LANES));
    if (w.added) weight[h] = add_f(weight[h], widen_f(w.added, at + h * LANES, w.scale_type));
  }
}

// Add the products of the spikes of a row, in float.
template <int H>
static inline void
add_spikes(const Weight& w, const SpikeList& list, int64_t nb, int first, int row, F (&v)[H]) {
  for (int64_t i = 0; i < list.count; i++) {
    const Spike& spike = list.items[i];
    if (spike.row != row) continue;
    F weight[H];
    weights_at<H>(w, nb, first, spike.k, weight);
    for (int h = 0; h < H; h++) v[h] = add_f(v[h], mul_f(set_f(spike.value), weight[h]));
  }
}

// The sums of row r, vectors of columns from vector `first` on, to results: scales per channel and of the row (`scaled`: of
// int8 activations), spikes, bias, rounding.
template <int H>
static inline __attribute__((always_inline)) void
finish_sums(const Weight& w, const Output& out, const Rows& x, int64_t nb, int first, int rows, int r, int64_t row0, bool scaled,
            const float* bias, F (&v)[H]) {
  float total = 0;
  if (w.added)
    for (int64_t b = 0; b < w.folds(); b++) total += x.total[b * rows + r];
  apply_channels(w, nb, first, total, v);
  if (scaled)
    for (int h = 0; h < H; h++) v[h] = mul_f(v[h], set_f(x.scale[r]));
  if (x.spikes->count) {
    F spiked[H];  // a copy: sums of which there are references would lie in memory
    for (int h = 0; h < H; h++) spiked[h] = v[h];
    add_spikes<H>(w, *x.spikes, nb, first, r, spiked);
    for (int h = 0; h < H; h++) v[h] = spiked[h];
  }
  finish_vectors(out, row0 + r, nb * COLUMNS + first * LANES, w.n, bias, v);
}
