// The routed experts of a MoE layer for few tokens, straight from their packed bundles:
//     out[t] = sum over experts, in the given order, of weight * down(glu(gate x_t, up x_t))
//
// A *slot* is a (token, expert) pair; slots are sorted by expert. Three steps, each a launch:
// gate and up with the activation (then records of the result, records.cuh), down per slot, and
// the weighted sum of each token's slots in their order. No atomics: the same input gives the same
// bits. The host knows the routing, because it has to fetch the experts, and hands it over by
// value: nothing is copied to the card, and nothing is waited for.
#pragma once
#include "glu.cuh"
#include "tile.cuh"

constexpr int MOST_EXPERTS = 64;
constexpr int MOST_SLOTS = 256;

struct ExpertArgs {
    u64 bases[MOST_EXPERTS];       // bundles
    int starts[MOST_EXPERTS + 2];  // first slot of each expert, and their end
    int slots[MOST_SLOTS];         // token * top_k + place among the token's experts
    i64 gate, up, down;            // offsets in a bundle
    i64 gate_bias, up_bias, down_bias;  // -1: none
    Records x_records;             // of the tokens
    const float* x;                // [tokens, hidden], for float formats
    float* h;                      // [slots, inner]
    Records h_records;             // of the slots
    float* y;                      // [slots, hidden]
    const float* weights;          // [tokens, top_k]
    float* out;                    // [tokens, hidden]
    int hidden, inner;
    int experts, tokens, top_k;
    int kind;                      // Glu
    float alpha, limit;
    int add;                       // onto what `out` holds
    int unused;
};

DEVICE float bias_of(u64 base, i64 offset, int row) {
    return offset < 0 ? 0.0f : *reinterpret_cast<const float*>(base + offset + 4 * static_cast<i64>(row));
}

// A block per tile of the inner size (x) and expert (y): half of its warps for gate, half for up.
template <class F, int T>
DEVICE void gate_up_block(const ExpertArgs& a) {
    SHARED float found[MOST_WARPS][T][TILE_ROWS];
    const int parts = blockDim.x / 64, warp = threadIdx.x / 32;
    const int tile = blockIdx.x, expert = blockIdx.y;
    const u64 base = a.bases[expert];
    const i64 offset = (warp < parts ? a.gate : a.up) + tile * tile_bytes<F>(a.hidden);
    const u8* packed = reinterpret_cast<const u8*>(base + offset);
    const int end = a.starts[expert + 1];
    for (int first = a.starts[expert]; first < end; first += T) {
        Inputs<T> in;
#pragma unroll
        for (int t = 0; t < T; ++t) {
            const int slot = first + t < end ? first + t : end - 1;
            aim<F, T>(in, t, a.x_records, a.x, a.hidden, a.slots[slot] / a.top_k);
        }
        tile_sums<F, T>(packed, a.hidden, in, warp % parts, parts, found[warp]);
        BARRIER();
        for (int i = threadIdx.x; i < T * TILE_ROWS; i += blockDim.x) {
            const int t = i / TILE_ROWS, row = TILE_ROWS * tile + i % TILE_ROWS;
            if (first + t >= end || row >= a.inner) continue;
            float g = row_sum<T>(found, parts, t, i % TILE_ROWS);
            float u = row_sum<T>(found + parts, parts, t, i % TILE_ROWS);
            if (a.gate_bias >= 0) g = add32(g, bias_of(base, a.gate_bias, row));
            if (a.up_bias >= 0) u = add32(u, bias_of(base, a.up_bias, row));
            a.h[static_cast<i64>(first + t) * a.inner + row] = glu(a.kind, g, u, a.alpha, a.limit);
        }
        BARRIER();  // before the next tokens' sums
    }
}

// A block per tile of the hidden size (x) and expert (y).
template <class F, int T>
DEVICE void down_block(const ExpertArgs& a) {
    SHARED float found[MOST_WARPS][T][TILE_ROWS];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x, expert = blockIdx.y;
    const u64 base = a.bases[expert];
    const u8* packed = reinterpret_cast<const u8*>(base + a.down + tile * tile_bytes<F>(a.inner));
    const int end = a.starts[expert + 1];
    for (int first = a.starts[expert]; first < end; first += T) {
        Inputs<T> in;
#pragma unroll
        for (int t = 0; t < T; ++t) {
            const int slot = first + t < end ? first + t : end - 1;
            aim<F, T>(in, t, a.h_records, a.h, a.inner, slot);
        }
        tile_sums<F, T>(packed, a.inner, in, warp, warps, found[warp]);
        BARRIER();
        for (int i = threadIdx.x; i < T * TILE_ROWS; i += blockDim.x) {
            const int t = i / TILE_ROWS, row = TILE_ROWS * tile + i % TILE_ROWS;
            if (first + t >= end || row >= a.hidden) continue;
            float sum = row_sum<T>(found, warps, t, i % TILE_ROWS);
            if (a.down_bias >= 0) sum = add32(sum, bias_of(base, a.down_bias, row));
            a.y[static_cast<i64>(first + t) * a.hidden + row] = sum;
        }
        BARRIER();
    }
}

// A thread per column of the hidden size (y) and token (x).
DEVICE void merge_block(const ExpertArgs& a) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x;
    if (column >= a.hidden) return;
    float* out = a.out + static_cast<i64>(token) * a.hidden + column;
    float sum = a.add ? *out : 0.0f;
    const int count = a.starts[a.experts];
    for (int slot = 0; slot < count; ++slot) {
        const int at = a.slots[slot];
        if (at / a.top_k != token) continue;
        sum = fma32(a.weights[at], a.y[static_cast<i64>(slot) * a.hidden + column], sum);
    }
    *out = sum;
}
