// Rotary embedding: x cos + cat(-x2, x1) sin, with x1 and x2 the halves of the last dimension. A lane computes elements
// of both halves, so that each is read once. Operands: the result, x, y = cos, z = sin.
//
// INDEXED: rows of the result lie where an index names them, as in a cache. It is the fifth operand, int32 and in range;
// along its dimension the result has stride 0, and p is its true one.

#version 450
#extension GL_GOOGLE_include_directive : require

#ifdef INDEXED
#define OPERANDS 5
#define MOST_DIMS 3u
#else
#define OPERANDS 4
#define MOST_DIMS 4u
#endif
#define PUSH_MORE uint half_way[4];  // from an element of the first half to that of the second
#include "formats.glsl"
#include "strided.glsl"

#ifdef INDEXED
layout(binding = 3) readonly buffer Index { uint rows[]; };
#endif

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
#ifdef INDEXED
    place[0] += rows[place[4]] * push.p;
#endif
    vec4 x1 = uintBitsToFloat(read_x(place[1]));
    vec4 x2 = uintBitsToFloat(read_x(place[1] + push.half_way[1]));
    vec4 cos1 = uintBitsToFloat(read_y(place[2]));
    vec4 cos2 = uintBitsToFloat(read_y(place[2] + push.half_way[2]));
    vec4 sin1 = uintBitsToFloat(read_z(place[3]));
    vec4 sin2 = uintBitsToFloat(read_z(place[3] + push.half_way[3]));
    write(place[0], floatBitsToUint(x1 * cos1 - x2 * sin1));
    write(place[0] + push.half_way[0], floatBitsToUint(x2 * cos2 + x1 * sin2));
}
