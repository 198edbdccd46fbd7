// GEMM by integer dot products for GPUs: y = x W^T, int8 activations, int8 or int4 weights.
//
// A workgroup computes BM x BN results, an invocation TM x TN of them, strided by the shape of the workgroup so that
// neighbours read different banks. Grid: x tiles of rows, y tiles of columns; each workgroup covers all of K. With
// EXPERTS a tile has rows of one expert.
//
// Memory: each step loads KB blocks of both operands from global memory to registers and writes them as signed bytes to
// one of two buffers in shared memory while the other is multiplied.
//
// Exactness: sums are int32 over a group, which `layout.LONGEST` keeps short enough for every zero point correction;
// each group is scaled in float32 once.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#include "dot.glsl"
#include "formats.glsl"
#include "gpu_result.glsl"

layout(constant_id = 0) const uint LANES = 256u;
layout(constant_id = 1) const uint BM = 128u;
layout(constant_id = 2) const uint BN = 128u;
layout(constant_id = 3) const uint KB = 1u;  // blocks of 32 columns in a tile
layout(constant_id = 4) const uint TM = 8u;
layout(constant_id = 5) const uint TN = 8u;
layout(constant_id = 6) const uint BITS = 4u;
layout(constant_id = 7) const uint ZERO = 0u;  // 0 none (int4: 8), 1 integer, 2 float
layout(constant_id = 8) const uint GROUPED = 1u;
layout(constant_id = 9) const uint EXPERTS = 0u;  // whether rows are sorted by expert
layout(constant_id = 10) const uint HALVED = 0u;  // whether two groups share a block
layout(local_size_x_id = 0) in;

const uint P = BITS / 4u;
const uint ROW = KB * 2u + 1u;  // uvec4 from one row of a tile to the next: 16 codes each, one spare against conflicts
const uint A_LOADS = (BM * KB * 2u + LANES - 1u) / LANES;
const uint B_LOADS = (BN * KB * P + LANES - 1u) / LANES;
const uint ZEROS = 1u + HALVED;  // of a block
const uint LX = BN / TN;  // lanes along n
const uint LY = BM / TM;
// Whether zero points do not go into the codes. A macro: glslc 2023 cannot order such a constant.
#define SUMMED (ZERO == 2u || (ZERO == 1u && BITS == 8u))

layout(push_constant) uniform Push {
    uint m, n, np, blocks, group_steps;  // blocks of 32 columns of a row; steps of 16 columns of a group
    uint pitch, dtype, biased, column, groups;
    uint asymmetric, x_zero, x_sums;  // whether x has zero points; their place and the sums' in x_token
    uint expert_first, expert_count, expert_total, expert_row;  // see experts.glsl
};

layout(set = 0, binding = 0) readonly buffer X { uvec4 x[]; };             // [M][blocks * 2]
layout(set = 0, binding = 1) readonly buffer W { uvec4 w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };     // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };        // [G][NP]
layout(set = 0, binding = 4) readonly buffer XToken { uint x_token[]; };   // scales [M], zero points [M], sums [M][G]
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7) readonly buffer RowSum { float row_sum[]; };  // [NP] of the dequantized weight

#include "gpu_experts.glsl"

shared uvec4 a_tile[2u * BM * ROW];  // [buffer][row][16 columns]
shared uvec4 b_tile[2u * BN * ROW];

// The next step's operands in registers.
uvec4 a_next[A_LOADS];
uvec4 b_next[B_LOADS];
uint zero_next[B_LOADS * ZEROS];

// Unit i of the weight's tile in the order of memory: (eight rows, block, vector, row), the row innermost, so that
// lanes read contiguous vectors.
void b_place(uint i, out uint row, out uint block, out uint part) {
    row = (i & 7u) + i / (8u * P * KB) * 8u;
    part = i / 8u % P;
    block = i / (8u * P) % KB;
}

// Global memory to registers. Rows and columns beyond the last read the last again; `main` skips their products, or
// their results are not written.
void load_tiles(uint row0, uint col0, uint step) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uint row = min(row0 + t / (KB * 2u), tile.end - 1u);
        a_next[i] = x[row * blocks * 2u + min(step * KB * 2u + t % (KB * 2u), blocks * 2u - 1u)];
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint row, block, part;
        b_place(gl_LocalInvocationIndex + i * LANES, row, block, part);
        uint n_ = weight_row(col0 + row);
        block = min(step * KB + block, blocks - 1u);
        b_next[i] = w[((n_ >> 3) * blocks + block) * P * 8u + part * 8u + (n_ & 7u)];
        if (ZERO == 1u && BITS == 4u) {
            uint group = HALVED != 0u ? block * 2u : block * 2u / group_steps;
            [[unroll]] for (uint h = 0u; h < ZEROS; ++h) zero_next[i * ZEROS + h] = zero[(group + h) * np + n_];
        }
    }
}

// Bytes 0..15 less z (0..15) as signed bytes; with 0x80 in each, no byte borrows from the next.
uvec4 less4(uvec4 v, uint z) {
    return (v + (0x80u - z) * 0x01010101u) ^ 0x80808080u;
}

