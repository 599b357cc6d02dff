// Activations as the dot products read them: int8 with a scale, as offload/cpu_ops/activations.py
// makes them, to the bit. Three arrays one after the other (offload/gpu_ops/records.py):
//     q      int8  [tokens, columns]
//     scale  float [tokens, columns / columns of a scale]
//     sums   int32 [tokens, columns / columns of a sum]
// A scale is of 32 columns with a sum of each, or of 256 with sums of 16.
#pragma once
#include "lane.cuh"

struct Records {
    const signed char* q;
    const float* scale;
    const int* sums;
};

struct QuantizeArgs {
    const float* x;  // [tokens, columns]
    signed char* q;
    float* scale;
    int* sums;
    int columns;
    int tokens;
    int per_scale;  // 32 or 256
    int unused;
};

// The scale of a block and what its columns are multiplied with, from the bits of the largest
// magnitude. A NaN or an infinity makes the scale NaN and the integers 0.
DEVICE void scale_of(u32 top, float& scale, float& inverse) {
    const float largest = as_float(top);
    inverse = 0.0f;
    if (top >= 0x7f800000u) {
        scale = as_float(0x7fc00000u);
    } else if (largest < 4e-37f) {  // 127 / largest would be infinite
        scale = 0.0f;
    } else {
        scale = divide(largest, 127.0f);
        inverse = divide(127.0f, largest);
    }
}

// A warp makes the records of 256 columns, a lane those of eight neighbours.
DEVICE void quantize_columns(const QuantizeArgs& a, int token, int chunk, int lane) {
    const int column = 256 * chunk + 8 * lane;
    const bool mine = column < a.columns;
    const i64 at = static_cast<i64>(token) * a.columns + column;
    float x[8];
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] = mine ? load_float(a.x + at + i) : 0.0f;
        const u32 magnitude = as_bits(x[i]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
    }
    const int lanes = a.per_scale / 8;
    for (int mask = 1; mask < lanes; mask *= 2) {
        const u32 other = from_lane(top, mask);
        top = other > top ? other : top;
    }
    float scale, inverse;
    scale_of(top, scale, inverse);
    int sum = 0;
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int q = top >= 0x7f800000u ? 0 : nearest(mul32(x[i], inverse));
        words[i / 4] |= static_cast<u32>(q & 255) << (8 * (i % 4));
        sum += q;
    }
    sum += from_lane(sum, 1);
    if (a.per_scale == 32) {
        sum += from_lane(sum, 2);
        // To the 11 bits of a float16, ties to even.
        const u32 bits = as_bits(scale);
        if (bits < 0x7f800000u) scale = as_float((bits + 0xfffu + ((bits >> 13) & 1u)) & 0x7fffe000u);
    }
    if (!mine) return;
    *reinterpret_cast<uint2*>(a.q + at) = make_uint2(words[0], words[1]);
    const int per_sum = a.per_scale == 32 ? 32 : 16;
    const i64 row = static_cast<i64>(token) * a.columns;
    if (column % a.per_scale == 0) a.scale[(row + column) / a.per_scale] = scale;
    if (column % per_sum == 0) a.sums[(row + column) / per_sum] = sum;
}

// A block per token (x, of which there may be 2^31; of y 65535) and up to eight chunks (y).
DEVICE void quantize_block(const QuantizeArgs& a) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int chunk = static_cast<int>(blockIdx.y) * (static_cast<int>(blockDim.x) / 32) + warp;
    quantize_columns(a, blockIdx.x, chunk, threadIdx.x % 32);
}
