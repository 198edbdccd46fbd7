// GEMM with cooperative matrices of int8: y = x W^T, int8 activations, int8 or int4 weights.
//
// A workgroup computes BM x BN results, a subgroup WM x WN of them in matrices of TM x TN. Grid: x tiles of rows, y
// tiles of columns, z parts of K, which gemm_join adds up.
//
// Memory: each step loads KB blocks of both operands from global memory to registers and writes them to shared memory,
// where int4 codes arrive as bytes less their zero point. Matrices are loaded from there. A step has no branches: the
// last loads its own tiles again.
//
// Exactness: sums are int32 over a step (or all of K if a row has one scale), which `layout.LONGEST` keeps short
// enough; each step of a group is scaled in float32 by a matrix that repeats the scales in every row. If groups share
// blocks (HALVED), each 16 columns are: matrices of 32 take 16 codes of the weight and 16 zeros, which meet what x has
// next. An int8 code less an integer zero point does not fit a byte: gemm_int_shared computes those.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#include "formats.glsl"
#include "gpu_result.glsl"

layout(constant_id = 0) const uint LANES = 256u;
layout(constant_id = 1) const uint BM = 128u;
layout(constant_id = 2) const uint BN = 128u;
layout(constant_id = 3) const uint KB = 1u;     // blocks of 32 columns in a tile; divides those of a group
layout(constant_id = 4) const uint WM = 64u;    // tile of a subgroup
layout(constant_id = 5) const uint WN = 32u;
layout(constant_id = 6) const uint BITS = 4u;
layout(constant_id = 7) const uint ZERO = 0u;   // 0 none (int4: 8), 1 integer, 2 float
layout(constant_id = 8) const uint GROUPED = 1u;
layout(constant_id = 9) const uint TM = 16u;    // shape of a cooperative matrix
layout(constant_id = 10) const uint TN = 16u;
layout(constant_id = 11) const uint TK = 32u;
layout(constant_id = 12) const uint REPEAT = 1u;   // rows of scales in shared memory: TM, or 1 read with stride 0
layout(constant_id = 13) const uint HALVED = 0u;   // whether two groups share a block
layout(local_size_x_id = 0) in;

const uint P = BITS / 4u;
const uint ROW = KB * 2u + 1u;  // uvec4 from one row of a tile to the next: 16 codes each, one spare against conflicts
const uint A_LOADS = (BM * KB * 2u + LANES - 1u) / LANES;
const uint B_LOADS = (BN * KB * P + LANES - 1u) / LANES;  // of uvec4: 32 or 16 codes
const uint SC = BN + 4u;
const uint GROUPS = HALVED != 0u ? 2u * KB : 1u;  // of a step
const uint SCALE_LOADS = (BN * GROUPS + LANES - 1u) / LANES;
const uint ZEROS = 1u + HALVED;  // zero points of a block
// Vectors of the weight's tile: from 16 columns to the next, from one matrix to the next, from one row to the next.
const uint GAP = HALVED != 0u ? TK / 16u : 1u;
const uint TAKEN = HALVED != 0u ? 1u : TK / 16u;  // of x, from one matrix to the next
const uint B_ROW = KB * 2u * GAP + 1u;

layout(push_constant) uniform Push {
    uint m, n, np, blocks, group_steps;  // blocks of 32 columns of a row; steps of 16 columns of a group
    uint pitch, dtype, biased, column, groups;
    uint split;                       // steps along K of a workgroup; those of grid z add to one result
    uint asymmetric, x_zero, x_sums;  // whether x has zero points; their place and the sums' in x_token
};

layout(set = 0, binding = 0) readonly buffer X { uvec4 x[]; };             // [M][blocks * 2]
layout(set = 0, binding = 1) readonly buffer W { uvec4 w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };     // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };        // [G][NP]
layout(set = 0, binding = 4) readonly buffer XToken { uint x_token[]; };   // scales [M], zero points [M], sums [M][G]
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7) readonly buffer RowSum { float row_sum[]; };  // [NP] of the dequantized weight

const uint A_TILE = BM * ROW;
const uint RESULTS = (BM / WM) * (BN / WN) * TM * TN / 4u;  // a matrix per subgroup, in the memory of a_tile

shared uvec4 a_tile[A_TILE > RESULTS ? A_TILE : RESULTS];  // [row]; after the last step results
shared uvec4 b_tile[BN * B_ROW];                           // [column of the result]
shared float scale_tile[GROUPED * GROUPS * REPEAT * SC + 1u];  // of the step

uvec4 a_next[A_LOADS];
uvec4 b_next[B_LOADS];
uint zero_next[B_LOADS * ZEROS];
float scale_next[SCALE_LOADS];
uint a_at[A_LOADS], b_at[B_LOADS], zero_at[B_LOADS];

// Unit i of the weight's tile in the order of memory: (eight rows, block, vector, row), the row innermost, so that
// lanes read contiguous vectors.
void b_place(uint i, out uint row, out uint block, out uint part) {
    row = (i & 7u) + i / (8u * P * KB) * 8u;
    part = i / 8u % P;
    block = i / (8u * P) % KB;
}

