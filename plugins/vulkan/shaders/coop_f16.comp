// GEMM with cooperative matrices of float16: y = x W^T, float activations, int4 or int8 weights, or codes of a table
// whose values, times 2^SHIFT, are float16 numbers, or (of four bits) sums of two, see coop_fragments.
//
// A workgroup computes BM x BN results, a subgroup WM x WN of them in matrices of TM x TN. Grid: x tiles of rows, y
// tiles of columns, z parts of K, which gemm_join adds up.
//
// Memory: each step loads KB blocks of both operands from global memory to registers and writes them to shared memory,
// where codes arrive as float16. Matrices are loaded from there. Within eight columns the order of k is coop_prep's for
// both operands, so sums are unaffected.
//
// Accuracy: codes less zero point are whole numbers that float16 holds exactly, x is float16 or the sum of two float16
// matrices, the second of which counts 2^-11 (see coop_prep): the weight is unpacked once, multiplied with the first,
// divided by 2^11, which is exact, and multiplied with the second. Products are summed in float32 per group (if rows
// have one scale, per 256 columns: matrix units round long sums badly); each sum is scaled afterwards by a matrix that
// repeats the scales in every row.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#include "coop_codes.glsl"
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
layout(constant_id = 11) const uint TK = 16u;
layout(constant_id = 12) const uint REPEAT = 1u;   // rows of scales in shared memory: TM, or 1 read with stride 0
layout(constant_id = 13) const uint TERMS = 1u;    // float16 matrices whose sum is x, one or two
layout(constant_id = 14) const uint VALUES = 0u;   // of a table that codes index, 16 or 256; 0: they are integers
layout(constant_id = 15) const uint W_TERMS = 1u;  // float16 matrices whose sum is the weight, one or two
layout(constant_id = 16) const uint SHIFT = 0u;
layout(constant_id = 17) const uint HALVED = 0u;  // whether two groups share a block; TK divides 16 then
layout(local_size_x_id = 0) in;

const uint P = BITS / 4u;
const uint ROW = KB * 4u + 1u;  // uvec4 from one row of a tile to the next: 8 halves each, one spare against conflicts
const uint AM = TERMS * BM;  // rows of the tile of x: those of the first term, those of the second
const uint A_LOADS = (AM * KB * 4u + LANES - 1u) / LANES;
const uint B_LOADS = (BN * KB * 2u * P + LANES - 1u) / LANES;  // of uvec2: 16 or 8 codes
const uint SC = BN + 4u;
const uint GROUPS = HALVED != 0u ? 2u * KB : 1u;  // whose scales are in use at a time

layout(push_constant) uniform Push {
    uint m, n, np, blocks, group_steps;  // blocks of 32 columns of a row; steps of 16 columns of a group
    uint pitch, dtype, biased, column, groups;
    uint split;  // steps along K of a workgroup; those of grid z add to one result
};

layout(set = 0, binding = 0) readonly buffer X { uvec4 x[]; };          // [TERMS][M][blocks * 4]
layout(set = 0, binding = 1) readonly buffer W { uvec2 w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };  // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };     // [G][NP]
layout(set = 0, binding = 4) readonly buffer XScale { float x_scale[]; };  // [M], see plain_rows.glsl
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7) readonly buffer XSums { float x_sum[]; };  // [M][G]
layout(set = 0, binding = 8) readonly buffer Table { float table[]; };  // [VALUES], if there is one

#include "coop_tables.glsl"
#include "plain_rows.glsl"

const uint A_TILE = AM * ROW;
const uint RESULTS = (BM / WM) * (BN / WN) * TM * TN / 4u;  // a matrix per subgroup, in the memory of a_tile

shared uvec4 a_tile[A_TILE > RESULTS ? A_TILE : RESULTS];  // [row]; after the last step results
shared uvec4 b_tile[W_TERMS * BN * ROW];                   // [term][column of the result]
shared float scale_tile[GROUPED * 2u * GROUPS * REPEAT * SC + 1u];  // twice: those in use, those for the next

uvec4 a_next[A_LOADS];
uvec2 b_next[B_LOADS];
float zero_next[B_LOADS];

// Unit i of the weight's tile in the order of memory: (eight rows, block, vector, row, half of the vector), the half
// innermost, so that lanes read contiguous words.
void b_place(uint i, out uint row, out uint block, out uint half_) {
    half_ = i & (2u * P - 1u);
    row = (i / (2u * P)) & 7u;
    block = i / (16u * P) % KB;
    row += i / (16u * P * KB) * 8u;
}

