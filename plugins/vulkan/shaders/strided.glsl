// Functions of single elements over strided operands of 32-bit words. A lane computes WIDTH elements that are adjacent
// along the innermost dimension; it finds their places once. Operand 0 is the result, others lie at bindings 0, 1, 2.
// Needs formats.glsl, OPERANDS and MOST_DIMS.

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint DIMS = 1u;
layout(constant_id = 2) const uint WIDTH = 1u;     // 1 or 4
layout(constant_id = 3) const uint FUNCTION = 0u;
layout(constant_id = 4) const uint TYPE = 0u;      // of the operands
layout(constant_id = 5) const uint MODE_OUT = 0u;  // how each operand is accessed, see below
layout(constant_id = 6) const uint MODE_X = 0u;
layout(constant_id = 7) const uint MODE_Y = 0u;
layout(constant_id = 8) const uint MODE_Z = 0u;

layout(constant_id = 9) const uint HALF = 0u;      // F16 or BF16 if X is that: it is read as float32

const uint FLOAT = 0u;
const uint INT = 1u;
const uint BOOL = 2u;

const uint STRIDED = 0u;   // word by word
const uint VECTORS = 1u;   // four words at a time: they are adjacent and aligned
const uint NUMBER_P = 2u;  // a number from the push constants
const uint NUMBER_Q = 3u;

layout(push_constant) uniform Push {
    uint count;             // lanes that have something to do
    uint size[MOST_DIMS];   // innermost first; that of the first in units of WIDTH
    uint stride[OPERANDS * MOST_DIMS];
    uint offset[OPERANDS];
    uint p, q;              // numbers: parameters of the function, or operands
#ifdef PUSH_MORE
    PUSH_MORE
#endif
} push;

layout(binding = 0) readonly buffer X { uint x_words[]; };
layout(binding = 0) readonly buffer X4 { uvec4 x_vectors[]; };
layout(binding = 0) readonly buffer X2 { uvec2 x_halves[]; };
#if OPERANDS > 2
layout(binding = 1) readonly buffer Y { uint y_words[]; };
layout(binding = 1) readonly buffer Y4 { uvec4 y_vectors[]; };
#endif
#if OPERANDS > 3
layout(binding = 2) readonly buffer Z { uint z_words[]; };
layout(binding = 2) readonly buffer Z4 { uvec4 z_vectors[]; };
#endif
layout(binding = 7) writeonly buffer Result { uint result_words[]; };
layout(binding = 7) writeonly buffer Result4 { uvec4 result_vectors[]; };

uint lane() {
    return (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
}

// Where the first of a lane's elements lies in each operand.
void find(uint at, out uint place[OPERANDS]) {
    for (uint o = 0u; o < uint(OPERANDS); ++o) place[o] = push.offset[o];
    for (uint d = 0u; d < DIMS; ++d) {
        uint rest = at;
        if (d + 1u < DIMS) {
            at /= push.size[d];
            rest -= at * push.size[d];
        }
        if (d == 0u) rest *= WIDTH;
        for (uint o = 0u; o < uint(OPERANDS); ++o) place[o] += rest * push.stride[o * MOST_DIMS + d];
    }
}

// Elements of one operand; words beyond WIDTH are not used.
#define DEFINE_READ(name, words, vectors, mode, operand)                                \
    uvec4 name(uint place) {                                                            \
        if (mode == NUMBER_P) return uvec4(push.p);                                     \
        if (mode == NUMBER_Q) return uvec4(push.q);                                     \
        if (mode == VECTORS) return vectors[place / 4u];                                \
        uint step = push.stride[operand * MOST_DIMS];                                   \
        uvec4 value = uvec4(words[place]);                                              \
        for (uint e = 1u; e < WIDTH; ++e) value[e] = words[place + e * step];           \
        return value;                                                                   \
    }

DEFINE_READ(read_words_of_x, x_words, x_vectors, MODE_X, 1u)

uvec4 read_x(uint place) {
    if (HALF == 0u) return read_words_of_x(place);
    vec4 value = vec4(0.0);
    if (MODE_X == VECTORS) {
        uvec2 words = x_halves[place / 4u];
        value = vec4(unpack_pair(words.x, HALF), unpack_pair(words.y, HALF));
    } else {
        uint step = push.stride[MOST_DIMS];
        for (uint e = 0u; e < WIDTH; ++e) {
            uint at = place + e * step;
            value[e] = unpack_pair(x_words[at / 2u], HALF)[at % 2u];
        }
    }
    return floatBitsToUint(value);
}

#if OPERANDS > 2
DEFINE_READ(read_y, y_words, y_vectors, MODE_Y, 2u)
#endif
#if OPERANDS > 3
DEFINE_READ(read_z, z_words, z_vectors, MODE_Z, 3u)
#endif

void write(uint place, uvec4 value) {
    if (MODE_OUT == VECTORS) {
        result_vectors[place / 4u] = value;
    } else {
        for (uint e = 0u; e < WIDTH; ++e) result_words[place + e * push.stride[0]] = value[e];
    }
}
