// Results of coop_f16 and coop_fragments, whose buffers, push constants, ZERO and SHIFT it needs.

// Scales, zero points and the bias of one result; `grouped`: the sums have their scales already. Parts of K add up in
// gemm_join: terms that must count once belong to the part z = 0.
float finish(bool grouped, uint m_, uint n_, float value) {
    if (SHIFT != 0u) value *= uintBitsToFloat((127u - SHIFT) << 23);
    if (!grouped) value *= scale[n_];
    value *= x_scale[m_];
    if (ZERO == 2u && gl_WorkGroupID.z == 0u) {
        for (uint g = 0u; g < groups; ++g) value += uintBitsToFloat(zero[g * np + n_]) * x_sum[m_ * groups + g];
    }
    return biased != 0u ? value + bias[column + n_] : value;
}
