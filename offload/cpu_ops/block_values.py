"""Sums of weighted values over the tokens of a block, of four rows at a time.

Dot products want a channel's tokens side by side. Quantised values lie so, in pairs; of bfloat16
memory has a token's channels so, and rows are woven in registers, a few shuffles that serve all
four rows. Sums then have their channels out of order until the end, where each is moved once.
"""

from __future__ import annotations

from typing import Any

from offload.cpu_ops.block_elements import (
    dot_32,
    load_32,
    load_element,
    load_pair_16,
    row_bytes,
    step_tokens,
)
from offload.cpu_ops.block_vectors import (
    dot_pairs,
    in_order_high,
    in_order_low,
    weave_half,
    weave_high,
    weave_low,
)
from offload.cpu_ops.lanes import store_i32
from offload.cpu_ops.prefetching import ask
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    both,
    fma,
    fmul,
    load_f32,
    load_i32,
    load_u16,
    right,
    splat,
    splat_f32,
    splat_i32,
    store_f32,
    to_float,
)


@inline
def _four_rows(out: int, row: int, last: int) -> Any:
    return out, out + min(1, last) * row, out + min(2, last) * row, out + min(3, last) * row


@inline
def _load_four(rows: Any, at: int) -> Any:
    o0, o1, o2, o3 = rows
    return load_f32(o0 + at), load_f32(o1 + at), load_f32(o2 + at), load_f32(o3 + at)


@inline
def _store_four(rows: Any, at: int, sums: Any) -> None:
    o0, o1, o2, o3 = rows
    a0, a1, a2, a3 = sums
    store_f32(o0 + at, a0)
    store_f32(o1 + at, a1)
    store_f32(o2 + at, a2)
    store_f32(o3 + at, a3)


def add_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """Add tokens t0..t1 to the sums of 64 channels of four ``rows``; only inside kernels."""
    raise NotImplementedError


def add_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """As ``add_wide`` for 16 channels."""
    raise NotImplementedError


def _fma_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    step, at, i = row_bytes(mode, dim), 4 * c, c // 16
    a0, a1, a2, a3 = _load_four(rows, at)
    b0, b1, b2, b3 = _load_four(rows, at + 64)
    c0, c1, c2, c3 = _load_four(rows, at + 128)
    d0, d1, d2, d3 = _load_four(rows, at + 192)
    for t in range(t0, min(t1, end)):
        ask(later, each)
        later += each
        row, by = v + t * step, p + 16 * t
        w, x, y, z = splat_f32(by), splat_f32(by + 4), splat_f32(by + 8), splat_f32(by + 12)
        u = load_element(mode, row, i)
        a0, a1, a2, a3 = fma(w, u, a0), fma(x, u, a1), fma(y, u, a2), fma(z, u, a3)
        u = load_element(mode, row, i + 1)
        b0, b1, b2, b3 = fma(w, u, b0), fma(x, u, b1), fma(y, u, b2), fma(z, u, b3)
        u = load_element(mode, row, i + 2)
        c0, c1, c2, c3 = fma(w, u, c0), fma(x, u, c1), fma(y, u, c2), fma(z, u, c3)
        u = load_element(mode, row, i + 3)
        d0, d1, d2, d3 = fma(w, u, d0), fma(x, u, d1), fma(y, u, d2), fma(z, u, d3)
    _store_four(rows, at, (a0, a1, a2, a3))
    _store_four(rows, at + 64, (b0, b1, b2, b3))
    _store_four(rows, at + 128, (c0, c1, c2, c3))
    _store_four(rows, at + 192, (d0, d1, d2, d3))


def _fma_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    step, at, i = row_bytes(mode, dim), 4 * c, c // 16
    a0, a1, a2, a3 = _load_four(rows, at)
    for t in range(t0, min(t1, end)):
        ask(later, each)
        later += each
        by, u = p + 16 * t, load_element(mode, v + t * step, i)
        a0, a1 = fma(splat_f32(by), u, a0), fma(splat_f32(by + 4), u, a1)
        a2, a3 = fma(splat_f32(by + 8), u, a2), fma(splat_f32(by + 12), u, a3)
    _store_four(rows, at, (a0, a1, a2, a3))


def load_sum(mode: Any, at: int) -> Any:
    """16 sums; only inside kernels."""
    raise NotImplementedError


def store_sum(mode: Any, at: int, sums: Any) -> None:
    """As ``load_sum``."""
    raise NotImplementedError


