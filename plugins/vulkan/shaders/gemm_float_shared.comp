// GEMM in float32 for GPUs without matrix units: y = x W^T, float activations, weights of 4 or 8 bits.
//
// A workgroup computes BM x BN results and an invocation TM x TN of them, in runs of four rows and four columns. Grid:
// x tiles of rows, y tiles of columns; each workgroup covers all of K. With EXPERTS a tile has rows of one expert.
//
// Memory: each step loads BK columns of k of both operands from global memory to registers, and writes them to one of
// two buffers in shared memory while the other is multiplied. Weights are dequantized on their way there, as
// (q - z) * s, or v[q] * s of a table, in float32; both tiles are stored by columns of k, so that an invocation reads the TM + TN values of one
// k as vectors of four. Codes less zero points are exact; products are fused multiply-adds in float32.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#include "formats.glsl"
#include "gpu_result.glsl"

layout(constant_id = 0) const uint LANES = 256u;
layout(constant_id = 1) const uint BM = 128u;
layout(constant_id = 2) const uint BN = 128u;
layout(constant_id = 3) const uint TM = 8u;  // multiples of 4
layout(constant_id = 4) const uint TN = 8u;
layout(constant_id = 5) const uint BITS = 4u;
layout(constant_id = 6) const uint ZERO = 0u;  // 0 none (int4: 8), 1 integer, 2 float
layout(constant_id = 7) const uint HALF = 1u;  // 16 columns of k in a tile, else 32
layout(constant_id = 8) const uint EXPERTS = 0u;  // whether rows are sorted by expert
layout(constant_id = 9) const uint VALUES = 0u;   // of a table that codes index; 0: they are integers
layout(local_size_x_id = 0) in;

const uint BK = 32u >> HALF;
const uint P = BITS / 4u;
const uint LX = BN / TN;  // lanes along n
const uint LY = BM / TM;
const uint A_ROW = BM / 4u + 1u;  // vec4 from one k to the next, one spare against bank conflicts
const uint B_ROW = BN / 4u + 1u;
const uint A_LOADS = (BM * BK / 4u + LANES - 1u) / LANES;
const uint B_LOADS = (BN * BK / 8u + LANES - 1u) / LANES;  // units of eight codes

layout(push_constant) uniform Push {
    uint m, n, np, blocks, group_steps;  // blocks of 32 columns of a row; steps of 16 columns of a group
    uint pitch, dtype, biased, column;
    uint stride;  // vec4 from one row of x to the next
    uint expert_first, expert_count, expert_total, expert_row;  // see experts.glsl
};

layout(set = 0, binding = 0) readonly buffer X { vec4 x[]; };           // [M][stride]
layout(set = 0, binding = 1) readonly buffer W { uint w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };  // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };     // [G][NP]
layout(set = 0, binding = 4) readonly buffer Table { float table[]; };
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };

#include "gpu_experts.glsl"

shared vec4 a_tile[2u * BK * A_ROW];  // [buffer][k][row]
shared vec4 b_tile[2u * BK * B_ROW];  // [buffer][k][column]
shared float values[VALUES + 1u];     // of the table

// The next step's operands in registers: fours of columns of x; eights of codes with their scale and zero point.
vec4 a_next[A_LOADS];
uvec2 b_next[B_LOADS];
float scale_next[B_LOADS];
uint zero_next[B_LOADS];

// Global memory to registers. Neighbouring lanes take neighbouring rows of either operand; rows beyond the last read
// the last again, and their results are not written.
void load_tiles(uint row0, uint col0, uint step) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        a_next[i] = x[min(row0 + t % BM, tile.end - 1u) * stride + step * BK / 4u + min(t / BM, BK / 4u - 1u)];
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uint n_ = weight_row(col0 + t % BN);
        uint k8 = step * BK / 8u + min(t / BN, BK / 8u - 1u);  // which eight codes
        uint at = ((n_ >> 3) * blocks + k8 / 4u) * P * 8u;
        // Eight int4 codes are one word of a block's vector, eight int8 codes two words of one of its two vectors.
        if (BITS == 4u) {
            b_next[i].x = w[(at + (n_ & 7u)) * 4u + k8 % 4u];
        } else {
            uint word = (at + (k8 % 4u) / 2u * 8u + (n_ & 7u)) * 4u + k8 % 2u * 2u;
            b_next[i] = uvec2(w[word], w[word + 1u]);
        }
        uint g = k8 / 2u / group_steps * np + n_;
        scale_next[i] = scale[g];
        if (ZERO != 0u) zero_next[i] = zero[g];
    }
}

// The unsigned byte `byte` of v as a float, plus 2^23: its bits below those of 2^23, exact and without a conversion.
float placed(uint v, uint byte) {
    return uintBitsToFloat(bitfieldExtract(v, int(byte * 8u), 8) | 0x4B000000u);
}

