// Batch norms with given statistics: of each element its channel's mean is subtracted, and it is divided by the
// deviation, times a weight, plus a bias. Operand y has the strides of these parameters: 1 along the channels, else 0.

#version 450
#extension GL_GOOGLE_include_directive : require

#define OPERANDS 3
#define MOST_DIMS 6u
#include "functions.glsl"
#include "formats.glsl"
#include "strided.glsl"
#include "normalized.glsl"

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
    uvec4 x = read_x(place[1]);
    for (uint e = 0u; e < WIDTH; ++e) {
        uint channel = place[2] + e * push.stride[2u * MOST_DIMS];
        x[e] = floatBitsToUint(normalized(uintBitsToFloat(x[e]), channel, uintBitsToFloat(push.p)));
    }
    write(place[0], x);
}
