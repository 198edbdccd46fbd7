// Products of a few rows with a large matrix on GPUs: a subgroup per row of the weight, which it reads once for all TM
// rows of a, sixteen bytes of float32 a lane. Grid: x (folded over y) workgroups of rows of the weight, z batches.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint TM = 1u;
layout(constant_id = 2) const uint A_VECTORS = 0u;
layout(constant_id = 3) const uint W_VECTORS = 0u;
layout(constant_id = 4) const uint W_TYPE = 0u;

#include "formats.glsl"
#include "product.glsl"

void main() {
    uint batch = gl_WorkGroupID.z;
    uint n = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_NumSubgroups + gl_SubgroupID;
    uint a_start = push.a_offset + batch_of(batch, push.a_batch);
    uint w_row = push.w_offset + batch_of(batch, push.w_batch) + min(n, push.n - 1u) * push.w_row;
    float sum[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) sum[i] = 0.0;
    for (uint k = 4u * gl_SubgroupInvocationID; k < push.k; k += 4u * gl_SubgroupSize) {
        vec4 w = read_w(w_row, k);
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            sum[i] += dot(w, read_a(a_start + min(i, push.m - 1u) * push.a_row, k));
        }
    }
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        float value = subgroupAdd(sum[i]);
        if (gl_SubgroupInvocationID == 0u) store(batch, i, n, value);
    }
}
