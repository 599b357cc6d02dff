"""What happens to a vector between matrices: RMS norms and the rotary embedding, in float32.

RMSNorm: Zhang and Sennrich, 2019. Rotary embedding: Su et al., 2021; ``rotate-half`` pairs column
i with i + n/2 as Hugging Face's modelling code does, ``interleaved`` 2i with 2i + 1 as the paper.
Lengths are multiples of 16.
"""

from __future__ import annotations

import math
from typing import Any

from numba import float32

from offload.cpu_ops.lanes import fsub, sum_floats, swap_pairs
from offload.cpu_ops.tags import inline
from offload.cpu_ops.vectors import (
    fadd,
    fma,
    fmul,
    load_f32,
    load_float,
    splat,
    store_f32,
    store_float,
)


@inline
def dot(x: int, y: int, n: int) -> Any:
    """Sum of products of ``n`` floats, in four chains."""
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    i = 0
    while i + 64 <= n:
        at, by = x + 4 * i, y + 4 * i
        a = fma(load_f32(at), load_f32(by), a)
        b = fma(load_f32(at + 64), load_f32(by + 64), b)
        c = fma(load_f32(at + 128), load_f32(by + 128), c)
        d = fma(load_f32(at + 192), load_f32(by + 192), d)
        i += 64
    while i < n:
        a = fma(load_f32(x + 4 * i), load_f32(y + 4 * i), a)
        i += 16
    return sum_floats(fadd(fadd(a, b), fadd(c, d)))


@inline
def rms_scale(x: int, n: int, eps: Any) -> Any:
    """1 / sqrt(mean of squares + eps)"""
    mean = dot(x, x, n) / float32(n)
    return float32(1.0) / math.sqrt(mean + eps)


@inline
def scale_by(x: int, n: int, scale: Any, weight: int, plus: Any, out: int) -> None:
    """``out = x * scale * (weight + plus)``: a norm's second half; may be in place."""
    by, more = splat(scale), splat(plus)
    for i in range(0, n, 16):
        v = fmul(load_f32(x + 4 * i), by)
        store_f32(out + 4 * i, fmul(v, fadd(load_f32(weight + 4 * i), more)))


@inline
def rotate_half(x: int, n: int, cos: int, sin: int) -> None:
    """In place on ``n`` columns; ``cos`` and ``sin`` [n / 2]."""
    half = n // 2
    far, i = x + 4 * half, 0
    while i + 16 <= half:
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        low, high = load_f32(x + 4 * i), load_f32(far + 4 * i)
        store_f32(x + 4 * i, fsub(fmul(low, c), fmul(high, s)))
        store_f32(far + 4 * i, fma(low, s, fmul(high, c)))
        i += 16
    while i < half:
        c1, s1 = load_float(cos + 4 * i), load_float(sin + 4 * i)
        a, b = load_float(x + 4 * i), load_float(far + 4 * i)
        store_float(x + 4 * i, a * c1 - b * s1)
        store_float(far + 4 * i, b * c1 + a * s1)
        i += 1


@inline
def rotate_pairs(x: int, n: int, cos: int, sin: int) -> None:
    """In place on ``n`` columns; ``cos`` [n] holds each cosine twice, ``sin`` each sine twice, the
    first time negated."""
    i = 0
    while i + 16 <= n:
        v = load_f32(x + 4 * i)
        turned = fmul(swap_pairs(v), load_f32(sin + 4 * i))
        store_f32(x + 4 * i, fma(v, load_f32(cos + 4 * i), turned))
        i += 16
    while i < n:
        a, b = load_float(x + 4 * i), load_float(x + 4 * i + 4)
        c1, s1 = load_float(cos + 4 * i), load_float(sin + 4 * i + 4)
        store_float(x + 4 * i, a * c1 - b * s1)
        store_float(x + 4 * i + 4, b * c1 + a * s1)
        i += 2


@inline
def multiply(x: int, n: int, by: Any) -> None:
    """In place."""
    factor = splat(by)
    for i in range(0, n, 16):
        store_f32(x + 4 * i, fmul(load_f32(x + 4 * i), factor))
