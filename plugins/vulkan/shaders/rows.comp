// Normalizations and softmax of rows: a workgroup each. A lane takes four columns at a time; rows are read once for
// every sum that a function needs, from the cache after the first time.
//
// Rows are numbered over up to five outer dimensions, each operand with strides of its own.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint DIMS = 1u;      // outer dimensions
layout(constant_id = 2) const uint FUNCTION = 0u;
layout(constant_id = 3) const uint VECTORS = 0u;   // whether fours of columns of every operand are adjacent and aligned
layout(constant_id = 4) const uint RESIDUAL = 0u;  // whether a residual is added first, and the sum kept

const uint MOST_DIMS = 5u;
const uint RMS_NORM = 0u;
const uint LAYER_NORM = 1u;
const uint SOFTMAX = 2u;
const uint LOG_SOFTMAX = 3u;

layout(push_constant) uniform Push {
    uint rows, columns;
    uint size[MOST_DIMS];  // innermost first
    uint x_stride[MOST_DIMS], y_stride[MOST_DIMS], r_stride[MOST_DIMS];
    uint x_step, y_step, r_step;  // from column to column
    uint x_offset, y_offset, r_offset;
    uint parameters;  // bit 0: a weight, bit 1: a bias
    float eps;
} push;

layout(binding = 0) readonly buffer X { float x_words[]; };
layout(binding = 0) readonly buffer X4 { vec4 x_vectors[]; };
layout(binding = 1) readonly buffer Weight { float weight[]; };
layout(binding = 2) readonly buffer Bias { float bias[]; };
layout(binding = 3) readonly buffer Residual { float r_words[]; };
layout(binding = 3) readonly buffer Residual4 { vec4 r_vectors[]; };
layout(binding = 6) buffer Sum { float sum_words[]; };  // contiguous rows
layout(binding = 7) writeonly buffer Result { float y_words[]; };
layout(binding = 7) writeonly buffer Result4 { vec4 y_vectors[]; };

#include "functions.glsl"
#include "team.glsl"

uint x_row, y_row, r_row, sum_row;

// Where the workgroup's row begins in each operand.
void find(uint at) {
    x_row = push.x_offset;
    y_row = push.y_offset;
    r_row = push.r_offset;
    sum_row = at * push.columns;
    for (uint d = 0u; d < DIMS; ++d) {
        uint rest = at % push.size[d];
        at /= push.size[d];
        x_row += rest * push.x_stride[d];
        y_row += rest * push.y_stride[d];
        if (RESIDUAL != 0u) r_row += rest * push.r_stride[d];
    }
}

// Four columns from k on; those past the last are `outside`.
vec4 read(uint k, float outside) {
    if (VECTORS != 0u) {
        vec4 value = x_vectors[(x_row + k) / 4u];
        return RESIDUAL != 0u ? value + r_vectors[(r_row + k) / 4u] : value;
    }
    vec4 value = vec4(outside);
    for (uint e = 0u; e < 4u && k + e < push.columns; ++e) {
        value[e] = x_words[x_row + (k + e) * push.x_step];
        if (RESIDUAL != 0u) value[e] += r_words[r_row + (k + e) * push.r_step];
    }
    return value;
}

void write(uint k, vec4 value) {
    if (VECTORS != 0u) {
        y_vectors[(y_row + k) / 4u] = value;
    } else {
        for (uint e = 0u; e < 4u && k + e < push.columns; ++e) y_words[y_row + (k + e) * push.y_step] = value[e];
    }
}

vec4 parameter(uint which, uint k) {
    vec4 value = vec4(which == 0u ? 1.0 : 0.0);
    if ((push.parameters >> which & 1u) == 0u) return value;
    for (uint e = 0u; e < 4u && k + e < push.columns; ++e) value[e] = which == 0u ? weight[k + e] : bias[k + e];
    return value;
}

float add_up(vec4 v) {
    return (v.x + v.y) + (v.z + v.w);
}

// The lanes' fours of columns: at the end of a row, those that exist.
vec4 present(uint k, vec4 value) {
    return mix(vec4(0.0), value, lessThan(uvec4(k) + uvec4(0u, 1u, 2u, 3u), uvec4(push.columns)));
}

void normalize(uint first, uint step) {
    float mean = 0.0;
    if (FUNCTION == LAYER_NORM) {
        for (uint k = first; k < push.columns; k += step) mean += add_up(read(k, 0.0));
        mean = team_sum(mean) / float(push.columns);
    }
    float squares = 0.0;
    for (uint k = first; k < push.columns; k += step) {
        vec4 x = present(k, read(k, 0.0) - mean);
        squares += dot(x, x);
    }
    float scale = divide(1.0, sqrt(team_sum(squares) / float(push.columns) + push.eps));
    for (uint k = first; k < push.columns; k += step) {
        vec4 x = read(k, 0.0);
        if (RESIDUAL != 0u) {
            for (uint e = 0u; e < 4u && k + e < push.columns; ++e) sum_words[sum_row + k + e] = x[e];
        }
        write(k, fma((x - mean) * scale, parameter(0u, k), parameter(1u, k)));
    }
}

void softmax(uint first, uint step) {
    float most = -INFINITY;
    for (uint k = first; k < push.columns; k += step) {
        vec4 x = read(k, -INFINITY);
        most = max(most, max(max(x.x, x.y), max(x.z, x.w)));
    }
    most = team_max(most);
    float sum = 0.0;
    for (uint k = first; k < push.columns; k += step) {
        vec4 x = read(k, -INFINITY) - most;
        sum += add_up(present(k, vec4(exp_(x.x), exp_(x.y), exp_(x.z), exp_(x.w))));
    }
    sum = team_sum(sum);
    float shift = FUNCTION == LOG_SOFTMAX ? log_(sum) : divide(1.0, sum);
    for (uint k = first; k < push.columns; k += step) {
        vec4 x = read(k, 0.0) - most;
        vec4 y = FUNCTION == LOG_SOFTMAX ? x - shift : vec4(exp_(x.x), exp_(x.y), exp_(x.z), exp_(x.w)) * shift;
        write(k, y);
    }
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (row >= push.rows) return;  // all of a workgroup
    find(row);
    uint first = 4u * gl_LocalInvocationIndex;
    uint step = 4u * gl_WorkGroupSize.x;
    if (FUNCTION <= LAYER_NORM) normalize(first, step);
    else softmax(first, step);
}
