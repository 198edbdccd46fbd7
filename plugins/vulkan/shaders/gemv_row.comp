// GEMV for GPUs, y = x W^T for one row of float32 x, in a single step: x is used as it is (CODES = 0), or every workgroup
// quantizes it for itself (CODES = 1), symmetrically, to the codes and the scale that quantize.comp finds. Weights of a
// table are read with the table in shared memory.
//
// What makes x of other rows may be computed here as well, by every workgroup for itself (PROLOGUE): a norm of x, or its
// gate. A row may be added to the result. PLACED: the result is rotated as rope.comp does it, and lies where a row of a
// cache does. Whole models wait less so: a step that waits for another takes longer to start than these rows take to
// compute.
//
// A lane owns one row of each of R row groups (8 rows) and every (LANES / 8)-th block of 32 columns, so that eight lanes
// read 128 contiguous bytes of the weight. Grid: x, folded into y, tiles of 8 R rows of the weight.
//
// Memory: weights go from global memory to registers (`v`), UNROLL blocks in flight, the first of them before x is
// made. Floats of x come from global memory, which every workgroup reads: they are in a cache. Its codes, and what is made
// of it, are in shared memory, beside partial sums.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "dot.glsl"
#include "formats.glsl"
#include "functions.glsl"
#include "gpu_result.glsl"

layout(constant_id = 0) const uint LANES = 512u;
layout(constant_id = 1) const uint R = 4u;       // row groups of a workgroup
layout(constant_id = 2) const uint BITS = 4u;    // of a weight's code
layout(constant_id = 3) const uint ZERO = 0u;    // 0 none (int4: 8), 1 integer, 2 float
layout(constant_id = 4) const uint UNROLL = 2u;  // blocks in flight
layout(constant_id = 5) const uint SUBGROUP = 32u;
layout(constant_id = 6) const uint CODES = 0u;
layout(constant_id = 7) const uint SIXTEENS = 1u;  // of columns of x whose codes are in shared memory
layout(constant_id = 8) const uint VALUES = 0u;    // of a table that codes index; 0: they are integers. With CODES = 0
layout(constant_id = 9) const uint PROLOGUE = 0u;  // one of those below
layout(constant_id = 10) const uint FOURS = 1u;    // of columns of x in shared memory, as PROLOGUE makes them
layout(constant_id = 11) const uint HALVED = 0u;   // whether two groups share a block
#ifdef PLACED
// Columns of a head if heads are rotated, a multiple of 16; else 0. R is even then: a workgroup has both halves.
layout(constant_id = 12) const uint ROPE = 0u;
#else
const uint ROPE = 0u;
#endif
layout(local_size_x_id = 0) in;

const uint RMS_NORM = 1u;  // x / sqrt(mean(x^2) + eps) * other
const uint SILU_MUL = 2u;  // silu(x) * other, as the next two
const uint GELU_MUL = 3u;
const uint GELU_TANH_MUL = 4u;

const uint P = BITS / 4u;
const uint SPANS = 1u + HALVED;  // of a block: steps of 16 columns with scales in common
const uint STEPS = 2u / SPANS;
const uint SUBGROUPS = LANES / SUBGROUP;
// Fours of columns of a lane, as PROLOGUE makes them.
const uint EACH = PROLOGUE == 0u ? 1u : ((CODES == 0u ? FOURS : SIXTEENS * 4u) + LANES - 1u) / LANES;

layout(push_constant) uniform Push {
    uint n, np, blocks;
    float groups_per_block;
    uint pitch, dtype, biased, column;
    uint added;     // whether a row is added to the result
    uint weighted;  // whether a norm has a weight
    float eps;
#ifdef PLACED
    uint head, head_stride;  // columns of a head, and words from one to the next in the result
    uint row_stride;         // words from a row to the next where `row_index` names one
    uint offset;             // of the first row
#endif
};

layout(set = 0, binding = 0) readonly buffer X { vec4 x[]; };  // [blocks][8]
layout(set = 0, binding = 1) readonly buffer W { uvec4 w[]; };
layout(set = 0, binding = 2) readonly buffer Scale { float scale[]; };  // [G][NP]
layout(set = 0, binding = 3) readonly buffer Zero { uint zero[]; };     // [G][NP]
layout(set = 0, binding = 4) readonly buffer Table { float table[]; };
layout(set = 0, binding = 4) readonly buffer Residual { float residual[]; };  // of a weight without a table
layout(set = 0, binding = 5) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 7) readonly buffer Other { vec4 other[]; };  // what PROLOGUE needs beside x
#ifdef PLACED
layout(set = 0, binding = 8) readonly buffer Cos { float cosine[]; };
layout(set = 0, binding = 9) readonly buffer Sin { float sine_[]; };
layout(set = 0, binding = 10) readonly buffer Row { uint row_index[]; };
#endif

