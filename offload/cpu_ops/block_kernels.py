"""Attention of a few query rows over the tokens of one block.

    R rows (queries times heads that share keys), T tokens, Dk, Dv head sizes

Rows go in quads: a register's lane ``4 t + r`` holds what belongs to token t of four and row r of
four, so that what is loaded of keys and values serves four rows at once. Where R is no multiple of
four the last row fills the empty places; its copies write the same numbers to the same place.

What is computed for a row depends on that row's visible tokens and nothing else: a masked token
adds an exact zero, and sums over tokens keep their places modulo eight. So a token decoded by
itself, in a chunk, or beside any other rows comes out equal to the bit.

Partial results and their merge: Milakov and Gimelshein (2018), as in flash-decoding (Dao et al.,
2023).
"""

from __future__ import annotations

from typing import Any

from numba import float32

from offload.cpu_ops.block_elements import (
    ask,
    dot_four,
    integer,
    load_64,
    load_element,
    paired,
    place_of,
    quantised,
    row_bytes,
)
from offload.cpu_ops.block_vectors import (
    cross_sums,
    dot_bytes,
    dot_pairs,
    finite,
    four_woven_0,
    four_woven_1,
    four_woven_2,
    four_woven_3,
    in_order_high,
    in_order_low,
    load_pairs,
    max_floats,
    row_floats,
    row_limits,
    store_quarters,
    store_quarters_of_nibbles,
    store_tokens,
    token_bf16,
    token_pairs,
    unless_lowest,
    visible,
    weave_half,
    weave_high,
    weave_low,
)
from offload.cpu_ops.functions import exp
from offload.cpu_ops.lanes import fmax, fsub, store_i32, sum_floats, turn_4, turn_8
from offload.cpu_ops.tags import by_format, inline, outline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    fadd,
    fdiv,
    fence,
    fma,
    fmul,
    iadd,
    int_splat,
    lane,
    left,
    load_f32,
    load_float,
    load_i32,
    nearest,
    splat,
    splat_f32,
    splat_i32,
    stack,
    store_f32,
    store_float,
    store_i8,
    to_float,
    to_int,
)
from offload.cpu_ops.wide import load_bf16

BLOCK = 256
"""Tokens of a partial result at most; longer blocks are cut at multiples of it."""
ROWS = 32
"""Query rows of a task at most."""
WIDEST = 512
"""Head size at most."""
EXTRA = 16
"""Floats after a row's Dv sums: the largest score, and the sum of exponentials."""
TOP = 127 * 128
"""Of the integers that queries and weights become: 127 high bytes' worth. The sums over 256 tokens,
or 512 channels, stay below 2^31."""
_NEAR = 8192
"""Bytes of keys or values that all rows go over before the next: a quarter of an L1 cache."""

_score_room = stack(ROWS * BLOCK * 4)
_query_room = stack(ROWS * WIDEST * 4)
_offset_room = stack(ROWS * 4 + 64)
_factor_room = stack(ROWS * 4 + 64)


@inline
def _capped(scores: Any, cap: Any) -> Any:
    """cap * tanh(scores / cap), tanh as 1 - 2 / (1 + exp(2 x))"""
    power = exp(fmul(scores, splat(float32(2.0) / cap)))
    one = splat(float32(1.0))
    tanh = fsub(one, fdiv(splat(float32(2.0)), fadd(one, power)))
    return fmul(tanh, splat(cap))


@inline
def _scores(
    mode: Any, q: int, row: int, last: int, k: int, t0: int, t1: int, end: int, dim: int,
    scale: Any, cap: Any, offsets: int, factors: int, limits: int, out: int, keys_end: int, values: int,
) -> None:  # fmt: skip
    """Of four rows at ``q`` with tokens t0..t1, of which those from ``end`` on are none."""
    zero = splat(float32(0.0))
    rows = (q, q + min(1, last) * row, q + min(2, last) * row, q + min(3, last) * row)
    low, high = row_limits(limits), row_limits(limits + 4 * ROWS)
    step = row_bytes(mode, dim)
    for t in range(t0, t1, 4):
        if values != 0:
            ask(k + t * step, 4 * step, keys_end, values)
        k0, k1 = k + min(t, end - 1) * step, k + min(t + 1, end - 1) * step
        k2, k3 = k + min(t + 2, end - 1) * step, k + min(t + 3, end - 1) * step
        none = (
            zero, zero, zero, zero, zero, zero, zero, zero,
            zero, zero, zero, zero, zero, zero, zero, zero,
        )  # fmt: skip
        sums = dot_four(mode, rows, (k0, k1, k2, k3), dim, none)
        v = cross_sums(*sums)
        if integer(mode):
            v = fma(v, row_floats(factors), row_floats(offsets))
        elif quantised(mode):
            v = fadd(v, row_floats(offsets))
        v = fmul(v, splat(scale))
        if cap > float32(0.0):
            v = _capped(v, cap)
        store_f32(out + 16 * t, visible(v, low, high, t))


