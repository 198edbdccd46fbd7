// Convolutions whose channel groups are too narrow for tiles, such as depthwise ones: a lane computes one result from
// its column of the image, which is read from global memory and never written out. Neighbouring lanes have neighbouring
// output channels. No lane waits for another: there is no shared memory and there are no barriers. int8 products are
// exact int32 sums per group of K.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_shader_16bit_storage : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 4) const uint BITS = 8u;
layout(constant_id = 6) const uint WIDE = 1u;
layout(constant_id = 5) const uint QUANTIZED = 0u;  // whether activations are int8 codes
layout(constant_id = 7) const uint VALUES = 0u;  // of a table that codes index; 0: they are integers

#define PUSH_MORE \
    uint columns;   /* output channels of all channel groups */ \
    uint padded_n;  /* N of scale and zero, rounded up to 8 */ \
    uint out_pitch; \
    uint out_dtype; \
    uint zero_kind; \
    uint has_bias;

#include "formats.glsl"
#include "source.glsl"
#include "quantization.glsl"
#include "result.glsl"
#include "zero.glsl"

layout(binding = 1) readonly buffer Codes { uint codes[]; };
layout(binding = 2) readonly buffer Scale { float scale[]; };
layout(binding = 3) readonly buffer Zero { uint zero_bits[]; };
layout(binding = 4) readonly buffer Table { float table[]; };
layout(binding = 6) readonly buffer Bias { float bias[]; };

// Stored codes of four columns: word i of group g of row n of the weight.
ivec4 weight_codes(uint n, uint g, uint i) {
    const uint vectors = BITS / 4u;
    uint place = g * push.steps * 4u + i;
    uint vector = (n / 8u) * push.groups * push.steps * BITS + place / 8u * vectors * 8u + n % 8u;
    i = place % 8u;
    if (BITS == 8u) {
        uint word = codes[(vector + i / 4u * 8u) * 4u + i % 4u];
        return VALUES != 0u ? ivec4(unpack_unsigned(word)) : unpack_bytes(word);
    }
    uint word = codes[vector * 4u + i / 2u];
    return ivec4(unpack_unsigned((i % 2u == 0u ? word : word >> 4) & 0x0f0f0f0fu));
}

uint words_of(uint g) {
    return (columns_of(g) + 3u) / 4u;
}

// Scale and zero point of the column: given, or from its extent, for which each lane reads its whole column first.
vec2 parameters(Origin o) {
    if (push.mode == GIVEN) return vec2(push.given_scale, float(push.given_zero));
    Extent e = Extent(0u, 0.0, 0.0);
    for (uint g = 0u; g < push.groups; ++g) {
        for (uint i = 0u; i < words_of(g); ++i) e = widened(e, read_columns(o, g, i * 4u, 0.0));
    }
    return dynamic_parameters(e, push.mode);
}

// The sums over a group of K of (q - z)(u - z') s and (q - z) times what is added to weights.
float int_group(Origin o, uint n, uint g, vec2 row, float s, ZeroPoint zero) {
    ivec4 product = ivec4(0);
    ivec4 total = ivec4(0);
    for (uint i = 0u; i < words_of(g); ++i) {
        ivec4 q = codes_of(read_columns(o, g, i * 4u, outside(row)), row) - int(row.y);
        q = mix(ivec4(0), q, which_exist(count_columns(g, i * 4u)));
        product += q * (weight_codes(n, g, i) - zero.subtracted);
        total += q;
    }
    int sum = product.x + product.y + product.z + product.w;
    return s * float(sum) + zero.added * float(total.x + total.y + total.z + total.w);
}

// The sum over a group of K of x w in float32, in four partial sums.
float float_group(Origin o, uint n, uint g, float s, ZeroPoint zero) {
    vec4 sum = vec4(0.0);
    for (uint i = 0u; i < words_of(g); ++i) {
        ivec4 u = weight_codes(n, g, i);
        vec4 w = vec4(u - zero.subtracted);
        if (VALUES != 0u) w = vec4(table[u.x], table[u.y], table[u.z], table[u.w]);
        sum += read_columns(o, g, i * 4u, 0.0) * (w * s + zero.added);
    }
    return sum.x + sum.y + sum.z + sum.w;
}

void main() {
    uint place = (gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint m = place / push.columns;
    if (m >= push.rows) return;
    uint n = place - m * push.columns;
    // 1. The channel group of output channel n, and the column that all of its output channels share.
    uint heads = push.all_rows / push.rows;
    uint head = n / (push.columns / heads);
    Origin o = origin(head * push.rows + m);
    // 2. Parameters of the column, for which it may have to be read a first time.
    vec2 row = QUANTIZED != 0u ? parameters(o) : vec2(1.0, 0.0);
    // 3. The products, group by group of K. If QUANTIZED, each lane encodes its column anew, so codes are never stored.
    float y = 0.0;
    for (uint g = 0u; g < push.groups; ++g) {
        uint parameter = g * push.padded_n + n;
        ZeroPoint zero = zero_point(zero_bits[parameter], push.zero_kind);
        float s = scale[parameter];
        y += QUANTIZED != 0u ? int_group(o, n, g, row, s, zero) : float_group(o, n, g, s, zero);
    }
    y = y * row.x + (push.has_bias != 0u ? bias[n] : 0.0);
    store_float(m * push.out_pitch + n, y, push.out_dtype);
}