shared float partial[SUBGROUPS * R * 8u];
shared uint largest[SUBGROUPS];
shared float squares[SUBGROUPS];
shared uvec4 codes[SIXTEENS];  // of x
shared vec4 made[FOURS];       // of x
shared float values[VALUES + 1u];  // of the table

uint lane() {
    return gl_SubgroupID * SUBGROUP + gl_SubgroupInvocationID;
}

float acc[R];
uvec4 v[UNROLL * R * P];  // weights on their way, with their scales and zero points
float scales[UNROLL * R * SPANS];
uint zeros[UNROLL * R * SPANS];

// Row group r of a workgroup. Those of the halves of heads alternate if heads are rotated.
uint row_group(uint tile, uint r) {
    if (ROPE == 0u) return tile * R + r;
    uint pair = tile * (R / 2u) + r / 2u;
    uint half_head = ROPE / 16u;
    return pair / half_head * (2u * half_head) + pair % half_head + (r & 1u) * half_head;
}

// Half a block of a row, 16 codes as bytes in the order of k: int8 as they are, int4 as 0..15.
uvec4 bytes(uint from, uint h) {
    if (BITS == 8u) return v[from + h];
    uvec2 one = h == 0u ? v[from].xy : v[from].zw;
    return uvec4(one.x & 0x0F0F0F0Fu, (one.x >> 4) & 0x0F0F0F0Fu, one.y & 0x0F0F0F0Fu, (one.y >> 4) & 0x0F0F0F0Fu);
}

// Four codes less z as floats: 2^23 + u is u below the bits of 2^23, which spares conversions of integers. Or their values
// in the table.
vec4 floats(uint four, float z) {
    if (VALUES != 0u) {
        uvec4 u = unpack_unsigned(four);
        return vec4(values[u.x], values[u.y], values[u.z], values[u.w]);
    }
    uint u = BITS == 8u ? four ^ 0x80808080u : four;
    float less = 8388608.0 + (BITS == 8u ? 128.0 : 0.0) + z;
    uvec4 one = uvec4(u & 0xffu, (u >> 8) & 0xffu, (u >> 16) & 0xffu, u >> 24);
    return uintBitsToFloat(one | 0x4B000000u) - less;
}

int dot16(uvec4 a, uvec4 b) {
    return dot_bytes(a.x, b.x) + dot_bytes(a.y, b.y) + dot_bytes(a.z, b.z) + dot_bytes(a.w, b.w);
}

// Global memory to registers. Blocks and rows beyond the last read the last again: a load without a branch. Such blocks
// are skipped later, such rows are not written.
void load(uint tile, uint first) {
    [[unroll]] for (uint c = 0u; c < UNROLL; ++c) {
        uint block = min(first + c * (LANES / 8u), blocks - 1u);
        // The 0.5 keeps the product away from whole numbers, where it could round.
        uint group = HALVED != 0u ? block * 2u : uint((float(block) + 0.5) * groups_per_block);
        [[unroll]] for (uint r = 0u; r < R; ++r) {
            uint rows = min(row_group(tile, r), np / 8u - 1u);
            uint base = (rows * blocks + block) * P * 8u + (lane() & 7u);
            [[unroll]] for (uint p = 0u; p < P; ++p) v[(c * R + r) * P + p] = w[base + p * 8u];
            uint at = group * np + rows * 8u + (lane() & 7u);
            [[unroll]] for (uint span = 0u; span < SPANS; ++span) {
                scales[(c * SPANS + span) * R + r] = scale[at + span * np];
                if (ZERO != 0u) zeros[(c * SPANS + span) * R + r] = zero[at + span * np];
            }
        }
    }
}

