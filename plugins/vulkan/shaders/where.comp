// One of two elements, chosen by a third: x is the condition, an int32; y where it is not 0, else z.

#version 450
#extension GL_GOOGLE_include_directive : require

#define OPERANDS 4
#define MOST_DIMS 5u
#include "formats.glsl"
#include "strided.glsl"

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
    uvec4 chosen = read_x(place[1]);
    uvec4 y = read_y(place[2]);
    uvec4 z = read_z(place[3]);
    for (uint e = 0u; e < WIDTH; ++e) y[e] = chosen[e] != 0u ? y[e] : z[e];
    write(place[0], y);
}
