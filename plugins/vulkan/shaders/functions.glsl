// Functions of float32 within a few ulp on every device. Vulkan allows its own functions far larger errors (sin and cos
// 2^-11, atan 4096 ulp, and erf does not exist). Polynomials were fitted to the functions by relative error; NaN and
// infinities become what torch makes of them. NaN is recognized by its bits: `isnan`, and what min, max and comparisons
// make of NaN, are up to the device.

#define INFINITY uintBitsToFloat(0x7f800000u)
#define NOT_A_NUMBER uintBitsToFloat(0x7fc00000u)

bool is_nan(float x) {
    return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u;
}

bool is_inf(float x) {
    return (floatBitsToUint(x) & 0x7fffffffu) == 0x7f800000u;
}

// 2^n for -126 <= n <= 127.
float power_of_two(int n) {
    return uintBitsToFloat(uint(n + 127) << 23);
}

float high_half(float x) {
    return uintBitsToFloat(floatBitsToUint(x) & 0xfffff000u);
}

// c - a b with one rounding; devices may round the product of fma, too. Halves of floats have exact products.
float difference(float c, float a, float b) {
    float a_high = high_half(a);
    float b_high = high_half(b);
    precise float product = a * b;
    precise float a_low = a - a_high;
    precise float b_low = b - b_high;
    precise float error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
    precise float rest = (c - product) - error;
    return rest;
}

// a / b, corrected once: devices may be 2.5 ulp off.
float divide(float a, float b) {
    float q = a / b;
    float more = difference(a, q, b) / b;
    bool usual = !is_nan(more) && !is_inf(more) && !is_inf(q);
    return usual ? q + more : q;
}

// e^r - 1 - r for |r| <= 0.35.
float exp_tail(float r) {
    float p = 0.000199088906;
    p = fma(p, r, 0.00139345443);
    p = fma(p, r, 0.00833328413);
    p = fma(p, r, 0.0416664568);
    p = fma(p, r, 0.166666668);
    return fma(p, r, 0.500000001) * r * r;
}

// e^r 2^n for |n| <= 200, with one rounding at the end if the result is subnormal.
float exp_scaled(float r, int n) {
    int half_n = n / 2;
    return (exp_tail(r) + r + 1.0) * power_of_two(half_n) * power_of_two(n - half_n);
}

float exp_(float x) {
    if (is_nan(x)) return x;
    float bounded = clamp(x, -110.0, 90.0);
    float n = roundEven(bounded * 1.44269504);
    // n ln 2 in two parts, the first exact. Compilers would add the parts up if it were not `precise`.
    precise float rest = bounded - n * 0.693359375;
    precise float r = rest + n * 2.12194440e-4;
    return exp_scaled(r, int(n));
}

float exp2_(float x) {
    if (is_nan(x)) return x;
    float bounded = clamp(x, -160.0, 129.0);
    float n = roundEven(bounded);
    return exp_scaled((bounded - n) * 0.693147181, int(n));
}

float expm1_(float x) {
    return abs(x) < 0.35 ? x + exp_tail(x) : exp_(x) - 1.0;
}

// x = 2^exponent (1 + f), with 1 + f between sqrt(1/2) and sqrt(2); x is positive and finite.
float split(float x, out int exponent) {
    bool small = x < 1.17549435e-38;
    uint bits = floatBitsToUint(small ? x * 16777216.0 : x);
    int e = int(bits - 0x3f3504f3u) >> 23;  // these are the bits of sqrt(1/2)
    exponent = e - (small ? 24 : 0);
    return uintBitsToFloat(bits - uint(e << 23)) - 1.0;
}

// log(1 + f) - f for the f of `split`.
float log_tail(float f) {
    float p = 0.0733213968;
    p = fma(p, f, -0.116597508);
    p = fma(p, f, 0.116347244);
    p = fma(p, f, -0.123967295);
    p = fma(p, f, 0.142511524);
    p = fma(p, f, -0.166691496);
    p = fma(p, f, 0.200006882);
    p = fma(p, f, -0.249999812);
    p = fma(p, f, 0.333333313);
    return fma(p * f, f * f, -0.5 * f * f);
}

// The logarithm of what has none that is finite, else `value`.
float log_or(float x, float value) {
    if (is_nan(x) || x < 0.0) return NOT_A_NUMBER;
    if (x == 0.0) return -INFINITY;
    return is_inf(x) ? x : value;
}

float log_(float x) {
    int e;
    float f = split(x, e);
    precise float low = log_tail(f) - 2.12194440e-4 * float(e);
    precise float high = float(e) * 0.693359375;
    precise float sum = high + (f + low);
    return log_or(x, sum);
}

// exponent + result is the logarithm to base 2 of a positive finite x.
float log2_part(float x, out int exponent) {
    float f = split(x, exponent);
    float tail = log_tail(f);
    float whole = f + tail;
    return fma(whole, 1.44269504, ((f - whole) + tail) * 1.44269504 + whole * 1.925963e-8);
}