@inline
def _softmax(
    mode: Any, scores: int, t0: int, t1: int, end: int, v: int, out: int, row: int, last: int,
    dim: int, offsets: int, factors: int, span: int,
) -> None:  # fmt: skip
    """Scores of four rows to weights in place, as ``_values`` reads them; largest scores and sums
    go to the partial results."""
    top = splat(float32(float("-inf")))
    for t in range(t0, t1, 4):
        top = fmax(load_f32(scores + 16 * t), top)
    top = fmax(top, turn_8(top))
    top = fmax(top, turn_4(top))
    zero = splat(float32(0.0))
    total, more, largest = zero, zero, zero
    for t in range(t0, t1, 8):
        x, y = load_f32(scores + 16 * t), load_f32(scores + 16 * t + 64)
        a, b = unless_lowest(x, exp(fsub(x, top))), unless_lowest(y, exp(fsub(y, top)))
        if paired(mode):
            pairs = token_pairs(a, b)
            # What is summed is what will be multiplied: rounding then cancels in the quotient.
            total = fadd(total, fadd(as_float(left(pairs, 16)), as_float(both(pairs, -65536))))
            store_i32(scores + 8 * t, pairs)
        else:
            total = fadd(total, fadd(a, b))
            if quantised(mode):
                # Reads up to seven tokens behind the last: still inside the record, weights 0.
                lows = v + 2 * span + 2 * t
                more = fma(a, finite(token_bf16(lows)), more)
                more = fma(b, finite(token_bf16(lows + 8)), more)
                a = fmul(a, finite(token_bf16(v + 2 * t)))
                b = fmul(b, finite(token_bf16(v + 2 * t + 8)))
                largest = fmax(largest, fmax(a, b))
            store_f32(scores + 16 * t, a)
            store_f32(scores + 16 * t + 64, b)
    total = fadd(total, turn_8(total))
    total = fadd(total, turn_4(total))
    more = fadd(more, turn_8(more))
    more = fadd(more, turn_4(more))
    if integer(mode):
        largest = fmax(largest, turn_8(largest))
        largest = fmax(largest, turn_4(largest))
        inverse = fdiv(splat(float32(TOP)), fmax(largest, splat(float32(1e-30))))
        for t in range(t0, t1, 4):
            x = nearest(fmul(load_f32(scores + 16 * t), inverse))
            high = nearest(fmul(x, splat(float32(1 / 128))))
            low = fma(high, splat(float32(-128.0)), x)
            store_tokens(scores + 8 * t, to_int(high))
            store_tokens(scores + 8 * t + 16, to_int(low))
        largest = fmul(largest, splat(float32(1 / TOP)))
    for i in range(last + 1):
        if integer(mode):
            store_float(factors + 4 * i, lane(largest, i))
        store_float(out + i * row + 4 * dim, lane(top, i))
        store_float(out + i * row + 4 * dim + 4, lane(total, i))
        store_float(offsets + 4 * i, lane(more, i))


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
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    """Add tokens t0..t1 to the sums of 64 channels of four ``rows``; only inside kernels."""
    raise NotImplementedError


