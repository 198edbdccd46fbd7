// Decomposes floats into DIGITS signed digits to base 256, with one power of two per chunk of STEPS times 16 columns
// (see gemv_digits). The part that digits cannot hold is written as floats (`rest`); a chunk is marked if that is more
// than 2^-21 of an element. A chunk that is not finite, or too large or small for powers of two, is written to `rest`
// whole.
//
// An invocation decomposes four columns, from global memory to global memory. Four neighbours share a step, and the
// lanes of a chunk share a subgroup: they exchange magnitudes and sums by shuffles, without shared memory or barriers.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "formats.glsl"
#include "gpu_rows.glsl"

layout(constant_id = 0) const uint DIGITS = 3u;
layout(constant_id = 1) const uint STEPS = 2u;  // a power of two
layout(local_size_x = 64) in;

layout(push_constant) uniform Push { uint m, k, pitch, group, padded, blocks, dtype; };

layout(set = 0, binding = 1) writeonly buffer Digits { uint digits[]; };  // [M][blocks][DIGITS][8]
// [M][chunks]: scale, sums of digits 0 + 256 of digits 1, of digits 2 + 256 of digits 3, whether something is left.
layout(set = 0, binding = 2) writeonly buffer Sums { uvec4 sums[]; };
layout(set = 0, binding = 3) writeonly buffer Rest { vec4 rest[]; };  // [M][blocks][8], of marked chunks

void main() {
    uint workgroup = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    uint id = workgroup * 64u + gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    uint row = id / (blocks * 8u);
    uint word = id % (blocks * 8u);
    vec4 value = vec4(0.0);
    uint bits = 0u;  // of the largest magnitude: they order as the floats do, with Inf and NaN above
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        if (row < m) value[i] = fetch_padded(row, word * 4u + i, k, pitch, group, padded, dtype);
        bits = max(bits, floatBitsToUint(value[i]) & 0x7fffffffu);
    }
    [[unroll]] for (uint o = 1u; o < 4u * STEPS; o <<= 1) bits = max(bits, subgroupShuffleXor(bits, o));
    // The power of two: with the chunk's largest magnitude below 2^(e + 1), x 2^shift fits the digits.
    // |whole| < 2^(8 DIGITS - 1) less one part in 128, which the digits can just hold.
    int e = int((bits + 0x20000u) >> 23) - 127;
    bool fits = e >= -90 && e < 127 || bits == 0u;
    int shift = int(8u * DIGITS) - 2 - clamp(e, -90, 126);
    float up = uintBitsToFloat(uint(127 + shift / 2) << 23);
    float more = uintBitsToFloat(uint(127 + shift - shift / 2) << 23);
    vec4 scaled = fits ? value * up * more : vec4(0.0);
    vec4 rounded = roundEven(scaled);
    vec4 lost = scaled - rounded;
    uint marked = any(greaterThan(abs(lost), abs(scaled) * 4.76837158e-7)) || !fits ? 1u : 0u;
    // Digits from the lowest on: the low byte as a signed number, whose sign carries into the remainder. The last digit
    // is the remainder. `low` and `high` are the exact sums that gemv_digits corrects zero points by.
    int low = 0;
    int high = 0;
    uint packed[DIGITS];
    [[unroll]] for (uint d = 0u; d < DIGITS; ++d) packed[d] = 0u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        int whole = int(rounded[i]);
        [[unroll]] for (uint d = 0u; d < DIGITS; ++d) {
            int digit = d + 1u == DIGITS ? whole : bitfieldExtract(whole, 0, 8);
            if (d < 2u) low += digit << (8u * d);
            else high += digit << (8u * d - 16u);
            packed[d] |= (uint(digit) & 0xffu) << (8u * i);
            whole = (whole - digit) >> 8;
        }
    }
    [[unroll]] for (uint o = 1u; o < 4u * STEPS; o <<= 1) {
        low += subgroupShuffleXor(low, o);
        high += subgroupShuffleXor(high, o);
        marked |= subgroupShuffleXor(marked, o);
    }
    if (row >= m) return;  // not before: shuffles want every lane
    uint block = row * blocks + word / 8u;
    [[unroll]] for (uint d = 0u; d < DIGITS; ++d) digits[(block * DIGITS + d) * 8u + word % 8u] = packed[d];
    float down = uintBitsToFloat(uint(127 - shift / 2) << 23);
    float less = uintBitsToFloat(uint(127 - shift + shift / 2) << 23);
    if (marked != 0u) rest[block * 8u + word % 8u] = fits ? lost * down * less : value;
    if (word % (4u * STEPS) == 0u)
        sums[(row * blocks * 8u + word) / (4u * STEPS)] = uvec4(floatBitsToUint(down * less), low, high, marked);
}
