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
    channels,
    dot_eight,
    dot_sixteen,
    integer,
    paired,
    quantised,
    row_bytes,
    step_tokens,
)
from offload.cpu_ops.block_queries import (
    BLOCK,
    ROWS,
    TOP,
    WIDEST,
    scale_queries,
    twice,
    whole_queries,
)
from offload.cpu_ops.block_values import add_values, in_order
from offload.cpu_ops.block_vectors import (
    finite,
    row_floats,
    row_limits,
    token_bf16,
    token_pairs,
    token_words,
    unless_lowest,
    visible,
)
from offload.cpu_ops.functions import capped, exp
from offload.cpu_ops.lanes import fmax, fsub, store_i32, turn_4, turn_8
from offload.cpu_ops.tags import by_format, inline, outline
from offload.cpu_ops.vectors import (
    as_float,
    as_int,
    at_least,
    both,
    fadd,
    fdiv,
    fence,
    fma,
    fmul,
    iadd,
    lane,
    left,
    load_f32,
    load_float,
    nearest,
    splat,
    stack,
    store_f32,
    store_float,
    to_int,
)

EXTRA = 16
"""Floats after a row's Dv sums: the largest score, and the sum of exponentials."""
_NEAR = 8192
"""Bytes of keys or values that all rows go over before the next: few, as they are asked of memory
in their order, and at an even pace."""
_AHEAD = 16384
"""Bytes between what is computed and what is asked of memory. The hardware's prefetchers learn each
page of 4 KiB anew, and a page's first access may wait for its translation, too."""

_score_room = stack(ROWS * BLOCK * 4)
_query_room = stack((ROWS + 1) * WIDEST * 4)
_offset_room = stack(2 * ROWS * 4 + 64)


@inline
def _scaled(mode: Any, v: Any, scale: Any, cap: Any, offsets: int) -> Any:
    if integer(mode):
        v = fma(v, row_floats(offsets + 4 * ROWS), row_floats(offsets))
    elif quantised(mode):
        v = fadd(v, row_floats(offsets))
    v = fmul(v, splat(scale))
    if cap > float32(0.0):
        v = capped(v, cap)
    return v


def score_tokens(
    mode: Any, q: int, row: int, last: int, k: int, t0: int, t1: int, end: int, dim: int,
    scale: Any, cap: Any, offsets: int, limits: int, out: int, later: int, each: int,
) -> None:  # fmt: skip
    """Of four rows at ``q`` with tokens t0..t1, of which those from ``end`` on are none.
    ``later``, ``each``: as for ``dot_eight``. Only inside kernels."""
    raise NotImplementedError