float log2_(float x) {
    int e;
    float part = log2_part(x, e);
    return log_or(x, float(e) + part);
}

float log1p_(float x) {
    if (abs(x) < 0.29) return x + log_tail(x);
    precise float u = 1.0 + x;
    precise float lost = x - (u - 1.0);
    return is_inf(x) || u <= 0.0 ? log_(u) : log_(u) + lost / u;
}

// x^y by torch's rules.
float pow_(float x, float y) {
    if (y == 0.0 || x == 1.0) return 1.0;
    if (is_nan(x) || is_nan(y)) return NOT_A_NUMBER;
    float size = abs(x);
    bool whole = floor(y) == y;
    bool odd = whole && abs(y) < 16777216.0 && (int(y) & 1) != 0;
    if (is_inf(y)) return size == 1.0 ? 1.0 : ((size > 1.0) == (y > 0.0) ? INFINITY : 0.0);
    float power;
    if (size == 0.0 || is_inf(x)) {
        power = (size == 0.0) == (y > 0.0) ? 0.0 : INFINITY;
    } else {
        // y (e + f) to base 2; the product with the whole part e is split into its rounded value and the rest.
        int e;
        float f = log2_part(size, e);
        precise float product = y * float(e);
        float rest = -difference(product, y, float(e));
        float n = clamp(roundEven(product + y * f), -300.0, 300.0);
        float r = clamp((product - n) + fma(y, f, rest), -600.0, 600.0);
        float more = clamp(roundEven(r), -300.0, 300.0);
        n = clamp(n + more, -190.0, 190.0);
        power = exp_scaled(clamp(r - more, -0.5, 0.5) * 0.693147181, int(n));
    }
    bool negative = (floatBitsToUint(x) >> 31) != 0u;
    if (negative && !whole && !is_inf(x) && x != 0.0) return NOT_A_NUMBER;
    return negative && odd ? -power : power;
}

// The bits of 2/pi, after 32 zeros.
const uint TWO_OVER_PI[9] = uint[9](0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u,
                                    0xfe5163abu, 0xdebbc561u);

uint bits_of_two_over_pi(uint first) {
    uint word = first >> 5;
    uint shift = first & 31u;
    return shift == 0u ? TWO_OVER_PI[word] : (TWO_OVER_PI[word] << shift) | (TWO_OVER_PI[word + 1u] >> (32u - shift));
}

// x = quadrant pi/2 + result, with |result| <= pi/4, for a finite x of any size.
float reduce_angle(float x, out uint quadrant) {
    uint bits = floatBitsToUint(x);
    int e = int((bits >> 23) & 0xffu) - 150;
    quadrant = 0u;
    if (abs(x) < 0.78539816) return x;
    // |x| = m 2^e. Bits of 2/pi whose products are multiples of four quadrants are left out: 96 bits are enough.
    uint m = (bits & 0x7fffffu) | 0x800000u;
    uint first = uint(e - 2 + 32);
    uint high, mid, carry, middle, unused;
    umulExtended(m, bits_of_two_over_pi(first + 64u), carry, unused);
    umulExtended(m, bits_of_two_over_pi(first + 32u), high, mid);
    middle = mid + carry;
    high += middle < mid ? 1u : 0u;
    high += m * bits_of_two_over_pi(first);
    // The two highest bits count quadrants; the next 32 are a fraction, which is rounded to the nearest quadrant.
    uint fraction = (high << 2) | (middle >> 30);
    quadrant = (high >> 30) + (fraction >> 31);
    float rest = float(int(fraction)) * 3.6572952e-10;  // pi/2 2^-32
    if ((bits >> 31) == 0u) return rest;
    quadrant = 4u - quadrant;
    return -rest;
}

// The sine of x + turn pi/2.
float sine(float x, uint turn) {
    if (is_nan(x) || is_inf(x)) return NOT_A_NUMBER;
    uint quadrant;
    float r = reduce_angle(x, quadrant);
    quadrant += turn;
    float z = r * r;
    float s = fma(fma(fma(2.724939e-06, z, -0.000198400827), z, 0.00833333187), z, -0.166666667);
    float c = fma(fma(2.4547536e-05, z, -0.00138883013), z, 0.0416666647);
    float value = (quadrant & 1u) == 0u ? fma(s * z, r, r) : fma(c * z, z, fma(-0.5, z, 1.0));
    return (quadrant & 2u) == 0u ? value : -value;
}

float tanh_(float x) {
    if (is_nan(x)) return x;
    float z = x * x;
    float p = -0.00611317521;
    p = fma(p, z, 0.0210100688);
    p = fma(p, z, -0.0538540667);
    p = fma(p, z, 0.133327945);
    p = fma(p, z, -0.333333292);
    if (abs(x) < 0.625) return fma(p * z, x, x);
    float y = 1.0 - 2.0 / (exp_(2.0 * min(abs(x), 20.0)) + 1.0);
    return x < 0.0 ? -y : y;
}

