// GEMV for GPUs, y = x W^T for few rows of x, by integer dot products.
//
// Activations are int8 codes (DIGITS = 1), or floats that gemv_split has decomposed into signed digits to base 256 with
// one power of two per chunk of blocks, or half a block: three hold 16-bit floats, four float32. A lane owns one row of
// each of R row groups (8 rows) and every (LANES / 8)-th chunk, so that eight lanes read 128 contiguous bytes of the
// weight.
//
// Grid: x, folded into y, tiles of 8 R rows of the weight; z tiles of MT rows of x, with EXPERTS of one expert each. A
// workgroup covers all of K.
//
// Memory: weights go from global memory to registers (`v`), UNROLL chunks in flight; x is read from global memory at
// its use, since every workgroup reads the same few rows and finds them in a cache. Shared memory holds partial sums
// only.
//
// Exactness: a dot product of digits and codes is an int32, exact over a chunk of at most 4 blocks: two digits together
// are at most 128 columns * 128 * 128 * 257 < 2^30, and the zero point's share is no larger. Rounding begins with the
// conversion to float32, once per chunk.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "dot.glsl"
#include "formats.glsl"
#include "gpu_result.glsl"

layout(constant_id = 0) const uint LANES = 512u;
layout(constant_id = 1) const uint R = 4u;       // row groups of a workgroup
layout(constant_id = 2) const uint MT = 1u;      // rows of x
layout(constant_id = 3) const uint BITS = 4u;    // of a weight's code
layout(constant_id = 4) const uint DIGITS = 1u;  // of an activation
layout(constant_id = 5) const uint ZERO = 0u;    // 0 none (int4: 8), 1 integer, 2 float
layout(constant_id = 6) const uint UNROLL = 2u;  // chunks in flight
layout(constant_id = 7) const uint SUBGROUP = 32u;
layout(constant_id = 8) const uint CHUNK = 1u;  // blocks with scales in common; divides the blocks of a group
layout(constant_id = 9) const uint EXPERTS = 0u;  // whether rows are sorted by expert
layout(constant_id = 10) const uint HALVED = 0u;  // whether two groups share a block; CHUNK is 1 then
layout(local_size_x_id = 0) in;

const uint P = BITS / 4u;
const uint SPANS = 1u + HALVED;  // of a chunk: steps of 16 columns with scales in common
const uint STEPS = 2u * CHUNK / SPANS;

layout(push_constant) uniform Push {
    uint m, n, np, blocks;
    float groups_per_block;
    uint pitch, dtype, biased;
    uint column, asymmetric, x_zero;  // first column of the result; whether x has zero points, and where in x_token
    uint expert_first, expert_count, expert_total, expert_row;  // see experts.glsl
};

layout(set = 0, binding = 0) readonly buffer X { uvec4 x[]; };          // [M][blocks][DIGITS][2]
layout(set = 0, binding = 1) readonly buffer W { uvec4 w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };  // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };     // [G][NP]
layout(set = 0, binding = 4) readonly buffer XBlock { uvec4 x_block[]; };  // [M][chunks][SPANS]: see gemv_split
layout(set = 0, binding = 4) readonly buffer XToken { uint x_token[]; };  // scales [M], zero points [M]
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7) readonly buffer Sums { float row_sum[]; };  // [NP] of the dequantized weight
layout(set = 0, binding = 7) readonly buffer Rest { vec4 rest[]; };      // [M][blocks][8], see gemv_split

#include "gpu_experts.glsl"

shared float partial[LANES / SUBGROUP * R * MT * 8u];

// Half a block of a row, 16 codes as bytes in the order of k. An int4 word holds four codes in the low nibbles of its
// bytes and the next four in the high ones, so two masks unpack it.
uvec4 bytes(uvec4 first, uvec4 second, uint h) {
    if (BITS == 8u) {
        return h == 0u ? first : second;
    }
    uvec2 v = h == 0u ? first.xy : first.zw;
    return uvec4(v.x & 0x0F0F0F0Fu, (v.x >> 4) & 0x0F0F0F0Fu, v.y & 0x0F0F0F0Fu, (v.y >> 4) & 0x0F0F0F0Fu);
}

int dot16(uvec4 a, uvec4 b) {
    return dot_bytes(a.x, b.x) + dot_bytes(a.y, b.y) + dot_bytes(a.z, b.z) + dot_bytes(a.w, b.w);
}

// The sum of digits 0 and 1 with that of digits 2 and 3, which weigh 2^16 times as much.
float join(int low, int high) {
    return DIGITS == 2u ? float(low) : float(low) + 65536.0 * float(high);
}

