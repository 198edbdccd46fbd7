// Elements of a source at places of a target that an index names: set, added, multiplied, or the larger or smaller kept.
// A lane owns some rows of one line of the target along the indexed dimension. It goes over all of the line's indices
// in order and takes those within its rows: no two lanes write one element, so that results do not depend on timing,
// and of several elements for one place the last is set. Indices are int32 and in range.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint DIMS = 1u;      // dimensions beside the indexed one
layout(constant_id = 2) const uint FUNCTION = 0u;
layout(constant_id = 3) const uint TYPE = 0u;
layout(constant_id = 4) const uint NUMBER = 0u;    // whether the source is the number `value`

const uint MOST_DIMS = 5u;
const uint SET = 0u;
const uint ADD = 1u;
const uint MULTIPLY = 2u;
const uint LARGER = 3u;

layout(push_constant) uniform Push {
    uint count;              // lanes that have something to do
    uint lines, rows;        // lines along the indexed dimension, and rows of a lane
    uint indices;            // of a line
    uint size[MOST_DIMS];    // innermost first
    uint target_stride[MOST_DIMS], index_stride[MOST_DIMS], source_stride[MOST_DIMS];
    uint target_step, index_step, source_step;  // along the indexed dimension
    uint target_offset, index_offset, source_offset;
    uint value;
} push;

layout(binding = 0) readonly buffer Source { uint source[]; };
layout(binding = 1) readonly buffer Index { uint index[]; };
layout(binding = 7) buffer Target { uint target[]; };

#include "functions.glsl"
#include "ordering.glsl"

uint joined(uint a, uint b) {
    float x = uintBitsToFloat(a);
    float y = uintBitsToFloat(b);
    switch (FUNCTION) {
        case SET: return b;
        case ADD: return TYPE == FLOAT ? floatBitsToUint(x + y) : a + b;
        case MULTIPLY: return TYPE == FLOAT ? floatBitsToUint(x * y) : a * b;
        case LARGER: return ascending(b) > ascending(a) ? b : a;
        default: return descending(b, true) > descending(a, true) ? b : a;
    }
}

void main() {
    uint at = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (at >= push.count) return;
    uint first = at / push.lines * push.rows;
    uint line = at % push.lines;
    uint target_at = push.target_offset;
    uint index_at = push.index_offset;
    uint source_at = push.source_offset;
    for (uint d = 0u; d < DIMS; ++d) {
        uint own = line % push.size[d];
        line /= push.size[d];
        target_at += own * push.target_stride[d];
        index_at += own * push.index_stride[d];
        source_at += own * push.source_stride[d];
    }
    for (uint i = 0u; i < push.indices; ++i) {
        uint row = index[index_at + i * push.index_step];
        if (row - first >= push.rows) continue;
        uint place = target_at + row * push.target_step;
        uint word = NUMBER != 0u ? push.value : source[source_at + i * push.source_step];
        target[place] = joined(target[place], word);
    }
}