// Global memory to registers. Rows and columns beyond the last read the last again; their results are not written.
void load_tiles(uint row0, uint col0, uint step) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uint r = t / (KB * 4u);
        uint row = min(row0 + r % BM, m - 1u) + (TERMS == 1u ? 0u : min(r / BM, TERMS - 1u) * m);
        a_next[i] = x[row * blocks * 4u + step * KB * 4u + t % (KB * 4u)];
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint row, block, half_;
        b_place(gl_LocalInvocationIndex + i * LANES, row, block, half_);
        uint n_ = min(col0 + row, np - 1u);
        uint at = ((n_ >> 3) * blocks + step * KB + block) * P * 8u + (half_ >> 1) * 8u + (n_ & 7u);
        b_next[i] = w[at * 2u + (half_ & 1u)];
        uint group = HALVED != 0u ? (step * KB + block) * 2u + half_ / P : step * KB * 2u / group_steps;
        if (ZERO == 1u) zero_next[i] = float(int(zero[group * np + n_]));
    }
}

// Registers to shared memory: codes less their zero point as float16.
void store_tiles() {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        if (AM * KB * 4u % LANES == 0u || t < AM * KB * 4u)
            a_tile[t / (KB * 4u) * ROW + t % (KB * 4u)] = a_next[i];
    }
    [[unroll]] for (uint i = 0u; i < B_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uint row, block, half_;
        b_place(t, row, block, half_);
        float16_t z = ZERO == 1u ? float16_t(zero_next[i]) : float16_t(BITS == 4u ? 8.0 : 0.0);
        uint at = row * ROW + block * 4u;
        if (BN * KB * 2u * P % LANES == 0u || t < BN * KB * 2u * P) {
            uvec2 v = b_next[i];
            if (VALUES == 16u) {
                [[unroll]] for (uint term = 0u; term < W_TERMS; ++term) {
                    b_tile[term * BN * ROW + at + half_ * 2u] = eight_of_table(v.x, term);
                    b_tile[term * BN * ROW + at + half_ * 2u + 1u] = eight_of_table(v.y, term);
                }
            } else if (VALUES != 0u) {
                b_tile[at + half_] = uvec4(four_of_table(v.x), four_of_table(v.y));
            } else if (BITS == 4u) {
                b_tile[at + half_ * 2u] = halves_of_4(v.x, z);
                b_tile[at + half_ * 2u + 1u] = halves_of_4(v.y, z);
            } else {
                b_tile[at + half_] = uvec4(halves_of_8(v.x, z), halves_of_8(v.y, z));
            }
        }
    }
}

// The scales of GROUPS groups, number `turn` of K, for the workgroup's columns, into the half of scale_tile that the
// turn before does not use.
void store_scales(uint col0, uint turn) {
    [[unroll]] for (uint g = 0u; g < GROUPS; ++g) {
        uint at = ((turn & 1u) * GROUPS + g) * REPEAT * SC;
        [[unroll]] for (uint t = gl_LocalInvocationIndex; t < BN; t += LANES) {
            float s = scale[(turn * GROUPS + g) * np + min(col0 + t, np - 1u)];
            [[unroll]] for (uint r = 0u; r < REPEAT; ++r) scale_tile[at + r * SC + t] = s;
        }
    }
}

#include "coop_result.glsl"

float result(uint at) {
    return uintBitsToFloat(a_tile[at / 4u][at % 4u]);
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
        if (m_ < m && n_ < n && x_scale[m_] >= 0.0) write_result(to, finish(GROUPED != 0u, m_, n_, result(at + e)), dtype);
    }
    subgroupMemoryBarrierShared();
    subgroupBarrier();
}

#define TILE(t) (t < TILES_M * TILES_N ? t : 0u)
#define ROW_MAJOR gl_CooperativeMatrixLayoutRowMajor
#define EACH_TILE(t)                                                                  \
    if (t < TILES_M * TILES_N) {                                                      \
        coopMatStore(total[TILE(t)], a_tile, sub * TM * TN / 4u, TN / 4u, ROW_MAJOR); \
        write_tile(row0 + sub_m + t / TILES_N * TM, col0 + sub_n + t % TILES_N * TN); \
    }

const uint TILES_M = WM / TM;
const uint TILES_N = WN / TN;

