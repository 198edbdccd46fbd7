// Tables of float32 whose values, times 2^SHIFT, are float16 numbers, or sums of two (W_TERMS), in shared memory.
// Needs formats.glsl, LANES, BITS, VALUES, W_TERMS, SHIFT and the buffer `table`; defines what plain_rows.glsl asks for.

// Of sixteen values, by a byte: the halves of its low code and of its high code, then what these round off. Of 256 the
// half of each.
shared uint looked_up[VALUES == 0u ? 1u : W_TERMS * 256u];

#define NO_ZERO (VALUES == 0u && BITS == 4u ? 8.0 : 0.0)
#define NUMBERS(codes) numbers_of(codes)
// An index of matrices of the second term, of which there is one only if they are not used.
#define REST(at) (W_TERMS > 1u ? (at) : 0u)

// What four codes, of eight bits as signed bytes, stand for, less no zero point.
vec4 numbers_of(vec4 codes) {
    if (VALUES == 0u) return codes;
    uvec4 at = uvec4(ivec4(codes)) & 255u;
    return vec4(table[at.x], table[at.y], table[at.z], table[at.w]);
}

// To shared memory; visible to others after a barrier.
void store_table() {
    float unit = uintBitsToFloat((127u + SHIFT) << 23);
    for (uint t = gl_LocalInvocationIndex; VALUES != 0u && t < 256u; t += LANES) {
        if (VALUES != 16u) {
            looked_up[t] = half_bits(table[t] * unit);
        } else {
            vec2 v = vec2(table[t % 16u], table[t / 16u]) * unit;
            uint bits = half_bits(v.x) | half_bits(v.y) << 16;
            looked_up[t] = bits;
            v -= unpackHalf2x16(bits);
            if (W_TERMS > 1u) looked_up[256u + t] = half_bits(v.x) | half_bits(v.y) << 16;
        }
    }
}

// Eight codes of four bits as pairs of halves in the order of coop_prep for tables.
uvec4 eight_of_table(uint word, uint term) {
    uint from = term * 256u;
    return uvec4(looked_up[from + (word & 255u)], looked_up[from + ((word >> 8) & 255u)],
                 looked_up[from + ((word >> 16) & 255u)], looked_up[from + (word >> 24)]);
}

// Four codes of eight bits in the order of halves_of_8.
uvec2 four_of_table(uint word) {
    return uvec2(looked_up[word & 255u] | looked_up[(word >> 16) & 255u] << 16,
                 looked_up[(word >> 8) & 255u] | looked_up[word >> 24] << 16);
}
