// Rows of floats as float16 for cooperative matrices, in the order in which unpacked weights leave their words: ORDER
// 4: k = 0 2 4 6 1 3 5 7 of each eight, ORDER 8: 0 2 1 3 of each four, ORDER 16: 0 4 1 5 2 6 3 7 (tables). Rows that
// are not float16 are scaled by a power of two into its range, where the eight bits of bfloat16 fit exactly. A second
// term, row m + row, holds eleven more bits at 2^-11 of the scale: 22 bits of a float32, which is what sums in float32
// are worth. Also sums of x per group.
//
// A row whose largest magnitude is so far above the others that its scale would make zeros of them is stored as it is,
// behind the scales; its halves are zeros and its scale is negative: see plain_rows.glsl.
//
// A workgroup of LANES per row; a lane takes eight columns at a time, 16 bytes of the result. Rows that are scaled are
// read from global memory twice, once for their largest magnitude; shared memory holds that reduction only.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "formats.glsl"
#include "gpu_rows.glsl"

layout(constant_id = 0) const uint ORDER = 4u;
layout(constant_id = 1) const uint LANES = 256u;
layout(constant_id = 2) const uint DTYPE = 2u;    // of x
layout(constant_id = 3) const uint ALIGNED = 1u;  // whether eights of columns lie side by side at multiples of 16 bytes
layout(constant_id = 4) const uint TERMS = 1u;    // rows whose sum is x, one or two: the second holds the rest
// 1: in the order of coop_fragments, where four lanes share a block; 2: in that of two groups that share a block.
layout(constant_id = 5) const uint QUADS = 0u;
layout(local_size_x_id = 1) in;

layout(push_constant) uniform Push {
    uint m, k, pitch, group, padded, columns;
    uint summed, group_columns, groups;  // whether sums are wanted, and of how many padded columns each
    uint tile;                           // rows of a tile of sixteen columns, in which the result comes; 0: plain rows
};

layout(set = 0, binding = 1) writeonly buffer Halves { uvec4 halves[]; };  // [TERMS M][columns / 8], or [][][tile][2]
layout(set = 0, binding = 1) writeonly buffer Words { uint words[]; };
layout(set = 0, binding = 2) writeonly buffer Scales { float scales[]; };  // [M]
layout(set = 0, binding = 2) writeonly buffer Plain { vec4 plain[]; };     // the same, padded to fours; [M][columns / 4]
layout(set = 0, binding = 3) writeonly buffer Sums { float sums[]; };      // [M][groups]

// Octaves from the mean of a row to its largest magnitude that halves can hold. Two terms hold all of their 22 bits up to
// 28 octaves below the largest, the one of bfloat16 all of its 8 up to 32; what is left are at least the leading bits of
// the others.
const uint REACH = TERMS > 1u ? 22u : 26u;

shared uint largest[LANES];
shared uvec2 octaves[LANES];  // the sum of the exponents of numbers other than 0, and their count

float value[8];

// Eight columns as float32 in `value`: as vectors if they are aligned and exist, else one by one.
void read_eight(uint row, uint first) {
    if (ALIGNED == 0u || first + 8u > k) {
        [[unroll]] for (uint i = 0u; i < 8u; ++i)
            value[i] = fetch_padded(row, first + i, k, pitch, group, padded, DTYPE);
    } else if (DTYPE == F32) {
        uint at = (row * pitch + first) / 4u;
        [[unroll]] for (uint i = 0u; i < 8u; ++i) value[i] = uintBitsToFloat(source4[at + i / 4u][i % 4u]);
    } else {
        uvec4 words = source4[(row * pitch + first) / 8u];
        [[unroll]] for (uint i = 0u; i < 8u; ++i) value[i] = unpack_pair(words[i / 2u], DTYPE)[i % 2u];
    }
}

// 2^15 (for float32 2^14, since rounding may carry into the next) over the power of two at or below the largest magnitude
// of the row; 1 for a row of zeros; 0 for one that halves cannot hold.
float row_unit(uint row, uint lane) {
    uint most = 0u;
    uvec2 all = uvec2(0u);
    for (uint c = lane * 8u; c < columns; c += LANES * 8u) {
        read_eight(row, c);
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            uint bits = floatBitsToUint(value[i]) & 0x7fffffffu;
            most = max(most, bits);
            all += bits < 0x00800000u ? uvec2(0u) : uvec2(bits >> 23, 1u);
        }
    }
    // A tree over the lanes; bits of magnitudes have the order of the numbers. Every round ends with a barrier.
    largest[lane] = most;
    octaves[lane] = all;
    barrier();
    for (uint reach = LANES / 2u; reach > 0u; reach /= 2u) {
        if (lane < reach) {
            largest[lane] = max(largest[lane], largest[lane + reach]);
            octaves[lane] += octaves[lane + reach];
        }
        barrier();
    }
    uint mean = octaves[0].x / max(octaves[0].y, 1u);
    if (largest[0] < 0x7f800000u && largest[0] >> 23 > mean + REACH) return 0.0;
    most = min(largest[0], 0x7f000000u);
    return most < 0x00800000u ? 1.0 : uintBitsToFloat(min((DTYPE == F32 ? 268u : 269u) - (most >> 23), 230u) << 23);
}

