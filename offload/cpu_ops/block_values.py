"""Sums of weighted values over the tokens of a block, of four rows at a time.

Dot products want a channel's tokens side by side, and memory has a token's channels so: rows are
woven in registers, a few shuffles that serve all four rows. Sums then have their channels out of
order until the end, where each is moved once.
"""

from __future__ import annotations

from typing import Any

from offload.cpu_ops.block_elements import ask, load_64, load_element, place_of, row_bytes
from offload.cpu_ops.block_vectors import (
    dot_bytes,
    dot_pairs,
    four_woven_0,
    four_woven_1,
    four_woven_2,
    four_woven_3,
    in_order_high,
    in_order_low,
    load_pairs,
    store_quarters,
    store_quarters_of_nibbles,
    weave_half,
    weave_high,
    weave_low,
)
from offload.cpu_ops.lanes import store_i32
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    fma,
    fmul,
    iadd,
    int_splat,
    left,
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
        if t % 4 == 0:
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
        if t % 4 == 0:
            ask(later, each)
            later += each
        by, u = p + 16 * t, load_element(mode, v + t * step, i)
        a0, a1 = fma(splat_f32(by), u, a0), fma(splat_f32(by + 4), u, a1)
        a2, a3 = fma(splat_f32(by + 8), u, a2), fma(splat_f32(by + 12), u, a3)
    _store_four(rows, at, (a0, a1, a2, a3))


def _pairs_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """The channels stay as ``weave_low`` and ``weave_high`` leave them."""
    step, at = 2 * dim, 4 * c
    a0, a1, a2, a3 = _load_four(rows, at)
    b0, b1, b2, b3 = _load_four(rows, at + 64)
    c0, c1, c2, c3 = _load_four(rows, at + 128)
    d0, d1, d2, d3 = _load_four(rows, at + 192)
    for t in range(t0, min(t1, end), 2):
        if t % 4 == 0:
            ask(later, each)
            later += each
        row, by = v + t * step + 2 * c, p + 8 * t
        # An odd last token is paired with itself; the second weight is 0.
        after = row + (step if t + 1 < end else 0)
        w, x, y, z = splat_i32(by), splat_i32(by + 4), splat_i32(by + 8), splat_i32(by + 12)
        e, f = load_pairs(row), load_pairs(after)
        u = weave_low(e, f)
        a0, a1 = dot_pairs(a0, w, u), dot_pairs(a1, x, u)
        a2, a3 = dot_pairs(a2, y, u), dot_pairs(a3, z, u)
        u = weave_high(e, f)
        b0, b1 = dot_pairs(b0, w, u), dot_pairs(b1, x, u)
        b2, b3 = dot_pairs(b2, y, u), dot_pairs(b3, z, u)
        e, f = load_pairs(row + 64), load_pairs(after + 64)
        u = weave_low(e, f)
        c0, c1 = dot_pairs(c0, w, u), dot_pairs(c1, x, u)
        c2, c3 = dot_pairs(c2, y, u), dot_pairs(c3, z, u)
        u = weave_high(e, f)
        d0, d1 = dot_pairs(d0, w, u), dot_pairs(d1, x, u)
        d2, d3 = dot_pairs(d2, y, u), dot_pairs(d3, z, u)
    _store_four(rows, at, (a0, a1, a2, a3))
    _store_four(rows, at + 64, (b0, b1, b2, b3))
    _store_four(rows, at + 128, (c0, c1, c2, c3))
    _store_four(rows, at + 192, (d0, d1, d2, d3))


def _pairs_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    step, at = 2 * dim, 4 * c
    a0, a1, a2, a3 = _load_four(rows, at)
    for t in range(t0, min(t1, end), 2):
        if t % 4 == 0:
            ask(later, each)
            later += each
        row, by = v + t * step + 2 * c, p + 8 * t
        u = weave_half(row, row + (step if t + 1 < end else 0))
        a0, a1 = dot_pairs(a0, splat_i32(by), u), dot_pairs(a1, splat_i32(by + 4), u)
        a2, a3 = dot_pairs(a2, splat_i32(by + 8), u), dot_pairs(a3, splat_i32(by + 12), u)
    _store_four(rows, at, (a0, a1, a2, a3))


@inline
def _add_ints(rows: Any, at: int, high: Any, low: Any) -> None:
    """128 high + low to the int32 that are there."""
    o0, o1, o2, o3 = rows
    h0, h1, h2, h3 = high
    l0, l1, l2, l3 = low
    # All are loaded first: rows that fill empty places are one row several times.
    a0, a1, a2, a3 = load_i32(o0 + at), load_i32(o1 + at), load_i32(o2 + at), load_i32(o3 + at)
    store_i32(o0 + at, iadd(a0, iadd(left(h0, 7), l0)))
    store_i32(o1 + at, iadd(a1, iadd(left(h1, 7), l1)))
    store_i32(o2 + at, iadd(a2, iadd(left(h2, 7), l2)))
    store_i32(o3 + at, iadd(a3, iadd(left(h3, 7), l3)))