// Adds the products of a span of a block, whose weights are in slot c of `v`, to `acc`.
void add_span(uint block, uint c, uint span) {
    uint parameters = (c * SPANS + span) * R;
    float z[R];
    [[unroll]] for (uint r = 0u; r < R; ++r) {
        uint own = zeros[parameters + r];
        z[r] = ZERO == 0u ? 0.0 : (ZERO == 1u ? float(int(own)) : uintBitsToFloat(own));
    }
    float middle = BITS == 4u ? 8.0 : 0.0;
    if (CODES == 0u) {
        float sums[R];
        [[unroll]] for (uint r = 0u; r < R; ++r) sums[r] = 0.0;
        [[unroll]] for (uint h = span * STEPS; h < (span + 1u) * STEPS; ++h) {
            uvec4 from[R];
            [[unroll]] for (uint r = 0u; r < R; ++r) from[r] = bytes((c * R + r) * P, h);
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                uint at = block * 8u + h * 4u + i;
                vec4 own = PROLOGUE == 0u ? x[at] : made[at];
                [[unroll]] for (uint r = 0u; r < R; ++r) {
                    vec4 weights = floats(from[r][i], ZERO == 1u ? z[r] : middle);
                    // The whole weight first: an infinite x times its parts may be Inf and -Inf, whose sum is NaN.
                    if (ZERO == 2u) weights = weights * scales[parameters + r] + z[r];
                    sums[r] += dot(own, weights);
                }
            }
        }
        [[unroll]] for (uint r = 0u; r < R; ++r) acc[r] += ZERO == 2u ? sums[r] : scales[parameters + r] * sums[r];
    } else {
        int sums[R];
        int ones = 0;
        [[unroll]] for (uint r = 0u; r < R; ++r) sums[r] = 0;
        [[unroll]] for (uint h = span * STEPS; h < (span + 1u) * STEPS; ++h) {
            uvec4 own = codes[block * 2u + h];
            if (ZERO != 0u || BITS == 4u) ones += dot16(own, uvec4(0x01010101u));
            [[unroll]] for (uint r = 0u; r < R; ++r) sums[r] += dot16(own, bytes((c * R + r) * P, h));
        }
        [[unroll]] for (uint r = 0u; r < R; ++r) {
            int less = ZERO == 1u ? int(z[r]) : int(middle);
            acc[r] += scales[parameters + r] * float(sums[r] - less * ones);
            if (ZERO == 2u) acc[r] += z[r] * float(ones);
        }
    }
}

// The sum of a value of each lane: once.
float sum_of_all(float value) {
    for (uint o = 1u; o < SUBGROUP; o <<= 1) value += subgroupShuffleXor(value, o);
    if (gl_SubgroupInvocationID == 0u) squares[gl_SubgroupID] = value;
    barrier();
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < SUBGROUPS; ++i) sum += squares[i];
    return sum;
}

// What PROLOGUE makes of x, fours of columns LANES apart: of this lane, in registers.
vec4 mine[EACH];

bool has(uint i) {
    return lane() + i * LANES < blocks * 8u;
}

void make() {
    vec4 theirs[EACH];
    [[unroll]] for (uint i = 0u; i < EACH; ++i) {
        uint t = min(lane() + i * LANES, blocks * 8u - 1u);
        mine[i] = x[t];
        theirs[i] = PROLOGUE == RMS_NORM && weighted == 0u ? vec4(1.0) : other[t];
    }
    if (PROLOGUE == RMS_NORM) {
        float sum = 0.0;
        [[unroll]] for (uint i = 0u; i < EACH; ++i) {
            if (has(i)) sum += dot(mine[i], mine[i]);
        }
        float scale_ = divide(1.0, sqrt(sum_of_all(sum) / float(blocks * 32u) + eps));
        [[unroll]] for (uint i = 0u; i < EACH; ++i) mine[i] = mine[i] * scale_ * theirs[i];
        return;
    }
    [[unroll]] for (uint i = 0u; i < EACH; ++i) {
        vec4 own = mine[i];
        if (PROLOGUE == SILU_MUL) own = vec4(silu_(own.x), silu_(own.y), silu_(own.z), silu_(own.w));
        if (PROLOGUE == GELU_MUL) own = vec4(gelu_(own.x), gelu_(own.y), gelu_(own.z), gelu_(own.w));
        if (PROLOGUE == GELU_TANH_MUL)
            own = vec4(gelu_tanh_(own.x), gelu_tanh_(own.y), gelu_tanh_(own.z), gelu_tanh_(own.w));
        mine[i] = own * theirs[i];
    }
}

uint larger(uint most, vec4 own) {
    uvec4 bits = floatBitsToUint(own) & 0x7fffffffu;
    return max(most, max(max(bits.x, bits.y), max(bits.z, bits.w)));
}

// The scale of a row: its largest magnitude over 127. The order of bits is that of magnitudes, with NaN above all. A row
// of zeros has scale 1; one that is not finite has NaN, which its results keep.
float row_scale() {
    uint most = 0u;
    if (PROLOGUE == 0u) {
        for (uint t = lane(); t < blocks * 8u; t += LANES) most = larger(most, x[t]);
    } else {
        [[unroll]] for (uint i = 0u; i < EACH; ++i) {
            if (has(i)) most = larger(most, mine[i]);
        }
    }
    for (uint o = 1u; o < SUBGROUP; o <<= 1) most = max(most, subgroupShuffleXor(most, o));
    if (gl_SubgroupInvocationID == 0u) largest[gl_SubgroupID] = most;
    barrier();
    [[unroll]] for (uint i = 0u; i < SUBGROUPS; ++i) most = max(most, largest[i]);
    if (most == 0u) return 1.0;
    return most >= 0x7f800000u ? uintBitsToFloat(0x7fc00000u) : max(uintBitsToFloat(most) / 127.0, 1.17549435e-38);
}

