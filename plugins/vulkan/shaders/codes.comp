// Between floats and int8 codes in words: clamp(round(x / s) + z, -128, 127) and (q - z) s, with s in p and z in q.

#version 450
#extension GL_GOOGLE_include_directive : require

#define OPERANDS 2
#define MOST_DIMS 6u
#include "functions.glsl"
#include "formats.glsl"
#include "strided.glsl"

const uint ENCODE = 0u;

uint function(uint word) {
    float scale = uintBitsToFloat(push.p);
    float zero = float(int(push.q));
    if (FUNCTION != ENCODE) return floatBitsToUint(float(int(word) - int(push.q)) * scale);
    return uint(int(clamp(roundEven(divide(uintBitsToFloat(word), scale)) + zero, -128.0, 127.0)));
}

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
    uvec4 x = read_x(place[1]);
    for (uint e = 0u; e < WIDTH; ++e) x[e] = function(x[e]);
    write(place[0], x);
}
