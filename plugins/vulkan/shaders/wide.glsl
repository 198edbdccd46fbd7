// Sums of int32 in 64 bits, low word first: devices need not have such integers.

uvec2 wide(uint word) {
    return uvec2(word, (word >> 31) != 0u ? 0xffffffffu : 0u);
}

uvec2 wide_sum(uvec2 a, uvec2 b) {
    uint carry;
    uint low = uaddCarry(a.x, b.x, carry);
    return uvec2(low, a.y + b.y + carry);
}

bool fits(uvec2 sum) {
    return sum.y == wide(sum.x).y;
}