_LOAD_SUM = {True: lambda mode, at: load_f32(at), False: lambda mode, at: load_i32(at)}
_STORE_SUM = {
    True: lambda mode, at, sums: store_f32(at, sums),
    False: lambda mode, at, sums: store_i32(at, sums),
}
by_format(load_sum)(lambda name: _LOAD_SUM[name == "bf16dot"])
by_format(store_sum)(lambda name: _STORE_SUM[name == "bf16dot"])


@inline
def _sums_of(mode: Any, rows: Any, at: int) -> Any:
    o0, o1, o2, o3 = rows
    a0, a1 = load_sum(mode, o0 + at), load_sum(mode, o1 + at)
    return a0, a1, load_sum(mode, o2 + at), load_sum(mode, o3 + at)


@inline
def _keep_sums(mode: Any, rows: Any, at: int, sums: Any) -> None:
    o0, o1, o2, o3 = rows
    a0, a1, a2, a3 = sums
    store_sum(mode, o0 + at, a0)
    store_sum(mode, o1 + at, a1)
    store_sum(mode, o2 + at, a2)
    store_sum(mode, o3 + at, a3)


@inline
def _dot_rows(mode: Any, sums: Any, weights: Any, u: Any) -> Any:
    a0, a1, a2, a3 = sums
    w, x, y, z = weights
    a0, a1 = dot_32(mode, a0, w, u), dot_32(mode, a1, x, u)
    return a0, a1, dot_32(mode, a2, y, u), dot_32(mode, a3, z, u)


def _pairs_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """The channels stay as ``weave_low`` and ``weave_high`` leave them."""
    step, at, i = row_bytes(mode, dim), 4 * c, c // 64
    a, b = _sums_of(mode, rows, at), _sums_of(mode, rows, at + 64)
    k, m = _sums_of(mode, rows, at + 128), _sums_of(mode, rows, at + 192)
    for t in range(t0, min(t1, end), 2):
        ask(later, each)
        later += each
        row, by = v + t * step, p + 8 * t
        # An odd last token is paired with itself; the second weight is 0.
        after = row + (step if t + 1 < end else 0)
        w, x = splat_i32(by), splat_i32(by + 4)
        weights = (w, x, splat_i32(by + 8), splat_i32(by + 12))
        e, f = load_32(mode, row, i, 0), load_32(mode, after, i, 0)
        a = _dot_rows(mode, a, weights, weave_low(e, f))
        b = _dot_rows(mode, b, weights, weave_high(e, f))
        e, f = load_32(mode, row, i, 1), load_32(mode, after, i, 1)
        k = _dot_rows(mode, k, weights, weave_low(e, f))
        m = _dot_rows(mode, m, weights, weave_high(e, f))
    _keep_sums(mode, rows, at, a)
    _keep_sums(mode, rows, at + 64, b)
    _keep_sums(mode, rows, at + 128, k)
    _keep_sums(mode, rows, at + 192, m)


def _pairs_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    step, at = 2 * dim, 4 * c
    a0, a1, a2, a3 = _load_four(rows, at)
    for t in range(t0, min(t1, end), 2):
        ask(later, each)
        later += each
        row, by = v + t * step + 2 * c, p + 8 * t
        u = weave_half(row, row + (step if t + 1 < end else 0))
        a0, a1 = dot_pairs(a0, splat_i32(by), u), dot_pairs(a1, splat_i32(by + 4), u)
        a2, a3 = dot_pairs(a2, splat_i32(by + 8), u), dot_pairs(a3, splat_i32(by + 12), u)
    _store_four(rows, at, (a0, a1, a2, a3))


def _words_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """Of an odd last token the second of a pair has a weight of 0."""
    step, at, i = row_bytes(mode, dim), 4 * c, c // 64
    a, b = _sums_of(mode, rows, at), _sums_of(mode, rows, at + 64)
    k, m = _sums_of(mode, rows, at + 128), _sums_of(mode, rows, at + 192)
    for t in range(t0, min(t1, end), 2):
        ask(later, each)
        later += each
        row, by = v + t * step, p + 8 * t
        w, x = splat_i32(by), splat_i32(by + 4)
        weights = (w, x, splat_i32(by + 8), splat_i32(by + 12))
        a = _dot_rows(mode, a, weights, load_pair_16(mode, row, i, 0))
        b = _dot_rows(mode, b, weights, load_pair_16(mode, row, i, 1))
        k = _dot_rows(mode, k, weights, load_pair_16(mode, row, i, 2))
        m = _dot_rows(mode, m, weights, load_pair_16(mode, row, i, 3))
    _keep_sums(mode, rows, at, a)
    _keep_sums(mode, rows, at + 64, b)
    _keep_sums(mode, rows, at + 128, k)
    _keep_sums(mode, rows, at + 192, m)


