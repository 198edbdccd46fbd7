// GEMM with cooperative matrices of float16 whose layout across lanes is known: y = x W^T, float activations, weights of
// four bits: int4, or codes of a table whose values are float16 numbers, or sums of two.
//
// A workgroup computes BM x BN results, a subgroup of 32 lanes WM x WN of them. Grid: x tiles of rows, y tiles of
// columns, z parts of K, which gemm_join adds up.
//
// The weight never passes shared memory: lane (g, q), with g = lane / 4 and q = lane % 4, loads one word, the codes of
// row g of eight rows at k = 8 q ... 8 q + 7 of a block of 32 columns, and unpacks it straight into its own elements
// of the matrices B. coop_layout.comp determines the layout of a device: a lane has the elements of A at rows g and g
// + 8 and k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9; of B the same with columns for rows; of C columns 2 q, 2 q + 1 and 8
// more of rows g and g + 8. What is adjacent in a lane's word is not in the matrix, so coop_prep stores x in the order
// of the lanes (QUADS).
//
// If two groups share a block (HALVED), a matrix has the 16 columns of one: lanes 2 apart, whose words are of different
// groups, exchange halves of them.
//
// Memory: A passes shared memory, STEPS blocks at a time: loaded to registers at the start of a step, stored at its
// end. B is loaded STEPS blocks ahead, scales one fold ahead. A step has no branches, which cost more than they spare:
// what lies past the end of K is loaded again and multiplied by zeros of A.
//
// Accuracy: as coop_f16. Sums of FOLD blocks are scaled and added to the total in float32; FOLD divides the blocks of
// a group and STEPS. Values of a table are multiplied by 2^SHIFT, which brings them into the range of float16; what
// float16 rounds off of them is a second matrix (W_TERMS), which meets the first term of x only: the product with the
// second is 2^-22 of the result.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#include "coop_codes.glsl"
#include "formats.glsl"
#include "gpu_result.glsl"

layout(constant_id = 0) const uint LANES = 256u;
layout(constant_id = 1) const uint BM = 64u;
layout(constant_id = 2) const uint BN = 256u;
layout(constant_id = 3) const uint STEPS = 4u;  // blocks of 32 columns in a step
layout(constant_id = 4) const uint WM = 64u;    // tile of a subgroup
layout(constant_id = 5) const uint WN = 32u;
layout(constant_id = 6) const uint ZERO = 0u;   // 0 none (8), 1 integer, 2 float
layout(constant_id = 7) const uint GROUP = 0u;  // blocks of a group; 0: a row has one scale
layout(constant_id = 8) const uint FOLD = 4u;
layout(constant_id = 9) const uint TERMS = 1u;  // float16 matrices whose sum is x, one or two
layout(constant_id = 10) const uint VALUES = 0u;  // of a table that codes index, 16; 0: they are integers
layout(constant_id = 11) const uint W_TERMS = 1u;  // float16 matrices whose sum is the weight, one or two
layout(constant_id = 12) const uint SHIFT = 0u;
layout(constant_id = 13) const uint HALVED = 0u;  // whether two groups share a block; GROUP and FOLD are 1 then
layout(local_size_x_id = 0) in;

const uint BITS = 4u;
const uint P = 1u;
const uint TILES_M = WM / 16u;
const uint TILES_N = WN / 16u;
const uint EIGHTS = WN / 8u;  // of rows of the weight
const uint SPANS = 1u + HALVED;  // of a block, with scales in common
const uint ROWS = TERMS * BM;

layout(push_constant) uniform Push {
    uint m, n, np, blocks, group_steps;  // blocks of 32 columns of a row; steps of 16 columns of a group
    uint pitch, dtype, biased, column, groups;
    uint split;  // blocks of a workgroup, a multiple of STEPS; those of grid z add to one result
};

layout(set = 0, binding = 0) readonly buffer X { uvec4 x[]; };          // [TERMS][M][blocks * 4]
layout(set = 0, binding = 1) readonly buffer W { uint w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };  // [G][NP]
layout(set = 0, binding = 2) readonly buffer Scale2 { vec2 scale2[]; };
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };     // [G][NP]
layout(set = 0, binding = 4) readonly buffer XScale { float x_scale[]; };  // [M], see plain_rows.glsl
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7) readonly buffer XSums { float x_sum[]; };  // [M][G]
layout(set = 0, binding = 8) readonly buffer Table { float table[]; };  // [VALUES], if there is one

