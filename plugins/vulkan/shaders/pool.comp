// Largest elements or means of windows over images, of any strides in memory; a lane computes one result.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint FUNCTION = 0u;
layout(constant_id = 2) const uint ADAPTIVE = 0u;  // whether windows divide the image evenly, else they are given
layout(constant_id = 3) const uint INDEXED = 0u;   // whether places of the largest are wanted

const uint LARGEST = 0u;  // of float32 words
const uint MEAN = 1u;

layout(push_constant) uniform Push {
    uint count;
    uint channels;
    int out_height, out_width;
    int height, width;
    uint kernel, stride, padding, dilation;  // height in the low 16 bits, width in the high ones
    uint padded;     // MEAN: whether padding counts as elements
    uint divisor;    // MEAN: 0, or what sums are divided by
    uint x_stride[4];
    uint x_offset;
} push;

layout(binding = 0) readonly buffer X { float x_words[]; };
layout(binding = 6) writeonly buffer Indices { int indices[]; };
layout(binding = 7) writeonly buffer Result { float result[]; };

#include "functions.glsl"

ivec2 halves(uint word) {
    return ivec2(word & 0xffffu, word >> 16);
}

void main() {
    uint at = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (at >= push.count) return;
    // 1. The window: its first row and column, those after its last, and the steps between them.
    ivec2 size = ivec2(push.height, push.width);
    ivec2 out_size = ivec2(push.out_height, push.out_width);
    int line = int(at) / out_size.y;
    int plane = line / out_size.x;
    ivec2 place = ivec2(line - plane * out_size.x, int(at) - line * out_size.y);
    ivec2 start, end;
    ivec2 step = ADAPTIVE != 0u ? ivec2(1) : halves(push.dilation);
    int elements = int(push.divisor);
    if (ADAPTIVE != 0u) {
        start = place * size / out_size;
        end = ((place + 1) * size + out_size - 1) / out_size;
    } else {
        ivec2 padding = halves(push.padding);
        start = place * halves(push.stride) - padding;
        end = start + (halves(push.kernel) - 1) * step + 1;
        ivec2 spread = min(end, size + padding) - start;
        if (push.padded != 0u && elements == 0) elements = spread.x * spread.y;
        start += (max(-start, ivec2(0)) + step - 1) / step * step;
        end = min(end, size);
    }
    if (elements == 0) elements = (end.x - start.x) * (end.y - start.y);
    // 2. Its elements. A NaN is the largest, as in torch. Means sum row by row, so that rounding errors stay small.
    uint channel = uint(plane) % push.channels;
    uint image = uint(plane) / push.channels;
    uint x_start = push.x_offset + image * push.x_stride[0] + channel * push.x_stride[1];
    float best = -INFINITY;
    ivec2 best_at = start;
    float total = 0.0;
    for (int row = start.x; row < end.x; row += step.x) {
        float part = 0.0;
        for (int column = start.y; column < end.y; column += step.y) {
            float x = x_words[x_start + uint(row) * push.x_stride[2] + uint(column) * push.x_stride[3]];
            part += x;
            if (FUNCTION == LARGEST && (is_nan(x) || (!is_nan(best) && x > best))) {
                best = x;
                best_at = ivec2(row, column);
            }
        }
        total += part;
    }
    result[at] = FUNCTION == LARGEST ? best : divide(total, float(elements));
    if (INDEXED != 0u) indices[at] = best_at.x * size.y + best_at.y;
}
