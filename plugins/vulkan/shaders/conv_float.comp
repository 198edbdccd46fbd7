// Convolutions of float images in two dimensions, of any strides in memory: a lane computes TM pixels of TN output
// channels in registers, straight from global memory and without columns. Neighbouring lanes have neighbouring pixels,
// and read the same weights. Products are summed over a few input channels at a time, and these sums are added to the
// total, so that rounding errors stay small for many channels. A batch norm of the result may be part of it.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint TM = 4u;
layout(constant_id = 2) const uint TN = 4u;
layout(constant_id = 3) const uint BIASED = 0u;

layout(push_constant) uniform Push {
    uint tiles;     // workgroups for the pixels of some output channels
    uint blocks;    // workgroups for the output channels of a channel group
    uint groups;
    uint pixels;    // of all results of a channel
    uint out_height, out_width;
    int height, width;
    uint kernel_height, kernel_width;
    uint stride, padding, dilation;  // height in the low 16 bits, width in the high ones
    uint channels;  // input channels of a channel group
    uint columns;   // output channels of a channel group
    uint chunk;     // input channels whose products are summed at a time
    uint x_stride[4], y_stride[4];  // of image, channel, row and column
    uint x_offset, w_offset;
    float eps;
} push;

layout(binding = 0) readonly buffer X { float x_words[]; };
layout(binding = 1) readonly buffer W { float w_words[]; };  // (output channels, channels, kernel height and width)
layout(binding = 2) readonly buffer Bias { float bias[]; };
layout(binding = 7) writeonly buffer Result { float result[]; };

#include "functions.glsl"
#include "normalized.glsl"

ivec2 halves(uint word) {
    return ivec2(word & 0xffffu, word >> 16);
}

void main() {
    // 1. The pixels and the output channels of this lane; those beyond the last compute the last one again.
    uint which = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    uint block = which / push.tiles;
    if (block >= push.blocks * push.groups) return;
    uint group = block / push.blocks;
    uint column = (block - group * push.blocks) * TN;
    uint pixel = (which - block * push.tiles) * gl_WorkGroupSize.x * TM + gl_LocalInvocationID.x;
    ivec2 corner[TM];
    uint x_start[TM];
    uint y_start[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        uint at = min(pixel + i * gl_WorkGroupSize.x, push.pixels - 1u);
        uint row = at / push.out_width;
        uint image = row / push.out_height;
        uvec2 place = uvec2(row - image * push.out_height, at - row * push.out_width);
        corner[i] = ivec2(place) * halves(push.stride) - halves(push.padding);
        x_start[i] = push.x_offset + image * push.x_stride[0] + group * push.channels * push.x_stride[1];
        y_start[i] = image * push.y_stride[0] + place.x * push.y_stride[2] + place.y * push.y_stride[3];
    }
    uint area = push.kernel_height * push.kernel_width;
    uint w_row[TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        uint n = group * push.columns + min(column + j, push.columns - 1u);
        w_row[j] = push.w_offset + n * push.channels * area;
    }
    // 2. The sums.
    float y[TM * TN];
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] = 0.0;
    for (uint first = 0u; first < push.channels; first += push.chunk) {
        float part[TM * TN];
        [[unroll]] for (uint i = 0u; i < TM * TN; ++i) part[i] = 0.0;
        uint end = min(first + push.chunk, push.channels);
        for (uint tap_row = 0u; tap_row < push.kernel_height; ++tap_row) {
            for (uint tap_column = 0u; tap_column < push.kernel_width; ++tap_column) {
                ivec2 shift = ivec2(tap_row, tap_column) * halves(push.dilation);
                bool inside[TM];
                uint x_at[TM];
                [[unroll]] for (uint i = 0u; i < TM; ++i) {
                    ivec2 at = corner[i] + shift;
                    inside[i] = at.x >= 0 && at.x < push.height && at.y >= 0 && at.y < push.width;
                    ivec2 valid = inside[i] ? at : ivec2(0);
                    x_at[i] = x_start[i] + uint(valid.x) * push.x_stride[2] + uint(valid.y) * push.x_stride[3];
                }
                uint tap = tap_row * push.kernel_width + tap_column;
                for (uint c = first; c < end; ++c) {
                    float x[TM];
                    [[unroll]] for (uint i = 0u; i < TM; ++i) {
                        float value = x_words[x_at[i] + c * push.x_stride[1]];
                        x[i] = inside[i] ? value : 0.0;
                    }
                    [[unroll]] for (uint j = 0u; j < TN; ++j) {
                        float w = w_words[w_row[j] + c * area + tap];
                        [[unroll]] for (uint i = 0u; i < TM; ++i) {
                            part[i * TN + j] = fma(x[i], w, part[i * TN + j]);
                        }
                    }
                }
            }
        }
        [[unroll]] for (uint i = 0u; i < TM * TN; ++i) y[i] += part[i];
    }
    // 3. Results.
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        if (pixel + i * gl_WorkGroupSize.x >= push.pixels) continue;
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            if (column + j >= push.columns) continue;
            uint n = group * push.columns + column + j;
            float value = BIASED != 0u ? y[i * TN + j] + bias[n] : y[i * TN + j];
            result[y_start[i] + n * push.y_stride[1]] = normalized(value, n, push.eps);
        }
    }
}
