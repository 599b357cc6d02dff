// out [tokens, rows] = x [tokens, columns] times packed weights [rows, columns], plus a bias.
#pragma once
#include "tile.cuh"

struct LinearArgs {
    const u8* packed;
    Records records;   // of quantised formats
    const float* x;    // of the others
    const float* bias; // [rows] or null
    float* out;
    int rows;
    int columns;
    int tokens;
    int unused;
};

// A block per tile (x) and T tokens (y).
template <class F, int T>
DEVICE void linear_block(const LinearArgs& a) {
    SHARED float found[MOST_WARPS][T][TILE_ROWS];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const int first = blockIdx.y * T, tile = blockIdx.x;
    Inputs<T> in;
#pragma unroll
    for (int t = 0; t < T; ++t) {
        const int token = first + t < a.tokens ? first + t : a.tokens - 1;
        aim<F, T>(in, t, a.records, a.x, a.columns, token);
    }
    const u8* packed = a.packed + tile * tile_bytes<F>(a.columns);
    tile_sums<F, T>(packed, a.columns, in, warp, warps, found[warp]);
    BARRIER();
    for (int i = threadIdx.x; i < T * TILE_ROWS; i += blockDim.x) {
        const int t = i / TILE_ROWS, row = TILE_ROWS * tile + i % TILE_ROWS;
        if (first + t >= a.tokens || row >= a.rows) continue;
        float sum = row_sum<T>(found, warps, t, i % TILE_ROWS);
        if (a.bias != nullptr) sum = add32(sum, a.bias[row]);
        a.out[static_cast<i64>(first + t) * a.rows + row] = sum;
    }
}
