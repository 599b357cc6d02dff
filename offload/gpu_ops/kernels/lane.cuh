// What one lane of a warp does with words and floats. Everything that exists on a card alone is
// here, so that the rest of the kernels is plain C++: tests compile it for the CPU with
// OFFLOAD_SHIM naming a header that defines the same functions.
//
// Floating-point operations are named (fma32, mul32, add32 and so on): a compiler may not fuse or reorder
// them, so a result depends on the source alone.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef OFFLOAD_SHIM
#include OFFLOAD_SHIM
#else

#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define DEVICE static __device__ __forceinline__

// 16 aligned bytes through the read-only cache.
DEVICE uint4 load16(const void* at) { return __ldg(reinterpret_cast<const uint4*>(at)); }
DEVICE uint2 load8(const void* at) { return __ldg(reinterpret_cast<const uint2*>(at)); }
DEVICE u32 load4(const void* at) { return __ldg(reinterpret_cast<const u32*>(at)); }
DEVICE float load_float(const float* at) { return __ldg(at); }
DEVICE int load_int(const int* at) { return __ldg(at); }

// sum + the products of four signed bytes
DEVICE int dot4(u32 a, u32 b, int sum) {
    return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
}
// Byte i of the result is byte (selector >> 4 i) & 7 of the eight of low and high.
DEVICE u32 pick_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// Written out: CuPy compiles with -ftz=true, and the intrinsics would take numbers below 2^-126 as 0.
DEVICE float fma32(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
DEVICE float mul32(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
DEVICE float add32(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// Not add32(a, -b): the compiler's own negation is one of those that take small numbers as 0.
DEVICE float sub32(float a, float b) {
    float r;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
DEVICE float divide(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
DEVICE float root32(float a) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
DEVICE bool less32(float a, float b) {
    int r;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(r) : "f"(a), "f"(b));
    return r;
}
DEVICE float to_float(int a) { return __int2float_rn(a); }
DEVICE int nearest(float a) { return __float2int_rn(a); }  // ties to even
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float a) { return __float_as_uint(a); }
// The float16 in the low half of a word.
DEVICE float half_to_float(u32 bits) {
    float value;
    asm("{ .reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(value) : "r"(bits));
    return value;
}
// To nearest, ties to even, in the low half of a word.
DEVICE u32 float_to_half(float a) {
    u32 bits;
    asm("{ .reg .b16 half; cvt.rn.f16.f32 half, %1; cvt.u32.u16 %0, half; }" : "=r"(bits) : "f"(a));
    return bits;
}

// What the lane whose number differs in the bits of `mask` has.
DEVICE float from_lane(float a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
DEVICE u32 from_lane(u32 a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
DEVICE int from_lane(int a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }

#endif

// To bfloat16, nearest, ties to even; NaN stays NaN. In the low half of a word.
DEVICE u32 float_to_bfloat(float a) {
    const u32 bits = as_bits(a);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Component 0..3 of a vector; `i` is known when this is compiled.
DEVICE u32 part(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