float sigmoid_(float x) {
    return divide(1.0, 1.0 + exp_(-x));
}

float erf_(float x) {
    if (is_nan(x)) return x;
    float size = min(abs(x), 4.5);
    if (size < 1.0) {
        float z = x * x;
        float p = -9.68012703e-06;
        p = fma(p, z, 0.000112705412);
        p = fma(p, z, -0.0008484711);
        p = fma(p, z, 0.00522107485);
        p = fma(p, z, -0.0268654458);
        p = fma(p, z, 0.112837827);
        p = fma(p, z, -0.376126385);
        return fma(p, z, 1.12837917) * x;
    }
    // 1 - e^(-x^2) times a polynomial in 1 / (1 + x).
    float u = 1.0 / (1.0 + size);
    float p = -0.169964501;
    p = fma(p, u, 0.90028869);
    p = fma(p, u, -1.48546837);
    p = fma(p, u, 0.711635893);
    p = fma(p, u, 0.479220576);
    p = fma(p, u, 0.573167809);
    p = fma(p, u, -0.000396495948);
    float y = 1.0 - exp_(-size * size) * p;
    return x < 0.0 ? -y : y;
}

float atan_(float x) {
    if (is_nan(x)) return x;
    // To |angle| <= pi/8: by 1 / x beyond tan(3 pi/8), by (x - 1) / (x + 1) beyond tan(pi/8).
    float size = abs(x);
    bool far = size > 2.41421356;
    bool middle = !far && size > 0.414213562;
    float t = far ? -1.0 / size : (middle ? (size - 1.0) / (size + 1.0) : size);
    float z = t * t;
    float p = -0.06462616;
    p = fma(p, z, 0.107475903);
    p = fma(p, z, -0.142643902);
    p = fma(p, z, 0.199995561);
    p = fma(p, z, -0.333333318);
    float y = fma(p * z, t, t) + (far ? 1.57079633 : (middle ? 0.785398163 : 0.0));
    return x < 0.0 ? -y : y;
}

float asin_(float x) {
    return abs(x) <= 1.0 ? atan_(divide(x, sqrt((1.0 - x) * (1.0 + x)))) : NOT_A_NUMBER;
}

float acos_(float x) {
    return abs(x) <= 1.0 ? 2.0 * atan_(sqrt(divide(1.0 - x, 1.0 + x))) : NOT_A_NUMBER;
}

float sinh_(float x) {
    if (is_nan(x)) return x;
    float size = abs(x);
    float y;
    if (size < 0.35) {
        float m = expm1_(size);
        y = 0.5 * (m + m / (m + 1.0));
    } else {
        float e = exp_(0.5 * size);  // twice, because e^x may overflow where its half does not
        y = 0.5 * e * e - 0.5 / e / e;
    }
    return x < 0.0 ? -y : y;
}

float cosh_(float x) {
    float e = exp_(0.5 * abs(x));
    return 0.5 * e * e + 0.5 / e / e;
}

float gelu_(float x) {
    return 0.5 * x * (1.0 + erf_(x * 0.707106781));
}

float gelu_tanh_(float x) {
    return 0.5 * x * (1.0 + tanh_(0.797884561 * (x + 0.044715 * x * x * x)));
}

float silu_(float x) {
    return divide(x, 1.0 + exp_(-x));
}

float log_of_sum(float beta, float x) {
    return divide(log1p_(exp_(beta * x)), beta);
}

int exponent(float x) {
    return int(floatBitsToUint(x) >> 23) & 0xff;
}

// Remainder of a / b with the sign of a. Each turn takes multiples of b times a power of two whose quotient is exact.
float fmod_(float a, float b) {
    if (is_nan(a) || is_nan(b) || is_inf(a) || b == 0.0) return NOT_A_NUMBER;
    if (is_inf(b)) return a;
    float size = abs(b);
    float r = abs(a);
    for (int turn = 0; turn < 14 && r >= size; ++turn) {
        float part = ldexp(size, max(exponent(r) - exponent(size) - 21, 0));
        r = difference(r, trunc(r / part), part);
        if (r < 0.0) r += part;
        if (r >= part) r -= part;
    }
    return a < 0.0 ? -r : r;
}

// With the sign of b.
float remainder_(float a, float b) {
    float r = fmod_(a, b);
    return r != 0.0 && (r < 0.0) != (b < 0.0) ? r + b : r;
}

// As torch: through the remainder, so that quotients of integers are exact.
float floor_divide_(float a, float b) {
    if (b == 0.0) return a / b;
    float r = fmod_(a, b);
    float q = divide(a - r, b);
    return roundEven(r != 0.0 && (r < 0.0) != (b < 0.0) ? q - 1.0 : q);
}
