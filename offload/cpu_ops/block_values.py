"""Sums of weighted values over the tokens of a block, of four rows at a time.

Dot products want a channel's tokens side by side, and memory has a token's channels so: rows are
woven in registers, a few shuffles that serve all four rows. Sums then have their channels out of
order until the end, where each is moved once.
"""

from __future__ import annotations

from typing import Any

from offload.cpu_ops.block_elements import (
    ask,
    by_quarter,
    dot_32,
    integer,
    load_32,
    load_element,
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
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_int,
    fma,
    fmul,
    load_f32,
    load_i32,
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


def _words_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """Head sizes of these modes are multiples of 64."""


_NARROW = {"bf16dot": _pairs_narrow, "q8dot": _words_narrow, "q4dot": _words_narrow}
by_format(add_wide)(lambda name: _pairs_wide if name.endswith("dot") else _fma_wide)
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


@inline
def _as_sum(mode: Any, v: Any, factor: Any) -> Any:
    if integer(mode):
        v = fmul(to_float(as_int(v)), splat(factor))
    return v


@inline
def in_order(mode: Any, out: int, dim: int, factor: Any) -> None:
    """A row's channels in their order; integers times ``factor``."""
    c = 0
    while c + 64 <= dim:  # narrower ends were never woven
        at = out + 4 * c
        e, f, g, h = load_f32(at), load_f32(at + 64), load_f32(at + 128), load_f32(at + 192)
        a, b = in_order_low(e, f), in_order_high(e, f)
        k, m = in_order_low(g, h), in_order_high(g, h)
        a, b, k, m = by_quarter(mode, a, b, k, m)
        store_f32(at, _as_sum(mode, a, factor))
        store_f32(at + 64, _as_sum(mode, b, factor))
        store_f32(at + 128, _as_sum(mode, k, factor))
        store_f32(at + 192, _as_sum(mode, m, factor))
        c += 64
