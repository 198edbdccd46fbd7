// Rows of floats as float16 for cooperative matrices, in the order in which unpacked weights leave their words
// (ORDER 4: k = 0 2 4 6 1 3 5 7 of each eight, ORDER 8: 0 2 1 3 of each four). A row of bfloat16 is scaled by a
// power of two into float16's range, where its eight bits fit exactly. One workgroup per row; also the sums of x per
// group.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "formats.glsl"
#include "gpu_rows.glsl"

layout(constant_id = 0) const uint ORDER = 4u;
layout(local_size_x = 256) in;

layout(push_constant) uniform Push { uint m, k, pitch, group, padded, columns, dtype, summed, group_columns, groups; };

layout(set = 0, binding = 1) writeonly buffer Halves { uint halves[]; };  // [M][columns / 2]
layout(set = 0, binding = 2) writeonly buffer Scales { float scales[]; };  // [M]
layout(set = 0, binding = 3) writeonly buffer Sums { float sums[]; };      // [M][groups]

shared uint largest[256];

uint place(uint pair) {  // the first column of the pair's word, of four pairs in eight columns
    if (ORDER == 8u) return (pair & 1u) | (pair & 2u) << 1;
    return (pair & 1u) << 2 | (pair >> 1);
}

float at(uint row, uint column) {
    return fetch_padded(row, column, k, pitch, group, padded, dtype);
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (row >= m) return;
    uint lane = gl_LocalInvocationIndex;
    float unit = 1.0;
    if (dtype != F16) {
        uint most = 0u;
        for (uint c = lane; c < columns; c += 256u) most = max(most, floatBitsToUint(at(row, c)) & 0x7fffffffu);
        largest[lane] = most;
        barrier();
        for (uint o = 128u; o > 0u; o >>= 1) {
            if (lane < o) largest[lane] = max(largest[lane], largest[lane + o]);
            barrier();
        }
        most = min(largest[0], 0x7f000000u);
        // 2^15 over the power of two at or below the largest magnitude.
        if (most >= 0x00800000u) unit = uintBitsToFloat(min(269u - (most >> 23), 252u) << 23);
    }
    for (uint p = lane; p < columns / 2u; p += 256u) {
        uint c = (p & ~3u) * 2u + place(p & 3u);
        uint low = half_bits(at(row, c) * unit);
        halves[row * columns / 2u + p] = low | half_bits(at(row, c + 2u) * unit) << 16;
    }
    if (lane == 0u) scales[row] = 1.0 / unit;
    if (summed == 0u) return;
    for (uint g = lane; g < groups; g += 256u) {
        float sum = 0.0;
        for (uint c = 0u; c < group_columns; ++c) sum += at(row, g * group_columns + c);
        sums[row * groups + g] = sum;
    }
}
