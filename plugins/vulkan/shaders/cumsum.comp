// Running sums along one dimension of a strided operand: a workgroup per row. Each lane sums a run of elements; the sum
// of the runs before its own is where it begins as it goes over them again.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LANES = 64u;
layout(constant_id = 1) const uint OUTER = 1u;
layout(constant_id = 2) const uint TYPE = 0u;     // of the operand; 0: float32, else int32
layout(constant_id = 3) const uint FLAGGED = 0u;  // whether a flag is set if a sum does not fit int32

layout(push_constant) uniform Push {
    uint rows, count;
    uint outer_size[4], x_outer[4], y_outer[4];  // innermost first
    uint x_step, y_step, x_offset, y_offset;
} push;

layout(binding = 0) readonly buffer X { uint x_words[]; };
layout(binding = 6) buffer Bad { uint bad[]; };
layout(binding = 7) writeonly buffer Result { uint result[]; };

#include "wide.glsl"

shared uvec2 sums[LANES];

uvec2 add(uvec2 a, uvec2 b) {
    if (TYPE == 0u) return uvec2(floatBitsToUint(uintBitsToFloat(a.x) + uintBitsToFloat(b.x)), 0u);
    return wide_sum(a, b);
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (row >= push.rows) return;  // all of a workgroup
    uint x_place = push.x_offset;
    uint y_place = push.y_offset;
    for (uint d = 0u; d < OUTER; ++d) {
        uint own = row % push.outer_size[d];
        row /= push.outer_size[d];
        x_place += own * push.x_outer[d];
        y_place += own * push.y_outer[d];
    }
    uint lane = gl_LocalInvocationIndex;
    uint run = (push.count + LANES - 1u) / LANES;
    uint first = min(lane * run, push.count);
    uint end = min(first + run, push.count);
    uvec2 sum = uvec2(0u);
    for (uint i = first; i < end; ++i) sum = add(sum, wide(x_words[x_place + i * push.x_step]));
    sums[lane] = sum;
    barrier();
    sum = uvec2(0u);
    for (uint l = 0u; l < lane; ++l) sum = add(sum, sums[l]);
    for (uint i = first; i < end; ++i) {
        sum = add(sum, wide(x_words[x_place + i * push.x_step]));
        if (FLAGGED != 0u && !fits(sum)) atomicOr(bad[0], 2u);
        result[y_place + i * push.y_step] = sum.x;
    }
}
