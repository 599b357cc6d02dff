// Adam on a tile of parameters, operation by operation as offload/cpu_ops/adam_bodies.py has it: the
// same bits. Each element's arithmetic is its own, but for the scale of an 8-bit block, which is a
// maximum; so nothing depends on how a tile is cut into threads.
#pragma once
#include "lane.cuh"

// In the order of offload/cpu_ops/adam_step.py.
enum Constant { CLIP, DECAY, L2, LERP, BETA2, REST2, ROOT2, EPS, MINUS_STEP, BY_ROOT2, CONSTANTS };

// The lines of the 8-bit code (offload/cpu_ops/dynamic_map.py), for magnitudes of 7 and of 8 bits.
enum Line { SLOPE, OFFSET, INVERSE_SLOPE, INVERSE_OFFSET, BOUND, LINES };

struct AdamArgs {
    const void* gradient;  // null: zeros
    void* p;               // float32; with bfloat16 states bfloat16, and what computes
    void* m;
    void* v;
    void* copy;            // null: none
    float* m_scales;
    float* v_scales;
    u64 seed;
    u64 step;
    u64 first;             // the first element's global index, a multiple of GROUP
    i64 count;
    float constants[CONSTANTS];
    float lines[2][LINES][8];
    int wide_gradient;     // float32, not bfloat16
    int wide_copy;
    int l2;                // weight decay joins the gradient
    int from_gradient;     // the end from which m's average is taken
};

constexpr int GROUP = 64;        // elements whose random bits come of 16 counters
constexpr int ADAM_BLOCK = 256;  // elements that share a scale
constexpr int ADAM_TASK = 1024;  // elements that a block of threads takes

DEVICE float bfloat_to_float(u16 bits) { return as_float(static_cast<u32>(bits) << 16); }

DEVICE float gradient_at(const AdamArgs& a, i64 i) {
    if (a.gradient == nullptr) return 0.0f;
    return a.wide_gradient ? static_cast<const float*>(a.gradient)[i]
                           : bfloat_to_float(static_cast<const u16*>(a.gradient)[i]);
}

DEVICE void store_copy(const AdamArgs& a, i64 i, float value) {
    if (a.copy == nullptr) return;
    if (a.wide_copy) static_cast<float*>(a.copy)[i] = value;
    else static_cast<u16*>(a.copy)[i] = static_cast<u16>(float_to_bfloat(value));
}

// m and v after the step
DEVICE void moments(const AdamArgs& a, float g, float p, float& m, float& v) {
    const float* k = a.constants;
    g = mul32(g, k[CLIP]);
    if (a.l2) g = fma32(p, k[L2], g);
    m = fma32(k[LERP], sub32(g, m), a.from_gradient ? g : m);
    v = fma32(mul32(k[REST2], g), g, mul32(v, k[BETA2]));
}

DEVICE float moved(const AdamArgs& a, float p, float m, float v) {
    const float* k = a.constants;
    const float below = add32(divide(root32(v), k[ROOT2]), k[EPS]);
    return add32(mul32(p, k[DECAY]), divide(mul32(k[MINUS_STEP], m), below));
}

// With a division less: where states are rounded anyway.
DEVICE float moved_fast(const AdamArgs& a, float p, float m, float v) {
    const float* k = a.constants;
    const float below = fma32(root32(v), k[BY_ROOT2], k[EPS]);
    return fma32(p, k[DECAY], divide(mul32(k[MINUS_STEP], m), below));
}

// ---- float32 states

DEVICE void adam_fp32_block(const AdamArgs& a) {
    float *ps = static_cast<float*>(a.p), *ms = static_cast<float*>(a.m), *vs = static_cast<float*>(a.v);
    for (int j = threadIdx.x; j < ADAM_TASK; j += blockDim.x) {
        const i64 i = static_cast<i64>(blockIdx.x) * ADAM_TASK + j;
        if (i >= a.count) return;
        float m = ms[i], v = vs[i];
        const float p = ps[i];
        moments(a, gradient_at(a, i), p, m, v);
        const float now = moved(a, p, m, v);
        ms[i] = m;
        vs[i] = v;
        ps[i] = now;
        store_copy(a, i, now);
    }
}

// ---- bfloat16 states

// Philox4x32-7 (Salmon et al. 2011) as offload/cpu_ops/counter_rng.py: the four words of a block.
DEVICE void random_words(u64 seed, u64 step, u64 block, u32 (&words)[4]) {
    u32 c0 = static_cast<u32>(block), c1 = static_cast<u32>(block >> 32);
    u32 c2 = static_cast<u32>(step), c3 = static_cast<u32>(step >> 32);
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<u32>(p1);
        c3 = static_cast<u32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// Away from zero if the low half plus the dice's low 16 bits carries; NaN stays NaN.
DEVICE u16 random_bfloat(float a, u32 dice) {
    const u32 bits = as_bits(a);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>((bits | 0x400000u) >> 16);
    return static_cast<u16>((bits + (dice & 0xffffu)) >> 16);
}

// A thread takes four elements of a group, 16 apart: one counter's words.
DEVICE void adam_bf16_block(const AdamArgs& a) {
    u16 *ps = static_cast<u16*>(a.p), *ms = static_cast<u16*>(a.m), *vs = static_cast<u16*>(a.v);
    for (int t = threadIdx.x; t < ADAM_TASK / 4; t += blockDim.x) {
        const i64 at = static_cast<i64>(blockIdx.x) * ADAM_TASK + t / 16 * GROUP + t % 16;
        if (at >= a.count) return;
        u32 dice[4];
        random_words(a.seed, a.step, (a.first + (at - t % 16)) / 4 + t % 16, dice);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 i = at + 16 * j;
            if (i >= a.count) break;
            float m = bfloat_to_float(ms[i]), v = bfloat_to_float(vs[i]);
            const float p = bfloat_to_float(ps[i]);
            moments(a, gradient_at(a, i), p, m, v);
            ps[i] = random_bfloat(moved_fast(a, p, m, v), dice[j]);
            ms[i] = random_bfloat(m, dice[j] >> 16);
            vs[i] = random_bfloat(v, dice[j] >> 16);
        }
    }
}

