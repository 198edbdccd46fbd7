// Rows of x whose range float16 cannot hold, for kernels of cooperative matrices: coop_prep stores zeros in their
// place, marks them by a negative scale and keeps them as float32 behind the scales. Their products are computed one
// by one, which is slow, and rare. Needs formats.glsl, BITS, ZERO and P, and the push constants m, np, blocks and
// group_steps. NUMBERS: what four codes stand for, if not themselves; NO_ZERO: what is subtracted from them without
// zero points.

#ifndef NUMBERS
#define NUMBERS(codes) codes
#define NO_ZERO (BITS == 4u ? 8.0 : 0.0)
#endif

layout(set = 0, binding = 1) readonly buffer PlainW { uvec4 plain_w[]; };
layout(set = 0, binding = 4) readonly buffer PlainX { vec4 plain_x[]; };  // scales [M], padded to fours; rows

// Four codes of a block, whose vector (the first of P) is number `at`.
vec4 plain_codes(uint at, uint word) {
    if (BITS == 8u) return vec4(unpack_bytes(plain_w[at + word / 4u * 8u][word % 4u]));
    return vec4(unpack_unsigned((plain_w[at][word / 2u] >> (word % 2u * 4u)) & 0x0F0F0F0Fu));
}

// The product of blocks first ... end - 1 of a row of x, of `words` fours of columns, and row n_ of the weight. Weights
// are scaled before they meet x, so that no intermediate value is larger than a term of the result.
float plain_product(uint row, uint words, uint n_, uint first, uint end) {
    uint from = (m + 3u) / 4u + row * words;
    float sum = 0.0;
    for (uint four = first * 8u; four < end * 8u; ++four) {
        uint parameter = four / 4u / group_steps * np + n_;
        float z = ZERO == 1u ? float(int(zero[parameter])) : NO_ZERO;
        float more = ZERO == 2u ? uintBitsToFloat(zero[parameter]) : 0.0;
        uint at = ((n_ >> 3) * blocks + four / 8u) * P * 8u + (n_ & 7u);
        sum += dot(plain_x[from + four], (NUMBERS(plain_codes(at, four % 8u)) - z) * scale[parameter] + more);
    }
    return sum;
}
