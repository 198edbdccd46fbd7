// Products of float matrices on any device: a lane computes TM x TN results in registers, straight from global memory,
// without barriers. Its columns lie a workgroup's width apart. Sums of 16 products are added to the total, so that
// rounding errors stay small for long rows. Grid: x tiles of columns, y tiles of rows, z batches.
//
// With SPREAD each lane reads one row of a and gets the others by shuffles, for subgroups of TM lanes: CPUs emulate
// subgroups by vectors and read memory lane by lane, so that reads are what takes time.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef LONG
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif
#ifdef SPREAD
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint TM = 4u;
layout(constant_id = 2) const uint TN = 4u;
layout(constant_id = 3) const uint A_VECTORS = 0u;
layout(constant_id = 4) const uint W_VECTORS = 0u;
layout(constant_id = 5) const uint W_TYPE = 0u;

#include "formats.glsl"
#include "product.glsl"

void main() {
    uint batch = gl_WorkGroupID.z;
    uint first = gl_WorkGroupID.x * gl_WorkGroupSize.x * TN + gl_LocalInvocationID.x;
    uint w_row[TN];
    float y[TM * TN];
    uint a_start = push.a_offset + batch_of(batch, push.a_batch);
    uint w_start = push.w_offset + batch_of(batch, push.w_batch);
    // Rows and columns beyond the last compute the last one again.
#ifdef SPREAD
    uint own_row = a_start + min(gl_WorkGroupID.y * TM + gl_SubgroupInvocationID, push.m - 1u) * push.a_row;
#else
    uint a_row[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        a_row[i] = a_start + min(gl_WorkGroupID.y * TM + i, push.m - 1u) * push.a_row;
    }
#endif
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        w_row[j] = w_start + min(first + j * gl_WorkGroupSize.x, push.n - 1u) * push.w_row;
    }
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] = 0.0;
    for (uint start = 0u; start < push.k; start += 16u) {
        float part[TM * TN];
        [[unroll]] for (uint i = 0u; i < TM * TN; ++i) part[i] = 0.0;
        for (uint k = start; k < min(start + 16u, push.k); k += 4u) {
            vec4 a[TM];
#ifdef SPREAD
            vec4 own = read_a(own_row, k);
            [[unroll]] for (uint i = 0u; i < TM; ++i) a[i] = subgroupShuffle(own, i);
#else
            [[unroll]] for (uint i = 0u; i < TM; ++i) a[i] = read_a(a_row[i], k);
#endif
            [[unroll]] for (uint j = 0u; j < TN; ++j) {
                vec4 w = read_w(w_row[j], k);
                [[unroll]] for (uint i = 0u; i < TM; ++i) {
                    float sum = part[i * TN + j];
                    part[i * TN + j] = fma(a[i].w, w.w, fma(a[i].z, w.z, fma(a[i].y, w.y, fma(a[i].x, w.x, sum))));
                }
            }
        }
        [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] += part[i];
    }
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            store(batch, gl_WorkGroupID.y * TM + i, first + j * gl_WorkGroupSize.x, y[i * TN + j]);
        }
    }
}
