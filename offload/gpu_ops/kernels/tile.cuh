// A tile of 16 rows times up to T tokens, by some of a block's warps: each takes every `parts`-th
// chunk of the columns, and their sums are added in the order of the warps. What a row's result is
// depends on the format, the columns and the number of warps, and on nothing else: not on T, on
// other rows, or on what else the card does.
#pragma once
#include "formats.cuh"
#include "records.cuh"

constexpr int MOST_WARPS = 8;  // 256 threads may have 255 registers each

// Where the activations of T tokens are; the unused ones repeat the last.
template <int T>
struct Inputs {
    const signed char* q[T];
    const float* scale[T];
    const int* sums[T];
    const float* x[T];
};

template <class F, int T>
DEVICE void aim(Inputs<T>& in, int i, const Records& records, const float* x, int columns,
                int token) {
    const i64 start = static_cast<i64>(token) * columns;
    if (F::KIND == PLAIN) {
        in.x[i] = x + start;
        return;
    }
    in.q[i] = records.q + start;
    in.scale[i] = records.scale + start / F::BLOCK;
    in.sums[i] = records.sums + start / (F::KIND == LARGE ? RUN : 32);
}

// The sums of the products of 32 columns, low and high runs apart.
DEVICE void dots(const u32 (&words)[8], const uint4& low, const uint4& high, int& low_dot,
                 int& high_dot) {
    low_dot = high_dot = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        low_dot = dot4(words[k], part(low, k), low_dot);
        high_dot = dot4(words[4 + k], part(high, k), high_dot);
    }
}

template <class F, int T>
DEVICE void add_small(const u8* at, int group, int column, const Inputs<T>& in,
                      float (&sums)[T][4]) {
    typename F::Raw raw;
    F::load(at, 0, group, raw);
    uint4 low[T], high[T];
    float scale[T], total[T];
#pragma unroll
    for (int t = 0; t < T; ++t) {
        low[t] = load16(in.q[t] + column);
        high[t] = load16(in.q[t] + column + RUN);
        scale[t] = load_float(in.scale[t] + column / 32);
        if (F::MINIMUM) total[t] = mul32(scale[t], to_float(load_int(in.sums[t] + column / 32)));
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        u32 words[8];
        F::unpack(raw, 0, r, words);
        const float d = F::scale(raw, r);
#pragma unroll
        for (int t = 0; t < T; ++t) {
            int low_dot, high_dot;
            dots(words, low[t], high[t], low_dot, high_dot);
            sums[t][r] = fma32(to_float(low_dot + high_dot), mul32(d, scale[t]), sums[t][r]);
            if (F::MINIMUM) sums[t][r] = fma32(F::minimum(raw, r), total[t], sums[t][r]);
        }
    }
}

template <class F, int T>
DEVICE void add_large(const u8* at, int slot, int group, int start, const Inputs<T>& in,
                      float (&sums)[T][4]) {
    const int low_column = start + F::low(slot), high_column = start + F::high(slot);
    typename F::Raw raw;
    F::load(at, slot, group, raw);
    uint4 low[T], high[T];
    float scale[T];
    int low_sum[T], high_sum[T];
#pragma unroll
    for (int t = 0; t < T; ++t) {
        low[t] = load16(in.q[t] + low_column);
        high[t] = load16(in.q[t] + high_column);
        scale[t] = load_float(in.scale[t] + start / CHUNK);
        if (F::MINIMUM) {
            low_sum[t] = load_int(in.sums[t] + low_column / RUN);
            high_sum[t] = load_int(in.sums[t] + high_column / RUN);
        }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        u32 words[8];
        int low_scale, high_scale, low_min, high_min;
        F::unpack(raw, slot, r, words);
        F::scales(raw, slot, r, low_scale, high_scale);
        F::minima(raw, slot, r, low_min, high_min);
        const float d = F::d(raw, r), dmin = F::dmin(raw, r);
#pragma unroll
        for (int t = 0; t < T; ++t) {
            int low_dot, high_dot;
            dots(words, low[t], high[t], low_dot, high_dot);
            const int dot = low_scale * low_dot + high_scale * high_dot;
            sums[t][r] = fma32(to_float(dot), mul32(d, scale[t]), sums[t][r]);
            if (F::MINIMUM) {
                const int less = low_min * low_sum[t] + high_min * high_sum[t];
                sums[t][r] = fma32(-to_float(less), mul32(dmin, scale[t]), sums[t][r]);
            }
        }
    }
}

template <class F, int T>
DEVICE void add_plain(const u8* tile, int chunk, int slot, int group, int columns,
                      const Inputs<T>& in, float (&sums)[T][4]) {
    const int first = 32 * chunk + 4 * slot, count = columns / F::BLOCK;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int word = first + k;
        if (word >= count) return;
        const uint4 v = load16(tile + 64 * static_cast<i64>(word) + 16 * group);
#pragma unroll
        for (int c = 0; c < F::BLOCK; ++c) {
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const float x = load_float(in.x[t] + word * F::BLOCK + c);
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    sums[t][r] = fma32(F::value(part(v, r), c), x, sums[t][r]);
            }
        }
    }
}

// Chunk `chunk` of a tile, by a warp.
template <class F, int T>
DEVICE void add_chunk(const u8* tile, int chunk, int columns, int lane, const Inputs<T>& in,
                      float (&sums)[T][4]) {
    const int slot = lane >> 2, group = lane & 3;
    if constexpr (F::KIND == PLAIN) {
        add_plain<F, T>(tile, chunk, slot, group, columns, in, sums);
    } else if constexpr (F::KIND == LARGE) {
        add_large<F, T>(block_at<F>(tile, chunk, slot), slot, group, CHUNK * chunk, in, sums);
    } else {
        const int column = CHUNK * chunk + F::low(slot);
        if (column < columns) add_small<F, T>(block_at<F>(tile, chunk, slot), group, column, in, sums);
    }
}

// This warp's part of a tile's sums, into shared memory: [token][row].
template <class F, int T>
DEVICE void tile_sums(const u8* tile, int columns, const Inputs<T>& in, int part, int parts,
                      float (*into)[TILE_ROWS]) {
    const int lane = threadIdx.x % 32;
    const int chunks = (columns + F::STEP - 1) / F::STEP;
    float sums[T][4];
#pragma unroll
    for (int t = 0; t < T; ++t)
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[t][r] = 0.0f;
    for (int chunk = part; chunk < chunks; chunk += parts)
        add_chunk<F, T>(tile, chunk, columns, lane, in, sums);
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float sum = sums[t][r];  // over the slots: lanes of the same group
            sum = add32(sum, from_lane(sum, 4));
            sum = add32(sum, from_lane(sum, 8));
            sum = add32(sum, from_lane(sum, 16));
            if (lane < 4) into[t][4 * lane + r] = sum;
        }
    }
}

// A row's sum, from those of the warps.
template <int T>
DEVICE float row_sum(float (*from)[T][TILE_ROWS], int parts, int token, int row) {
    float sum = from[0][token][row];
    for (int i = 1; i < parts; ++i) sum = add32(sum, from[i][token][row]);
    return sum;
}

template <class F>
DEVICE i64 tile_bytes(int columns) {
    return static_cast<i64>(columns / F::BLOCK) * F::BYTES;
}