// A group ends: its sums, times a matrix with a column's scale in every row, join the total. `number`: of those in use.
#define ADD_UP(number)                                                                                               \
    [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {                                                                 \
        coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> s;                                         \
        if (GROUPED != 0u)                                                                                           \
            coopMatLoad(s, scale_tile, ((turn & 1u) * GROUPS + (number)) * REPEAT * SC + sub_n + j * TN,             \
                        REPEAT == 1u ? 0u : SC, gl_CooperativeMatrixLayoutRowMajor);                                 \
        [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {                                                             \
            if (GROUPED != 0u) sum[i * TILES_N + j] = sum[i * TILES_N + j] * s;                                      \
            total[i * TILES_N + j] = total[i * TILES_N + j] + sum[i * TILES_N + j];                                  \
            sum[i * TILES_N + j] = coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0.0);           \
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

    // 1. Sums of the subgroup's tile stay in registers until the end: `sum` of the group, or the 256 columns, in
    //    progress; `total` of those that are complete.
    coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> total[TILES_M * TILES_N];
    coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> sum[TILES_M * TILES_N];
    [[unroll]] for (uint i = 0u; i < TILES_M * TILES_N; ++i) {
        total[i] = coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0.0);
        sum[i] = coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0.0);
    }
    // 2. The first tiles and scales, and the table; nothing overlaps with them.
    uint turn = HALVED != 0u ? start : start * KB * 2u / group_steps;
    load_tiles(row0, col0, start);
    if (VALUES != 0u) {
        store_table();
        barrier();
    }
    store_tiles();
    if (GROUPED != 0u) store_scales(col0, turn);
    barrier();
    // Steps until sums are added to the total: those of a group, or of 256 columns.
    uint fold = HALVED != 0u ? 1u : (GROUPED != 0u ? group_steps / 2u : 8u) / KB;
    uint left = fold;
    for (uint step = start; step < steps; ++step) {
        // 3. Begin to load the next step's tiles: they are in flight to registers during the products of this one.
        if (step + 1u < steps) load_tiles(row0, col0, step + 1u);
        [[unroll]] for (uint kk = 0u; kk < KB * 32u / TK; ++kk) {
            // 4. Products of this step, from shared memory. B stays in registers for all rows of the subgroup's tile, A
            //    passes matrix by matrix. A row of b_tile is a column of B: column major.
            coopmat<float16_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB> b[TILES_N];
            coopmat<float16_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB> rest[W_TERMS > 1u ? TILES_N : 1u];
            [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {
                uint at = (sub_n + j * TN) * ROW + kk * TK / 8u;
                coopMatLoad(b[j], b_tile, at, ROW, gl_CooperativeMatrixLayoutColumnMajor);
                if (W_TERMS > 1u)
                    coopMatLoad(rest[REST(j)], b_tile, BN * ROW + at, ROW, gl_CooperativeMatrixLayoutColumnMajor);
            }
            [[unroll]] for (uint term = 0u; term < TERMS; ++term) {
                if (term > 0u) {
                    [[unroll]] for (uint j = 0u; j < TILES_N; ++j) b[j] = b[j] * float16_t(0.00048828125);
                }
                [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {
                    coopmat<float16_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA> a;
                    coopMatLoad(a, a_tile, (term * BM + sub_m + i * TM) * ROW + kk * TK / 8u, ROW,
                                gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {
                        sum[i * TILES_N + j] = coopMatMulAdd(a, b[j], sum[i * TILES_N + j]);
                        if (W_TERMS > 1u && term == 0u)
                            sum[i * TILES_N + j] = coopMatMulAdd(a, rest[REST(j)], sum[i * TILES_N + j]);
                    }
                }
            }
            if (HALVED != 0u && (kk + 1u) * TK % 16u == 0u) ADD_UP(kk * TK / 16u)
        }
        if (--left == 0u || step + 1u == steps) {
            // 5. The next group's scales go to the other half of scale_tile; the barrier of step 6 makes them visible.
            if (HALVED == 0u) ADD_UP(0u)
            left = fold;
            ++turn;
            if (GROUPED != 0u && step + 1u < steps) store_scales(col0, turn);
        }
        // 6. Everybody has finished this step. Only now use the registers that step 3 loads: this is where the loads
        //    are waited for.
        barrier();
        if (step + 1u < steps) store_tiles();
        barrier();
    }
    // 7. Whether there are plain rows, in the memory of b_tile, which the last barrier has freed.
    if (gl_LocalInvocationIndex == 0u) b_tile[0].x = 0u;
    barrier();
    for (uint t = gl_LocalInvocationIndex; t < BM; t += LANES) {
        if (x_scale[min(row0 + t, m - 1u)] < 0.0) b_tile[0].x = 1u;
    }
    // 8. Results, through a_tile, which is free as well. By literal numbers: a driver that does not unroll a
    //    loop here would keep the matrices in memory all along.
    EACH_TILE(0) EACH_TILE(1) EACH_TILE(2) EACH_TILE(3) EACH_TILE(4) EACH_TILE(5) EACH_TILE(6) EACH_TILE(7)
    EACH_TILE(8) EACH_TILE(9) EACH_TILE(10) EACH_TILE(11) EACH_TILE(12) EACH_TILE(13) EACH_TILE(14) EACH_TILE(15)
    // 9. Plain rows, if there are any, a lane per result. The part z = 0 adds the bias, as there is none of several.
    barrier();
    if (b_tile[0].x == 0u) return;
    for (uint t = gl_LocalInvocationIndex; t < BM * BN; t += LANES) {
        uint m_ = row0 + t / BN;
        uint n_ = col0 + t % BN;
        if (m_ >= m || n_ >= n || x_scale[m_] >= 0.0) continue;
        float value = plain_product(m_, blocks * 8u, n_, start * KB, steps * KB);
        if (biased != 0u) value += bias[column + n_];
        write_result((gl_WorkGroupID.z * m + m_) * pitch + column + n_, value, dtype);
    }
}