// ---- 8-bit moments

DEVICE int largest(int a, int b) { return a > b ? a : b; }

DEVICE float decoded(const AdamArgs& a, int code, int unsigned_, float scale) {
    const int magnitude = unsigned_ ? code : code & 127;
    const float c = to_float(magnitude);
    const int at = largest(static_cast<int>(as_bits(c) >> 23) - 127, 0);
    const float value = fma32(c, a.lines[unsigned_][SLOPE][at], a.lines[unsigned_][OFFSET][at]);
    const u32 sign = unsigned_ ? 0u : static_cast<u32>(code & 128) << 24;
    return mul32(as_float(as_bits(value) | sign), scale);
}

// The code nearest to a magnitude in 0 .. 1; what is not finite gets any.
DEVICE int nearest_code(const AdamArgs& a, float size, int unsigned_) {
    const int levels = unsigned_ ? 8 : 7;
    const int exponent = static_cast<int>(as_bits(size) >> 23) * 77;
    int at = largest((exponent + 256 * levels - 127 * 77 - 1) >> 8, 0);
    at += less32(a.lines[unsigned_][BOUND][at & 7], size);
    const float slope = a.lines[unsigned_][INVERSE_SLOPE][at & 7];
    const float code = fma32(size, slope, a.lines[unsigned_][INVERSE_OFFSET][at & 7]);
    return static_cast<int>(as_bits(add32(code, 12582912.0f)));
}

DEVICE u8 encoded_signed(const AdamArgs& a, float m, float inverse) {
    const u32 x = as_bits(mul32(m, inverse));
    const int code = nearest_code(a, as_float(x & 0x7fffffffu), 0);
    return static_cast<u8>((code & 127) | (x >> 24 & 128));
}

DEVICE u8 encoded_unsigned(const AdamArgs& a, float v, float inverse) {
    const float x = mul32(v, inverse);
    const int least = static_cast<int>(as_bits(x));
    return static_cast<u8>(largest(nearest_code(a, x, 1) & 255, least < 1 ? least : 1));
}

// The largest magnitude's bits of all lanes of a warp.
DEVICE int top_of_warp(int top) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) top = largest(top, from_lane(top, mask));
    return top;
}

// The block's scale, of the bits of its largest magnitude, and the inverse.
DEVICE float scale_of(int top, float& inverse) {
    inverse = 0.0f;
    if (top >= 0x7f800000) return as_float(0x7fc00000u);
    if (top < 0x00800000) return 0.0f;
    inverse = divide(1.0f, as_float(static_cast<u32>(top)));
    return as_float(static_cast<u32>(top));
}

// A warp takes a block: eight elements a lane, 32 apart.
DEVICE void adam_8bit_block(const AdamArgs& a) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const i64 block = static_cast<i64>(blockIdx.x) * warps + threadIdx.x / 32;
    if (block * ADAM_BLOCK >= a.count) return;  // a whole warp
    float* ps = static_cast<float*>(a.p);
    u8 *ms = static_cast<u8*>(a.m), *vs = static_cast<u8*>(a.v);
    const float m_by = a.m_scales[block], v_by = a.v_scales[block];
    float m[ADAM_BLOCK / 32], v[ADAM_BLOCK / 32];
    int m_top = 0, v_top = 0;
#pragma unroll
    for (int j = 0; j < ADAM_BLOCK / 32; ++j) {
        const i64 i = block * ADAM_BLOCK + 32 * j + lane;
        m[j] = v[j] = 0.0f;
        if (i < a.count) {
            const float p = ps[i];
            m[j] = decoded(a, ms[i], 0, m_by);
            v[j] = decoded(a, vs[i], 1, v_by);
            moments(a, gradient_at(a, i), p, m[j], v[j]);
            const float now = moved_fast(a, p, m[j], v[j]);
            ps[i] = now;
            store_copy(a, i, now);
        }
        m_top = largest(m_top, static_cast<int>(as_bits(m[j]) & 0x7fffffffu));
        v_top = largest(v_top, static_cast<int>(as_bits(v[j]) & 0x7fffffffu));
    }
    float m_inverse, v_inverse;
    const float m_scale = scale_of(top_of_warp(m_top), m_inverse);
    const float v_scale = scale_of(top_of_warp(v_top), v_inverse);
    if (lane == 0) {
        a.m_scales[block] = m_scale;
        a.v_scales[block] = v_scale;
    }
#pragma unroll
    for (int j = 0; j < ADAM_BLOCK / 32; ++j) {
        const i64 i = block * ADAM_BLOCK + 32 * j + lane;
        if (i < a.count) {
            ms[i] = encoded_signed(a, m[j], m_inverse);
            vs[i] = encoded_unsigned(a, v[j], v_inverse);
        }
    }
}
