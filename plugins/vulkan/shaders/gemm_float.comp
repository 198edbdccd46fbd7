// y = x W^T with float activations on any device: weights become w = (u - z') s + b, with a table of values w = v[u] s + b;
// products and sums are float32.
//
// A lane computes TM x TN results (see tile.glsl) in registers, straight from global memory: no lane waits for another,
// and there are no barriers. Sums of 16 products are added to the total, so that rounding errors stay small for long
// rows.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#ifdef LONG
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif

#include "formats.glsl"
#include "tile.glsl"

layout(binding = 3) readonly buffer Table { float table[]; };
layout(binding = 4) readonly buffer Activations { VECTOR activations[]; };

float part[TM * TN];  // sums of the current 16 columns

// Four k: `word` holds a byte of each column's code for each of them, x begins at vector `place` of each row.
void multiply(uint word[TN], uint row[TM], uint place, float s[TN], ZeroPoint zero[TN]) {
    vec4 x[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) x[i] = uintBitsToFloat(words_of(activations[row[i] + place]));
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        vec4 w;
        if (VALUES != 0u) {
            uvec4 u = unpack_unsigned(word[j]);
            w = vec4(table[u.x], table[u.y], table[u.z], table[u.w]);
        } else {
            ivec4 u = BITS == 4u ? ivec4(unpack_unsigned(word[j])) : unpack_bytes(word[j]);
            w = vec4(u - zero[j].subtracted);
        }
        w = fma(w, vec4(s[j]), vec4(zero[j].added));
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            float sum = part[i * TN + j];
            part[i * TN + j] = fma(x[i].w, w.w, fma(x[i].z, w.z, fma(x[i].y, w.y, fma(x[i].x, w.x, sum))));
        }
    }
}

// 16 k: one vector of codes of each of the lane's columns, four words of which each hold four k.
void multiply_step(uint step, uint column[TN], uint row[TM], float s[TN], ZeroPoint zero[TN]) {
    uvec4 w[TN];
    uint word[TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) w[j] = weight_words(column[j], step);
    [[unroll]] for (uint t = 0u; t < 4u; ++t) {
        [[unroll]] for (uint j = 0u; j < TN; ++j) word[j] = w[j][t];
        multiply(word, row, step * 4u + t, s, zero);
    }
}

void main() {
    if (!begin_tile()) return;
    uint column[TN];
    uint row[TM];
    float y[TM * TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) column[j] = first_vector(weight_row(j));
    [[unroll]] for (uint i = 0u; i < TM; ++i) row[i] = activation_row(i) * push.row_stride;
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] = 0.0;

    // Groups of K in turn: scale and zero point of each column stay in registers for all of a group.
    for (uint g = 0u; g < push.groups; ++g) {
        float s[TN];
        ZeroPoint zero[TN];
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            uint place = g * push.padded_n + weight_row(j);
            s[j] = scale[place];
            zero[j] = zero_point(zero_bits[place], push.zero_kind);
        }
        for (uint k = g * push.steps; k < (g + 1u) * push.steps; ++k) {
            [[unroll]] for (uint i = 0u; i < TM * TN; ++i) part[i] = 0.0;
            multiply_step(k, column, row, s, zero);
            [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] += part[i];
        }
    }
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        float b = bias_of(j);
        [[unroll]] for (uint i = 0u; i < TM; ++i) store(i, j, y[i * TN + j] + b);
    }
}
