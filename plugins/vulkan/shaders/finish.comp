// Results to int8 codes: clamp(round(y / s) + z, -128, 127), with s and z of the tensor or of the row. A lane converts
// four columns, a word of codes.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

#include "formats.glsl"

layout(push_constant) uniform Push {
    uint rows;
    uint columns;
    uint from_pitch;  // elements of a row of float32, a multiple of 4
    uint pitch;       // elements of a row of codes, a multiple of 4
    uint grid;
    uint per_token;
    float given_scale;
    int given_zero;
} push;

layout(binding = 0) readonly buffer Source { vec4 source[]; };
layout(binding = 1) readonly buffer GivenScale { float token_scale[]; };
layout(binding = 2) readonly buffer GivenZero { int token_zero[]; };
layout(binding = 7) writeonly buffer Result { uint result[]; };

void main() {
    uint words = (push.columns + 3u) / 4u;
    uint place = (gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = place / words;
    if (row >= push.rows) return;
    uint word = place - row * words;
    float scale = push.per_token != 0u ? token_scale[row] : push.given_scale;
    int zero = push.per_token != 0u ? token_zero[row] : push.given_zero;
    vec4 y = source[row * (push.from_pitch / 4u) + word];
    ivec4 q = ivec4(clamp(roundEven(y / scale) + float(zero), vec4(-128.0), vec4(127.0)));
    result[row * (push.pitch / 4u) + word] = pack_bytes(q);
}
