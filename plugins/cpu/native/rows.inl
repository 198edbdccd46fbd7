// x to rows of int8 digits. Every step is exact or elementwise, so that all instruction sets give the same bits.

static inline F widen_f(const void* p, int64_t i, Type type) {
  if (type == F32) return load_f((const float*)p + i);
  if (type == BF16) return bf16_f((const uint16_t*)p + i);
  if (type == F16) return fp16_f((const uint16_t*)p + i);
  return to_f(signed_bytes_i((const int8_t*)p + i));
}

#ifdef QCORE_PARTS
// The first `count` of them, from 1 on.
static inline F widen_part_f(const void* p, int64_t i, Type type, int64_t count) {
  if (type == F32) return load_part_f((const float*)p + i, count);
  if (type == BF16) return bf16_part_f((const uint16_t*)p + i, count);
  if (type == F16) return fp16_part_f((const uint16_t*)p + i, count);
  return to_f(signed_bytes_part_i((const int8_t*)p + i, count));
}
#endif

static void widen(const void* from, Type type, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_f(to + i, widen_f(from, i, type));
  if (i == count) return;
  alignas(64) char raw[LANES * 4] = {0};
  alignas(64) float values[LANES];
  __builtin_memcpy(raw, (const char*)from + i * type_size(type), (size_t)(count - i) * type_size(type));
  store_f(values, widen_f(raw, 0, type));
  for (int j = 0; i < count; i++, j++) to[i] = values[j];
}

// The columns of packed block b: where they begin in x, how many there are.
struct Span { int64_t from; int64_t count; };
static inline Span block_columns(const Geometry& at, int64_t b) {
  const int64_t group = b / at.blocks, inside = (b % at.blocks) * at.block;
  const int64_t from = group * at.group + inside;
  int64_t count = at.group - inside < at.block ? at.group - inside : at.block;
  if (count > at.k - from) count = at.k - from;
  return {from, count < 0 ? 0 : count};
}

// The values of a block: where they lie in x if the block is whole, else copied to `buffer` and padded with zeros.
struct Values {
  const void* at;
  Type type;
  inline F load(int64_t i) const { return widen_f(at, i, type); }
};
static inline Values block_values(const Input& in, const char* row, const Span& span, int64_t block, float* buffer) {
  const char* from = row + span.from * type_size(in.type);
  if (span.count == block && block % LANES == 0) return {from, in.type};
  widen(from, in.type, span.count, buffer);
  for (int64_t i = span.count; i < (block + LANES - 1) / LANES * LANES; i++) buffer[i] = 0;
  return {buffer, F32};
}

// Where the packed columns from 4 * k4 on of a digit row lie, 4 of them.
static inline int8_t* digits_at(const Rows& x, int64_t k4, int64_t row) {
  constexpr int64_t FOURS = DIGIT_RUN / 4;
  return x.q + k4 / FOURS * x.k_step + k4 % FOURS * 4 + row * x.row_step;
}

// What is added to codes as products read them.
static inline int32_t read_offset(const Weight& w) { return w.offset - (SIGNED_CODES && w.element == INT8 ? 128 : 0); }

// Scale and zero point of one row of int8 activations; a row that holds NaN or Inf has the scale NaN.
struct Step { float scale; int32_t zero; };
static Step step_of(const Input& in, const char* row, int64_t k, int64_t index) {
  if (in.type == I8) return in.mode == TOKEN ? Step{in.scales[index], in.zeros[index]} : Step{in.scale, in.zero};
  I magnitude = set_i(0);
  F low = set_f(0), high = set_f(0);
  alignas(64) float rest[LANES] = {0};
  const I all_but_sign = set_i(0x7fffffff);
  const auto include = [&](F v) {
    magnitude = max_i(magnitude, and_i(bits(v), all_but_sign));
    if (in.mode == AFFINE) low = min_f(low, v), high = max_f(high, v);
  };
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) include(widen_f(row, i, in.type));
  if (i < k) {
    widen(row + i * type_size(in.type), in.type, k - i, rest);
    include(load_f(rest));
  }
  const int32_t most = largest_i(magnitude);
  if (in.mode == STATIC || in.mode == TOKEN) {
    Step s = in.mode == STATIC ? Step{in.scale, in.zero} : Step{in.scales[index], in.zeros[index]};
    if (most > INFINITE) s.scale = __builtin_nanf("");
    return s;
  }
  if (in.mode == DYNAMIC || most >= INFINITE) return {symmetric_scale(most), 0};
  const float least = least_f(low);
  const float scale = usable_scale((largest_f(high) - least) / 255.0f);
  return {scale, (int32_t)__builtin_rintf(-128.0f - least / scale)};
}