uint four_codes(vec4 own, float s) {
    return pack_bytes(ivec4(clamp(roundEven(own / s), vec4(-128.0), vec4(127.0))));
}

// Four columns of what is multiplied, to shared memory.
void share(uint t, vec4 own, float s) {
    if (CODES != 0u) codes[t / 4u][t % 4u] = four_codes(own, s);
    else made[t] = own;
}

// What a result is finished with, read before it is needed.
struct Ending {
    uint n;
    float bias, partner_bias, added;  // the partner: the element of the other half of the head
    float cosine, sine;
    uint row;
};

Ending ending(uint tile, uint t) {
    Ending end = Ending(row_group(tile, t / 8u) * 8u + t % 8u, 0.0, 0.0, 0.0, 1.0, 0.0, 0u);
    if (t >= R * 8u || end.n >= n) return end;
    if (biased != 0u) end.bias = bias[column + end.n];
    if (VALUES == 0u && added != 0u) end.added = residual[column + end.n];
#ifdef PLACED
    end.row = row_index[0];
    if (ROPE != 0u) {
        uint k = end.n % ROPE;
        bool second = k >= ROPE / 2u;
        end.cosine = cosine[k];
        end.sine = second ? sine_[k] : -sine_[k];
        if (biased != 0u) end.partner_bias = bias[column + (second ? end.n - ROPE / 2u : end.n + ROPE / 2u)];
    }
#endif
    return end;
}

// The sum of result t of the workgroup over the subgroups.
float total(uint t) {
    float value = 0.0;
    [[unroll]] for (uint s = 0u; s < SUBGROUPS; ++s) value += partial[s * R * 8u + t];
    return value;
}

void main() {
    uint tile = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    if (tile * R * 8u >= n) return;  // the whole workgroup, so that no barrier waits for it
    uint row = lane() & 7u;
    uint stride = LANES / 8u;
    [[unroll]] for (uint i = 0u; i < R; ++i) acc[i] = 0.0;
    // 1. The first weights are on their way while x is made and quantized: scales, which all lanes find together, codes.
    load(tile, lane() >> 3);
    Ending own = ending(tile, lane());
    if (VALUES != 0u) {
        for (uint t = lane(); t < VALUES; t += LANES) values[t] = table[t];
        barrier();
    }
    float factor = 1.0;
    if (PROLOGUE != 0u) make();
    if (CODES != 0u) factor = row_scale();
    if (PROLOGUE != 0u) {
        [[unroll]] for (uint i = 0u; i < EACH; ++i) {
            if (has(i)) share(lane() + i * LANES, mine[i], factor);
        }
    } else if (CODES != 0u) {
        for (uint t = lane(); t < blocks * 8u; t += LANES) share(t, x[t], factor);
    }
    if (CODES != 0u || PROLOGUE != 0u) barrier();
    // 2. Products of UNROLL blocks, then loads of the next.
    for (uint first = lane() >> 3; first < blocks; first += stride * UNROLL) {
        if (first != lane() >> 3) load(tile, first);
        [[unroll]] for (uint c = 0u; c < UNROLL; ++c) {
            if (first + c * stride >= blocks) continue;
            [[unroll]] for (uint span = 0u; span < SPANS; ++span) add_span(first + c * stride, c, span);
        }
    }
    // 3. Lanes of a subgroup that share a row, 8 apart, add their blocks up by shuffles ...
    [[unroll]] for (uint i = 0u; i < R; ++i) {
        float value = acc[i];
        for (uint o = 8u; o < SUBGROUP; o <<= 1) value += subgroupShuffleXor(value, o);
        if (gl_SubgroupInvocationID < 8u) partial[(gl_SubgroupID * R + i) * 8u + row] = value;
    }
    // 4. ... and the subgroups in shared memory. It is written once, so one barrier suffices.
    barrier();
    for (uint t = lane(); t < R * 8u; t += LANES) {
        if (t != lane()) own = ending(tile, t);
        if (own.n >= n) continue;
        float value = total(t) * factor + own.bias + own.added;
#ifdef PLACED
        if (ROPE != 0u) value = value * own.cosine + (total(t ^ 8u) * factor + own.partner_bias) * own.sine;
        uint place = offset + own.row * row_stride + own.n / head * head_stride + own.n % head;
        write_result(place, value, dtype);
#else
        write_result(column + own.n, value, dtype);
#endif
    }
}
