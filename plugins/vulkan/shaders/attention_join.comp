// Results of attention from the sums of each split of the keys: a lane per four columns of a row.

#version 450

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

void main() {
    uint at = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = at / push.fours;
    uint four = at % push.fours;
    if (row >= push.rows) return;
    float most = LOWEST;
    for (uint s = 0u; s < push.splits; ++s) most = max(most, totals[s * push.rows + row].x);
    float total = 0.0;
    vec4 sum = vec4(0.0);
    for (uint s = 0u; s < push.splits; ++s) {
        vec2 of_split = totals[s * push.rows + row];
        float less = of_split.x == LOWEST ? 0.0 : exp2(of_split.x - most);
        total += of_split.y * less;
        // Not a product with 0: what a split without keys has added up may be anything but is not needed.
        if (less != 0.0) sum += sums[(s * push.rows + row) * push.fours + four] * less;
    }
    sum *= total == 0.0 ? 0.0 : 1.0 / total;
    uint own = row % push.of_head;
    uint pair = row / push.of_head;
    uint query_head = pair % push.heads * push.shared_by + own % push.shared_by;
    uint place = push.y_offset + pair / push.heads * push.y_stride[0] + query_head * push.y_stride[1] +
                 own / push.shared_by * push.y_stride[2] + four * 4u;
    for (uint e = 0u; e < 4u && four * 4u + e < push.columns; ++e) result[place + e] = sum[e];
}
