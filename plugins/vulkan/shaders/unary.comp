// A function of each element of a strided operand. Numbers of functions: `steps.pointwise.UNARY`.

#version 450
#extension GL_GOOGLE_include_directive : require

#define OPERANDS 2
#define MOST_DIMS 6u
#include "functions.glsl"
#include "formats.glsl"
#include "strided.glsl"

layout(constant_id = 10) const uint FLAGGED = 0u;  // whether a flag is set if an element does not fit int32
layout(binding = 6) buffer Bad { uint bad[]; };

uint of_bool(bool b) {
    return b ? 1u : 0u;
}

// Functions whose result is a float.
float float_function(float x) {
    float p = uintBitsToFloat(push.p);
    float q = uintBitsToFloat(push.q);
    switch (FUNCTION) {
        case 1u: return -x;
        case 2u: return abs(x);
        case 3u: return is_nan(x) || x == 0.0 ? 0.0 : (x < 0.0 ? -1.0 : 1.0);
        case 4u: return exp_(x);
        case 5u: return exp2_(x);
        case 6u: return expm1_(x);
        case 7u: return log_(x);
        case 8u: return log1p_(x);
        case 9u: return log2_(x);
        case 10u: return x < 0.0 ? NOT_A_NUMBER : sqrt(x);
        case 11u: return x < 0.0 ? NOT_A_NUMBER : divide(1.0, sqrt(x));
        case 12u: return divide(1.0, x);
        case 13u: return sine(x, 0u);
        case 14u: return sine(x, 1u);
        case 15u: return divide(sine(x, 0u), sine(x, 1u));
        case 16u: return asin_(x);
        case 17u: return acos_(x);
        case 18u: return atan_(x);
        case 19u: return sinh_(x);
        case 20u: return cosh_(x);
        case 21u: return tanh_(x);
        case 22u: return sigmoid_(x);
        case 23u: return erf_(x);
        case 24u: return is_nan(x) || x > 0.0 ? x : 0.0;
        case 25u: return gelu_(x);
        case 26u: return gelu_tanh_(x);
        case 27u: return silu_(x);
        case 28u: return x * tanh_(x > 20.0 ? x : log_of_sum(1.0, x));
        case 29u: return is_nan(x) ? x : divide(clamp(x + 3.0, 0.0, 6.0), 6.0);
        case 30u: return is_nan(x) ? x : divide(x * clamp(x + 3.0, 0.0, 6.0), 6.0);
        case 31u: return floor(x);
        case 32u: return ceil(x);
        case 33u: return roundEven(x);
        case 34u: return trunc(x);
        case 35u: return x > 0.0 || is_nan(x) ? x : x * p;
        case 36u: return x > 0.0 || is_nan(x) ? x : p * expm1_(x);
        case 37u: return x * p > q ? x : log_of_sum(p, x);
        case 38u: return is_nan(x) ? x : min(max(x, p), q);
        default: return x;
    }
}

int int_function(int x) {
    switch (FUNCTION) {
        case 1u: return -x;
        case 2u: return abs(x);
        case 3u: return sign(x);
        case 24u: return max(x, 0);
        case 38u: return min(max(x, int(push.p)), int(push.q));
        case 39u: return ~x;
        default: return x;
    }
}

uint function(uint word) {
    float x = uintBitsToFloat(word);
    switch (FUNCTION) {
        case 40u: return TYPE == FLOAT ? of_bool(x == 0.0 && !is_nan(x)) : of_bool(word == 0u);  // logical_not
        case 41u: return of_bool(is_nan(x));
        case 42u: return of_bool(is_inf(x));
        case 43u: return floatBitsToUint(float(int(word)));  // to float32
        case 44u:  // to int32
            if (FLAGGED != 0u && !(x >= -2147483648.0 && x < 2147483648.0)) atomicOr(bad[0], 2u);
            return uint(int(is_nan(x) ? 0.0 : clamp(x, -2147483648.0, 2147483520.0)));
        case 45u: return TYPE == FLOAT ? of_bool(x != 0.0 || is_nan(x)) : of_bool(word != 0u);  // to bool
    }
    if (TYPE == BOOL && FUNCTION == 39u) return word ^ 1u;
    return TYPE == FLOAT ? floatBitsToUint(float_function(x)) : uint(int_function(int(word)));
}

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
    uvec4 x = read_x(place[1]);
    for (uint e = 0u; e < WIDTH; ++e) x[e] = function(x[e]);
    write(place[0], x);
}
