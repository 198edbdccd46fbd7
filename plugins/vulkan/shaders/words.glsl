// 16 bytes, and 8. With LONG as 64-bit words: CPUs, which load word by word, are a sixth faster then.
#ifdef LONG
#define VECTOR u64vec2
#define HALF_VECTOR uint64_t
uvec2 words_of(uint64_t w) {
    return uvec2(uint(w), uint(w >> 32));
}
uvec4 words_of(u64vec2 w) {
    return uvec4(words_of(w.x), words_of(w.y));
}
#else
#define VECTOR uvec4
#define HALF_VECTOR uvec2
uvec2 words_of(uvec2 w) {
    return w;
}
uvec4 words_of(uvec4 w) {
    return w;
}
#endif
