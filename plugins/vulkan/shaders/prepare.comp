// Activations as float32 (or float16) rows, padded group by group as the weight is. A lane copies four columns.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

#include "formats.glsl"
#include "source.glsl"

layout(binding = 7) writeonly buffer Result4 { vec4 result4[]; };
layout(binding = 7) writeonly buffer Result2 { uvec2 result2[]; };

void main() {
    uint words = push.groups * push.steps * 4u;
    uint place = (gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = place / words;
    if (row >= push.all_rows) return;
    uint word = place - row * words;
    uint g = word / (push.steps * 4u);
    vec4 x = read_columns(origin(row), g, (word - g * push.steps * 4u) * 4u, 0.0);
    if (push.mode == F32) {
        result4[place] = x;
    } else {
        uvec4 bits = uvec4(half_bits(x.x), half_bits(x.y), half_bits(x.z), half_bits(x.w));
        result2[place] = bits.xz | (bits.yw << 16);
    }
}