float acc[R * MT];
uint marked = 0u;  // whether digits did not hold all of x
uvec4 v[UNROLL * CHUNK * R * P];  // weights on their way

// The group of step `half_` of a block. The 0.5 keeps the product away from whole numbers, where it could round.
uint group_of(uint block, uint half_) {
    return HALVED != 0u ? block * 2u + half_ : uint((float(block) + 0.5) * groups_per_block);
}

// Adds the products of a span of one chunk, whose weights are in slot u of `v`, to `acc`.
void add_span(uint chunk, uint span, uint n0, uint row0, uint u) {
    // 1. The span's group. A span never crosses a border of groups.
    uint group = group_of(chunk * CHUNK, span);
    int sums[R * MT * DIGITS];
    int ones[MT];
    [[unroll]] for (uint i = 0u; i < R * MT * DIGITS; ++i) sums[i] = 0;
    [[unroll]] for (uint i = 0u; i < MT; ++i) ones[i] = 0;
    // 2. Integer products, 16 columns at a time: the codes of R rows are unpacked once and meet every digit of MT rows
    //    of x.
    [[unroll]] for (uint step = 0u; step < STEPS; ++step) {
        uint half_ = span * STEPS + step;
        uint c = half_ / 2u;
        uint from = ((u * CHUNK + c) * R) * P;
        uvec4 codes[R];
        [[unroll]] for (uint r = 0u; r < R; ++r)
            codes[r] = bytes(v[from + r * P], v[from + r * P + P - 1u], half_ % 2u);
        [[unroll]] for (uint m_ = 0u; m_ < MT; ++m_) {
            uint at = (min(row0 + m_, tile.end - 1u) * blocks + chunk * CHUNK + c) * DIGITS * 2u + half_ % 2u;
            [[unroll]] for (uint d = 0u; d < DIGITS; ++d) {
                uvec4 digits = x[at + 2u * d];
                // Sums of the codes of x, by which zero points are corrected; gemv_split brings those of digits.
                if (DIGITS == 1u && (ZERO != 0u || BITS == 4u)) ones[m_] += dot16(digits, uvec4(0x01010101u));
                [[unroll]] for (uint r = 0u; r < R; ++r) sums[(r * MT + m_) * DIGITS + d] += dot16(digits, codes[r]);
            }
        }
    }
    // 3. The span's integers become float32: s (sum - z * sum of x), plus z * sum of x if z is a float.
    [[unroll]] for (uint r = 0u; r < R; ++r) {
        uint at = group * np + weight_row(n0 + r * 8u);
        float s = scale[at];
        int z = ZERO == 1u ? int(zero[at]) : (BITS == 4u ? 8 : 0);
        [[unroll]] for (uint m_ = 0u; m_ < MT; ++m_) {
            uint i = (r * MT + m_) * DIGITS;
            float value, total;
            if (DIGITS == 1u) {
                value = float(sums[i] - z * ones[m_]);
                total = float(ones[m_]);
            } else {
                uvec4 k = x_block[(min(row0 + m_, tile.end - 1u) * (blocks / CHUNK) + chunk) * SPANS + span];
                int low = sums[i] + 256 * sums[i + 1u];
                int high = DIGITS == 3u ? sums[i + DIGITS - 1u] : 0;
                if (DIGITS == 4u) high = sums[i + DIGITS - 2u] + 256 * sums[i + DIGITS - 1u];
                value = uintBitsToFloat(k.x) * join(low - z * int(k.y), high - z * int(k.z));
                total = uintBitsToFloat(k.x) * join(int(k.y), int(k.z));
                marked |= k.w;
            }
            acc[r * MT + m_] += s * value;
            if (ZERO == 2u) acc[r * MT + m_] += uintBitsToFloat(zero[at]) * total;
        }
    }
}

// Four codes as floats.
vec4 code4(uint word) {
    if (BITS == 8u) return vec4(unpack_bytes(word));
    return vec4(word & 0xffu, (word >> 8) & 0xffu, (word >> 16) & 0xffu, word >> 24);
}

// Adds the products of step h of a block with the part of a row of x that its digits do not hold (`rest`). It is rare:
// weights are read from global memory once more.
void add_rest(uint block, uint h, uint r, uint m_, uint row_of_x, uint at, uint weight) {
    uint parameter = group_of(block, h) * np + weight;
    float z = float(ZERO == 1u ? int(zero[parameter]) : (BITS == 4u ? 8 : 0));
    float more = ZERO == 2u ? uintBitsToFloat(zero[parameter]) : 0.0;
    vec4 sum = vec4(0.0);
    uvec4 codes = bytes(w[at], w[at + (P - 1u) * 8u], h);
    for (uint i = 0u; i < 4u; ++i) {
        vec4 left = rest[(row_of_x * blocks + block) * 8u + h * 4u + i];
        // The weight first: an infinite x times its parts may be Inf and -Inf, whose sum is NaN.
        sum += left * ((code4(codes[i]) - z) * scale[parameter] + more);
    }
    acc[r * MT + m_] += dot(sum, vec4(1.0));
}

