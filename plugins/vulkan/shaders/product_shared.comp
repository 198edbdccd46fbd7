// Products of float matrices on GPUs: a workgroup computes BM x BN results and a lane TM x TN of them, in runs of four
// rows and four columns. Grid: x tiles of rows, y tiles of columns, z batches.
//
// Each step loads BK of k of both operands to registers, while the previous step's tile, in shared memory, is
// multiplied. Tiles are stored by k, so that a lane reads the TM + TN values of one k as vectors of four.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LANES = 256u;
layout(constant_id = 1) const uint BM = 64u;
layout(constant_id = 2) const uint BN = 64u;
layout(constant_id = 3) const uint TM = 4u;  // multiples of 4
layout(constant_id = 4) const uint TN = 4u;
layout(constant_id = 5) const uint A_VECTORS = 0u;
layout(constant_id = 6) const uint W_VECTORS = 0u;
layout(constant_id = 7) const uint W_TYPE = 0u;
layout(constant_id = 8) const uint A_ALONG = 0u;  // whether adjacent rows, not k, are adjacent in memory
layout(constant_id = 9) const uint W_ALONG = 0u;

#include "formats.glsl"
#include "product.glsl"

const uint BK = 16u;
const uint LX = BN / TN;  // lanes along n
const uint LY = BM / TM;
const uint A_ROW = BM / 4u + 1u;  // vec4 from one k to the next, one spare against bank conflicts
const uint W_ROW = BN / 4u + 1u;
const uint A_LOADS = (BM * 4u + LANES - 1u) / LANES;  // units of four k of a row
const uint W_LOADS = (BN * 4u + LANES - 1u) / LANES;

shared vec4 a_tile[BK * A_ROW];  // [k][row]
shared vec4 w_tile[BK * W_ROW];  // [k][column]

vec4 a_next[A_LOADS];
vec4 w_next[W_LOADS];
float total[TM * TN];

// Row and first k of a unit of the tile, so that neighbouring lanes read neighbouring memory.
uvec2 unit(uint t, uint size, uint along) {
    return along != 0u ? uvec2(t % size, min(t / size, 3u) * 4u) : uvec2(min(t / 4u, size - 1u), t % 4u * 4u);
}

// Rows beyond the last read the last again, and their results are not written; k beyond the last are 0.
void load_tiles(uint a_start, uint w_start, uint row0, uint col0, uint k0) {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uvec2 at = unit(gl_LocalInvocationIndex + i * LANES, BM, A_ALONG);
        uint row = a_start + min(row0 + at.x, push.m - 1u) * push.a_row;
        a_next[i] = k0 + at.y < push.k ? read_a(row, k0 + at.y) : vec4(0.0);
    }
    [[unroll]] for (uint i = 0u; i < W_LOADS; ++i) {
        uvec2 at = unit(gl_LocalInvocationIndex + i * LANES, BN, W_ALONG);
        uint row = w_start + min(col0 + at.x, push.n - 1u) * push.w_row;
        w_next[i] = k0 + at.y < push.k ? read_w(row, k0 + at.y) : vec4(0.0);
    }
}

// Registers to shared memory, transposed; the comparisons vanish if the tile is a multiple of the workgroup.
void store_tiles() {
    [[unroll]] for (uint i = 0u; i < A_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uvec2 at = unit(t, BM, A_ALONG);
        if (BM * 4u % LANES != 0u && t >= BM * 4u) continue;
        [[unroll]] for (uint e = 0u; e < 4u; ++e) a_tile[(at.y + e) * A_ROW + at.x / 4u][at.x % 4u] = a_next[i][e];
    }
    [[unroll]] for (uint i = 0u; i < W_LOADS; ++i) {
        uint t = gl_LocalInvocationIndex + i * LANES;
        uvec2 at = unit(t, BN, W_ALONG);
        if (BN * 4u % LANES != 0u && t >= BN * 4u) continue;
        [[unroll]] for (uint e = 0u; e < 4u; ++e) w_tile[(at.y + e) * W_ROW + at.x / 4u][at.x % 4u] = w_next[i][e];
    }
}

// One k: TM + TN values from shared memory to registers, TM * TN products.
void multiply(uint a_at, uint w_at) {
    vec4 a[TM / 4u];
    vec4 w[TN / 4u];
    [[unroll]] for (uint i = 0u; i < TM / 4u; ++i) a[i] = a_tile[a_at + i * LY];
    [[unroll]] for (uint j = 0u; j < TN / 4u; ++j) w[j] = w_tile[w_at + j * LX];
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            total[i * TN + j] = fma(a[i / 4u][i % 4u], w[j / 4u][j % 4u], total[i * TN + j]);
        }
    }
}

void main() {
    uint batch = gl_WorkGroupID.z;
    uint row0 = gl_WorkGroupID.x * BM;
    uint col0 = gl_WorkGroupID.y * BN;
    uint lx = gl_LocalInvocationIndex % LX;
    uint ly = gl_LocalInvocationIndex / LX;
    uint a_start = push.a_offset + batch_of(batch, push.a_batch);
    uint w_start = push.w_offset + batch_of(batch, push.w_batch);
    [[unroll]] for (uint i = 0u; i < TM * TN; ++i) total[i] = 0.0;
    // 1. The first tile; nothing overlaps with its loads.
    load_tiles(a_start, w_start, row0, col0, 0u);
    for (uint k0 = 0u; k0 < push.k; k0 += BK) {
        // 2. The tile goes to shared memory once everybody has finished with the one before.
        barrier();
        store_tiles();
        barrier();
        // 3. The next tile's loads are in flight during the products of this one.
        if (k0 + BK < push.k) load_tiles(a_start, w_start, row0, col0, k0 + BK);
        [[unroll]] for (uint k = 0u; k < BK; ++k) multiply(k * A_ROW + ly, k * W_ROW + lx);
    }
    // 4. Results, from registers.
    [[unroll]] for (uint i = 0u; i < TM; ++i) {
        [[unroll]] for (uint j = 0u; j < TN; ++j) {
            store(batch, row0 + (i / 4u * LY + ly) * 4u + i % 4u, col0 + (j / 4u * LX + lx) * 4u + j % 4u,
                  total[i * TN + j]);
        }
    }
}