// Where this lane's parts of both operands begin. Rows and columns beyond the last read the last again; their results
// are not written.
void place(uint row0, uint col0) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        a_at[i] = min(row0 + t / (KB * 2u), m - 1u) * blocks * 2u + t % (KB * 2u);
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint row, block, part;
        b_place(gl_LocalInvocationIndex + i * LANES, row, block, part);
        uint n_ = min(col0 + row, np - 1u);
        b_at[i] = ((n_ >> 3) * blocks + block) * P * 8u + part * 8u + (n_ & 7u);
        zero_at[i] = HALVED * block * 2u * np + n_;
    }
}

// Global memory to registers.
void load_tiles(uint col0, uint step) {
    uint parameters = step * KB * 2u / group_steps * np;
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) a_next[i] = x[a_at[i] + step * KB * 2u];
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        b_next[i] = w[b_at[i] + step * KB * P * 8u];
        if (ZERO != 1u) continue;
        [[unroll]] for (uint h = 0u; h < ZEROS; ++h) zero_next[i * ZEROS + h] = zero[parameters + h * np + zero_at[i]];
    }
    if (GROUPED == 0u) return;
    [[unroll]] for (uint i = 0u; i < SCALE_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        scale_next[i] = scale[parameters + min(t / BN, GROUPS - 1u) * np + min(col0 + t % BN, np - 1u)];
    }
}

// Bytes 0..15 less z (0..15) as signed bytes; with 0x80 in each, no byte borrows from the next.
uvec4 less4(uvec4 v, uint z) {
    return (v + (0x80u - z) * 0x01010101u) ^ 0x80808080u;
}

// Registers to shared memory. An int4 vector becomes two of bytes, in the order of k and less its zero point.
void store_tiles() {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        if (BM * KB * 2u % LANES == 0u || t < BM * KB * 2u) a_tile[t / (KB * 2u) * ROW + t % (KB * 2u)] = a_next[i];
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uint row, block, part;
        b_place(t, row, block, part);
        uint z = ZERO == 1u ? zero_next[i * ZEROS] : 8u;
        uint z2 = ZERO == 1u ? zero_next[i * ZEROS + HALVED] : 8u;
        uint at = row * B_ROW + block * 2u * GAP;
        if (BN * KB * P % LANES == 0u || t < BN * KB * P) {
            if (BITS == 4u) {
                uvec4 low = b_next[i] & 0x0F0F0F0Fu;
                uvec4 high = (b_next[i] >> 4) & 0x0F0F0F0Fu;
                b_tile[at] = less4(uvec4(low.x, high.x, low.y, high.y), z);
                b_tile[at + GAP] = less4(uvec4(low.z, high.z, low.w, high.w), z2);
            } else {
                b_tile[at + part * GAP] = b_next[i];
            }
        }
    }
    if (GROUPED == 0u) return;
    [[unroll]] for (uint i = 0u; i < SCALE_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        [[unroll]] for (uint r = 0u; r < REPEAT; ++r) {
            if (t < BN * GROUPS) scale_tile[(t / BN * REPEAT + r) * SC + t % BN] = scale_next[i];
        }
    }
}

// Scales, zero points and the bias of one result. Parts of K add up in gemm_join: terms that must count once belong to
// the part z = 0.
float finish(uint m_, uint n_, float value) {
    if (GROUPED == 0u) value *= scale[n_];
    if (ZERO == 2u && gl_WorkGroupID.z == 0u) {
        for (uint g = 0u; g < groups; ++g)
            value += uintBitsToFloat(zero[g * np + n_]) * float(int(x_token[x_sums + m_ * groups + g]));
    }
    if (asymmetric != 0u && gl_WorkGroupID.z == 0u) value -= float(int(x_token[x_zero + m_])) * row_sum[n_];
    value *= uintBitsToFloat(x_token[m_]);
    return biased != 0u ? value + bias[column + n_] : value;
}

float result(uint at) {
    uint bits = a_tile[at / 4u][at % 4u];
    return GROUPED != 0u ? uintBitsToFloat(bits) : float(int(bits));
}

// Writes a matrix of results that its subgroup has stored in its own part of a_tile: elements of a cooperative matrix
// cannot be addressed by row and column. No other subgroup is concerned, so subgroup barriers suffice: the first waits
// for the stores, the last for the reads before the next matrix comes.
void write_tile(uint row, uint col) {
    uint at = gl_SubgroupID * TM * TN;
    subgroupMemoryBarrierShared();
    subgroupBarrier();
    for (uint e = gl_SubgroupInvocationID; e < TM * TN; e += gl_SubgroupSize) {
        uint m_ = row + e / TN;
        uint n_ = col + e % TN;
        uint to = (gl_WorkGroupID.z * m + m_) * pitch + column + n_;
        if (m_ < m && n_ < n) write_result(to, finish(m_, n_, result(at + e)), dtype);
    }
    subgroupMemoryBarrierShared();
    subgroupBarrier();
}

