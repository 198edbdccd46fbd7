// For activations with zero points: the sum of each output channel's dequantized weights, s (sum u - z count) over the
// groups. A workgroup of 128 lanes computes eight rows of the weight: lane % 8 is the row, sixteen lanes share its
// groups and add their parts up by a tree in shared memory.
#version 450
layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
    uint np, groups, group, k;
    int offset;       // of stored codes
    uint integer;     // whether an integer zero point is taken off here
    uint zero_float;  // whether a float one is added here
};

layout(set = 0, binding = 0) readonly buffer Sums { int sums[]; };      // [G][NP]
layout(set = 0, binding = 1) readonly buffer Scale { float scale[]; };  // [G][NP]
layout(set = 0, binding = 2) readonly buffer Zero { uint zero[]; };     // [G][NP]
layout(set = 0, binding = 3) writeonly buffer Result { float result[]; };  // [NP]

shared float part[128];

void main() {
    uint lane = gl_LocalInvocationIndex;
    uint n = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * 8u + lane % 8u;
    float value = 0.0;
    for (uint g = lane / 8u; g < groups && n < np; g += 16u) {
        uint at = g * np + n;
        int count = int(min(group, k - min(g * group, k)));
        int less = integer != 0u ? int(zero[at]) : offset;
        value += scale[at] * float(sums[at] - less * count);
        if (zero_float != 0u) value += uintBitsToFloat(zero[at]) * float(count);
    }
    part[lane] = value;
    for (uint reach = 64u; reach >= 8u; reach /= 2u) {
        barrier();
        if (lane < reach) part[lane] += part[lane + reach];
    }
    if (lane < 8u && n < np) result[n] = part[lane];
}