static void remember(const Rows& out, int32_t row, int64_t k, float value) {
  SpikeList& list = *out.spikes;
  if (list.count == list.capacity) {
    const int64_t capacity = list.capacity ? 2 * list.capacity : 64;
    Spike* grown = (Spike*)__builtin_realloc(list.items, (size_t)capacity * sizeof(Spike));
    if (!grown) {  // no memory: the row must not be wrong in silence
      list.failed = true;
      return;
    }
    list.items = grown, list.capacity = capacity;
  }
  list.items[list.count++] = {row, (int32_t)k, value};
}

constexpr int64_t FAR = 16;  // an element this many times above the mean of the others is a spike

static inline float magnitude_of(float v) { return v < 0 ? -v : v; }

// Take spikes, NaN and Inf out of a block, until the largest of the rest is no spike.
static void take_spikes(float* v, int64_t count, int64_t base, int32_t row, const Rows& out) {
  for (;;) {
    int64_t at = 0, present = 0;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
      const float a = magnitude_of(v[i]);
      if (!(a < __builtin_inff())) {  // alone, whatever the others are
        remember(out, row, base + i, v[i]);
        v[i] = 0;
        continue;
      }
      sum += a;
      present += a > 0;
      if (a > magnitude_of(v[at])) at = i;
    }
    const double most = magnitude_of(v[at]);
    if (present < 2 || !(most * (double)(present - 1) > (double)FAR * (sum - most))) return;
    remember(out, row, base + at, v[at]);
    v[at] = 0;
  }
}

template <int D>
static void quantize_digits(const Weight& w, const Input& in, const char* row, int r, int rows, const Rows& out) {
  constexpr int32_t top = D == 2 ? 127 * 256 : 127 * 65536;
  const Geometry& at = w.at;
  const int64_t blocks = at.groups * at.blocks;
  alignas(64) float v[LARGEST_BLOCK + LANES];
  alignas(64) int8_t narrow[LANES];
  const I all_but_sign = set_i(0x7fffffff);
  for (int64_t b = 0; b < blocks; b++) {
    const Span span = block_columns(at, b);
    Values x = block_values(in, row, span, at.block, v);
    const int64_t padded = (at.block + LANES - 1) / LANES * LANES;
    float scale = 1, lift = 1, inverse = 0;
    bool examined = false;
    for (;;) {
      // 1. The scale: the largest magnitude becomes 127 in the highest digit. Tiny blocks are lifted, so that the
      //    reciprocal stays finite.
      I magnitude = set_i(0);
      for (int64_t i = 0; i < padded; i += LANES) magnitude = max_i(magnitude, and_i(bits(x.load(i)), all_but_sign));
      const int32_t most = largest_i(magnitude);
      if (most < INFINITE) {
        float largest;
        __builtin_memcpy(&largest, &most, 4);
        lift = largest < 0x1p-60f ? 0x1p64f : 1.0f;
        const float lifted = largest * lift;
        scale = largest > 0 ? lifted / (float)top / lift : 1.0f;
        inverse = largest > 0 ? (float)top / lifted : 0.0f;
      }
      // 2. Whether one element takes the digits of all others, by exact sums of the rounded magnitudes.
      if (!examined) {
        bool spiked = most >= INFINITE;
        if (!spiked) {
          I sum = set_i(0);
          const F f = set_f(inverse), l = set_f(lift);
          for (int64_t i = 0; i < padded; i += LANES) {
            sum = add_i(sum, absolute_i(round_i(mul_f(mul_f(x.load(i), l), f))));
          }
          spiked = (int64_t)top * (span.count - 1) > FAR * ((int64_t)sum_i(sum) - top) && most > 0;
        }
        if (spiked) {
          if (x.at != v) {
            for (int64_t i = 0; i < padded; i += LANES) store_f(v + i, x.load(i));
            x = {v, F32};
          }
          take_spikes(v, span.count, b * at.block, r, out);
          examined = true;
          continue;
        }
      }
      break;
    }
    // 3. Digits, the low ones first: each is the signed low byte, what is left carries up.
    I sums[D];
    for (int d = 0; d < D; d++) sums[d] = set_i(0);
    const F f = set_f(inverse), l = set_f(lift);
    for (int64_t i = 0; i < at.block; i += LANES) {
      I q = round_i(mul_f(mul_f(x.load(i), l), f));
      const int64_t k4 = (b * at.block + i) / 4;
      const int64_t steps = (at.block - i < LANES ? at.block - i : LANES) / 4;
      for (int d = 0; d < D; d++) {
        I digit = q;
        if (d < D - 1) {
          digit = sra_i<24>(shl_i<24>(q));
          q = sra_i<8>(sub_i(q, digit));
        }
        sums[d] = add_i(sums[d], digit);
        narrow_i(narrow, digit);
        for (int64_t j = 0; j < steps; j++) {
          __builtin_memcpy(digits_at(out, k4 + j, r * D + d), narrow + 4 * j, 4);
        }
      }
    }
    out.scale[b * rows + r] = scale;
    int32_t *sum = out.sum + (b * rows + r) * D, *begin = out.begin + (b * rows + r) * D;
    float total = 0;
    for (int d = D - 1; d >= 0; d--) {
      sum[d] = sum_i(sums[d]), begin[d] = -read_offset(w) * sum[d];
      total = total * 256.0f + (float)sum[d];
    }
    out.total[b * rows + r] = total * scale;
  }
}