// Scale and zero point of the row of x (int8 activations), then the bias.
float finish(uint m_, uint n_, float value) {
    if (DIGITS == 1u) {
        if (asymmetric != 0u) value -= float(int(x_token[x_zero + m_])) * row_sum[weight_first + n_];
        value *= uintBitsToFloat(x_token[m_]);
    }
    return value + bias_of(n_);
}

void main() {
    uint lane = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    uint columns = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (columns * R * 8u >= n) return;  // the whole workgroup, so that no barrier waits for it
    if (!begin_tile(gl_WorkGroupID.z, MT, columns * R * 8u, R * 8u, LANES)) return;
    uint row0 = tile.first;
    // 1. Lanes 8 i ... 8 i + 7 share a chunk and have one row each of every row group.
    uint row = lane & 7u;
    uint n0 = columns * R * 8u + row;
    uint stride = LANES / 8u;
    [[unroll]] for (uint i = 0u; i < R * MT; ++i) acc[i] = 0.0;
    uint chunks = blocks / CHUNK;
    for (uint chunk = lane >> 3; chunk < chunks; chunk += stride * UNROLL) {
        // 2. Issue all loads of UNROLL chunks before the first product needs one. Chunks and rows beyond the last read
        //    the last again: a load without a branch. Such chunks are skipped below, such rows are not written.
        [[unroll]] for (uint c = 0u; c < UNROLL * CHUNK; ++c) {
            uint at = min(chunk + c / CHUNK * stride, chunks - 1u) * CHUNK + c % CHUNK;
            [[unroll]] for (uint r = 0u; r < R; ++r) {
                uint base = ((weight_row((columns * R + r) * 8u) >> 3) * blocks + at) * P * 8u + row;
                [[unroll]] for (uint p = 0u; p < P; ++p) v[(c * R + r) * P + p] = w[base + p * 8u];
            }
        }
        // 3. The products: those of the first chunk run while the loads of the others are in flight.
        [[unroll]] for (uint u = 0u; u < UNROLL; ++u) {
            if (chunk + u * stride >= chunks) continue;
            [[unroll]] for (uint span = 0u; span < SPANS; ++span) add_span(chunk + u * stride, span, n0, row0, u);
        }
    }
    // 4. A second pass over the chunks that gemv_split marked, if this lane has met any.
    for (uint chunk = lane >> 3; marked != 0u && chunk < chunks; chunk += stride) {
        [[unroll]] for (uint m_ = 0u; m_ < MT; ++m_) {
            uint row_of_x = min(row0 + m_, tile.end - 1u);
            for (uint half_ = 0u; half_ < 2u * CHUNK; ++half_) {
                if (x_block[(row_of_x * chunks + chunk) * SPANS + half_ / STEPS].w == 0u) continue;
                uint block = chunk * CHUNK + half_ / 2u;
                [[unroll]] for (uint r = 0u; r < R; ++r) {
                    uint rows_ = weight_row((columns * R + r) * 8u) >> 3;
                    uint at = (rows_ * blocks + block) * P * 8u + row;
                    add_rest(block, half_ % 2u, r, m_, row_of_x, at, rows_ * 8u + row);
                }
            }
        }
    }
    // 5. Lanes of a subgroup that share a row, 8 apart, add their chunks up by shuffles ...
    [[unroll]] for (uint i = 0u; i < R * MT; ++i) {
        float value = acc[i];
        for (uint o = 8u; o < gl_SubgroupSize; o <<= 1) value += subgroupShuffleXor(value, o);
        if (gl_SubgroupInvocationID < 8u) partial[(gl_SubgroupID * R * MT + i) * 8u + row] = value;
    }
    // 6. ... and the subgroups in shared memory. It is written once, so one barrier suffices.
    barrier();
    for (uint t = lane; t < R * MT * 8u; t += LANES) {
        uint i = t / 8u;
        uint column_ = (columns * R + i / MT) * 8u + t % 8u;
        uint m_ = row0 + i % MT;
        float value = 0.0;
        [[unroll]] for (uint s = 0u; s < LANES / SUBGROUP; ++s) value += partial[s * R * MT * 8u + t];
        if (column_ < n && m_ < tile.end) write_result(m_ * pitch + column + column_, finish(m_, column_, value), dtype);
    }
}
