"""Activation functions of feed-forward layers, and the cap of scores, on 16 float32 lanes.

Written out with one ``exp`` so that results do not depend on a machine's libm. ``exp`` is the
degree-6 polynomial of the Cephes library (``expf``), within 2 ulp on [-87, 88] and clamped
outside; NaN stays NaN.
"""

from __future__ import annotations

import enum
from typing import Any

from numba import float32

from offload.cpu_ops.lanes import fsub
from offload.cpu_ops.tags import inline
from offload.cpu_ops.vectors import (
    as_float,
    as_int,
    at_least,
    at_most,
    both,
    either,
    fadd,
    fdiv,
    fma,
    fmul,
    iadd,
    int_splat,
    left,
    nearest,
    splat,
)


class Glu(enum.IntEnum):
    """What an expert does with its gate ``g`` and up ``u`` projections."""

    SILU = 0
    """silu(g) * u: Llama, Mixtral, Qwen, DeepSeek."""
    GELU = 1
    """gelu(g) * u with the error function, to 2e-7 of ``|g|``."""
    GELU_TANH = 2
    """gelu(g) * u in its tanh form."""
    CLAMPED = 3
    """gpt-oss: g <= limit, -limit <= u <= limit; g * sigmoid(alpha * g) * (u + 1)."""


@inline
def exp(x: Any) -> Any:
    x = at_least(at_most(x, float32(88.0)), float32(-87.0))
    n = nearest(fmul(x, splat(float32(1.44269504088896341))))
    r = fma(n, splat(float32(-0.693359375)), x)
    r = fma(n, splat(float32(2.12194440e-4)), r)
    p = splat(float32(1.9875691500e-4))
    p = fma(p, r, splat(float32(1.3981999507e-3)))
    p = fma(p, r, splat(float32(8.3334519073e-3)))
    p = fma(p, r, splat(float32(4.1665795894e-2)))
    p = fma(p, r, splat(float32(1.6666665459e-1)))
    p = fma(p, r, splat(float32(5.0000001201e-1)))
    p = fadd(fma(p, fmul(r, r), r), splat(float32(1.0)))
    # 1.5 * 2^23 + n has the integer n in its low bits. A conversion that is defined for NaN too
    # takes LLVM some 150 instructions per vector; here NaN comes from ``p``.
    bits = as_int(fadd(n, splat(float32(12582912.0))))
    power = as_float(iadd(left(bits, 23), int_splat(127 << 23)))
    return fmul(p, power)


@inline
def capped(scores: Any, cap: Any) -> Any:
    """cap * tanh(scores / cap), tanh as 1 - 2 / (1 + exp(2 x))"""
    power = exp(fmul(scores, splat(float32(2.0) / cap)))
    one = splat(float32(1.0))
    tanh = fsub(one, fdiv(splat(float32(2.0)), fadd(one, power)))
    return fmul(tanh, splat(cap))


@inline
def _times_sigmoid(g: Any, z: Any) -> Any:
    """g / (1 + exp(-z))"""
    minus = fmul(z, splat(float32(-1.0)))
    return fdiv(g, fadd(exp(minus), splat(float32(1.0))))


@inline
def _gelu(x: Any) -> Any:
    """x * Phi(x); erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7."""
    magnitude = as_float(both(as_int(x), 0x7FFFFFFF))
    sign = both(as_int(x), 0x80000000)
    z = fmul(magnitude, splat(float32(0.70710678118654752)))
    one = splat(float32(1.0))
    t = fdiv(one, fma(z, splat(float32(0.3275911)), one))
    p = splat(float32(1.061405429))
    p = fma(p, t, splat(float32(-1.453152027)))
    p = fma(p, t, splat(float32(1.421413741)))
    p = fma(p, t, splat(float32(-0.284496736)))
    p = fma(p, t, splat(float32(0.254829592)))
    tail = fmul(fmul(p, t), exp(fmul(fmul(z, z), splat(float32(-1.0)))))
    erf = fma(tail, splat(float32(-1.0)), one)
    erf = as_float(either(as_int(erf), sign))
    return fmul(fmul(x, splat(float32(0.5))), fadd(erf, one))


@inline
def _gelu_tanh(x: Any) -> Any:
    """x * sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3)"""
    cubic = fmul(fmul(x, x), splat(float32(0.044715)))
    inner = fma(x, cubic, x)
    return _times_sigmoid(x, fmul(inner, splat(float32(1.5957691216057308))))


@inline
def glu(kind: int, g: Any, u: Any, alpha: Any, limit: Any) -> Any:
    """Gate and up to what the down projection reads; ``kind`` of ``Glu``."""
    if kind == 0:
        out = fmul(_times_sigmoid(g, g), u)
    elif kind == 1:
        out = fmul(_gelu(g), u)
    elif kind == 2:
        out = fmul(_gelu_tanh(g), u)
    else:
        g = at_most(g, limit)
        u = at_least(at_most(u, limit), float32(0.0) - limit)
        swish = _times_sigmoid(g, fmul(g, splat(alpha)))
        out = fmul(swish, fadd(u, splat(float32(1.0))))
    return out