// Registers to shared memory. An int4 vector becomes two of bytes, in the order of k and less its zero point.
void store_tiles(uint buffer_) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        if (BM * KB * 2u % LANES == 0u || t < BM * KB * 2u)
            a_tile[buffer_ * BM * ROW + t / (KB * 2u) * ROW + t % (KB * 2u)] = a_next[i];
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uint row, block, part;
        b_place(t, row, block, part);
        uint z = ZERO == 1u ? zero_next[i * ZEROS] : 8u;
        uint z2 = ZERO == 1u ? zero_next[i * ZEROS + HALVED] : 8u;
        uint at = buffer_ * BN * ROW + row * ROW + block * 2u;
        if (BN * KB * P % LANES == 0u || t < BN * KB * P) {
            if (BITS == 4u) {
                uvec4 low = b_next[i] & 0x0F0F0F0Fu;
                uvec4 high = (b_next[i] >> 4) & 0x0F0F0F0Fu;
                b_tile[at] = less4(uvec4(low.x, high.x, low.y, high.y), z);
                b_tile[at + 1u] = less4(uvec4(low.z, high.z, low.w, high.w), z2);
            } else {
                b_tile[at + part] = b_next[i];
            }
        }
    }
}

int sum[TM * TN];
float total[TM * TN];

// 16 columns: TN vectors of the weight stay in registers, those of x pass one by one.
void multiply(uint a_at, uint b_at) {
    uvec4 b[TN];
    [[unroll]] for (uint j = 0u; j < TN; ++j) b[j] = b_tile[b_at + j * LX * ROW];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        uvec4 a = a_tile[a_at + i * LY * ROW];
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            int d = sum[i * TN + j];
            d += dot_bytes(a.x, b[j].x);
            d += dot_bytes(a.y, b[j].y);
            d += dot_bytes(a.z, b[j].z);
            sum[i * TN + j] = d + dot_bytes(a.w, b[j].w);
        }
    }
}

// The sums of a group become float32: s (sum - z * sum of x), or s * sum + z * sum of x.
void scale_group(uint row0, uint col0, uint group) {
    int x_sum[TM];
    [[unroll]] for (uint i = 0u; i < TM; ++i)
        x_sum[i] = SUMMED ? int(x_token[x_sums + min(row0 + i * LY, tile.end - 1u) * groups + group]) : 0;
    [[unroll]] for (uint j = 0u; j < TN; ++j) {
        uint at = group * np + weight_row(col0 + j * LX);
        float s = scale[at];
        uint z = SUMMED ? zero[at] : 0u;
        [[unroll]] for (uint i = 0u; i < TM; ++i) {
            int d = sum[i * TN + j];
            if (ZERO == 1u && SUMMED) d -= int(z) * x_sum[i];
            float value = s * float(d);
            if (ZERO == 2u) value += uintBitsToFloat(z) * float(x_sum[i]);
            total[i * TN + j] = GROUPED != 0u ? total[i * TN + j] + value : value;
            sum[i * TN + j] = 0;
        }
    }
}

// Zero point and scale of the row of x, then the bias.
float finish(uint m_, uint n_, float value) {
    if (asymmetric != 0u) value -= float(int(x_token[x_zero + m_])) * row_sum[weight_first + n_];
    return value * uintBitsToFloat(x_token[m_]) + bias_of(n_);
}

void main() {
    uint col0 = gl_WorkGroupID.y * BN;
    if (!begin_tile(gl_WorkGroupID.x, BM, col0, BN, LANES)) return;
    uint row0 = tile.first;
    uint lx = gl_LocalInvocationIndex % LX;
    uint ly = gl_LocalInvocationIndex / LX;
    uint steps = (blocks + KB - 1u) / KB;
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) {
        sum[i] = 0;
        total[i] = 0.0;
    }
    // 1. The first tile fills buffer 0; nothing overlaps with it.
    load_tiles(row0, col0, 0u);
    store_tiles(0u);
    barrier();
    uint left = group_steps / 2u;  // blocks until the group ends; without a meaning if HALVED
    uint group = 0u;
    for (uint step = 0u; step < steps; ++step) {
        // 2. Begin to load the next step's tile: it is in flight to registers during the products of this one.
        uint now = step & 1u;
        if (step + 1u < steps) load_tiles(row0, col0, step + 1u);
        // 3. Products of this step, block by block; a group that ends, in a block or at its end, is scaled at once.
        [[unroll]] for (uint kk = 0u; kk < KB; ++kk) {
            if (KB == 1u || step * KB + kk < blocks) {
                uint a_at = (now * BM + ly) * ROW + kk * 2u, b_at = (now * BN + lx) * ROW + kk * 2u;
                multiply(a_at, b_at);
                if (HALVED != 0u) scale_group(row0 + ly, col0 + lx, group++);
                multiply(a_at + 1u, b_at + 1u);
                if (HALVED != 0u) {
                    scale_group(row0 + ly, col0 + lx, group++);
                } else if (GROUPED != 0u && --left == 0u) {
                    scale_group(row0 + ly, col0 + lx, group++);
                    left = group_steps / 2u;
                }
            }
        }
        // 4. Only now use the registers that step 2 loads: this is where the loads are waited for. The tile goes to the
        //    buffer that the step before has read, and the barrier at that step's end has let everybody finish: one
        //    barrier a step.
        if (step + 1u < steps) store_tiles(now ^ 1u);
        barrier();
    }
    // 5. One group is all of K and is scaled here; then the results, from registers.
    if (GROUPED == 0u) scale_group(row0 + ly, col0 + lx, 0u);
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            uint m_ = row0 + ly + i * LY;
            uint n_ = col0 + lx + j * LX;
            if (m_ < tile.end && n_ < n) write_result(m_ * pitch + column + n_, finish(m_, n_, total[i * TN + j]), dtype);
        }
    }
}
