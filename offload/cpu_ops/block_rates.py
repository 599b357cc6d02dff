"""What the multiply-add instructions of attention reach from registers: the bound of benchmarks."""

from __future__ import annotations

import functools
from typing import Any

from numba import float32

from offload.cpu_ops.block_vectors import dot_pairs, dot_words
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.tags import by_format, inline, tag
from offload.cpu_ops.vectors import (
    as_float,
    as_int,
    fadd,
    fence,
    fma,
    load_f32,
    splat,
    stack,
    store_f32,
)

STEPS = 20_000_000
"""Of a run; a step is 12 instructions on chains of their own, more than any latency."""
_CHAINS = 12

_room = stack(64 * (_CHAINS + 2))


def products_per_step(how: str) -> int:
    """Multiply-adds; ``how`` as ``block_vectors.multiplier`` names it, or "words"."""
    return _CHAINS * (16 if how == "fma" else 32)


def multiply(how: Any, total: Any, v: Any, w: Any) -> Any:
    """One instruction; only inside kernels."""
    raise NotImplementedError


_BY_HOW = {
    "fma": lambda how, total, v, w: fma(v, w, total),
    "dot": lambda how, total, v, w: dot_pairs(total, as_int(v), as_int(w)),
    "words": lambda how, total, v, w: as_float(dot_words(as_int(total), as_int(v), as_int(w))),
}
by_format(multiply)(_BY_HOW.__getitem__)


@inline
def _steps(how: Any, at: int) -> None:
    # Every chain starts from memory: twelve that start from one constant would become one.
    a, b, c, d = load_f32(at), load_f32(at + 64), load_f32(at + 128), load_f32(at + 192)
    e, f, g, h = load_f32(at + 256), load_f32(at + 320), load_f32(at + 384), load_f32(at + 448)
    i, j, k, m = load_f32(at + 512), load_f32(at + 576), load_f32(at + 640), load_f32(at + 704)
    v, w = load_f32(at + 768), load_f32(at + 832)
    for _ in range(STEPS):
        a, b, c = multiply(how, a, v, w), multiply(how, b, v, w), multiply(how, c, v, w)
        d, e, f = multiply(how, d, v, w), multiply(how, e, v, w), multiply(how, f, v, w)
        g, h, i = multiply(how, g, v, w), multiply(how, h, v, w), multiply(how, i, v, w)
        j, k, m = multiply(how, j, v, w), multiply(how, k, v, w), multiply(how, m, v, w)
    total = fadd(fadd(fadd(a, b), fadd(c, d)), fadd(fadd(e, f), fadd(g, h)))
    store_f32(at, fadd(total, fadd(fadd(i, j), fadd(k, m))))
    fence()


@functools.cache
def multiply_entry(how_name: str) -> Entry:
    """STEPS steps on every thread of a region."""
    how = tag("how", how_name)

    def multiply_body(arguments: int) -> None:
        at = _room()
        for i in range(_CHAINS + 2):
            store_f32(at + 64 * i, splat(float32(0.0)))
        fence()
        _steps(how, at)

    return Kernel(multiply_body, f"multiply-adds by {how_name}", 0.5).entry()
