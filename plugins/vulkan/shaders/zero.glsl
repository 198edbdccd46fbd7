// Zero points of weights. With u the stored codes, w = (u - subtracted) s + added.

const uint NO_ZERO = 0u;
const uint INT_ZERO = 1u;
const uint FLOAT_ZERO = 2u;

struct ZeroPoint {
    int subtracted;
    float added;
};

// `bits`: the stored zero point, anything if there is none.
ZeroPoint zero_point(uint bits, uint kind) {
    int subtracted = kind == INT_ZERO ? int(bits) : (BITS == 4u ? 8 : 0);
    return ZeroPoint(subtracted, kind == FLOAT_ZERO ? uintBitsToFloat(bits) : 0.0);
}
