// y = A(x) W^T with int8 activations on any device: int32 sums per group of K, scales in float32.
//
// A lane computes TM x TN results (see tile.glsl) in registers, straight from global memory: no lane waits for another,
// and there are no barriers. int32 sums with all corrections below are exact, since `layout.LONGEST` bounds a group.
//
// With u the stored codes, z' their zero point, and q_x, z_x those of x, a group's sum of (q_x - z_x)(u - z') is
//   sum(q_x u) - z_x sum(u) - z' sum(q_x - z_x);
// sum(u) comes with the weight and sum(q_x - z_x) with the activations.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#ifdef LONG
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif

#include "formats.glsl"
#include "dot.glsl"
#include "tile.glsl"

layout(binding = 3) readonly buffer Sums { int sums[]; };
layout(binding = 4) readonly buffer Activations { VECTOR activations[]; };
layout(binding = 5) readonly buffer Parameters { float x_scale[]; };
layout(binding = 5) readonly buffer IntParameters { int x_int[]; };

int acc[TM * TN];  // sum(q_x u) of the current group

// 16 k: a vector of codes of each of the lane's rows and columns.
void multiply(uint step, uint column[TN], uint row[TM]) {
    uvec4 x[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) x[i] = words_of(activations[row[i] + step]);
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        uvec4 w = weight_words(column[j], step);
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            acc[i * TN + j] +=
                dot_bytes(x[i].x, w.x) + dot_bytes(x[i].y, w.y) + dot_bytes(x[i].z, w.z) + dot_bytes(x[i].w, w.w);
        }
    }
}

void main() {
    if (!begin_tile()) return;
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

    for (uint g = 0u; g < push.groups; ++g) {
        [[unroll]] for (uint i = 0u; i < TM * TN; ++i) acc[i] = 0;
        for (uint k = g * push.steps; k < (g + 1u) * push.steps; ++k) multiply(k, column, row);

        // The group ends: zero points are corrected in int32, then one conversion and one scale.
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
    float s[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) s[i] = x_scale[activation_row(i)];
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        float b = bias_of(j);
        [[unroll]] for (uint i = 0u; i < TM; ++i) store(i, j, s[i] * y[i * TN + j] + b);
    }
}
