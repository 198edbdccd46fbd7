// Elements of rows over several dimensions, and their order as unsigned keys. Needs functions.glsl, TYPE, INNER.

const uint FLOAT = 0u;

// A key that orders as the element does: -0 is 0, and NaN is above all. Elements of a smaller key come later.
uint ascending(uint word) {
    if (TYPE != FLOAT) return word ^ 0x80000000u;
    float x = uintBitsToFloat(word);
    if (is_nan(x)) return 0xffffffffu;
    if (x == 0.0) return 0x80000000u;
    return word ^ ((word >> 31) != 0u ? 0xffffffffu : 0x80000000u);
}

// The same for the smallest first; `nan_first` says where NaN belongs.
uint descending(uint word, bool nan_first) {
    uint key = ascending(word);
    if (TYPE == FLOAT && key == 0xffffffffu) return nan_first ? key : 0u;
    return ~key;
}

// Of two elements the one with the larger key, else that with the smaller index.
bool comes_first(uvec2 a, uvec2 b) {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}