def add_narrow(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    """As ``add_wide`` for 16 channels."""
    raise NotImplementedError


def _fma_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    step, at, i = row_bytes(mode, dim), 4 * c, c // 16
    a0, a1, a2, a3 = _load_four(rows, at)
    b0, b1, b2, b3 = _load_four(rows, at + 64)
    c0, c1, c2, c3 = _load_four(rows, at + 128)
    d0, d1, d2, d3 = _load_four(rows, at + 192)
    for t in range(t0, min(t1, end)):
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
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    step, at, i = row_bytes(mode, dim), 4 * c, c // 16
    a0, a1, a2, a3 = _load_four(rows, at)
    for t in range(t0, min(t1, end)):
        by, u = p + 16 * t, load_element(mode, v + t * step, i)
        a0, a1 = fma(splat_f32(by), u, a0), fma(splat_f32(by + 4), u, a1)
        a2, a3 = fma(splat_f32(by + 8), u, a2), fma(splat_f32(by + 12), u, a3)
    _store_four(rows, at, (a0, a1, a2, a3))


def _pairs_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    """The channels stay as ``weave_low`` and ``weave_high`` leave them."""
    step, at = 2 * dim, 4 * c
    a0, a1, a2, a3 = _load_four(rows, at)
    b0, b1, b2, b3 = _load_four(rows, at + 64)
    c0, c1, c2, c3 = _load_four(rows, at + 128)
    d0, d1, d2, d3 = _load_four(rows, at + 192)
    for t in range(t0, min(t1, end), 2):
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
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    step, at = 2 * dim, 4 * c
    a0, a1, a2, a3 = _load_four(rows, at)
    for t in range(t0, min(t1, end), 2):
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
    store_i32(o0 + at, iadd(load_i32(o0 + at), iadd(left(h0, 7), l0)))
    store_i32(o1 + at, iadd(load_i32(o1 + at), iadd(left(h1, 7), l1)))
    store_i32(o2 + at, iadd(load_i32(o2 + at), iadd(left(h2, 7), l2)))
    store_i32(o3 + at, iadd(load_i32(o3 + at), iadd(left(h3, 7), l3)))


def _bytes_wide(
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    """int32 sums of channels as ``four_woven_0`` .. ``_3`` leave them, two of those at a time."""
    step, at, i, zero = row_bytes(mode, dim), 4 * c, c // 64, int_splat(0)
    for half in range(2):
        a0, a1, a2, a3 = zero, zero, zero, zero
        b0, b1, b2, b3 = zero, zero, zero, zero
        c0, c1, c2, c3 = zero, zero, zero, zero
        d0, d1, d2, d3 = zero, zero, zero, zero
        for t in range(t0, min(t1, end), 4):
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
    mode: Any, p: int, v: int, c: int, t0: int, t1: int, end: int, dim: int, rows: Any
) -> None:
    """Head sizes of these modes are multiples of 64."""


_WIDE = {"bf16dot": _pairs_wide, "q8dot": _bytes_wide, "q4dot": _bytes_wide}
_NARROW = {"bf16dot": _pairs_narrow, "q8dot": _bytes_narrow, "q4dot": _bytes_narrow}
by_format(add_wide)(lambda name: _WIDE.get(name, _fma_wide))
by_format(add_narrow)(lambda name: _NARROW.get(name, _fma_narrow))


@inline
def _values(
    mode: Any, p: int, v: int, t0: int, t1: int, end: int, dim: int, out: int, row: int, last: int
) -> None:
    """Add the values of tokens t0..t1, weighted for four rows."""
    rows, c = _four_rows(out, row, last), 0
    while c + 64 <= dim:
        add_wide(mode, p, v, c, t0, t1, end, dim, rows)
        c += 64
    while c < dim:
        add_narrow(mode, p, v, c, t0, t1, end, dim, rows)
        c += 16


@inline
def _scale_queries(q: int, rows: int, k: int, dim: int, at: int, offsets: int) -> None:
    """Queries times the keys' steps to ``at``; their products with the lows to ``offsets``."""
    for r in range(rows):
        more = splat(float32(0.0))
        for c in range(0, dim, 16):
            x = load_f32(q + 4 * (r * dim + c))
            store_f32(at + 4 * (r * dim + c), fmul(x, load_bf16(k + 2 * c)))
            more = fma(x, load_bf16(k + 2 * (dim + c)), more)
        store_float(offsets + 4 * r, sum_floats(more))


@inline
def _whole_queries(
    mode: Any, q: int, rows: int, k: int, dim: int, at: int, offsets: int, factors: int
) -> None:
    """As ``_scale_queries``, to integers: a row's high bytes, then its low ones."""
    for r in range(rows):
        line, to = at + ROWS * WIDEST * 2, at + 2 * r * dim
        _scale_queries(q + 4 * r * dim, 1, k, dim, line, offsets + 4 * r)
        top = splat(float32(0.0))
        for c in range(0, dim, 16):
            v = load_f32(line + 4 * c)
            top = fmax(top, fmax(v, fmul(v, splat(float32(-1.0)))))
        largest = max(max_floats(top), float32(1e-30))
        by = splat(float32(TOP) / largest)
        for c in range(0, dim, 16):
            x = nearest(fmul(load_f32(line + 4 * c), by))
            high = nearest(fmul(x, splat(float32(1 / 128))))
            place = to + c // 64 * 64 + 16 * place_of(mode, c % 64 // 16)
            store_i8(place, to_int(high))
            store_i8(place + dim, to_int(fma(high, splat(float32(-128.0)), x)))
        store_float(factors + 4 * r, largest * float32(1 / TOP))


@outline
def attend(
    mode: Any, q: int, rows: int, k: int, v: int, span: int, key_dim: int, dim: int, t0: int,
    t1: int, end: int, limits: int, scale: Any, cap: Any, out: int,
) -> None:  # fmt: skip
    """``rows`` <= ROWS queries over tokens t0..t1 of a block's ``end`` <= BLOCK ones.

    ``q``: float32 or, in mode "bf16dot", bfloat16 [rows, key_dim]. ``k``, ``v``: one head's part
    of the block, room for ``span`` tokens. ``limits``: int32 [2, ROWS], the first token each row
    sees and the one behind its last; outside t0..t1 none is seen, t0 and t1 are multiples of 8.
    ``out``: float32 [rows, dim + EXTRA]: the sum of values weighted with exp(score - largest), the
    largest score, the sum of the weights. A row that sees nothing gets zeros and minus infinity.

    ``cap``: scores become cap * tanh(score / cap); 0: they do not.
    """
    scores, offsets, row = _score_room(), _offset_room(), 4 * (dim + EXTRA)
    factors = _factor_room()
    q_row = 4 * key_dim
    if paired(mode):
        q_row = 2 * key_dim
    values = v
    if quantised(mode):
        scaled = _query_room()
        if integer(mode):
            _whole_queries(mode, q, rows, k, key_dim, scaled, offsets, factors)
            q_row = 2 * key_dim
        else:
            _scale_queries(q, rows, k, key_dim, scaled, offsets)
        for r in range(rows, (rows + 3) // 4 * 4):  # empty places do what the last row does
            store_float(offsets + 4 * r, load_float(offsets + 4 * rows - 4))
            store_float(factors + 4 * r, load_float(factors + 4 * rows - 4))
        q = scaled
        k += 4 * key_dim
        values += 4 * span
    keys_end = k + end * row_bytes(mode, key_dim)
    near = max(8, _NEAR // row_bytes(mode, key_dim) // 8 * 8)
    for t in range(t0, t1, near):
        for h in range(0, rows, 4):
            _scores(
                mode, q + h * q_row, q_row, min(3, rows - 1 - h), k, t, min(t + near, t1), end,
                key_dim, scale, cap, offsets + 4 * h, factors + 4 * h, limits + 4 * h, scores + h * BLOCK * 4,
                keys_end, v if h == 0 else 0,
            )  # fmt: skip
    for h in range(0, rows, 4):
        last = min(3, rows - 1 - h)
        _softmax(
            mode, scores + h * BLOCK * 4, t0, t1, end, v, out + h * row, row, last, dim,
            offsets + 4 * h, factors + 4 * h, span,
        )  # fmt: skip
        for i in range(h, h + last + 1):
            for c in range(0, dim, 16):
                store_f32(out + i * row + 4 * c, splat(float32(0.0)))
    near = max(8, _NEAR // row_bytes(mode, dim) // 8 * 8)
    for t in range(t0, t1, near):
        until = min(t + near, t1)
        ask(values + t * row_bytes(mode, dim), (until - t) * row_bytes(mode, dim), 0, 0)
        for h in range(0, rows, 4):
            p, last = scores + h * BLOCK * 4, min(3, rows - 1 - h)
            _values(mode, p, values, t, until, end, dim, out + h * row, row, last)
            fence()
    if paired(mode):
        for r in range(rows):
            _in_order(out + r * row, dim)
    if quantised(mode):
        for r in range(rows):
            more = splat(load_float(offsets + 4 * r))
            if integer(mode):
                _to_floats(mode, out + r * row, dim, load_float(factors + 4 * r))
            for c in range(0, dim, 16):
                at = out + r * row + 4 * c
                store_f32(at, fadd(load_f32(at), more))


@inline
def _to_floats(mode: Any, out: int, dim: int, factor: Any) -> None:
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
def _in_order(out: int, dim: int) -> None:
    c = 0
    while c + 64 <= dim:  # narrower ends were never woven
        for at in (out + 4 * c, out + 4 * c + 128):
            low, high = load_f32(at), load_f32(at + 64)
            store_f32(at, in_order_low(low, high))
            store_f32(at + 64, in_order_high(low, high))
        c += 64


@inline
def _exp(x: Any) -> Any:
    return lane(exp(splat(x)), 0)


@outline
def fold(state: int, partial: int, rows: int, dim: int) -> None:
    """Add a block's partial results to what earlier blocks left: float32 [rows, dim + EXTRA]
    both. A row that saw nothing changes nothing."""
    step = 4 * (dim + EXTRA)
    for r in range(rows):
        to, of = state + r * step, partial + r * step
        old, new = load_float(to + 4 * dim), load_float(of + 4 * dim)
        if new == float32(float("-inf")):
            continue
        top = max(old, new)
        keep = float32(0.0)
        if old != float32(float("-inf")):
            keep = _exp(old - top)
        share = _exp(new - top)
        store_float(to + 4 * dim, top)
        total = keep * load_float(to + 4 * dim + 4)
        store_float(to + 4 * dim + 4, total + share * load_float(of + 4 * dim + 4))
        a, b = splat(keep), splat(share)
        for c in range(0, dim, 16):
            v = fmul(a, load_f32(to + 4 * c))
            store_f32(to + 4 * c, fma(b, load_f32(of + 4 * c), v))