def _bytes_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """int32 sums of channels as ``four_woven_0`` .. ``_3`` leave them, two of those at a time."""
    step, at, i, zero = row_bytes(mode, dim), 4 * c, c // 64, int_splat(0)
    for half in range(2):
        a0, a1, a2, a3 = zero, zero, zero, zero
        b0, b1, b2, b3 = zero, zero, zero, zero
        c0, c1, c2, c3 = zero, zero, zero, zero
        d0, d1, d2, d3 = zero, zero, zero, zero
        for t in range(t0, min(t1, end), 4):
            ask(later, each // 2)
            later += each // 2
            row, by, left_over = v + t * step, p + 8 * t, end - 1 - t
            e, f = load_64(mode, row, i), load_64(mode, row + min(1, left_over) * step, i)
            g = load_64(mode, row + min(2, left_over) * step, i)
            h = load_64(mode, row + min(3, left_over) * step, i)
            w, x, y, z = splat_i32(by), splat_i32(by + 4), splat_i32(by + 8), splat_i32(by + 12)
            by += 16
            k, m, n, o = splat_i32(by), splat_i32(by + 4), splat_i32(by + 8), splat_i32(by + 12)
            if half:
                u, s = four_woven_2(e, f, g, h), four_woven_3(e, f, g, h)
            else:
                u, s = four_woven_0(e, f, g, h), four_woven_1(e, f, g, h)
            a0, a1 = dot_bytes(a0, u, w), dot_bytes(a1, u, x)
            a2, a3 = dot_bytes(a2, u, y), dot_bytes(a3, u, z)
            b0, b1 = dot_bytes(b0, u, k), dot_bytes(b1, u, m)
            b2, b3 = dot_bytes(b2, u, n), dot_bytes(b3, u, o)
            c0, c1 = dot_bytes(c0, s, w), dot_bytes(c1, s, x)
            c2, c3 = dot_bytes(c2, s, y), dot_bytes(c3, s, z)
            d0, d1 = dot_bytes(d0, s, k), dot_bytes(d1, s, m)
            d2, d3 = dot_bytes(d2, s, n), dot_bytes(d3, s, o)
        _add_ints(rows, at + 128 * half, (a0, a1, a2, a3), (b0, b1, b2, b3))
        _add_ints(rows, at + 128 * half + 64, (c0, c1, c2, c3), (d0, d1, d2, d3))


def _bytes_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any,
    later: int, each: int,
) -> None:  # fmt: skip
    """Head sizes of these modes are multiples of 64."""


_WIDE = {"bf16dot": _pairs_wide, "q8dot": _bytes_wide, "q4dot": _bytes_wide}
_NARROW = {"bf16dot": _pairs_narrow, "q8dot": _bytes_narrow, "q4dot": _bytes_narrow}
by_format(add_wide)(lambda name: _WIDE.get(name, _fma_wide))
by_format(add_narrow)(lambda name: _NARROW.get(name, _fma_narrow))


@inline
def add_values(
    mode: Any, p: int, v: int, t0: int, t1: int, end: int, dim: int, out: int, row: int, last: int,
    later: int, each: int,
) -> None:  # fmt: skip
    """Add the values of tokens t0..t1, weighted for four rows. Memory is asked for ``each`` bytes
    from ``later`` on for every four tokens and 64 channels."""
    rows, c = _four_rows(out, row, last), 0
    while c + 64 <= dim:
        add_wide(mode, p, v, c, t0, t1, end, dim, rows, later, each)
        later += (t1 - t0) // 4 * each
        c += 64
    while c < dim:
        add_narrow(mode, p, v, c, t0, t1, end, dim, rows, later, each if c % 64 == 0 else 0)
        c += 16


@inline
def to_floats(mode: Any, out: int, dim: int, factor: Any) -> None:
    """int32 sums of a row in place, their channels in order."""
    by = splat(factor)
    for at in range(out, out + 4 * dim, 256):
        a, b = fmul(to_float(load_i32(at)), by), fmul(to_float(load_i32(at + 64)), by)
        c, d = fmul(to_float(load_i32(at + 128)), by), fmul(to_float(load_i32(at + 192)), by)
        if place_of(mode, 1) == 1:
            store_quarters(at, a, b, c, d)
        else:
            store_quarters_of_nibbles(at, a, b, c, d)


@inline
def in_order(out: int, dim: int) -> None:
    c = 0
    while c + 64 <= dim:  # narrower ends were never woven
        for at in (out + 4 * c, out + 4 * c + 128):
            low, high = load_f32(at), load_f32(at + 64)
            store_f32(at, in_order_low(low, high))
            store_f32(at + 64, in_order_high(low, high))
        c += 64
