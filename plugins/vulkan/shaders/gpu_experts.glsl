// The rows of x and of the weight of a workgroup of a kernel for GPUs: those of a tile, or with EXPERTS those of an
// expert within a tile (see experts.glsl). Needs EXPERTS, gpu_result.glsl, the binding `bias`, and the push constants m,
// n, pitch, dtype, biased and column besides those of experts.glsl.

layout(set = 0, binding = 5) readonly buffer Ends { int ends[]; };  // before the biases
#define PUSH(name) name
#include "experts.glsl"

RowTile tile;
uint weight_first;  // the first row of the weight
uint padded_n;      // rows of the weight, with padding

// Finds the tile. Returns whether there are products to compute, the same for the whole workgroup: rows of no expert get
// their zeros here, in columns col0 ... col0 + width - 1.
bool begin_tile(uint number, uint height, uint col0, uint width, uint lanes) {
    tile = row_tile(number, height, m);
    padded_n = (n + 7u) & ~7u;
    weight_first = 0u;
    if (EXPERTS == 0u) return true;
    weight_first = weight_start(tile.expert, n);
    if (tile.expert < expert_first + expert_count) return tile.first < tile.end;
    for (uint t = gl_LocalInvocationIndex; t < (tile.end - tile.first) * width; t += lanes) {
        uint n_ = col0 + t % width;
        if (n_ < n) write_result((tile.first + t / width) * pitch + n_, 0.0, dtype);
    }
    return false;
}

// The row of the weight for a column of the result; columns beyond the last read the last again.
uint weight_row(uint n_) {
    return weight_first + min(n_, padded_n - 1u);
}

float bias_of(uint n_) {
    if (biased == 0u) return 0.0;
    return bias[EXPERTS == 0u ? column + n_ : bias_start(tile.expert, n) + n_];
}
