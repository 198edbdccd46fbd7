// Products of float matrices of any strides, in batches: y[b][m][n] = sum over k of a[b][m][k] w[b][n][k], plus a bias.
// Needs formats.glsl.

#include "words.glsl"

layout(push_constant) uniform Push {
    uint m, n, k;
    uint a_row, a_step, w_row, w_step, y_row, y_step;  // strides: from row to row of m or n, from k to k or n to n
    uint inner;                                        // batches along the inner of two dimensions
    uint a_batch[2], w_batch[2], y_batch[2];           // strides, inner first
    uint a_offset, w_offset, y_offset, bias_offset;
    uint biased;
#ifdef GROUPED
    uint expert_first, expert_count, expert_total, expert_row;  // see experts.glsl; w_batch[0]: from expert to expert
#endif
} push;

layout(binding = 0) readonly buffer A { float a_words[]; };
layout(binding = 0) readonly buffer A4 { VECTOR a_vectors[]; };
layout(binding = 1) readonly buffer W { uint w_words[]; };
layout(binding = 1) readonly buffer W2 { HALF_VECTOR w_pairs[]; };
layout(binding = 1) readonly buffer W4 { VECTOR w_vectors[]; };
layout(binding = 2) readonly buffer Bias { float bias[]; };
layout(binding = 7) writeonly buffer Result { float result[]; };

// Where a batch begins in an operand.
uint batch_of(uint batch, uint strides[2]) {
    return batch % push.inner * strides[0] + batch / push.inner * strides[1];
}

// Four k of a row that begins at `row`; those past the last are 0. A_VECTORS, W_VECTORS: whether fours of k are
// adjacent and aligned, and their number is whole; W_TYPE: F32, F16 or BF16.
vec4 read_a(uint row, uint k) {
    if (A_VECTORS != 0u) return uintBitsToFloat(words_of(a_vectors[(row + k) / 4u]));
    vec4 value = vec4(0.0);
    for (uint e = 0u; e < 4u; ++e) {
        if (k + e < push.k) value[e] = a_words[row + (k + e) * push.a_step];
    }
    return value;
}

vec4 read_w(uint row, uint k) {
    if (W_VECTORS != 0u) {
        uint at = (row + k) / 4u;
        if (W_TYPE == F32) return uintBitsToFloat(words_of(w_vectors[at]));
        uvec2 words = words_of(w_pairs[at]);
        return vec4(unpack_pair(words.x, W_TYPE), unpack_pair(words.y, W_TYPE));
    }
    vec4 value = vec4(0.0);
    for (uint e = 0u; e < 4u; ++e) {
        if (k + e >= push.k) continue;
        uint at = row + (k + e) * push.w_step;
        value[e] = W_TYPE == F32 ? uintBitsToFloat(w_words[at]) : unpack_pair(w_words[at / 2u], W_TYPE)[at % 2u];
    }
    return value;
}

void store(uint batch, uint m, uint n, float value) {
    if (m >= push.m || n >= push.n) return;
    if (push.biased != 0u) value += bias[push.bias_offset + n];
    result[push.y_offset + batch_of(batch, push.y_batch) + m * push.y_row + n * push.y_step] = value;
}
