// What an expert does with its gate and up projections, operation by operation as
// offload/cpu_ops/functions.py does it: one exp (Cephes' expf), no library of the card's.
#pragma once
#include "lane.cuh"

enum Glu { SILU = 0, GELU = 1, GELU_TANH = 2, CLAMPED = 3 };

// Comparisons that keep a NaN of `a`.
DEVICE float at_most(float a, float limit) { return a > limit ? limit : a; }
DEVICE float at_least(float a, float limit) { return a < limit ? limit : a; }

DEVICE float exponential(float x) {
    x = at_least(at_most(x, 88.0f), -87.0f);
    // 1.5 * 2^23 + n has the integer n in its low bits, for NaN too.
    const float rounded = add32(mul32(x, 1.44269504088896341f), 12582912.0f);
    const float n = add32(rounded, -12582912.0f);
    float r = fma32(n, -0.693359375f, x);
    r = fma32(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fma32(p, r, 1.3981999507e-3f);
    p = fma32(p, r, 8.3334519073e-3f);
    p = fma32(p, r, 4.1665795894e-2f);
    p = fma32(p, r, 1.6666665459e-1f);
    p = fma32(p, r, 5.0000001201e-1f);
    p = add32(fma32(p, mul32(r, r), r), 1.0f);
    return mul32(p, as_float((as_bits(rounded) << 23) + (127u << 23)));
}

// g / (1 + exp(-z))
DEVICE float times_sigmoid(float g, float z) { return divide(g, add32(exponential(-z), 1.0f)); }

// x * Phi(x); erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
DEVICE float gelu(float x) {
    const float magnitude = as_float(as_bits(x) & 0x7fffffffu);
    const float z = mul32(magnitude, 0.70710678118654752f);
    const float t = divide(1.0f, fma32(z, 0.3275911f, 1.0f));
    float p = 1.061405429f;
    p = fma32(p, t, -1.453152027f);
    p = fma32(p, t, 1.421413741f);
    p = fma32(p, t, -0.284496736f);
    p = fma32(p, t, 0.254829592f);
    const float tail = mul32(mul32(p, t), exponential(-mul32(z, z)));
    const float erf = as_float(as_bits(fma32(tail, -1.0f, 1.0f)) | (as_bits(x) & 0x80000000u));
    return mul32(mul32(x, 0.5f), add32(erf, 1.0f));
}

// x * sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3)
DEVICE float gelu_tanh(float x) {
    const float inner = fma32(x, mul32(mul32(x, x), 0.044715f), x);
    return times_sigmoid(x, mul32(inner, 1.5957691216057308f));
}

DEVICE float glu(int kind, float g, float u, float alpha, float limit) {
    if (kind == SILU) return mul32(times_sigmoid(g, g), u);
    if (kind == GELU) return mul32(gelu(g), u);
    if (kind == GELU_TANH) return mul32(gelu_tanh(g), u);
    g = at_most(g, limit);
    u = at_least(at_most(u, limit), -limit);
    return mul32(times_sigmoid(g, mul32(g, alpha)), add32(u, 1.0f));
}