// The value of float16's bits, whatever the device does with subnormal numbers.
float half_value(uint bits) {
    float small = float(bits & 0x3ffu) * 5.9604644775390625e-8;
    return (bits & 0x7c00u) != 0u ? unpackHalf2x16(bits).x : (bits & 0x8000u) != 0u ? -small : small;
}

// The value rounded to float16, as bits. The remainder is exact in float32 and so is its product with 2^11, which
// brings it into the next term's range; of Inf and NaN nothing remains.
uint take(uint i) {
    uint bits = half_bits(value[i]);
    if (TERMS > 1u) value[i] = (bits & 0x7c00u) == 0x7c00u ? 0.0 : (value[i] - half_value(bits)) * 2048.0;
    return bits;
}

// Two values as the halves of a word.
uint pair(uint a, uint b) {
    return take(a) | take(b) << 16;
}

// The vector of eight columns from c on in the result: plain rows, or tiles of `tile` rows by sixteen columns, each of
// which is contiguous.
uint place(uint row, uint c) {
    if (tile == 0u) return (row * columns + c) / 8u;
    return ((row / tile * (columns / 16u) + c / 16u) * tile + row % tile) * 2u + c / 8u % 2u;
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (row >= m) return;  // the whole workgroup, so that no barrier waits for it
    uint lane = gl_LocalInvocationIndex;
    // 1. The row's power of two: a first pass over the row, which float16 does not need.
    float unit = DTYPE == F16 ? 1.0 : row_unit(row, lane);
    // 2. Scale, split into TERMS halves and store, eight columns at a time.
    for (uint c = lane * 8u; c < columns; c += LANES * 8u) {
        read_eight(row, c);
        if (DTYPE != F16 && unit == 0.0) {
            uint at = (m + 3u + row * columns + c) / 4u;
            plain[at] = vec4(value[0], value[1], value[2], value[3]);
            plain[at + 1u] = vec4(value[4], value[5], value[6], value[7]);
        }
        [[unroll]] for (uint i = 0u; i < 8u; ++i) value[i] *= unit;
        [[unroll]] for (uint t = 0u; t < TERMS; ++t) {
            uvec4 order;
            if (ORDER == 16u) order = uvec4(pair(0u, 4u), pair(1u, 5u), pair(2u, 6u), pair(3u, 7u));
            else order = uvec4(pair(0u, 2u), pair(4u, 6u), pair(1u, 3u), pair(5u, 7u));
            if (ORDER == 8u) order = order.xzyw;
            if (QUADS == 0u) {
                halves[place(t * m + row, c)] = order;
            } else if (QUADS == 1u) {  // the words of four adjacent vectors, transposed
                uint at = ((t * m + row) * columns + (c & ~31u)) / 2u + c / 8u % 4u;
                [[unroll]] for (uint i = 0u; i < 4u; ++i) words[at + i * 4u] = order[i];
            } else {  // of two adjacent vectors: words 0 and 1 go to lanes 0 and 1, words 2 and 3 to lanes 2 and 3
                uint at = ((t * m + row) * columns + (c & ~15u)) / 2u + c / 8u % 2u;
                [[unroll]] for (uint i = 0u; i < 4u; ++i) words[at + i % 2u * 4u + i / 2u * 2u] = order[i];
            }
        }
    }
    // 3. What a row of the result has to be multiplied by.
    if (lane == 0u) scales[row] = unit > 0.0 ? 1.0 / unit : -1.0;
    // 4. Float zero points of weights multiply the sums of x.
    if (summed == 0u) return;
    for (uint g = lane; g < groups; g += LANES) {
        float sum = 0.0;
        for (uint c = 0u; c < group_columns; ++c)
            sum += fetch_padded(row, g * group_columns + c, k, pitch, group, padded, DTYPE);
        sums[row * groups + g] = sum;
    }
}
