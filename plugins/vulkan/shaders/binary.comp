// A function of each pair of elements of two strided operands. Numbers of functions: `steps.pointwise.BINARY`.

#version 450
#extension GL_GOOGLE_include_directive : require

#define OPERANDS 3
#define MOST_DIMS 6u
#include "functions.glsl"
#include "formats.glsl"
#include "strided.glsl"

layout(constant_id = 10) const uint FLAGGED = 0u;  // whether a flag is set if a sum, difference or product overflows
layout(binding = 6) buffer Bad { uint bad[]; };

float float_function(float x, float y) {
    bool nan = is_nan(x) || is_nan(y);
    switch (FUNCTION) {
        case 0u: return x + y;
        case 1u: return x - y;
        case 2u: return x * y;
        case 3u: return divide(x, y);
        case 4u: return nan ? NOT_A_NUMBER : max(x, y);
        case 5u: return nan ? NOT_A_NUMBER : min(x, y);
        case 6u: return pow_(x, y);
        case 7u: return remainder_(x, y);
        case 8u: return fmod_(x, y);
        case 9u: return floor_divide_(x, y);
        case 10u: return silu_(x) * y;
        case 11u: return gelu_(x) * y;
        default: return gelu_tanh_(x) * y;
    }
}

int int_pow(int x, int y) {
    int power = 1;
    for (uint bit = 0u; bit < 32u; ++bit) {
        if ((y >> bit & 1) != 0) power *= x;
        x *= x;
    }
    return power;
}

// Quotients and remainders of integers by the signs: devices differ where an operand is negative.
int int_function(int x, int y) {
    uint a = uint(abs(x));
    uint b = max(uint(abs(y)), 1u);
    bool opposed = (x < 0) != (y < 0);
    int r = int(a % b);
    switch (FUNCTION) {
        case 0u: return x + y;
        case 1u: return x - y;
        case 2u: return x * y;
        case 4u: return max(x, y);
        case 5u: return min(x, y);
        case 6u: return int_pow(x, y);
        case 7u: return r == 0 ? 0 : (opposed ? y + (x < 0 ? -r : r) : (x < 0 ? -r : r));
        case 8u: return x < 0 ? -r : r;
        case 9u: return opposed ? -int(a / b) - (r != 0 ? 1 : 0) : int(a / b);
        case 22u: return x & y;
        case 23u: return x | y;
        default: return x ^ y;
    }
}

// Comparisons and logic.
bool truth(uint x_word, uint y_word) {
    float x = uintBitsToFloat(x_word);
    float y = uintBitsToFloat(y_word);
    int i = int(x_word);
    int j = int(y_word);
    bool nan = TYPE == FLOAT && (is_nan(x) || is_nan(y));
    bool x_true = TYPE == FLOAT ? x != 0.0 || is_nan(x) : i != 0;
    bool y_true = TYPE == FLOAT ? y != 0.0 || is_nan(y) : j != 0;
    switch (FUNCTION) {
        case 13u: return !nan && (TYPE == FLOAT ? x == y : i == j);
        case 14u: return nan || (TYPE == FLOAT ? x != y : i != j);
        case 15u: return !nan && (TYPE == FLOAT ? x < y : i < j);
        case 16u: return !nan && (TYPE == FLOAT ? x <= y : i <= j);
        case 17u: return !nan && (TYPE == FLOAT ? x > y : i > j);
        case 18u: return !nan && (TYPE == FLOAT ? x >= y : i >= j);
        case 19u: return x_true && y_true;
        case 20u: return x_true || y_true;
        default: return x_true != y_true;
    }
}

bool overflows(int x, int y) {
    int high, low;
    imulExtended(x, y, high, low);
    switch (FUNCTION) {
        case 0u: return ((x ^ (x + y)) & (y ^ (x + y))) < 0;
        case 1u: return ((x ^ y) & (x ^ (x - y))) < 0;
        case 2u: return high != low >> 31;
        default: return false;
    }
}

uint function(uint x, uint y) {
    if (FUNCTION >= 13u && FUNCTION <= 21u) return truth(x, y) ? 1u : 0u;
    if (TYPE == FLOAT) return floatBitsToUint(float_function(uintBitsToFloat(x), uintBitsToFloat(y)));
    if (FLAGGED != 0u && overflows(int(x), int(y))) atomicOr(bad[0], 2u);
    int value = int_function(int(x), int(y));
    return TYPE == BOOL ? uint(min(value, 1)) : uint(value);  // a sum of bools is whether one is true
}

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
    uvec4 x = read_x(place[1]);
    uvec4 y = read_y(place[2]);
    for (uint e = 0u; e < WIDTH; ++e) x[e] = function(x[e], y[e]);
    write(place[0], x);
}