def _scores_by_eight(
    mode: Any, q: int, row: int, last: int, k: int, t0: int, t1: int, end: int, dim: int,
    scale: Any, cap: Any, offsets: int, limits: int, out: int, later: int, each: int,
) -> None:  # fmt: skip
    rows = (q, q + min(1, last) * row, q + min(2, last) * row, q + min(3, last) * row)
    low, high = row_limits(limits), row_limits(limits + 4 * ROWS)
    step = row_bytes(mode, dim)
    behind = end - 1
    for t in range(t0, t1, 8):
        k0, k1 = k + min(t, behind) * step, k + min(t + 1, behind) * step
        k2, k3 = k + min(t + 2, behind) * step, k + min(t + 3, behind) * step
        k4, k5 = k + min(t + 4, behind) * step, k + min(t + 5, behind) * step
        k6, k7 = k + min(t + 6, behind) * step, k + min(t + 7, behind) * step
        v, w = dot_eight(mode, rows, (k0, k1, k2, k3, k4, k5, k6, k7), dim, later, each)
        later += 2 * (dim // channels(mode)) * each
        v, w = _scaled(mode, v, scale, cap, offsets), _scaled(mode, w, scale, cap, offsets)
        store_f32(out + 16 * t, visible(v, low, high, t))
        store_f32(out + 16 * t + 64, visible(w, low, high, t + 4))


def _scores_by_sixteen(
    mode: Any, q: int, row: int, last: int, k: int, t0: int, t1: int, end: int, dim: int,
    scale: Any, cap: Any, offsets: int, limits: int, out: int, later: int, each: int,
) -> None:  # fmt: skip
    """Quantised records are whole: what is behind ``end`` is read, and masked."""
    rows = (q, q + min(1, last) * row, q + min(2, last) * row, q + min(3, last) * row)
    low, high = row_limits(limits), row_limits(limits + 4 * ROWS)
    step = row_bytes(mode, dim)
    for t in range(t0 // 16 * 16, t1, 16):
        v, w, x, y = dot_sixteen(mode, rows, k + t * step, dim, later, each)
        later += 4 * (dim // channels(mode)) * each
        v, w = _scaled(mode, v, scale, cap, offsets), _scaled(mode, w, scale, cap, offsets)
        x, y = _scaled(mode, x, scale, cap, offsets), _scaled(mode, y, scale, cap, offsets)
        store_f32(out + 16 * t, visible(v, low, high, t))
        store_f32(out + 16 * t + 64, visible(w, low, high, t + 4))
        store_f32(out + 16 * t + 128, visible(x, low, high, t + 8))
        store_f32(out + 16 * t + 192, visible(y, low, high, t + 12))


by_format(score_tokens)(
    lambda name: _scores_by_sixteen if name.startswith("q") else _scores_by_eight
)


@inline
def _weight(mode: Any, x: Any) -> Any:
    """exp(x) of x <= 0; to 3e-6 of it where it will be rounded to 2^-9 or 2^-15."""
    if paired(mode) or integer(mode):
        y = fmul(at_least(x, float32(-87.0)), splat(float32(1.44269504088896341)))
        n = nearest(y)
        r = fsub(y, n)
        # 2^r on [-1/2, 1/2]: the polynomial of degree 4 with the least relative error.
        p = fma(splat(float32(0.009570091)), r, splat(float32(0.055917863)))
        p = fma(fma(p, r, splat(float32(0.24024746))), r, splat(float32(0.69312179)))
        p = fma(p, r, splat(float32(0.99999928)))
        # The low bits of 1.5 * 2^23 + n are n, which is added to the exponent.
        power = left(as_int(fadd(n, splat(float32(12582912.0)))), 23)
        return as_float(iadd(as_int(p), power))
    return exp(x)


@inline
def _softmax(
    mode: Any, scores: int, t0: int, t1: int, v: int, out: int, row: int, last: int, dim: int,
    offsets: int, span: int,
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
        a = unless_lowest(x, _weight(mode, fsub(x, top)))
        b = unless_lowest(y, _weight(mode, fsub(y, top)))
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
        for t in range(t0, t1, 8):
            x = nearest(fmul(load_f32(scores + 16 * t), inverse))
            y = nearest(fmul(load_f32(scores + 16 * t + 64), inverse))
            store_i32(scores + 8 * t, token_words(to_int(x), to_int(y)))
        largest = fmul(largest, splat(float32(1 / TOP)))
    for i in range(last + 1):
        if integer(mode):
            store_float(offsets + 4 * (ROWS + i), lane(largest, i))
        store_float(out + i * row + 4 * dim, lane(top, i))
        store_float(out + i * row + 4 * dim + 4, lane(total, i))
        store_float(offsets + 4 * i, lane(more, i))


@outline
def attend(
    mode: Any, q: int, rows: int, k: int, v: int, span: int, key_dim: int, dim: int, t0: int,
    t1: int, end: int, limits: int, scale: Any, cap: Any, next_k: int, out: int,
) -> None:  # fmt: skip
    """``rows`` <= ROWS queries over tokens t0..t1 of a block's ``end`` <= BLOCK ones.

    ``q``: float32 or, in mode "bf16dot", bfloat16 [rows, key_dim]. ``k``, ``v``: one head's part
    of the block, room for ``span`` tokens. ``limits``: int32 [2, ROWS], the first token each row
    sees and the one behind its last; outside t0..t1 none is seen, t0 and t1 are multiples of 8.
    ``out``: float32 [rows, dim + EXTRA]: the sum of values weighted with exp(score - largest), the
    largest score, the sum of the weights. A row that sees nothing gets zeros and minus infinity.

    ``cap``: scores become cap * tanh(score / cap); 0: they do not. ``next_k``: the keys of the next
    call, 0 if they are not known: the first of them are asked of memory at the end.
    """
    scores, offsets, row = _score_room(), _offset_room(), 4 * (dim + EXTRA)
    q_row = 4 * key_dim
    values = v
    if paired(mode):
        doubled = _query_room()
        twice(q, rows, key_dim, doubled)
        q = doubled
    if quantised(mode):
        scaled = _query_room()
        if integer(mode):
            whole_queries(q, rows, k, key_dim, scaled, offsets)
        else:
            scale_queries(q, rows, k, key_dim, scaled, offsets)
        for r in range(rows, (rows + 3) // 4 * 4):  # empty places do what the last row does
            store_float(offsets + 4 * r, load_float(offsets + 4 * rows - 4))
            factor = load_float(offsets + 4 * (ROWS + rows - 1))
            store_float(offsets + 4 * (ROWS + r), factor)
        q = scaled
        k += 4 * key_dim
        values += 4 * span
    quads, key_row, value_row = (rows + 3) // 4, row_bytes(mode, key_dim), row_bytes(mode, dim)
    key_end, value_end = k + t1 * key_row, values + t1 * value_row
    near = max(8, _NEAR // key_row // 8 * 8)
    each = row_bytes(mode, 4 * channels(mode)) // quads
    for t in range(t0, t1, near):
        until, later = min(t + near, t1), k + t * key_row + _AHEAD
        if later >= key_end:
            later += values + t0 * value_row - key_end
        for h in range(0, rows, 4):
            score_tokens(
                mode, q + h * q_row, q_row, min(3, rows - 1 - h), k, t, until, end,
                key_dim, scale, cap, offsets + 4 * h, limits + 4 * h, scores + h * BLOCK * 4,
                later, each,
            )  # fmt: skip
            later += (until - t) // 4 * (key_dim // channels(mode)) * each
    for h in range(0, rows, 4):
        last = min(3, rows - 1 - h)
        _softmax(
            mode, scores + h * BLOCK * 4, t0, t1, v, out + h * row, row, last, dim,
            offsets + 4 * h, span,
        )  # fmt: skip
        for i in range(h, h + last + 1):
            for c in range(0, dim, 16):
                store_f32(out + i * row + 4 * c, splat(float32(0.0)))
    near = max(8, 2 * _NEAR // value_row // 8 * 8)  # sums are loaded and stored once for each
    each = row_bytes(mode, 64 * step_tokens(mode)) // quads
    for t in range(t0, t1, near):
        until, later = min(t + near, t1), values + t * value_row + _AHEAD
        if later >= value_end:
            later += next_k - value_end
            if next_k == 0:
                each = 0
        for h in range(0, rows, 4):
            p, last = scores + h * BLOCK * 4, min(3, rows - 1 - h)
            add_values(mode, p, values, t, until, end, dim, out + h * row, row, last, later, each)
            later += (until - t) // step_tokens(mode) * (dim // 64) * each
            fence()
    for r in range(rows):
        if paired(mode) or integer(mode):
            in_order(mode, out + r * row, dim, load_float(offsets + 4 * (ROWS + r)))
        if quantised(mode):
            more = splat(load_float(offsets + 4 * r))
            for c in range(0, dim, 16):
                at = out + r * row + 4 * c
                store_f32(at, fadd(load_f32(at), more))


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


@inline
def clear_state(state: int, dim: int) -> None:
    """Of a row that has seen nothing."""
    for c in range(0, dim + EXTRA, 16):
        store_f32(state + 4 * c, splat(float32(0.0)))
    store_float(state + 4 * dim, float32(float("-inf")))


@inline
def share_of(state: int, sink: int, dim: int) -> Any:
    """What a row's sums are multiplied with at the end; 0 if it saw nothing.

    ``sink``: address of a score that takes its share and has no value (gpt-oss); 0: there is none.
    """
    top, total = load_float(state + 4 * dim), load_float(state + 4 * dim + 4)
    share = float32(0.0)
    if total > float32(0.0):
        share = float32(1.0)
        if sink != 0:
            highest = max(top, load_float(sink))
            share = _exp(top - highest)
            total = total * share + _exp(load_float(sink) - highest)
        share /= total
    return share


@inline
def divided(state: int, sink: int, dim: int, out: int) -> None:
    """A row's sums to its attention, float32 [dim]; ``sink`` as for ``share_of``."""
    by = splat(share_of(state, sink, dim))
    for c in range(0, dim, 16):
        store_f32(out + 4 * c, fmul(by, load_f32(state + 4 * c)))
