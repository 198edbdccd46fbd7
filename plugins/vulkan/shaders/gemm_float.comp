// y = x W^T with float activations: weights become w = u s + b, where b holds the zero point; products and sums in
// float32. Sums of 16 or 32 products are added to the total, so that rounding errors stay small for long rows.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require

#include "formats.glsl"
#include "tile.glsl"

layout(binding = 4) readonly buffer Activations { vec4 activations[]; };

float part[TM * TN];

// Four k: `word` holds a byte of each column's code for each of them, x begins at vector `place` of each row.
void multiply(uint word[TN], uint row[TM], uint place, float s[TN], float b[TN]) {
    vec4 x[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) x[i] = activations[row[i] + place];
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        vec4 u = BITS == 4u ? vec4(unpack_unsigned(word[j])) : vec4(unpack_bytes(word[j]));
        vec4 w = fma(u, vec4(s[j]), vec4(b[j]));
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            float sum = part[i * TN + j];
            part[i * TN + j] = fma(x[i].w, w.w, fma(x[i].z, w.z, fma(x[i].y, w.y, fma(x[i].x, w.x, sum))));
        }
    }
}

void multiply_vector(uint vector, uint column[TN], uint row[TM], float s[TN], float b[TN]) {
    uvec4 w[TN];
    uint word[TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) w[j] = codes[column[j] + vector * 8u];
    [[unroll]] for (uint t = 0u; t < 4u; ++t) {
        if (BITS == 8u) {
            [[unroll]] for (uint j = 0u; j < TN; ++j) word[j] = w[j][t];
            multiply(word, row, vector * 4u + t, s, b);
        } else {
            [[unroll]] for (uint j = 0u; j < TN; ++j) word[j] = w[j][t] & 0x0f0f0f0fu;
            multiply(word, row, vector * 8u + t * 2u, s, b);
            [[unroll]] for (uint j = 0u; j < TN; ++j) word[j] = (w[j][t] >> 4) & 0x0f0f0f0fu;
            multiply(word, row, vector * 8u + t * 2u + 1u, s, b);
        }
    }
}

void main() {
    uint column[TN];
    uint row[TM];
    float y[TM * TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) column[j] = first_vector(weight_row(j));
    [[unroll]] for (uint i = 0u; i < TM; ++i) row[i] = activation_row(i) * push.row_stride;
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] = 0.0;

    uint vectors = push.blocks * VECTORS;
    for (uint g = 0u; g < push.groups; ++g) {
        float s[TN];
        float b[TN];
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            uint place = g * push.padded_n + weight_row(j);
            ZeroPoint zero = zero_point(zero_bits[place], push.zero_kind);
            s[j] = scale[place];
            b[j] = zero.added - float(zero.subtracted) * s[j];
        }
        for (uint v = g * vectors; v < (g + 1u) * vectors; ++v) {
            [[unroll]] for (uint i = 0u; i < TM * TN; ++i) part[i] = 0.0;
            multiply_vector(v, column, row, s, b);
            [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] += part[i];
        }
    }
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        [[unroll]] for (uint j = 0u; j < TN; ++j) store(i, j, y[i * TN + j]);
    }
}
