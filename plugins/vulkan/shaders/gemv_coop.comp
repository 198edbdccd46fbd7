// GEMV with cooperative matrices of float16 for a few rows of x: float activations, int4 or int8 weights.
//
// The weight is the matrix A, sixteen rows of it, and x the matrix B, so that TN rows of x cost little more than one.
// Grid: x, folded into y, tiles of 16 R rows of the weight; z tiles of TN rows of x. Each subgroup, of 32 lanes, takes
// every (LANES / 32)-th chunk of CHUNK blocks.
//
// Memory: codes come from global memory to registers one chunk ahead (`ahead`), become float16 less their zero point
// in the subgroup's own part of shared memory, and are loaded from there as A. B and the scales are loaded from global
// memory as matrices: coop_prep stores x so that each matrix is contiguous.
//
// Accuracy: codes less integer zero points are exact in float16, products are summed in float32 and scaled FOLD steps
// at a time. Float zero points are left to gemv_digits.
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

layout(constant_id = 0) const uint LANES = 512u;
layout(constant_id = 1) const uint R = 4u;      // sixteens of rows of a workgroup
layout(constant_id = 2) const uint CHUNK = 2u;  // 2 or 4 blocks of 32 columns
layout(constant_id = 3) const uint FOLD = 4u;   // steps of 16 columns with a scale in common; 0: all of a row
layout(constant_id = 4) const uint BITS = 4u;
layout(constant_id = 5) const uint ZERO = 0u;   // 0 none (int4: 8), 1 integer
layout(constant_id = 6) const uint TN = 8u;     // rows of x in a matrix, 8 or 16
layout(local_size_x_id = 0) in;

const uint P = BITS / 4u;
const uint SUBGROUPS = LANES / 32u;
const uint ROW = CHUNK * 4u + 1u;  // uvec4 from one row to the next: 8 halves each, one spare against conflicts
const uint UNITS = CHUNK / 2u;     // of a lane: a block of one row
const uint STEPS = CHUNK * 2u;     // of sixteen columns
const uint SPAN = FOLD == 0u ? STEPS : FOLD;

layout(push_constant) uniform Push {
    uint m, n, np, blocks, group_steps;  // blocks of 32 columns of a row; steps of 16 columns of a group
    uint pitch, dtype, biased, column;
};

layout(set = 0, binding = 0) readonly buffer X { uvec4 x[]; };             // [M / TN][chunks * STEPS][TN][2]
layout(set = 0, binding = 1) readonly buffer W { uvec4 w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };     // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };        // [G][NP]
layout(set = 0, binding = 4) readonly buffer XScale { float x_scale[]; };  // [M], see plain_rows.glsl
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };

#include "plain_rows.glsl"

#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, 16, TN, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, 16, TN, gl_MatrixUseAccumulator>

shared uvec4 tile[SUBGROUPS * 16u * ROW];  // afterwards the results of the subgroups

uvec4 ahead[R * UNITS * P];

// The row (of sixteen) and the block (of the chunk) of a lane's unit.
uint unit_row(uint unit) {
    return (gl_SubgroupInvocationID & 7u) + ((gl_SubgroupInvocationID >> 3) / CHUNK + unit * (4u / CHUNK)) * 8u;
}

uint unit_block() {
    return (gl_SubgroupInvocationID >> 3) % CHUNK;
}

// The codes of a chunk for R sixteens of rows, global memory to registers; eight lanes read 128 contiguous bytes.
// Blocks beyond the last read the last again: x is 0 there.
void load(uint chunk, uint n0) {
    uint block = min(chunk * CHUNK + unit_block(), blocks - 1u);
    [[unroll]] for (uint r = 0u; r < R; ++r) {
        [[unroll]] for (uint i = 0u; i < UNITS; ++i) {
            uint n_ = min(n0 + r * 16u + unit_row(i), np - 1u);
            uint at = ((n_ >> 3) * blocks + block) * P * 8u + (n_ & 7u);
            [[unroll]] for (uint p = 0u; p < P; ++p) ahead[(r * UNITS + i) * P + p] = w[at + p * 8u];
        }
    }
}

// The codes of sixteen rows, registers to the subgroup's tile: a block of a row is four vectors of eight halves.
void unpack(uint chunk, uint n0, uint r) {
    uint block = min(chunk * CHUNK + unit_block(), blocks - 1u);
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) {
        uint row = unit_row(i);
        float16_t z[2];  // of the steps of the block
        z[0] = z[1] = float16_t(BITS == 4u ? 8.0 : 0.0);
        if (ZERO == 1u) {
            uint parameter = block * 2u / group_steps * np + min(n0 + r * 16u + row, np - 1u);
            z[0] = z[1] = float16_t(int(zero[parameter]));
            if (FOLD == 1u) z[1] = float16_t(int(zero[parameter + np]));
        }
        uint at = (gl_SubgroupID * 16u + row) * ROW + unit_block() * 4u;
        uint from = (r * UNITS + i) * P;
        if (BITS == 4u) {
            [[unroll]] for (uint q = 0u; q < 4u; ++q) tile[at + q] = halves_of_4(ahead[from][q], z[q >> 1]);
        } else {
            [[unroll]] for (uint q = 0u; q < 4u; ++q) {
                uvec4 v = ahead[from + (q >> 1) * (P - 1u)];
                uint two = (q & 1u) * 2u;
                tile[at + q] = uvec4(halves_of_8(v[two], z[q >> 1]), halves_of_8(v[two + 1u], z[q >> 1]));
            }
        }
    }
}

