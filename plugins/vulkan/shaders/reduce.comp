// Reductions: sums, extrema and their places, over up to three dimensions of a strided operand. For each result either
// a workgroup, whose lanes' parts are joined by a tree in shared memory, or a lane.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LANES = 64u;    // a power of two
layout(constant_id = 1) const uint TEAM = 1u;      // lanes of a result: 1 or LANES
layout(constant_id = 2) const uint OUTER = 1u;     // dimensions that stay
layout(constant_id = 3) const uint INNER = 1u;     // dimensions that are reduced
layout(constant_id = 4) const uint FUNCTION = 0u;  // as in `steps.reductions`
layout(constant_id = 5) const uint TYPE = 0u;      // of the operand
layout(constant_id = 6) const uint FLAGGED = 0u;   // whether a flag is set if a sum does not fit int32

const uint SUM = 0u;
const uint MEAN = 1u;
const uint PROD = 2u;
const uint ANY = 3u;
const uint AMAX = 4u;
const uint AMIN = 5u;
const uint ARGMAX = 6u;
const uint ARGMIN = 7u;

layout(push_constant) uniform Push {
    uint results, count;
    uint outer_size[4], x_outer[4], y_outer[4];  // innermost first
    uint inner_size[3], x_inner[3];
    uint x_offset, y_offset;
} push;

layout(binding = 0) readonly buffer X { uint x_words[]; };
layout(binding = 6) buffer Bad { uint bad[]; };
layout(binding = 7) writeonly buffer Result { uint result[]; };

#include "functions.glsl"
#include "ordering.glsl"
#include "wide.glsl"

shared uvec2 parts[TEAM];

// What a lane has found: in x the bits of a sum or product, or the key of an element; in y the element's index, or the
// high word of a sum of integers.
uvec2 nothing() {
    if (FUNCTION == PROD) return uvec2(TYPE == FLOAT ? floatBitsToUint(1.0) : 1u, 0u);
    return uvec2(0u, FUNCTION >= AMAX ? 0xffffffffu : 0u);
}

uvec2 join(uvec2 a, uvec2 b) {
    float x = uintBitsToFloat(a.x);
    float y = uintBitsToFloat(b.x);
    switch (FUNCTION) {
        case SUM:
        case MEAN: return TYPE == FLOAT ? uvec2(floatBitsToUint(x + y), 0u) : wide_sum(a, b);
        case PROD: return uvec2(TYPE == FLOAT ? floatBitsToUint(x * y) : a.x * b.x, 0u);
        case ANY: return a | b;
        default: return comes_first(b, a) ? b : a;
    }
}

uvec2 of_element(uint word, uint index) {
    float x = uintBitsToFloat(word);
    switch (FUNCTION) {
        case ANY: return uvec2((TYPE == FLOAT ? x != 0.0 || is_nan(x) : word != 0u) ? 1u : 0u, 0u);
        case AMAX:
        case ARGMAX: return uvec2(ascending(word), index);
        case AMIN:
        case ARGMIN: return uvec2(descending(word, true), index);
        case SUM: return TYPE == FLOAT ? uvec2(word, 0u) : wide(word);
        default: return uvec2(word, 0u);
    }
}

uint place_of(uint index) {
    uint place = 0u;
    for (uint d = 0u; d < INNER; ++d) {
        uint rest = index;
        if (d + 1u < INNER) {
            index /= push.inner_size[d];
            rest -= index * push.inner_size[d];
        }
        place += rest * push.x_inner[d];
    }
    return place;
}

// The elements of one lane. Eight loads are in flight at a time; sums of 8 are added to the total, so that rounding
// errors stay small.
uvec2 reduce(uint start, uint lane) {
    uvec2 total = nothing();
    for (uint first = lane; first < push.count; first += 8u * TEAM) {
        uint words[8];
        [[unroll]] for (uint e = 0u; e < 8u; ++e) {
            words[e] = x_words[start + place_of(min(first + e * TEAM, push.count - 1u))];
        }
        uvec2 part = nothing();
        [[unroll]] for (uint e = 0u; e < 8u; ++e) {
            uint i = first + e * TEAM;
            if (i < push.count) part = join(part, of_element(words[e], i));
        }
        total = join(total, part);
    }
    return total;
}

void write(uint at, uint start, uvec2 found) {
    uint word = found.x;
    if (FUNCTION == MEAN) word = floatBitsToUint(divide(uintBitsToFloat(word), float(push.count)));
    if (FUNCTION == AMAX || FUNCTION == AMIN) word = x_words[start + place_of(found.y)];
    if (FUNCTION == ARGMAX || FUNCTION == ARGMIN) word = found.y;
    if (FLAGGED != 0u && !fits(found)) atomicOr(bad[0], 2u);
    result[at] = word;
}

void main() {
    uint group = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    uint which = TEAM == 1u ? group * LANES + gl_LocalInvocationIndex : group;
    uint lane = TEAM == 1u ? 0u : gl_LocalInvocationIndex;
    bool exists = which < push.results;
    uint x_place = push.x_offset;
    uint y_place = push.y_offset;
    uint rest = which;
    for (uint d = 0u; d < OUTER; ++d) {
        uint own = d + 1u < OUTER ? rest % push.outer_size[d] : rest;
        rest /= push.outer_size[d];
        x_place += own * push.x_outer[d];
        y_place += own * push.y_outer[d];
    }
    uvec2 found = nothing();
    if (exists) found = reduce(x_place, lane);
    if (TEAM > 1u) {
        parts[lane] = found;
        for (uint reach = TEAM / 2u; reach > 0u; reach /= 2u) {
            barrier();
            if (lane < reach) parts[lane] = join(parts[lane], parts[lane + reach]);
        }
        found = parts[lane];
    }
    if (exists && lane == 0u) write(y_place, x_place, found);
}
