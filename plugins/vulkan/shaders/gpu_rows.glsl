// Rows of float activations, read element by element as the padded columns of a weight. Needs formats.glsl.
//
// Column c of the padded matrix belongs to group c / padded; columns past the group's own or past K are 0.

layout(set = 0, binding = 0) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 0) readonly buffer Source4 { uvec4 source4[]; };

float fetch(uint at, uint dtype) {
    if (dtype == F32) return uintBitsToFloat(source[at]);
    vec2 pair = unpack_pair(source[at >> 1], dtype);
    return (at & 1u) == 0u ? pair.x : pair.y;
}

float fetch_padded(uint row, uint column, uint k, uint pitch, uint group, uint padded, uint dtype) {
    uint g = column / padded;
    uint offset = column - g * padded;
    uint at = g * group + offset;
    return offset < group && at < k ? fetch(row * pitch + at, dtype) : 0.0;
}
