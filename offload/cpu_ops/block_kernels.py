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
    paired,
    quantised,
    row_bytes,
)
from offload.cpu_ops.block_queries import BLOCK, ROWS, TOP, WIDEST, scale_queries, whole_queries
from offload.cpu_ops.block_values import add_values, in_order, to_floats
from offload.cpu_ops.block_vectors import (
    cross_sums,
    finite,
    row_floats,
    row_limits,
    store_tokens,
    token_bf16,
    token_pairs,
    unless_lowest,
    visible,
)
from offload.cpu_ops.functions import exp
from offload.cpu_ops.lanes import fmax, fsub, store_i32, turn_4, turn_8
from offload.cpu_ops.tags import inline, outline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    fadd,
    fdiv,
    fence,
    fma,
    fmul,
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
_NEAR = 16384
"""Bytes of keys or values that all rows go over before the next: half an L1 cache."""

_score_room = stack(ROWS * BLOCK * 4)
_query_room = stack(ROWS * WIDEST * 4)
_offset_room = stack(2 * ROWS * 4 + 64)


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
    scale: Any, cap: Any, offsets: int, limits: int, out: int, later: int, each: int,
) -> None:  # fmt: skip
    """Of four rows at ``q`` with tokens t0..t1, of which those from ``end`` on are none. Memory is
    asked for ``each`` bytes from ``later`` on for every four tokens."""
    zero = splat(float32(0.0))
    rows = (q, q + min(1, last) * row, q + min(2, last) * row, q + min(3, last) * row)
    low, high = row_limits(limits), row_limits(limits + 4 * ROWS)
    step = row_bytes(mode, dim)
    for t in range(t0, t1, 4):
        ask(later, each)
        later += each
        k0, k1 = k + min(t, end - 1) * step, k + min(t + 1, end - 1) * step
        k2, k3 = k + min(t + 2, end - 1) * step, k + min(t + 3, end - 1) * step
        none = (
            zero, zero, zero, zero, zero, zero, zero, zero,
            zero, zero, zero, zero, zero, zero, zero, zero,
        )  # fmt: skip
        sums = dot_four(mode, rows, (k0, k1, k2, k3), dim, none)
        v = cross_sums(*sums)
        if integer(mode):
            v = fma(v, row_floats(offsets + 4 * ROWS), row_floats(offsets))
        elif quantised(mode):
            v = fadd(v, row_floats(offsets))
        v = fmul(v, splat(scale))
        if cap > float32(0.0):
            v = _capped(v, cap)
        store_f32(out + 16 * t, visible(v, low, high, t))


@inline
def _softmax(
    mode: Any, scores: int, t0: int, t1: int, end: int, v: int, out: int, row: int, last: int,
    dim: int, offsets: int, span: int, later: int, each: int,
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
        ask(later, each)
        later += each
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
            store_float(offsets + 4 * (ROWS + i), lane(largest, i))
        store_float(out + i * row + 4 * dim, lane(top, i))
        store_float(out + i * row + 4 * dim + 4, lane(total, i))
        store_float(offsets + 4 * i, lane(more, i))


@inline
def share_of_request(at: int, nbytes: int, turns: int) -> int:
    """Bytes to ask for in each of so many turns; none if ``at`` is 0."""
    return 0 if at == 0 else min(1024, (nbytes + turns - 1) // turns)


@outline
def attend(
    mode: Any, q: int, rows: int, k: int, v: int, span: int, key_dim: int, dim: int, t0: int,
    t1: int, end: int, limits: int, scale: Any, cap: Any, next_k: int, next_v: int, out: int,
) -> None:  # fmt: skip
    """``rows`` <= ROWS queries over tokens t0..t1 of a block's ``end`` <= BLOCK ones.

    ``q``: float32 or, in mode "bf16dot", bfloat16 [rows, key_dim]. ``k``, ``v``: one head's part
    of the block, room for ``span`` tokens. ``limits``: int32 [2, ROWS], the first token each row
    sees and the one behind its last; outside t0..t1 none is seen, t0 and t1 are multiples of 8.
    ``out``: float32 [rows, dim + EXTRA]: the sum of values weighted with exp(score - largest), the
    largest score, the sum of the weights. A row that sees nothing gets zeros and minus infinity.

    ``cap``: scores become cap * tanh(score / cap); 0: they do not. ``next_k``, ``next_v``: the keys
    and values of the next call, 0 if they are not known: they are asked of memory meanwhile, spread
    over everything that is computed here, as memory would else be idle half of the time.
    """
    scores, offsets, row = _score_room(), _offset_room(), 4 * (dim + EXTRA)
    q_row = 4 * key_dim
    if paired(mode):
        q_row = 2 * key_dim
    values = v
    if quantised(mode):
        scaled = _query_room()
        if integer(mode):
            whole_queries(mode, q, rows, k, key_dim, scaled, offsets)
            q_row = 2 * key_dim
        else:
            scale_queries(q, rows, k, key_dim, scaled, offsets)
        for r in range(rows, (rows + 3) // 4 * 4):  # empty places do what the last row does
            store_float(offsets + 4 * r, load_float(offsets + 4 * rows - 4))
            factor = load_float(offsets + 4 * (ROWS + rows - 1))
            store_float(offsets + 4 * (ROWS + r), factor)
        q = scaled
        k += 4 * key_dim
        values += 4 * span
    quads, n = (rows + 3) // 4, max(8, t1 - t0)
    each = share_of_request(next_k, span * row_bytes(mode, key_dim) * 3 // 4, quads * n // 4)
    pause = share_of_request(next_k, span * row_bytes(mode, key_dim) // 4, quads * n // 8)
    near = max(8, _NEAR // row_bytes(mode, key_dim) // 8 * 8)
    for t in range(t0, t1, near):
        for h in range(0, rows, 4):
            _scores(
                mode, q + h * q_row, q_row, min(3, rows - 1 - h), k, t, min(t + near, t1), end,
                key_dim, scale, cap, offsets + 4 * h, limits + 4 * h, scores + h * BLOCK * 4,
                next_k, each,
            )  # fmt: skip
            next_k += (min(t + near, t1) - t) // 4 * each
    for h in range(0, rows, 4):
        last = min(3, rows - 1 - h)
        _softmax(
            mode, scores + h * BLOCK * 4, t0, t1, end, v, out + h * row, row, last, dim,
            offsets + 4 * h, span, next_k, pause,
        )  # fmt: skip
        next_k += n // 8 * pause
        for i in range(h, h + last + 1):
            for c in range(0, dim, 16):
                store_f32(out + i * row + 4 * c, splat(float32(0.0)))
    near = max(8, _NEAR // row_bytes(mode, dim) // 8 * 8)
    passes = quads * ((dim + 63) // 64)
    each = share_of_request(next_v, span * row_bytes(mode, dim), passes * n // 4)
    for t in range(t0, t1, near):
        until = min(t + near, t1)
        for h in range(0, rows, 4):
            p, last = scores + h * BLOCK * 4, min(3, rows - 1 - h)
            add_values(mode, p, values, t, until, end, dim, out + h * row, row, last, next_v, each)
            next_v += (until - t) // 4 * ((dim + 63) // 64) * each
            fence()
    if paired(mode):
        for r in range(rows):
            in_order(out + r * row, dim)
    if quantised(mode):
        for r in range(rows):
            more = splat(load_float(offsets + 4 * r))
            if integer(mode):
                to_floats(mode, out + r * row, dim, load_float(offsets + 4 * (ROWS + r)))
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
