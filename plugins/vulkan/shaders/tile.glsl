// Common part of the register tiles gemm_float and gemm_int: a lane owns TM rows and TN columns. The columns lie a
// workgroup's width apart, so that neighbouring lanes read neighbouring vectors of the weight. Without shared memory
// and subgroups it is correct on any device.
//
// Grid: x tiles of columns, y tiles of rows, z channel groups of a convolution, each with its own rows of x and of the
// weight; with EXPERTS each tile of rows has its own rows of the weight. Sizes are those of `layout.Geometry`; a column
// is a row of the weight.

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 1) const uint TM = 4u;
layout(constant_id = 2) const uint TN = 4u;
layout(constant_id = 3) const uint BITS = 8u;
layout(constant_id = 4) const uint WIDE = 1u;  // whether results are float32
layout(constant_id = 5) const uint EXPERTS = 0u;  // whether rows are sorted by expert
layout(constant_id = 6) const uint VALUES = 0u;   // of a table that codes index; 0: they are integers

#include "result.glsl"
#include "zero.glsl"

layout(push_constant) uniform Push {
    uint rows;        // rows of x of one channel group
    uint columns;     // columns of one channel group
    uint padded_n;    // N of scale, zero and sums, rounded up to 8
    uint groups;      // groups of K
    uint steps;       // steps of 16 k in a group
    uint row_stride;  // vec4 or uvec4 of a row of x
    uint pitch;       // elements of a row of the result
    uint first;       // the first column in result and bias
    uint out_dtype;   // F16 or BF16, unless WIDE
    uint zero_kind;   // NO_ZERO, INT_ZERO or FLOAT_ZERO
    uint has_bias;
    uint all_rows;    // int8: rows of x of all channel groups, where zero points and sums begin
    uint has_sums;    // int8: activations have a zero point
    uint expert_first, expert_count, expert_total, expert_row;  // see experts.glsl
} push;
#define PUSH(name) push.name

#include "words.glsl"

layout(binding = 0) readonly buffer Codes { VECTOR codes[]; };
layout(binding = 0) readonly buffer HalfCodes { HALF_VECTOR half_codes[]; };
layout(binding = 1) readonly buffer Scale { float scale[]; };
layout(binding = 2) readonly buffer Zero { uint zero_bits[]; };
layout(binding = 6) readonly buffer Bias { float bias[]; };
layout(binding = 6) readonly buffer Ends { int ends[]; };  // before the biases

#include "experts.glsl"

uint first_column() {
    return gl_WorkGroupID.x * gl_WorkGroupSize.x * TN + gl_LocalInvocationID.x;
}

RowTile tile;       // the tile's rows, within a channel group
uint weight_first;  // the first row of the weight of the channel group or expert

// Finds the tile. Returns whether there are products to compute: rows of no expert get their zeros here.
bool begin_tile() {
    tile = row_tile(gl_WorkGroupID.y, TM, push.rows);
    weight_first = gl_WorkGroupID.z * push.columns;
    if (EXPERTS == 0u) return true;
    weight_first = weight_start(tile.expert, push.columns);
    if (tile.expert < push.expert_first + push.expert_count) return tile.first < tile.end;
    for (uint m = tile.first; m < tile.end; ++m) {
        for (uint j = 0u; j < TN; ++j) {
            uint n = first_column() + j * gl_WorkGroupSize.x;
            if (n < push.columns) store_float(m * push.pitch + n, 0.0, push.out_dtype);
        }
    }
    return false;
}

uint own_column(uint j) {
    return min(first_column() + j * gl_WorkGroupSize.x, push.columns - 1u);
}

// The row of the weight for column j of the lane; columns beyond the last compute the last one again.
uint weight_row(uint j) {
    return weight_first + own_column(j);
}

// Where the vectors of a row of the weight begin; they lie 8 apart. An int8 vector is a step, an int4 vector two.
uint first_vector(uint n) {
    return (n / 8u) * push.groups * push.steps * BITS + n % 8u;
}

// The codes of 16 k, four to a word in the order of k, of the row that begins at vector `first`: a vector of int8, half
// a vector of int4, whose low nibbles are k 0 to 3 of each eight and whose high nibbles are k 4 to 7.
uvec4 weight_words(uint first, uint step) {
    if (BITS == 8u) return words_of(codes[first + step * 8u]);
    uvec2 w = words_of(half_codes[(first + step / 2u * 8u) * 2u + step % 2u]);
    return uvec4(w, w >> 4).xzyw & 0x0f0f0f0fu;
}

// The row of x for row i of the lane.
uint activation_row(uint i) {
    return gl_WorkGroupID.z * push.rows + min(tile.first + i, tile.end - 1u);
}

float bias_of(uint j) {
    if (push.has_bias == 0u) return 0.0;
    return bias[EXPERTS == 0u ? push.first + weight_row(j) : bias_start(tile.expert, push.columns) + own_column(j)];
}

void store(uint i, uint j, float y) {
    uint m = tile.first + i;
    uint n = first_column() + j * gl_WorkGroupSize.x;
    if (m >= tile.end || n >= push.columns) return;
    store_float(m * push.pitch + gl_WorkGroupID.z * push.columns + push.first + n, y, push.out_dtype);
}
