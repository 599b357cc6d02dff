// The card's side of offload/gpu_ops/kernels/lane.cuh on a CPU: a thread is a fiber, and the fibers
// of a warp run in lock step from one shuffle to the next (harness.cpp). What a card forbids is an
// error here: a shuffle or a barrier that only some lanes reach, an unaligned load, a load from
// memory that was not given.
#pragma once
#include <cmath>
#include <cstring>

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define SHARED static

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Place {
    u32 x, y, z;
};
extern Place threadIdx, blockIdx, blockDim;

void check_load(const void* at, u64 nbytes);
u32 exchange(u32 mine, int mask);
void barrier();
#define BARRIER() barrier()

template <class V>
static inline V loaded(const void* at) {
    check_load(at, sizeof(V));
    V value;
    std::memcpy(&value, at, sizeof(V));
    return value;
}
DEVICE uint4 load16(const void* at) { return loaded<uint4>(at); }
DEVICE uint2 load8(const void* at) { return loaded<uint2>(at); }
DEVICE u32 load4(const void* at) { return loaded<u32>(at); }
DEVICE float load_float(const float* at) { return loaded<float>(at); }
DEVICE int load_int(const int* at) { return loaded<int>(at); }

DEVICE int dot4(u32 a, u32 b, int sum) {
    for (int i = 0; i < 4; ++i)
        sum += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
    return sum;
}
DEVICE u32 pick_bytes(u32 low, u32 high, u32 selector) {
    const u64 all = static_cast<u64>(high) << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i)
        found |= static_cast<u32>(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

DEVICE float as_float(u32 bits) {
    float a;
    std::memcpy(&a, &bits, 4);
    return a;
}
DEVICE u32 as_bits(float a) {
    u32 bits;
    std::memcpy(&bits, &a, 4);
    return bits;
}
DEVICE float fma32(float a, float b, float c) { return std::fmaf(a, b, c); }
DEVICE float mul32(float a, float b) { return a * b; }
DEVICE float add32(float a, float b) { return a + b; }
DEVICE float sub32(float a, float b) { return a - b; }
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float root32(float a) { return std::sqrt(a); }
DEVICE bool less32(float a, float b) { return a < b; }
DEVICE float to_float(int a) { return static_cast<float>(a); }
DEVICE int nearest(float a) { return static_cast<int>(std::nearbyintf(a)); }

DEVICE float half_to_float(u32 bits) {
    const u32 sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}
DEVICE u32 float_to_half(float a) {
    const u32 sign = as_bits(a) >> 16 & 0x8000u, magnitude = as_bits(a) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
    if (magnitude < 0x38800000u)  // subnormal: the last places of floats from 0.5 to 1
        return sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u);
    return sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - 0x1c000u);
}

DEVICE u32 from_lane(u32 a, int mask) { return exchange(a, mask); }
DEVICE int from_lane(int a, int mask) { return static_cast<int>(exchange(a, mask)); }
DEVICE float from_lane(float a, int mask) { return as_float(exchange(as_bits(a), mask)); }