def _words_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """Head sizes of these modes are multiples of 64."""


def words_of_two(mode: Any, row: int, c: int) -> Any:
    """Integers of 16 channels from ``c`` on of two tokens; only inside kernels."""
    raise NotImplementedError


def _bytes_of_two(mode: Any, row: int, c: int) -> Any:
    u = load_u16(row + 2 * c)
    return to_float(both(u, 255)), to_float(right(u, 8))


def _nibbles_of_two(mode: Any, row: int, c: int) -> Any:
    u = right(load_u16(row + c // 32 * 32), 4 * (c // 16 % 2))
    return to_float(both(u, 15)), to_float(both(right(u, 8), 15))


by_format(words_of_two)({"q8": _bytes_of_two, "q4": _nibbles_of_two}.__getitem__)


def _coarse_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    step, at = row_bytes(mode, dim), 4 * c
    a0, a1, a2, a3 = _load_four(rows, at)
    for t in range(t0, min(t1, end), 2):
        ask(later, each)
        later += each
        u, w = words_of_two(mode, v + t * step, c)
        by = p + 16 * t
        a0, a1 = fma(splat_f32(by), u, a0), fma(splat_f32(by + 4), u, a1)
        a2, a3 = fma(splat_f32(by + 8), u, a2), fma(splat_f32(by + 12), u, a3)
        a0, a1 = fma(splat_f32(by + 16), w, a0), fma(splat_f32(by + 20), w, a1)
        a2, a3 = fma(splat_f32(by + 24), w, a2), fma(splat_f32(by + 28), w, a3)
    _store_four(rows, at, (a0, a1, a2, a3))


def _coarse_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    for i in range(4):
        add_narrow(mode, p, v, c + 16 * i, t0, t1, end, dim, rows, later, each // 4)
        later += (t1 - t0) // 2 * (each // 4)


_NARROW = {
    "bf16dot": _pairs_narrow, "q8dot": _words_narrow, "q4dot": _words_narrow,
    "q8": _coarse_narrow, "q4": _coarse_narrow,
}  # fmt: skip
_WIDE = {
    "bf16dot": _pairs_wide, "q8dot": _words_wide, "q4dot": _words_wide, "q8": _coarse_wide,
    "q4": _coarse_wide,
}  # fmt: skip
by_format(add_wide)(lambda name: _WIDE.get(name, _fma_wide))
by_format(add_narrow)(lambda name: _NARROW.get(name, _fma_narrow))


@inline
def add_values(
    mode: Any, p: int, v: int, t0: int, t1: int, end: int, dim: int, out: int, row: int, last: int,
    later: int, each: int,
) -> None:  # fmt: skip
    """Add the values of tokens t0..t1, weighted for four rows. Memory is asked for ``each`` bytes
    from ``later`` on in every step of 64 channels."""
    rows, c = _four_rows(out, row, last), 0
    while c + 64 <= dim:
        add_wide(mode, p, v, c, t0, t1, end, dim, rows, later, each)
        later += (t1 - t0) // step_tokens(mode) * each
        c += 64
    while c < dim:
        add_narrow(mode, p, v, c, t0, t1, end, dim, rows, later, each // 4)
        later += (t1 - t0) // step_tokens(mode) * (each // 4)
        c += 16


def in_order(mode: Any, out: int, dim: int, factor: Any) -> None:
    """A row's channels in their order; integers times ``factor``. Only inside kernels."""
    raise NotImplementedError


def _unwoven(mode: Any, out: int, dim: int, factor: Any) -> None:
    c = 0
    while c + 64 <= dim:  # narrower ends were never woven
        at = out + 4 * c
        e, f, g, h = load_f32(at), load_f32(at + 64), load_f32(at + 128), load_f32(at + 192)
        store_f32(at, in_order_low(e, f))
        store_f32(at + 64, in_order_high(e, f))
        store_f32(at + 128, in_order_low(g, h))
        store_f32(at + 192, in_order_high(g, h))
        c += 64


def _as_floats(mode: Any, out: int, dim: int, factor: Any) -> None:
    by = splat(factor)
    for c in range(0, dim, 16):
        at = out + 4 * c
        store_f32(at, fmul(to_float(load_i32(at)), by))


by_format(in_order)(lambda name: _as_floats if name.startswith("q") else _unwoven)
