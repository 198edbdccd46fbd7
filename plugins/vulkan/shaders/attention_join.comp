// Results of attention from the sums of each split of the keys: a lane per four columns of a row.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

layout(push_constant) uniform Push {
    uint rows, splits;        // rows of all key heads
    uint fours, columns;      // of a row
    uint of_head, shared_by;  // rows of a key head, and the query heads that share it
    uint heads;               // key heads
    uint y_stride[3], y_offset;
} push;

layout(binding = 0) readonly buffer Sums { vec4 sums[]; };      // [split][row][four]
layout(binding = 1) readonly buffer Totals { vec2 totals[]; };  // [split][row]: largest score, sum of weights
layout(binding = 7) writeonly buffer Result { float result[]; };

#define LOWEST uintBitsToFloat(0xff800000u)
#define TOTAL(split, row) totals[(split) * push.rows + (row)]
#define SUM(split, row, four) sums[((split) * push.rows + (row)) * push.fours + (four)]
#include "attention_splits.glsl"

void main() {
    uint at = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = at / push.fours;
    uint four = at % push.fours;
    if (row >= push.rows) return;
    vec4 sum = of_splits(push.splits, row, four);
    uint own = row % push.of_head;
    uint pair = row / push.of_head;
    uint query_head = pair % push.heads * push.shared_by + own % push.shared_by;
    uint place = push.y_offset + pair / push.heads * push.y_stride[0] + query_head * push.y_stride[1] +
                 own / push.shared_by * push.y_stride[2] + four * 4u;
    for (uint e = 0u; e < 4u && four * 4u + e < push.columns; ++e) result[place + e] = sum[e];
}
