// Codes of weights as float16, exactly and without conversions: 1024 + u is the bits of u below those of 1024.
// The order of k within eight columns is that of coop_prep.

uint halves(uint bits, float16_t by, float16_t less) {
    return packFloat2x16(fma(unpackFloat2x16(bits | 0x64006400u), f16vec2(by), f16vec2(-less)));
}

// Eight int4 codes (0..15) less z: of 1024 + u, or of 1024 + 16 u divided by 16.
uvec4 halves_of_4(uint v, float16_t z) {
    float16_t one = float16_t(1.0), part = float16_t(0.0625);
    float16_t low = float16_t(1024.0) + z, high = float16_t(64.0) + z;
    uint w = v >> 8;
    return uvec4(halves(v & 0x000F000Fu, one, low), halves(v & 0x00F000F0u, part, high),
                 halves(w & 0x000F000Fu, one, low), halves(w & 0x00F000F0u, part, high));
}

// Four int8 codes less z.
uvec2 halves_of_8(uint v, float16_t z) {
    uint u = v ^ 0x80808080u;
    float16_t one = float16_t(1.0), low = float16_t(1152.0) + z;
    return uvec2(halves(u & 0x00FF00FFu, one, low), halves((u >> 8) & 0x00FF00FFu, one, low));
}