// Scales of the weight's row, if it has one only, and of the row of x, then the bias.
float finish(uint m_, uint n_, float value) {
    if (FOLD == 0u) value *= scale[n_];
    value *= x_scale[m_];
    return biased != 0u ? value + bias[column + n_] : value;
}

float result(uint at) {
    return uintBitsToFloat(tile[at / 4u][at % 4u]);
}

void main() {
    uint n0 = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * R * 16u;
    if (n0 >= n) return;
    uint row0 = gl_WorkGroupID.z * TN;
    uint chunks = (blocks + CHUNK - 1u) / CHUNK;
    uint x0 = gl_WorkGroupID.z * chunks * STEPS * TN * 2u;
    MATRIX_C total[R];
    MATRIX_C s[R * (STEPS / SPAN)];
    [[unroll]] for (uint r = 0u; r < R; ++r) total[r] = MATRIX_C(0.0);
    // 1. The first chunk's codes. Subgroups without a chunk load one, too, and do nothing with it.
    load(min(gl_SubgroupID, chunks - 1u), n0);
    for (uint chunk = gl_SubgroupID; chunk < chunks; chunk += SUBGROUPS) {
        // 2. All of x for the chunk, then the scales: stride 0 repeats sixteen of them in every column.
        uint next = min(chunk + SUBGROUPS, chunks - 1u);
        MATRIX_B b[STEPS];
        [[unroll]] for (uint i = 0u; i < STEPS; ++i)
            coopMatLoad(b[i], x, x0 + (chunk * STEPS + i) * TN * 2u, 2u, gl_CooperativeMatrixLayoutColumnMajor);
        [[unroll]] for (uint f = 0u; f < (FOLD == 0u ? 0u : STEPS / SPAN); ++f) {
            uint group = min(chunk * STEPS + f * SPAN, blocks * 2u - 1u) / group_steps;
            [[unroll]] for (uint r = 0u; r < R; ++r)
                coopMatLoad(s[f * R + r], scale, group * np + min(n0 + r * 16u, np - 16u), 0u,
                            gl_CooperativeMatrixLayoutColumnMajor);
        }
        [[unroll]] for (uint r = 0u; r < R; ++r) {
            // 3. Sixteen rows at a time through the subgroup's tile. It is free once the matrices of the sixteen rows
            //    before have been loaded. `ahead` is free after the last sixteen: the next chunk is in flight during
            //    their products.
            subgroupBarrier();
            unpack(chunk, n0, r);
            if (r + 1u == R) load(next, n0);
            subgroupMemoryBarrierShared();
            subgroupBarrier();
            // 4. Products of the sixteen rows; their sums are scaled FOLD steps at a time, or (0) at the very end.
            MATRIX_C sum = MATRIX_C(0.0);
            [[unroll]] for (uint i = 0u; i < STEPS; ++i) {
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a;
                coopMatLoad(a, tile, gl_SubgroupID * 16u * ROW + i * 2u, ROW, gl_CooperativeMatrixLayoutRowMajor);
                sum = coopMatMulAdd(a, b[i], sum);
                if ((i + 1u) % SPAN == 0u) {
                    if (FOLD != 0u) sum = sum * s[i / SPAN * R + r];
                    total[r] = total[r] + sum;
                    sum = MATRIX_C(0.0);
                }
            }
        }
    }
    // 5. Subgroups add their sums in shared memory, one sixteen of rows after the other. The first barrier waits until
    //    nobody reads the tile any more, the second until all sums are there. By literal numbers: see coop_f16.
#define EACH_SIXTEEN(r)                                                                                                \
    if (r < R) {                                                                                                       \
        barrier();                                                                                                     \
        coopMatStore(total[r < R ? r : 0u], tile, gl_SubgroupID * 4u * TN, TN / 4u,                                    \
                     gl_CooperativeMatrixLayoutRowMajor);                                                              \
        barrier();                                                                                                     \
        for (uint t = gl_LocalInvocationIndex; t < 16u * TN; t += LANES) {                                             \
            uint n_ = n0 + r * 16u + t % 16u;                                                                          \
            float value = 0.0;                                                                                         \
            for (uint u = 0u; u < SUBGROUPS; ++u) value += result((u * 16u + t % 16u) * TN + t / 16u);                 \
            uint m_ = row0 + t / 16u;                                                                                  \
            if (n_ < n && m_ < m && x_scale[m_] >= 0.0)                                                                \
                write_result(m_ * pitch + column + n_, finish(m_, n_, value), dtype);                                  \
        }                                                                                                              \
    }
    EACH_SIXTEEN(0) EACH_SIXTEEN(1) EACH_SIXTEEN(2) EACH_SIXTEEN(3)
    // 6. Plain rows, which are rare, a lane per result.
    for (uint t = gl_LocalInvocationIndex; t < R * 16u * TN; t += LANES) {
        uint m_ = row0 + t / (R * 16u);
        uint n_ = n0 + t % (R * 16u);
        if (m_ >= m || n_ >= n || x_scale[m_] >= 0.0) continue;
        float value = plain_product(m_, chunks * CHUNK * 8u, n_, 0u, blocks);
        if (biased != 0u) value += bias[column + n_];
        write_result(m_ * pitch + column + n_, value, dtype);
    }
}