#include "coop_tables.glsl"
#include "plain_rows.glsl"

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>

const uint ROW = STEPS * 4u + 1u;  // uvec4 from one row of A to the next: 8 halves each, one spare against conflicts
const uint LOADS = ROWS * STEPS * 4u / LANES;

shared uvec4 a_tile[2u * ROWS * ROW];  // [of two steps][row]
shared uint any_plain;

uvec4 a_next[LOADS];
uint a_at[LOADS];
uint b_next[STEPS][EIGHTS];
uint b_at[EIGHTS];
vec2 scale_now[SPANS * EIGHTS], scale_next[SPANS * EIGHTS];  // of two adjacent columns of C
float16_t zero_now[SPANS * EIGHTS];
uint zero_next[SPANS * EIGHTS];

// Where this lane's parts of x and of the weight begin. Rows and columns beyond the last read the last again.
void place(uint col0) {
    [[unroll]] for (uint i = 0u; i < LOADS; ++i) {
        uint unit = gl_LocalInvocationIndex + i * LANES;
        uint r = unit / (STEPS * 4u);
        uint row = min(gl_WorkGroupID.x * BM + r % BM, m - 1u) + r / BM * m;
        a_at[i] = row * blocks * 4u + unit % (STEPS * 4u);
    }
    [[unroll]] for (uint j = 0u; j < EIGHTS; ++j)
        b_at[j] = min(col0 / 8u + j, np / 8u - 1u) * blocks * 32u + gl_SubgroupInvocationID;
}

// A step's rows of x: global memory to registers.
void load_a(uint step) {
    [[unroll]] for (uint i = 0u; i < LOADS; ++i) {
        uint within = (gl_LocalInvocationIndex + i * LANES) / 4u % STEPS;
        a_next[i] = x[a_at[i] + (min(step + within, blocks - 1u) - within) * 4u];
    }
}

// Registers to shared memory, zeros for what is past the end.
void store_a(uint buffer_, uint step, uint stop) {
    [[unroll]] for (uint i = 0u; i < LOADS; ++i) {
        uint unit = gl_LocalInvocationIndex + i * LANES;
        uint at = (buffer_ * ROWS + unit / (STEPS * 4u)) * ROW;
        uint vector = unit % (STEPS * 4u);
        a_tile[at + vector] = step + vector / 4u < stop ? a_next[i] : uvec4(0u);
    }
}

void load_b(uint u, uint j, uint block) {
    b_next[u][j] = w[b_at[j] + min(block, blocks - 1u) * 32u];
}

// Scales and zero points of the fold that begins at a block.
void load_group(uint col0, uint block) {
    [[unroll]] for (uint i = 0u; i < SPANS * EIGHTS; ++i) {
        uint group = block / max(GROUP, 1u) * SPANS + i / EIGHTS;
        uint col = (GROUP == 0u ? 0u : min(group, groups - 1u) * np) + min(col0 + i % EIGHTS * 8u, np - 8u);
        if (GROUP != 0u) scale_next[i] = scale2[col / 2u + (gl_SubgroupInvocationID & 3u)];
        if (ZERO == 1u) zero_next[i] = zero[col + gl_SubgroupInvocationID / 4u];
    }
}

void next_group(uint col0, uint block) {
    [[unroll]] for (uint i = 0u; i < SPANS * EIGHTS; ++i) {
        if (GROUP != 0u) scale_now[i] = scale_next[i];
        if (ZERO == 1u) zero_now[i] = float16_t(float(int(zero_next[i])));
    }
    load_group(col0, block + FOLD);
}

// Eight codes less z, or a term of what they stand for, as pairs of halves in the order of coop_prep.
uvec4 unpacked(uint word, float16_t z, uint term) {
    return VALUES == 0u ? halves_of_4(word, z) : eight_of_table(word, term);
}

