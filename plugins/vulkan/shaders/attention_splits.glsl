// The result of attention for four columns of a row, from the splits of its keys. The includer defines TOTAL(split,
// row): the largest score of a split and its sum of weights; SUM(split, row, four): what it adds up; LOWEST: the score
// of no key.

vec4 of_splits(uint count, uint row, uint four) {
    float largest = LOWEST;
    for (uint s = 0u; s < count; ++s) largest = max(largest, TOTAL(s, row).x);
    float weights = 0.0;
    vec4 sum = vec4(0.0);
    for (uint s = 0u; s < count; ++s) {
        vec2 total = TOTAL(s, row);
        vec4 own = SUM(s, row, four);
        float less = total.x == LOWEST ? 0.0 : exp2(total.x - largest);
        weights += total.y * less;
        // Not a product with 0: what a split without keys has added up may be anything but is not needed.
        if (less != 0.0) sum += own * less;
    }
    return sum * (weights == 0.0 ? 0.0 : 1.0 / weights);
}