#define TILE(t) (t < TILES_M * TILES_N ? t : 0u)
#define ROW_MAJOR gl_CooperativeMatrixLayoutRowMajor
#define EACH_TILE(t)                                                                      \
    if (t < TILES_M * TILES_N) {                                                          \
        if (GROUPED != 0u)                                                                \
            coopMatStore(total[TILE(t)], a_tile, sub * TM * TN / 4u, TN / 4u, ROW_MAJOR); \
        else                                                                              \
            coopMatStore(sum[TILE(t)], a_tile, sub * TM * TN / 4u, TN / 4u, ROW_MAJOR);   \
        write_tile(row0 + sub_m + t / TILES_N * TM, col0 + sub_n + t % TILES_N * TN);     \
    }

const uint TILES_M = WM / TM;
const uint TILES_N = WN / TN;

// int32 sums become float32, times a matrix with a column's scale in every row. `number`: the group of the step.
#define ADD_UP(number)                                                                                               \
    [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {                                                                 \
        coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> s;                                         \
        coopMatLoad(s, scale_tile, (number) * REPEAT * SC + sub_n + j * TN, REPEAT == 1u ? 0u : SC,                  \
                    gl_CooperativeMatrixLayoutRowMajor);                                                             \
        [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {                                                             \
            total[i * TILES_N + j] = total[i * TILES_N + j] +                                                        \
                coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(sum[i * TILES_N + j]) * s;         \
            sum[i * TILES_N + j] = coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0);               \
        }                                                                                                            \
    }

void main() {
    uint col0 = gl_WorkGroupID.y * BN;
    uint row0 = gl_WorkGroupID.x * BM;
    uint sub = gl_SubgroupID;
    uint sub_m = sub / (BN / WN) * WM;
    uint sub_n = sub % (BN / WN) * WN;
    uint start = gl_WorkGroupID.z * split;
    uint steps = min(start + split, blocks / KB);

    // 1. Sums of the subgroup's tile stay in registers until the end: `sum` of the step in progress or, with one
    //    group, of all of K; `total` of the groups that have been scaled.
    coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> total[TILES_M * TILES_N];
    coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> sum[TILES_M * TILES_N];
    [[unroll]] for (uint i = 0u; i < TILES_M * TILES_N; ++i) {
        total[i] = coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0.0);
        sum[i] = coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0);
    }
    // 2. The first tiles and scales, and zeros between the columns of groups; nothing overlaps with them.
    if (GAP > 1u) {
        for (uint t = gl_LocalInvocationIndex; t < BN * B_ROW; t += LANES) b_tile[t] = uvec4(0u);
        barrier();
    }
    place(row0, col0);
    load_tiles(col0, start);
    store_tiles();
    barrier();
    for (uint step = start; step < steps; ++step) {
        // 3. Begin to load the next step's tiles: they are in flight to registers during the products of this one.
        load_tiles(col0, min(step + 1u, steps - 1u));
        [[unroll]] for (uint kk = 0u; kk < KB * 2u / TAKEN; ++kk) {
            // 4. Products of this step, from shared memory. B stays in registers for all rows of the subgroup's tile, A
            //    passes matrix by matrix. A row of b_tile is a column of B: column major.
            coopmat<int8_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB> b[TILES_N];
            [[unroll]] for (uint j = 0u; j < TILES_N; ++j)
                coopMatLoad(b[j], b_tile, (sub_n + j * TN) * B_ROW + kk * TK / 16u, B_ROW,
                            gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {
                coopmat<int8_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA> a;
                coopMatLoad(a, a_tile, (sub_m + i * TM) * ROW + kk * TAKEN, ROW, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint j = 0u; j < TILES_N; ++j)
                    sum[i * TILES_N + j] = coopMatMulAdd(a, b[j], sum[i * TILES_N + j]);
            }
            if (HALVED != 0u) ADD_UP(kk)
        }
        // 5. The step's sums are scaled. A group may end in a later step: that costs less than a branch.
        if (GROUPED != 0u && HALVED == 0u) ADD_UP(0u)
        // 6. Everybody has finished this step. Only now use the registers that step 3 loads: this is where the loads
        //    are waited for.
        barrier();
        store_tiles();
        barrier();
    }
    // 7. Results, through a_tile, which the last barrier has freed. By literal numbers: a driver that does not unroll a
    //    loop here would keep the matrices in memory all along.
    EACH_TILE(0) EACH_TILE(1) EACH_TILE(2) EACH_TILE(3) EACH_TILE(4) EACH_TILE(5) EACH_TILE(6) EACH_TILE(7)
    EACH_TILE(8) EACH_TILE(9) EACH_TILE(10) EACH_TILE(11) EACH_TILE(12) EACH_TILE(13) EACH_TILE(14) EACH_TILE(15)
}