// Unit i of registers, eight codes of one column, dequantized into column `at` of eight rows of b_tile.
void store_weights(uint at, uint i) {
    // Codes as unsigned bytes: of int4 the low nibbles are the first four k, of int8 a flipped sign bit adds 128.
    uvec2 bytes = BITS == 4u ? uvec2(b_next[i].x & 0x0F0F0F0Fu, (b_next[i].x >> 4) & 0x0F0F0F0Fu)
                             : VALUES != 0u ? b_next[i] : b_next[i] ^ 0x80808080u;
    float z = ZERO == 1u ? float(int(zero_next[i])) : (BITS == 4u ? 8.0 : 0.0);
    // One exact subtraction takes off 2^23, the 128 of int8 and an integer zero point; the scale then rounds once.
    float less = 8388608.0 + (BITS == 8u ? 128.0 : 0.0) + z;
    float more = ZERO == 2u ? uintBitsToFloat(zero_next[i]) : 0.0;
    [[unroll]] for (uint k = 0u; k < 8u; ++k) {
        uint four = k < 4u ? bytes.x : bytes.y;
        float number = VALUES != 0u ? values[bitfieldExtract(four, int(k % 4u * 8u), 8)] : placed(four, k % 4u) - less;
        float value = number * scale_next[i];
        b_tile[at / 4u + k * B_ROW][at % 4u] = ZERO == 2u ? value + more : value;
    }
}

// Registers to shared memory, transposed; the comparisons vanish if the tile is a multiple of the workgroup.
void store_tiles(uint buffer_) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        if (BM * BK / 4u % LANES == 0u || t < BM * BK / 4u) {
            uint at = (buffer_ * BK + t / BM * 4u) * A_ROW * 4u + t % BM;
            [[unroll]] for (uint k = 0u; k < 4u; ++k) a_tile[at / 4u + k * A_ROW][at % 4u] = a_next[i][k];
        }
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        if (BN * BK / 8u % LANES == 0u || t < BN * BK / 8u)
            store_weights((buffer_ * BK + t / BN * 8u) * B_ROW * 4u + t % BN, i);
    }
}

float total[TM * TN];

// One k: TM + TN values from shared memory to registers, TM * TN products.
void multiply(uint a_at, uint b_at) {
    vec4 a[TM / 4u];
    vec4 b[TN / 4u];
    [[unroll]] for (uint i = 0u; i < TM / 4u; ++i) a[i] = a_tile[a_at + i * LY];
    [[unroll]] for (uint j = 0u; j < TN / 4u; ++j) b[j] = b_tile[b_at + j * LX];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        [[unroll]] for (uint j = 0u; j < TN; ++j)
            total[i * TN + j] = fma(a[i / 4u][i % 4u], b[j / 4u][j % 4u], total[i * TN + j]);
    }
}

void main() {
    uint col0 = gl_WorkGroupID.y * BN;
    if (!begin_tile(gl_WorkGroupID.x, BM, col0, BN, LANES)) return;
    uint row0 = tile.first;
    uint lx = gl_LocalInvocationIndex % LX;
    uint ly = gl_LocalInvocationIndex / LX;
    uint steps = blocks << HALF;
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) total[i] = 0.0;
    // 1. The first tile fills buffer 0; nothing overlaps with it. Codes of a table wait for its values in shared memory.
    load_tiles(row0, col0, 0u);
    if (VALUES != 0u) {
        for (uint t = gl_LocalInvocationIndex; t < VALUES; t += LANES) values[t] = table[t];
        barrier();
    }
    store_tiles(0u);
    barrier();
    for (uint step = 0u; step < steps; ++step) {
        // 2. Begin to load the next step's tile: it is in flight to registers, weights still packed, during the
        //    products of this one.
        uint now = step & 1u;
        if (step + 1u < steps) load_tiles(row0, col0, step + 1u);
        // 3. Products of this step: a value read from shared memory meets TM or TN others.
        [[unroll]] for (uint k = 0u; k < BK; ++k)
            multiply((now * BK + k) * A_ROW + ly, (now * BK + k) * B_ROW + lx);
        // 4. Only now use the registers that step 2 loads: this is where the loads are waited for, and where weights
        //    are dequantized. The tile goes to the buffer that the step before has read, and the barrier at that step's
        //    end has let everybody finish: one barrier a step.
        if (step + 1u < steps) store_tiles(now ^ 1u);
        barrier();
    }
    // 5. Results, from registers.
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            uint m_ = row0 + (i / 4u * LY + ly) * 4u + i % 4u;
            uint n_ = col0 + (j / 4u * LX + lx) * 4u + j % 4u;
            if (m_ < tile.end && n_ < n)
                write_result(m_ * pitch + column + n_, total[i * TN + j] + bias_of(n_), dtype);
        }
    }
}
