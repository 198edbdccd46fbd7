// Quantization of a row of activations: q = clamp(round(x / s) + z, -128, 127).

const uint SYMMETRIC = 0u;
const uint ASYMMETRIC = 1u;
const uint GIVEN = 2u;
const uint PER_TOKEN = 3u;

const float SMALLEST = 1.17549435e-38;
const uint INFINITE = 0x7f800000u;

// The largest |x| of a row as bits, whose order is that of the numbers with NaN above all; smallest and largest x, and
// 0.
struct Extent {
    uint size;
    float low;
    float high;
};

Extent widened(Extent e, vec4 x) {
    uvec4 bits = floatBitsToUint(x) & 0x7fffffffu;
    e.size = max(e.size, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    e.low = min(e.low, min(min(x.x, x.y), min(x.z, x.w)));
    e.high = max(e.high, max(max(x.x, x.y), max(x.z, x.w)));
    return e;
}

// Scale and zero point. A row of zeros has scale 1; one that is not finite has NaN, which its results keep.
vec2 dynamic_parameters(Extent e, uint mode) {
    if (e.size == 0u) return vec2(1.0, mode == SYMMETRIC ? 0.0 : -128.0);
    if (e.size >= INFINITE) return vec2(uintBitsToFloat(0x7fc00000u), 0.0);
    if (mode == SYMMETRIC) return vec2(max(uintBitsToFloat(e.size) / 127.0, SMALLEST), 0.0);
    float scale = max((e.high - e.low) / 255.0, SMALLEST);
    return vec2(scale, clamp(roundEven(-128.0 - e.low / scale), -128.0, 127.0));
}

// Codes for x, or x itself if it holds codes; `row`: scale and zero point.
ivec4 codes_of(vec4 x, vec2 row) {
    if (DTYPE == INT8) return ivec4(x);
    return ivec4(clamp(roundEven(x / row.x) + row.y, vec4(-128.0), vec4(127.0)));
}

// The padding of an image: the value 0, which is the code z.
float outside(vec2 row) {
    return DTYPE == INT8 ? row.y : 0.0;
}

// Which of four columns exist, given their count.
bvec4 which_exist(uint count) {
    return lessThan(uvec4(0u, 1u, 2u, 3u), uvec4(count));
}
