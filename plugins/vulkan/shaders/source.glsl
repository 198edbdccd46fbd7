// Activations as they came: rows of f32, f16, bf16 or int8, or the columns of a convolution over an NHWC image. These
// are never written out: `element` finds the pixel and channel for column k of row m. Columns are read in fours, as the
// padded rows of `layout.Geometry` have them: whole groups of K, each rounded up to steps of 16.

layout(constant_id = 1) const uint CONV = 0u;
layout(constant_id = 2) const uint DTYPE = 0u;    // F32, F16, BF16 or INT8
layout(constant_id = 3) const uint ALIGNED = 0u;  // whether fours of columns lie side by side at a multiple of four

layout(push_constant) uniform Push {
    uint rows;       // rows of one channel group
    uint k;          // columns of x
    uint pitch;      // elements from row to row, of an image from pixel to pixel
    uint group;      // columns of a group
    uint groups;
    uint steps;      // steps of 16 columns in a padded group
    uint grid;       // workgroups in x, by which rows or words are folded
    uint all_rows;   // rows of all channel groups
    uint mode;       // prepare: dtype of the result; quantize: SYMMETRIC, ASYMMETRIC, GIVEN or PER_TOKEN
    float given_scale;
    int given_zero;
    uint first;      // the output position that row 0 of an image's columns stands for
    uint channels;   // of one channel group
    uint height, width;
    uint out_height, out_width;
    uint kernel_width;
    uint stride, padding, dilation;  // height in the low 16 bits, width in the high ones
    float per_channel, per_kernel_width;  // 1 / channels, 1 / kernel_width
#ifdef PUSH_MORE
    PUSH_MORE
#endif
} push;

layout(binding = 0) readonly buffer Words { uint source[]; };
layout(binding = 0) readonly buffer Pairs { uvec2 source2[]; };
layout(binding = 0) readonly buffer Fours { uvec4 source4[]; };

const uint OUTSIDE = 0xffffffffu;

ivec2 halves(uint word) {
    return ivec2(word & 0xffffu, word >> 16);
}

// A row: where it begins, or for an image the first pixel's row and column and the offset of image and channel group.
struct Origin {
    ivec2 corner;
    uint offset;
};

Origin origin(uint row) {
    if (CONV == 0u) return Origin(ivec2(0), row * push.pitch);
    // Rows of the channel groups follow each other; within one, rows are output positions, image after image.
    uint pixels = push.out_height * push.out_width;
    uint head = row / push.rows;
    uint place = row % push.rows + push.first;
    uint within = place % pixels;
    ivec2 out_place = ivec2(within / push.out_width, within % push.out_width);
    uint image = place / pixels * push.height * push.width;
    return Origin(out_place * halves(push.stride) - halves(push.padding), image * push.pitch + head * push.channels);
}

// floor(a / b) for a < 2**21, from 1 / b: integer division is slow where there are no instructions for it.
uint quotient(uint a, float inverse) {
    return uint((float(a) + 0.5) * inverse);
}

// The element of x for column k of a row, or OUTSIDE for the padding of an image.
uint element(Origin o, uint k) {
    if (CONV == 0u) return o.offset + k;
    // Columns are in (KH, KW, IC) order: the tap of the kernel, then the channel.
    uint tap = quotient(k, push.per_channel);
    uint tap_row = quotient(tap, push.per_kernel_width);
    ivec2 pixel = o.corner + ivec2(tap_row, tap - tap_row * push.kernel_width) * halves(push.dilation);
    bool inside = all(greaterThanEqual(pixel, ivec2(0))) && all(lessThan(pixel, ivec2(push.height, push.width)));
    if (!inside) return OUTSIDE;
    return o.offset + (uint(pixel.x) * push.width + uint(pixel.y)) * push.pitch + (k - tap * push.channels);
}

float read_one(uint place, float outside) {
    if (place == OUTSIDE) return outside;
    if (DTYPE == F32) return uintBitsToFloat(source[place]);
    if (DTYPE == INT8) return float(unpack_bytes(source[place / 4u])[place % 4u]);
    return unpack_pair(source[place / 2u], DTYPE)[place % 2u];
}

vec4 read_four(uint place, float outside) {
    if (place == OUTSIDE) return vec4(outside);
    if (DTYPE == F32) return uintBitsToFloat(source4[place / 4u]);
    if (DTYPE == INT8) return vec4(unpack_bytes(source[place / 4u]));
    uvec2 words = source2[place / 4u];
    return vec4(unpack_pair(words.x, DTYPE), unpack_pair(words.y, DTYPE));
}

// Columns of group g; the last group may be shorter, or empty.
uint columns_of(uint g) {
    return min(push.group, push.k - min(g * push.group, push.k));
}

// Columns of group g from `offset` on: how many of four exist.
uint count_columns(uint g, uint offset) {
    uint end = columns_of(g);
    return offset >= end ? 0u : min(end - offset, 4u);
}

// Four columns of group g from `offset` on. Those that do not exist are 0, those in the padding of an image `outside`.
vec4 read_columns(Origin o, uint g, uint offset, float outside) {
    uint count = count_columns(g, offset);
    if (count == 0u) return vec4(0.0);
    uint k = g * push.group + offset;
    vec4 x;
    if (ALIGNED != 0u) {
        x = read_four(element(o, k), outside);
    } else {
        x.x = read_one(element(o, k), outside);
        x.y = count > 1u ? read_one(element(o, k + 1u), outside) : 0.0;
        x.z = count > 2u ? read_one(element(o, k + 2u), outside) : 0.0;
        x.w = count > 3u ? read_one(element(o, k + 3u), outside) : 0.0;
    }
    return mix(vec4(0.0), x, lessThan(uvec4(0u, 1u, 2u, 3u), uvec4(count)));
}
