// y = x W^T with a weight as the XPU op for int4 takes it:
//
//   words   int   (N, words_per_row): eight unsigned codes each, the lowest bits hold the lowest k (layout PLAIN_INT32)
//   scales  S     (G, N)
//   zeros   char  (G, N), in the domain of the unsigned codes
//   w[n][k] = (code[n][k] - zeros[k / group][n]) * scales[k / group][n]
//
// x is (M, K) and y is (M, N), of dtype X; sums are in float. A word lies in one group: `group` is a multiple of 8.
// Built with -DX=<dtype> and -DS=<dtype>, each of the numbers below.

#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2

#if X == FLOAT32
typedef float x_t;
#else
typedef ushort x_t; // the bits: neither half arithmetic nor a type bfloat16 is needed of the device
#endif

#if S == FLOAT32
typedef float s_t;
#else
typedef ushort s_t;
#endif

float from_bfloat16(ushort bits) { return as_float((uint)bits << 16); }

ushort to_bfloat16(float value) {
    if (isnan(value)) return 0x7fc0;
    uint bits = as_uint(value);
    return (ushort)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); // half to even
}

float load_x(global const x_t *x, size_t i) {
#if X == FLOAT32
    return x[i];
#elif X == FLOAT16
    return vload_half(i, (global const half *)x);
#else
    return from_bfloat16(x[i]);
#endif
}

void store_y(global x_t *y, size_t i, float value) {
#if X == FLOAT32
    y[i] = value;
#elif X == FLOAT16
    vstore_half_rte(value, i, (global half *)y);
#else
    y[i] = to_bfloat16(value);
#endif
}

float load_scale(global const s_t *scales, size_t i) {
#if S == FLOAT32
    return scales[i];
#elif S == FLOAT16
    return vload_half(i, (global const half *)scales);
#else
    return from_bfloat16(scales[i]);
#endif
}

// The code of column j of a word. As an int a word is negative where its last code is above 7; as uint it has no sign.
int code_of(uint word, int j) { return (int)((word >> (4 * j)) & 15u); }

// One sub-group for each element of y; its lanes stride over the words of a row.
// Global size: (16, N, M), local size: (16, 1, 1).
__attribute__((intel_reqd_sub_group_size(16)))
kernel void by_sub_groups(global const x_t *x, global const uint *words, global const s_t *scales,
                          global const char *zeros, global x_t *y, int N, int K, int words_per_row, int group) {
    const int n = get_global_id(1), m = get_global_id(2);
    const int lane = get_sub_group_local_id(), lanes = get_sub_group_size();
    float sum = 0;
    for (int i = lane; i * 8 < K; i += lanes) {
        const uint word = words[(size_t)n * words_per_row + i];
        const size_t g = (size_t)(i * 8 / group) * N + n;
        const int zero = zeros[g], here = min(8, K - i * 8);
        float part = 0;
        for (int j = 0; j < here; j++)
            part = fma(load_x(x, (size_t)m * K + i * 8 + j), (float)(code_of(word, j) - zero), part);
        sum = fma(load_scale(scales, g), part, sum);
    }
    sum = sub_group_reduce_add(sum);
    if (lane == 0) store_y(y, (size_t)m * N + n, sum);
}

// Tiles of 16 x 16 elements of y; x and the dequantized weight pass through local memory, 32 columns at a time.
// Global size: (N, M), each rounded up to 16; local size: (16, 16).
#define TILE 16
#define DEPTH 32
__attribute__((reqd_work_group_size(TILE, TILE, 1)))
kernel void by_tiles(global const x_t *x, global const uint *words, global const s_t *scales,
                     global const char *zeros, global x_t *y, int M, int N, int K, int words_per_row, int group) {
    local float xs[TILE][DEPTH];
    local float ws[TILE][DEPTH + 1];
    const int column = get_local_id(0), row = get_local_id(1);
    const int first_n = get_group_id(0) * TILE, first_m = get_group_id(1) * TILE;
    const int lane = row * TILE + column;
    float sum = 0;
    for (int first_k = 0; first_k < K; first_k += DEPTH) {
        for (int i = lane; i < TILE * DEPTH; i += TILE * TILE) {
            const int m = first_m + i / DEPTH, k = first_k + i % DEPTH;
            xs[i / DEPTH][i % DEPTH] = m < M && k < K ? load_x(x, (size_t)m * K + k) : 0.0f;
        }
        if (lane < TILE * DEPTH / 8) { // a word each
            const int n = first_n + lane / (DEPTH / 8), k = first_k + lane % (DEPTH / 8) * 8;
            const bool inside = n < N && k < K;
            const uint word = inside ? words[(size_t)n * words_per_row + k / 8] : 0;
            const size_t g = inside ? (size_t)(k / group) * N + n : 0;
            const int zero = zeros[g];
            const float scale = inside ? load_scale(scales, g) : 0.0f;
            for (int j = 0; j < 8; j++)
                ws[lane / (DEPTH / 8)][lane % (DEPTH / 8) * 8 + j] = scale * (float)(code_of(word, j) - zero);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float part = 0; // of its own: one float that takes up every product in turn would err too much over a long K
        for (int k = 0; k < DEPTH; k++) part = fma(xs[row][k], ws[column][k], part);
        sum += part;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    const int m = first_m + row, n = first_n + column;
    if (m < M && n < N) store_y(y, (size_t)m * N + n, sum);
}
