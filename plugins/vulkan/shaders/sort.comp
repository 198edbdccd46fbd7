// Rows in order, by a bitonic network over keys and indices; of equal elements the first comes first. Rows of up to
// BLOCK elements are sorted in shared memory at once. Longer ones take several steps over pairs in memory: blocks that
// are sorted in alternating directions, exchanges between blocks, and the rest of each merge within blocks.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LANES = 64u;
layout(constant_id = 1) const uint OUTER = 1u;
layout(constant_id = 2) const uint TYPE = 0u;
layout(constant_id = 3) const uint LARGEST = 1u;  // whether the largest come first
layout(constant_id = 4) const uint BLOCK = 2u;    // elements of a workgroup, a power of two
layout(constant_id = 5) const uint STEP = 0u;
layout(constant_id = 6) const uint LAST = 0u;     // whether results are written, instead of pairs

const uint SORT = 0u;      // elements to sorted blocks
const uint EXCHANGE = 1u;  // pairs that lie `reach` apart, at least a block
const uint MERGE = 2u;     // pairs within blocks

layout(push_constant) uniform Push {
    uint rows, count;
    uint padded;  // elements of a row, rounded up to a power of two
    uint run;     // elements of a run that is merged: runs go forward and backward in turn
    uint reach;
    uint outer_size[4], x_outer[4];  // innermost first
    uint x_step, x_offset;
} push;

layout(binding = 0) readonly buffer X { uint x_words[]; };
layout(binding = 5) buffer Pairs { uvec2 pairs[]; };               // (rows, padded)
layout(binding = 6) writeonly buffer Indices { uint indices[]; };  // (rows, count)
layout(binding = 7) writeonly buffer Values { uint values[]; };    // (rows, count)

#include "functions.glsl"
#include "ordering.glsl"

shared uvec2 block[BLOCK];

uint start_of(uint row) {
    uint start = push.x_offset;
    for (uint d = 0u; d < OUTER; ++d) {
        start += row % push.outer_size[d] * push.x_outer[d];
        row /= push.outer_size[d];
    }
    return start;
}

// What does not exist comes after everything.
uvec2 element(uint start, uint i) {
    if (i >= push.count) return uvec2(0u, 0xffffffffu);
    uint word = x_words[start + i * push.x_step];
    return uvec2(LARGEST != 0u ? ascending(word) : descending(word, false), i);
}

// The place of the t-th pair whose elements lie `reach` apart, a power of two.
uint place_of(uint t, uint reach) {
    return 2u * t - (t & (reach - 1u));
}

// Compares and exchanges within the block, over all smaller distances than `run`.
void merge(uint lane, uint first, uint run, uint largest_reach) {
    for (uint reach = largest_reach; reach > 0u; reach /= 2u) {
        barrier();
        for (uint t = lane; t < BLOCK / 2u; t += LANES) {
            uint i = place_of(t, reach);
            bool forward = ((first + i) & run) == 0u;
            uvec2 a = block[i];
            uvec2 b = block[i + reach];
            if (comes_first(b, a) == forward) {
                block[i] = b;
                block[i + reach] = a;
            }
        }
    }
}

void main() {
    uint which = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    uint blocks = push.padded / BLOCK;
    uint row = which / blocks;
    if (row >= push.rows) return;  // all of a workgroup
    uint first = which % blocks * BLOCK;
    uint start = start_of(row);
    uint lane = gl_LocalInvocationIndex;
    uint base = row * push.padded;
    if (STEP == EXCHANGE) {
        for (uint t = first / 2u + lane; t < (first + BLOCK) / 2u; t += LANES) {
            uint i = place_of(t, push.reach);
            uvec2 a = pairs[base + i];
            uvec2 b = pairs[base + i + push.reach];
            if (comes_first(b, a) == ((i & push.run) == 0u)) {
                pairs[base + i] = b;
                pairs[base + i + push.reach] = a;
            }
        }
        return;
    }
    for (uint i = lane; i < BLOCK; i += LANES) {
        block[i] = STEP == SORT ? element(start, first + i) : pairs[base + first + i];
    }
    if (STEP == SORT) {
        for (uint run = 2u; run <= BLOCK; run *= 2u) merge(lane, first, run, run / 2u);
    } else {
        merge(lane, first, push.run, BLOCK / 2u);
    }
    barrier();
    for (uint i = lane; i < BLOCK; i += LANES) {
        uvec2 found = block[i];
        if (LAST == 0u) {
            pairs[base + first + i] = found;
        } else if (first + i < push.count) {
            values[row * push.count + first + i] = x_words[start + found.y * push.x_step];
            indices[row * push.count + first + i] = found.y;
        }
    }
}
