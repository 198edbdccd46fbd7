// Element types of activations as numbers in push constants, and how their bits become float32 and back.
// Rounding is done on the bits: packHalf2x16 may round any way it likes, and results must not depend on the device.

const uint F32 = 0u;
const uint F16 = 1u;
const uint BF16 = 2u;
const uint INT8 = 3u;

// float32 to the bits of float16, half to even; what is too large becomes Inf.
uint half_bits(float value) {
    // Below 2^-14 results are multiples of 2^-24, and their count is their bits. Others get float16's exponent, and
    // half of the last bit, less one if that bit is even, carries into the bits that stay.
    uint bits = floatBitsToUint(value);
    uint sign = (bits >> 16) & 0x8000u;
    uint size = bits & 0x7fffffffu;
    uint subnormal = uint(roundEven(uintBitsToFloat(min(size, 0x38800000u)) * 16777216.0));
    uint normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    uint finite = size < 0x38800000u ? subnormal : normal;
    uint rounded = size >= 0x477ff000u ? 0x7c00u : finite;
    return sign | (size > 0x7f800000u ? 0x7e00u : rounded);
}

// float32 to the bits of bfloat16, half to even.
uint bfloat_bits(float value) {
    uint bits = floatBitsToUint(value);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Two 16-bit floats of a word; `dtype`: F16 or BF16.
vec2 unpack_pair(uint word, uint dtype) {
    return dtype == F16 ? unpackHalf2x16(word) : vec2(uintBitsToFloat(word << 16), uintBitsToFloat(word & 0xffff0000u));
}

// Four signed bytes of a word.
ivec4 unpack_bytes(uint word) {
    int w = int(word);
    return ivec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8), w >> 24);
}

uint pack_bytes(ivec4 codes) {
    uvec4 low = uvec4(codes) & 0xffu;
    return low.x | (low.y << 8) | (low.z << 16) | (low.w << 24);
}

// Four unsigned bytes of a word.
uvec4 unpack_unsigned(uint word) {
    return uvec4(word & 0xffu, (word >> 8) & 0xffu, (word >> 16) & 0xffu, word >> 24);
}
