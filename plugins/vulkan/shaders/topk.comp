// The largest or smallest elements of each row, in order: a workgroup per row. Each lane keeps the first of its own
// elements; the first of all, found by a tree in shared memory, is written, and its lane gets its next one.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LANES = 64u;   // a power of two
layout(constant_id = 1) const uint OUTER = 1u;
layout(constant_id = 2) const uint TYPE = 0u;
layout(constant_id = 3) const uint LARGEST = 1u;

layout(push_constant) uniform Push {
    uint rows, count, k;
    uint outer_size[4], x_outer[4];  // innermost first
    uint x_step, x_offset;
} push;

layout(binding = 0) readonly buffer X { uint x_words[]; };
layout(binding = 6) writeonly buffer Indices { uint indices[]; };  // (rows, k)
layout(binding = 7) writeonly buffer Values { uint values[]; };    // (rows, k)

#include "functions.glsl"
#include "ordering.glsl"

shared uvec2 firsts[LANES];

// The first of the elements at `first`, `first + step`, ... that comes after `last`, or of all of them;
// (0, 0xffffffff), which comes after all, if there is none. Four loads are in flight at a time.
uvec2 search(uint start, uint first, uint step, uvec2 last, bool all) {
    uvec2 best = uvec2(0u, 0xffffffffu);
    for (uint i = first; i < push.count; i += 4u * step) {
        uvec4 words;
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            words[e] = x_words[start + min(i + e * step, push.count - 1u) * push.x_step];
        }
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            uvec2 own = uvec2(LARGEST != 0u ? ascending(words[e]) : descending(words[e], false), i + e * step);
            bool counts = own.y < push.count && (all || comes_first(last, own));
            if (counts && comes_first(own, best)) best = own;
        }
    }
    return best;
}

// The first of what the lanes have, for all of them.
uvec2 first_of_all(uint lane, uvec2 own) {
    barrier();  // everybody has read the result of the call before
    firsts[lane] = own;
    for (uint reach = LANES / 2u; reach > 0u; reach /= 2u) {
        barrier();
        if (lane < reach && comes_first(firsts[lane + reach], firsts[lane])) firsts[lane] = firsts[lane + reach];
    }
    barrier();
    return firsts[0];
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (row >= push.rows) return;  // all of a workgroup
    uint start = push.x_offset;
    uint rest = row;
    for (uint d = 0u; d < OUTER; ++d) {
        start += rest % push.outer_size[d] * push.x_outer[d];
        rest /= push.outer_size[d];
    }
    uint lane = gl_LocalInvocationIndex;
    uvec2 own = search(start, lane, LANES, uvec2(0u), true);
    for (uint i = 0u; i < push.k; ++i) {
        uvec2 found = first_of_all(lane, own);
        if (lane == 0u) {
            values[row * push.k + i] = x_words[start + found.y * push.x_step];
            indices[row * push.k + i] = found.y;
        }
        // All lanes search what belongs to the one that has just lost its first.
        uint owner = found.y % LANES;
        uvec2 next = first_of_all(lane, search(start, owner + lane * LANES, LANES * LANES, found, false));
        if (lane == owner) own = next;
    }
}
