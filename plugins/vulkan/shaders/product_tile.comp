// Products of float matrices on any device: a lane computes TM x TN results in registers, straight from global memory,
// without barriers. Its columns lie a workgroup's width apart. Sums of 16 products are added to the total, so that
// rounding errors stay small for long rows. Grid: x tiles of columns, y tiles of rows, z batches.
//
// With SPREAD each lane reads one row of a and gets the others by shuffles, for subgroups of TM lanes: CPUs emulate
// subgroups by vectors and read memory lane by lane, so that reads are what takes time.
//
// With GROUPED rows of a are sorted by expert, whose matrix each multiplies; a tile has rows of one.

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

#ifdef GROUPED
layout(binding = 3) readonly buffer Ends { int ends[]; };
const uint EXPERTS = 1u;
#define PUSH(name) push.name
#include "experts.glsl"
#endif

void main() {
    uint batch = gl_WorkGroupID.z;
    uint row = gl_WorkGroupID.y * TM;
    uint end = push.m;
    uint first = gl_WorkGroupID.x * gl_WorkGroupSize.x * TN + gl_LocalInvocationID.x;
    uint w_row[TN];
    float y[TM * TN];
    uint a_start = push.a_offset + batch_of(batch, push.a_batch);
    uint w_start = push.w_offset + batch_of(batch, push.w_batch);
#ifdef GROUPED
    RowTile tile = row_tile(gl_WorkGroupID.y, TM, push.m);
    if (tile.first >= tile.end) return;  // the whole workgroup, so that no shuffle misses a lane
    row = tile.first;
    end = tile.end;
    // Rows of no expert multiply the last one's matrix, and get zeros.
    bool owned = tile.expert < push.expert_total;
    w_start += min(tile.expert, push.expert_total - 1u) * push.w_batch[0];
#endif
    // Rows and columns beyond the last compute the last one again.
#ifdef SPREAD
    uint own_row = a_start + min(row + gl_SubgroupInvocationID, end - 1u) * push.a_row;
#else
    uint a_row[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        a_row[i] = a_start + min(row + i, end - 1u) * push.a_row;
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
            float value = y[i * TN + j];
#ifdef GROUPED
            if (!owned) value = 0.0;
#endif
            if (row + i < end) store(batch, row + i, first + j * gl_WorkGroupSize.x, value);
        }
    }
}