// The word of this lane, whose first two pairs are of one group and the others of the next, if two share a block: words
// of lanes 0 and 1 of four are of the first group, and these keep their own first two pairs and get those of lanes 2
// and 3, which get and keep the last two.
uint of_both_groups(uint word) {
    const uint FIRST = VALUES == 0u ? 0x00FF00FFu : 0x0000FFFFu;  // the codes of the first two pairs
    const uint APART = VALUES == 0u ? 8u : 16u;                   // bits to those of the last two
    uint other = subgroupShuffleXor(word, 2u);
    bool second = (gl_SubgroupInvocationID & 2u) != 0u;
    return second ? (word & ~FIRST) | ((other >> APART) & FIRST) : (word & FIRST) | ((other & FIRST) << APART);
}

// Two halves of a lane as adjacent elements of its matrix.
#define PUT(matrix, at, word)               \
    {                                       \
        f16vec2 v_ = unpackFloat2x16(word); \
        matrix[(at) * 2u] = v_.x;           \
        matrix[(at) * 2u + 1u] = v_.y;      \
    }

#include "coop_result.glsl"

void main() {
    uint lane = gl_SubgroupInvocationID;
    uint sub_m = gl_SubgroupID / (BN / WN) * WM;
    uint row0 = gl_WorkGroupID.x * BM + sub_m;
    uint col0 = gl_WorkGroupID.y * BN + gl_SubgroupID % (BN / WN) * WN;
    uint start = gl_WorkGroupID.z * split;
    uint stop = min(start + split, blocks);

    // 1. Sums stay in registers until the end: `sum` of the fold in progress, `total` of those that are scaled.
    MATRIX_C total[TILES_M * TILES_N];
    MATRIX_C sum[TILES_M * TILES_N];
    [[unroll]] for (uint i = 0u; i < TILES_M * TILES_N; ++i) {
        total[i] = MATRIX_C(0.0);
        sum[i] = MATRIX_C(0.0);
    }
    // 2. The first step's x, weights and scales, and the table; nothing overlaps with them.
    place(col0);
    load_a(start);
    [[unroll]] for (uint u = 0u; u < STEPS; ++u) {
        [[unroll]] for (uint j = 0u; j < EIGHTS; ++j) load_b(u, j, start + u);
    }
    load_group(col0, start);
    next_group(col0, start);
    store_table();
    store_a(0u, start, stop);
    barrier();
    uint now = 0u;
    for (uint step = start; step < stop; step += STEPS) {
        // 3. Begin to load the next step's x: in flight to registers during all of this step.
        load_a(step + STEPS);
        [[unroll]] for (uint u = 0u; u < STEPS; ++u) {
            // 4. Unpack the block's codes into B; their registers take those of the block STEPS later, in flight since.
            MATRIX_B b[2u * TILES_N];
            MATRIX_B rest[W_TERMS > 1u ? 2u * TILES_N : 1u];
            [[unroll]] for (uint j = 0u; j < EIGHTS; ++j) {
                uint word = b_next[u][j];
                load_b(u, j, step + u + STEPS);
                if (HALVED != 0u) word = of_both_groups(word);
                uvec4 codes = unpacked(word, ZERO == 1u ? zero_now[j] : float16_t(8.0), 0u);
                if (HALVED != 0u && ZERO == 1u) codes.zw = unpacked(word, zero_now[(SPANS - 1u) * EIGHTS + j], 0u).zw;
                [[unroll]] for (uint i = 0u; i < 4u; ++i)
                    PUT(b[i / 2u * TILES_N + j / 2u], j % 2u * 2u + i % 2u, codes[i])
                if (W_TERMS > 1u) {
                    codes = unpacked(word, float16_t(0.0), 1u);
                    [[unroll]] for (uint i = 0u; i < 4u; ++i)
                        PUT(rest[REST(i / 2u * TILES_N + j / 2u)], j % 2u * 2u + i % 2u, codes[i])
                }
            }
            // 5. Products. A comes from shared memory matrix by matrix and meets every B of the block, or of a group.
            [[unroll]] for (uint span = 0u; span < SPANS; ++span) {
                const uint from = span, to = span + 2u / SPANS;  // the matrices along k
                [[unroll]] for (uint term = 0u; term < TERMS; ++term) {
                    if (term > 0u) {
                        [[unroll]] for (uint j = from * TILES_N; j < to * TILES_N; ++j)
                            b[j] = b[j] * float16_t(0.00048828125);
                    }
                    [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {
                        [[unroll]] for (uint k = from; k < to; ++k) {
                            MATRIX_A a;
                            uint at = (now * ROWS + term * BM + sub_m + i * 16u) * ROW + u * 4u + k * 2u;
                            coopMatLoad(a, a_tile, at, ROW, gl_CooperativeMatrixLayoutRowMajor);
                            [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {
                                uint t = i * TILES_N + j;
                                sum[t] = coopMatMulAdd(a, b[k * TILES_N + j], sum[t]);
                                if (W_TERMS > 1u && term == 0u)
                                    sum[t] = coopMatMulAdd(a, rest[REST(k * TILES_N + j)], sum[t]);
                            }
                        }
                    }
                }
                // 6. The fold ends: its sums, times a matrix with a column's scale in every row, join the total.
                if ((u + 1u) % FOLD == 0u) {
                    [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {
                        MATRIX_C s;
                        [[unroll]] for (uint e = 0u; e < 8u; ++e)
                            s[e] = scale_now[span * EIGHTS + 2u * j + e / 2u % 2u][e % 2u];
                        [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {
                            if (GROUP != 0u) sum[i * TILES_N + j] = sum[i * TILES_N + j] * s;
                            total[i * TILES_N + j] = total[i * TILES_N + j] + sum[i * TILES_N + j];
                            sum[i * TILES_N + j] = MATRIX_C(0.0);
                        }
                    }
                }
            }
            if ((u + 1u) % FOLD == 0u && (GROUP != 0u || ZERO == 1u)) next_group(col0, step + u + 1u);
        }
        // 7. The loads of 3 are waited for here. The other buffer was last read in the step before, which all have
        //    left.
        now ^= 1u;
        store_a(now, step + STEPS, stop);
        barrier();
    }
    // 8. Results, straight from each lane's elements: pairs of adjacent columns of two rows of each matrix.
    [[unroll]] for (uint i = 0u; i < TILES_M; ++i) {
        [[unroll]] for (uint e = 0u; e < 8u; e += 4u) {
            uint m_ = row0 + i * 16u + e * 2u + lane / 4u;
            if (m_ >= m || x_scale[m_] < 0.0) continue;
            [[unroll]] for (uint j = 0u; j < TILES_N; ++j) {
                [[unroll]] for (uint c = 0u; c < 4u; ++c) {
                    uint n_ = col0 + j * 16u + c / 2u * 8u + (lane & 3u) * 2u + c % 2u;
                    uint to = (gl_WorkGroupID.z * m + m_) * pitch + column + n_;
                    if (n_ < n) write_result(to, finish(GROUP != 0u, m_, n_, total[i * TILES_N + j][e + c]), dtype);
                }
            }
        }
    }
    // 9. Plain rows, if there are any, a lane per result. The part z = 0 adds the bias, as there is none of several.
    if (gl_LocalInvocationIndex == 0u) any_plain = 0u;
    barrier();
    for (uint t = gl_LocalInvocationIndex; t < BM; t += LANES) {
        if (x_scale[min(gl_WorkGroupID.x * BM + t, m - 1u)] < 0.0) any_plain = 1u;
    }
    barrier();
    if (any_plain == 0u) return;
    for (uint t = gl_LocalInvocationIndex; t < BM * BN; t += LANES) {
        uint m_ = gl_WorkGroupID.x * BM + t / BN;
        uint n_ = gl_WorkGroupID.y * BN + t % BN;
        if (m_ >= m || n_ >= n || x_scale[m_] >= 0.0) continue;
        float value = plain_product(m_, blocks * 8u, n_, start, stop);
        if (biased != 0u) value += bias[column + n_];
        write_result((gl_WorkGroupID.z * m + m_) * pitch + column + n_, value, dtype);
    }
}
