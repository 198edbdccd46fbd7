// y = A(x) W^T with int8 activations: exact int32 sums per group of K, scales in float32.
//
// With u the stored codes, z' their zero point, and q_x, z_x those of x, a group's sum of (q_x - z_x)(u - z') is
//   sum(q_x u) - z_x sum(u) - z' sum(q_x - z_x);
// sum(u) comes with the weight and sum(q_x - z_x) with the activations.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require

#include "formats.glsl"
#include "dot.glsl"
#include "tile.glsl"

layout(binding = 3) readonly buffer Sums { int sums[]; };
layout(binding = 4) readonly buffer Activations { uvec4 activations[]; };
layout(binding = 5) readonly buffer Parameters { float x_scale[]; };
layout(binding = 5) readonly buffer IntParameters { int x_int[]; };

int acc[TM * TN];

void multiply(uvec4 w, uint column, uvec4 x[TM]) {
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        acc[i * TN + column] +=
            dot_bytes(x[i].x, w.x) + dot_bytes(x[i].y, w.y) + dot_bytes(x[i].z, w.z) + dot_bytes(x[i].w, w.w);
    }
}

// A vector of 16 int8 codes or 32 int4 codes; x begins at `place`, rows `row` apart from the start.
void multiply_vector(uint vector, uint column[TN], uint row[TM]) {
    uvec4 x[TM];
    if (BITS == 8u) {
        [[unroll]] for (uint i = 0u; i < TM; ++i) x[i] = activations[row[i] + vector];
        [[unroll]] for (uint j = 0u; j < TN; ++j) multiply(codes[column[j] + vector * 8u], j, x);
        return;
    }
    uvec4 high[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        uvec4 first = activations[row[i] + vector * 2u];
        uvec4 second = activations[row[i] + vector * 2u + 1u];
        x[i] = uvec4(first.xz, second.xz);
        high[i] = uvec4(first.yw, second.yw);
    }
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        uvec4 w = codes[column[j] + vector * 8u];
        multiply(w & 0x0f0f0f0fu, j, x);
        multiply((w >> 4) & 0x0f0f0f0fu, j, high);
    }
}

void main() {
    uint column[TN];
    uint row[TM];
    int x_zero[TM];
    float y[TM * TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) column[j] = first_vector(weight_row(j));
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        row[i] = activation_row(i) * push.row_stride;
        x_zero[i] = x_int[push.all_rows + activation_row(i)];
    }
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] = 0.0;

    uint vectors = push.blocks * VECTORS;
    for (uint g = 0u; g < push.groups; ++g) {
        [[unroll]] for (uint i = 0u; i < TM * TN; ++i) acc[i] = 0;
        for (uint v = g * vectors; v < (g + 1u) * vectors; ++v) multiply_vector(v, column, row);

        int x_sum[TM];
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            x_sum[i] = x_int[push.all_rows * 2u + activation_row(i) * push.groups + g];
        }
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            uint place = g * push.padded_n + weight_row(j);
            float s = scale[place];
            int u_sum = push.has_sums != 0u ? sums[place] : 0;
            ZeroPoint zero = zero_point(zero_bits[place], push.zero_kind);
            [[unroll]] for (uint i = 0u; i < TM; ++i) {
                int total = acc[i * TN + j] - x_zero[i] * u_sum - zero.subtracted * x_sum[i];
                y[i * TN + j] += s * float(total) + zero.added * float(x_sum[i]);
            }
        }
    }
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        float s = x_scale[activation_row(i)];
        [[unroll]] for (uint j = 0u; j < TN; ++j) store(i, j, s * y[i * TN + j]);
    }
}
