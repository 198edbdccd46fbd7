// Adds up the partial results of a product that was cut along K, in the order of the parts, then the bias; rounds once.
// A lane per result.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_shader_16bit_storage : require
#include "formats.glsl"
#include "gpu_result.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push { uint m, n, parts, pitch, dtype, biased, column; };

layout(set = 0, binding = 0) readonly buffer Parts { float part[]; };  // [parts][M][N]
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };

void main() {
    uint at = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * 64u + gl_LocalInvocationIndex;
    if (at >= m * n) return;
    float value = 0.0;
    for (uint p = 0u; p < parts; ++p) value += part[p * m * n + at];
    uint n_ = at % n;
    if (biased != 0u) value += bias[column + n_];
    write_result(at / n * pitch + column + n_, value, dtype);
}
