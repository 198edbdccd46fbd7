// Rows of a quantized table, dequantized: a lane reads a word of codes and writes its four or eight values, in float32
// with one rounding to the result's dtype. The grid covers the words of all rows asked for; a large table lies in
// several parts, each with a dispatch of its own, and a lane whose row is in another part does nothing.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_shader_16bit_storage : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint BITS = 8u;
layout(constant_id = 2) const uint WIDE = 1u;
layout(constant_id = 3) const uint VALUES = 0u;  // of a table that codes index; 0: they are integers

#include "formats.glsl"
#include "result.glsl"
#include "zero.glsl"

layout(push_constant) uniform Push {
    uint count;      // indices
    uint k;          // columns of the table
    uint padded_n;
    uint group;
    uint groups;
    uint steps;      // steps of 16 columns in a padded group
    uint pitch;      // elements of a row of the result
    uint out_dtype;
    uint zero_kind;
    uint grid;
    uint first;      // the table's part: its first row,
    uint rows;       // and how many it has
} push;

layout(binding = 0) readonly buffer Codes { uint codes[]; };
layout(binding = 1) readonly buffer Scale { float scale[]; };
layout(binding = 2) readonly buffer Zero { uint zero_bits[]; };
layout(binding = 3) readonly buffer Table { float table[]; };
layout(binding = 4) readonly buffer Indices { uint indices[]; };

// Four codes, a byte each, as numbers without their scale.
vec4 four_numbers(uint word, ZeroPoint zero) {
    uvec4 u = unpack_unsigned(word);
    if (VALUES != 0u) return vec4(table[u.x], table[u.y], table[u.z], table[u.w]);
    return vec4((BITS == 8u ? unpack_bytes(word) : ivec4(u)) - zero.subtracted);
}

// Four values of a group from column `offset` on; columns of padding are not written.
void store_four(uint row, uint g, uint offset, uint u, float s, ZeroPoint zero) {
    uint end = min(push.group, push.k - min(g * push.group, push.k));
    uint place = row * push.pitch + g * push.group + offset;
    vec4 w = four_numbers(u, zero) * s + zero.added;
    for (uint e = 0u; e < 4u; ++e) {
        if (offset + e < end) store_float(place + e, w[e], push.out_dtype);
    }
}

void main() {
    const uint step_words = BITS / 2u;  // words of 16 codes
    uint words = push.groups * push.steps * step_words;
    uint place = (gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = place / words;
    if (row >= push.count) return;
    uint n = indices[row] - push.first;
    if (n >= push.rows) return;
    // The word's place: its group of columns, and its columns within that.
    uint word = place - row * words;
    uint g = word / (push.steps * step_words);
    uint offset = (word - g * push.steps * step_words) * (16u / step_words);

    // Words lie in vectors of four, vectors of eight rows side by side (see `layout`).
    uint code = codes[(((n / 8u) * (words / 4u) + word / 4u) * 8u + n % 8u) * 4u + word % 4u];
    uint parameter = g * push.padded_n + n;
    float s = scale[parameter];
    ZeroPoint zero = zero_point(zero_bits[parameter], push.zero_kind);
    if (BITS == 8u) {
        store_four(row, g, offset, code, s, zero);
    } else {
        store_four(row, g, offset, code & 0x0f0f0f0fu, s, zero);
        store_four(row, g, offset + 4u, (code >> 4) & 0x0f0f0f0fu, s, zero);
    }
}
