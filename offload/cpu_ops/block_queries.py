"""Queries for quantised keys: the keys' steps and lows are taken out of the products."""

from __future__ import annotations

from numba import float32

from offload.cpu_ops.block_vectors import load_two, max_floats, store_words
from offload.cpu_ops.lanes import fmax, store_i32, sum_floats
from offload.cpu_ops.tags import inline
from offload.cpu_ops.vectors import (
    fma,
    fmul,
    load_f32,
    nearest,
    splat,
    store_f32,
    store_float,
    to_int,
)
from offload.cpu_ops.wide import load_bf16

BLOCK = 256
"""Tokens of a partial result at most; longer blocks are cut at multiples of it."""
ROWS = 32
"""Query rows of a task at most."""
WIDEST = 512
"""Head size at most."""
TOP = 127 * 128
"""Of the integers that queries and weights become, of 15 bits: so large that the sums over 256
tokens, or 512 channels, of products with 255 stay below 2^31."""


@inline
def scale_queries(q: int, rows: int, k: int, dim: int, at: int, offsets: int) -> None:
    """Queries times the keys' steps to ``at``; their products with the lows to ``offsets``."""
    for r in range(rows):
        more = splat(float32(0.0))
        for c in range(0, dim, 16):
            x = load_f32(q + 4 * (r * dim + c))
            store_f32(at + 4 * (r * dim + c), fmul(x, load_bf16(k + 2 * c)))
            more = fma(x, load_bf16(k + 2 * (dim + c)), more)
        store_float(offsets + 4 * r, sum_floats(more))


@inline
def twice(q: int, rows: int, dim: int, at: int) -> None:
    """bfloat16 queries to ``at``, each 16 channels twice: for two tokens in a register."""
    for c in range(0, rows * dim, 16):
        store_i32(at + 4 * c, load_two(q + 2 * c, q + 2 * c))


@inline
def whole_queries(q: int, rows: int, k: int, dim: int, at: int, offsets: int) -> None:
    """As ``scale_queries``, to words, a row where its floats would begin. Behind ROWS offsets: the
    rows' factors."""
    for r in range(rows):
        line, to = at + ROWS * WIDEST * 4, at + 4 * r * dim
        scale_queries(q + 4 * r * dim, 1, k, dim, line, offsets + 4 * r)
        top = splat(float32(0.0))
        for c in range(0, dim, 16):
            v = load_f32(line + 4 * c)
            top = fmax(top, fmax(v, fmul(v, splat(float32(-1.0)))))
        largest = max(max_floats(top), float32(1e-30))
        by = splat(float32(TOP) / largest)
        for c in range(0, dim, 16):
            words = to_int(nearest(fmul(load_f32(line + 4 * c), by)))
            store_words(to + 2 * c, words)
        store_float(offsets + 4 * (ROWS + r), largest * float32(1 / TOP))