static void quantize_codes(const Weight& w, const Input& in, const char* row, int64_t index, int r, int rows,
                           const Rows& out) {
  const Geometry& at = w.at;
  const int64_t blocks = at.groups * at.blocks, per_fold = w.fold / at.block;
  const Step step = step_of(in, row, at.k, index);
  const bool ready = in.type == I8;
  const F inverse = set_f(inverse_scale(step.scale)), most = set_f(1e6f), least = set_f(-1e6f);
  const I zero = set_i(ready ? 0 : step.zero), high = set_i(127), low = set_i(-128);
  alignas(64) float v[LARGEST_BLOCK + LANES];
  alignas(64) int8_t narrow[LANES];
  alignas(64) int32_t codes[LANES];
  int32_t sum = 0;
  int64_t counted = 0;
  out.scale[r] = step.scale;
  out.zero[r] = step.zero;
  for (int64_t b = 0; b < blocks; b++) {
    const Span span = block_columns(at, b);
    const Values x = block_values(in, row, span, at.block, v);
    I sums = set_i(0);
    for (int64_t i = 0; i < at.block; i += LANES) {
      const F value = x.load(i);
      I q = round_i(ready ? value : max_f(min_f(mul_f(value, inverse), most), least));
      q = max_i(min_i(add_i(q, zero), high), low);
      const int64_t left = at.block - i < LANES ? at.block - i : LANES;
      narrow_i(narrow, q);
      if (i + LANES > span.count) {  // behind the last column of a group the code is 0: it adds nothing
        for (int64_t j = span.count > i ? span.count - i : 0; j < LANES; j++) narrow[j] = 0;
        for (int j = 0; j < LANES; j++) codes[j] = narrow[j];
        q = load_i(codes);
      }
      sums = add_i(sums, q);
      const int64_t k4 = (b * at.block + i) / 4;
      for (int64_t j = 0; j < left / 4; j++) __builtin_memcpy(digits_at(out, k4 + j, r), narrow + 4 * j, 4);
    }
    sum += sum_i(sums);
    counted += span.count;
    if ((b + 1) % per_fold == 0) {
      const int64_t f = b / per_fold;
      out.sum[f * rows + r] = sum, out.begin[f * rows + r] = -read_offset(w) * sum;
      out.total[f * rows + r] = (float)(sum - (int32_t)counted * step.zero);
      sum = 0, counted = 0;
    }
  }
}

static void quantize(const Weight& w, const Input& in, const void* x, int64_t row, int r, int rows, int digits,
                     const Rows& out) {
  if (digits == 2) quantize_digits<2>(w, in, (const char*)x, r, rows, out);
  else if (digits == 3) quantize_digits<3>(w, in, (const char*)x, r, rows, out);
  else quantize_codes(w, in, (const char*)x, row, r, rows, out);
}
