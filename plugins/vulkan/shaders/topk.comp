// The largest or smallest elements of each row, in order: a workgroup per row. Each lane keeps the first of its own
// elements; the first of all, found by a tree in shared memory, is written, and its lane looks for its next one.

#version 450
#extension GL_GOOGLE_include_directive : require

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

// The first of a lane's elements that comes after `last`; (0, 0xffffffff), which comes after all, if there is none.
uvec2 next(uint start, uvec2 last, bool any) {
    uvec2 best = uvec2(0u, 0xffffffffu);
    for (uint i = gl_LocalInvocationIndex; i < push.count; i += LANES) {
        uint word = x_words[start + i * push.x_step];
        uvec2 own = uvec2(LARGEST != 0u ? ascending(word) : descending(word, false), i);
        if ((any || comes_first(last, own)) && comes_first(own, best)) best = own;
    }
    return best;
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
    uvec2 own = next(start, uvec2(0u), true);
    for (uint i = 0u; i < push.k; ++i) {
        firsts[lane] = own;
        for (uint reach = LANES / 2u; reach > 0u; reach /= 2u) {
            barrier();
            if (lane < reach && comes_first(firsts[lane + reach], firsts[lane])) firsts[lane] = firsts[lane + reach];
        }
        barrier();
        uvec2 found = firsts[0];
        barrier();  // everybody has read it
        if (lane == 0u) {
            values[row * push.k + i] = x_words[start + found.y * push.x_step];
            indices[row * push.k + i] = found.y;
        }
        if (found.y == own.y) own = next(start, own, false);
    }
}
