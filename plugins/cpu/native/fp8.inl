// Activations of fp8 (e4m3): the codes of x as floats, which hold them.

// The nearest number of e4m3, half to even, of magnitudes up to 448; NaN stays NaN. The sum with 1.5 times a power of two leaves
// three bits behind the first one of v, or those above 2^-9 in subnormal numbers.
static inline F e4m3_f(F v) {
  const I exponent = max_i(and_i(bits(v), set_i(0x7f800000)), set_i((127 - 6) << 23));
  const F magic = from_bits(or_i(add_i(exponent, set_i((23 - 3) << 23)), set_i(0x00400000)));
  return sub_f(add_f(v, magic), magic);
}

static void fp8_row(const void* x, Type type, int64_t k, int64_t group, float given, void* to, float* scales) {
  const F most = set_f(448.0f), least = set_f(-448.0f);
  for (int64_t from = 0, g = 0; from < k; from += group, g++) {
    const int64_t end = from + group < k ? from + group : k;
    float scale = given;
    if (given == 0) {
      const int32_t largest = magnitude((const char*)x + from * type_size(type), type, end - from);
      __builtin_memcpy(&scale, &largest, 4);
      scale = usable_scale(scale / 448.0f);
    }
    if (scales) scales[g] = scale;
    const F inverse = set_f(1.0f / scale), factor = set_f(scale);
    const auto code = [&](F v) { return e4m3_f(max_f(least, min_f(most, mul_f(v, inverse)))); };  // NaN is the second of both
    int64_t i = from;
    for (; i + LANES <= end; i += LANES) {
      const F q = code(widen_f(x, i, type));
      if (scales) store_words((uint16_t*)to + i, bf16_words(q));
      else store_f((float*)to + i, mul_f(q, factor));
    }
    if (i == end) continue;
    alignas(64) float rest[LANES] = {0};
    alignas(64) uint16_t words[LANES];
    widen((const char*)x + i * type_size(type), type, end - i, rest);
    const F q = code(load_f(rest));
    if (scales) store_words(words, bf16_words(q));
    else store_f(rest, mul_f(q, factor));
    if (scales) __builtin_memcpy((uint16_t*)to + i, words, (size_t)(end - i) * 2);
    else __builtin_memcpy((float*)to + i, rest, (size_t)(end - i) * 4);
  }
}
