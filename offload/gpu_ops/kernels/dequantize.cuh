// Packed tiles to rows of float32, bfloat16 or float16, for products with many tokens by the
// vendor's library. Float32 values equal offload/cpu_ops/codecs.py to the bit, the others are
// nearest to them, ties to even.
#pragma once
#include "formats.cuh"

enum Into { TO_F32 = 0, TO_BF16 = 1, TO_F16 = 2 };

struct DequantizeArgs {
    const u8* packed;  // the first tile
    void* out;         // [rows, columns]
    int rows;          // of `out`; the last tile's others are left out
    int columns;
    int into;
    int unused;
};

DEVICE void store(const DequantizeArgs& a, int row, int column, float value) {
    const i64 at = static_cast<i64>(row) * a.columns + column;
    if (a.into == TO_F32) {
        static_cast<float*>(a.out)[at] = value;
    } else {
        const u32 bits = a.into == TO_BF16 ? float_to_bfloat(value) : float_to_half(value);
        static_cast<u16*>(a.out)[at] = static_cast<u16>(bits);
    }
}

// A run of 16 columns: whole sectors of the card's memory where the type allows.
DEVICE void store_run(const DequantizeArgs& a, int row, int column, const float (&values)[RUN]) {
    const i64 at = static_cast<i64>(row) * a.columns + column;
    if (a.into == TO_F32) {
        float* to = static_cast<float*>(a.out) + at;
#pragma unroll
        for (int i = 0; i < RUN; i += 4)
            *reinterpret_cast<uint4*>(to + i) = make_uint4(as_bits(values[i]), as_bits(values[i + 1]),
                                                           as_bits(values[i + 2]), as_bits(values[i + 3]));
        return;
    }
    u32 pairs[RUN / 2];
#pragma unroll
    for (int i = 0; i < RUN / 2; ++i) {
        const float first = values[2 * i], second = values[2 * i + 1];
        pairs[i] = a.into == TO_BF16 ? float_to_bfloat(first) | float_to_bfloat(second) << 16
                                     : float_to_half(first) | float_to_half(second) << 16;
    }
    uint4* to = reinterpret_cast<uint4*>(static_cast<u16*>(a.out) + at);
    to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

DEVICE int signed_byte(u32 word, int i) { return static_cast<signed char>(word >> (8 * i)); }

template <class F>
DEVICE void dequantize_slot(const DequantizeArgs& a, int tile, int chunk, int slot, int group) {
    const u8* start = a.packed + tile * (static_cast<i64>(a.columns / F::BLOCK) * F::BYTES);
    const int row0 = TILE_ROWS * tile + 4 * group;
    if constexpr (F::KIND == PLAIN) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int word = 32 * chunk + 4 * slot + k;
            if (word >= a.columns / F::BLOCK) return;
            const uint4 v = load16(start + 64 * static_cast<i64>(word) + 16 * group);
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < F::BLOCK; ++c)
                    if (row0 + r < a.rows)
                        store(a, row0 + r, word * F::BLOCK + c, F::value(part(v, r), c));
        }
    } else {
        const int low_column = CHUNK * chunk + F::low(slot);
        if (low_column >= a.columns) return;
        typename F::Raw raw;
        F::load(block_at<F>(start, chunk, slot), slot, group, raw);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (row0 + r >= a.rows) return;
            u32 words[8];
            F::unpack(raw, slot, r, words);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float scale, less = 0.0f;
                if constexpr (F::KIND == LARGE) {
                    int scales[2], minima[2];
                    F::scales(raw, slot, r, scales[0], scales[1]);
                    F::minima(raw, slot, r, minima[0], minima[1]);
                    scale = mul32(F::d(raw, r), to_float(scales[half]));
                    less = mul32(F::dmin(raw, r), to_float(minima[half]));
                } else {
                    scale = F::scale(raw, r);
                    less = -F::minimum(raw, r);
                }
                float values[RUN];
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const int q = signed_byte(words[4 * half + i / 4], i % 4);
                    values[i] = mul32(scale, to_float(q));
                    if (F::MINIMUM) values[i] = sub32(values[i], less);
                }
                const int column = CHUNK * chunk + (half ? F::high(slot) : F::low(slot));
                store_run(a, row0 + r, column, values);
            }
        }
    }
}

// A warp per chunk (y) of a tile (x).
template <class F>
DEVICE void dequantize_block(const DequantizeArgs& a) {
    const int chunk = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (chunk * F::STEP >= a.columns) return;
    dequantize_slot<F>(a, blockIdx.x, chunk, lane >> 2, lane & 3);
}
