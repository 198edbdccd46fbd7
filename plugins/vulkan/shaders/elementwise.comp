// A function of each element, computed in float32 and rounded once. A lane takes 16 bytes; the padding of rows is
// computed, too, and nobody reads it.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

#include "formats.glsl"

layout(constant_id = 1) const uint DTYPE = 0u;  // F32, F16 or BF16
layout(constant_id = 2) const uint FUNCTION = 0u;

layout(push_constant) uniform Push {
    uint vectors;  // of four words
    uint grid;
} push;

layout(binding = 0) readonly buffer Source { uvec4 source[]; };
layout(binding = 7) writeonly buffer Result { uvec4 result[]; };

// tanh without overflow: some devices make NaN of a quotient of two Inf.
float safe_tanh(float x) {
    return tanh(clamp(x, -15.0, 15.0));
}

float sigmoid(float x) {
    return 1.0 / (1.0 + exp(-x));
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
float erf(float x) {
    float t = 1.0 / (1.0 + 0.3275911 * abs(x));
    float p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    return sign(x) * (1.0 - p * exp(-x * x));
}

// By the bits: `isnan`, and what clamp and sign make of NaN, are up to the device.
bool is_nan(float x) {
    return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u;
}

// FUNCTION as in `steps.elementwise`: relu, gelu, gelu_tanh, silu, sigmoid, tanh. NaN stays NaN.
float apply(float x) {
    if (is_nan(x)) return x;
    switch (FUNCTION) {
        case 0u: return x < 0.0 ? 0.0 : x;
        case 1u: return 0.5 * x * (1.0 + erf(x * 0.70710678));
        case 2u: return 0.5 * x * (1.0 + safe_tanh(0.79788456 * (x + 0.044715 * x * x * x)));
        case 3u: return x * sigmoid(x);
        case 4u: return sigmoid(x);
        default: return safe_tanh(x);
    }
}

// A word: one float32, or two 16-bit floats whose results are rounded half to even.
uint apply_word(uint word) {
    if (DTYPE == F32) return floatBitsToUint(apply(uintBitsToFloat(word)));
    vec2 x = unpack_pair(word, DTYPE);
    vec2 y = vec2(apply(x.x), apply(x.y));
    uvec2 bits = DTYPE == F16 ? uvec2(half_bits(y.x), half_bits(y.y)) : uvec2(bfloat_bits(y.x), bfloat_bits(y.y));
    return bits.x | (bits.y << 16);
}

void main() {
    uint place = (gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (place >= push.vectors) return;
    uvec4 words = source[place];
    result[place] = uvec4(apply_word(words.x), apply_word(words.y), apply_word(words.z), apply_word(words.w));
}
