"""Attention of a few tokens over a cache, in float32.

    G query heads that share a key and value head, D head size, T cached tokens

Several tokens of a prompt are G more heads each, of which every token sees one key more
(``prompt_bodies.py``): what a token gets is the same to the bit, alone or among others.

Work is cut into (key head, block of BLOCK tokens) at fixed places. A task reads its keys and its
values once, for all G heads, and leaves per head the largest score, the sum of exponentials and
their weighted sum of values; ``merge`` joins the blocks of a head in order. Neither depends on
which thread does what, so results do not depend on the number of threads. Splitting over tokens
and merging by maxima: flash-decoding (Dao et al., 2023), after Milakov and Gimelshein (2018).

Inside a task four heads go together: a register's lane ``4 t + q`` holds what belongs to token t
of four and head q of four. Where G is no multiple of four, the last head fills the empty places;
its copies write the same numbers to the same place.
"""

from __future__ import annotations

from typing import Any

from numba import float32

from offload.cpu_ops.functions import capped, exp
from offload.cpu_ops.lanes import (
    first_lanes,
    fmax,
    fsub,
    store_bf16,
    sums_of_16,
    turn_4,
    turn_8,
)
from offload.cpu_ops.prefetching import ask
from offload.cpu_ops.tags import by_format, inline, outline
from offload.cpu_ops.vectors import (
    as_float,
    fadd,
    fence,
    fma,
    fmul,
    lane,
    left,
    load_f32,
    load_float,
    load_u16,
    splat,
    splat_f32,
    stack,
    store_f32,
    store_float,
)

BLOCK = 256
"""Tokens of a task. Half of it reads twice as many partial results, which then are 7 % of the keys
and values in bfloat16; twice of it leaves threads without work below 2,000 tokens."""
GROUP = 32
"""Query heads per key head at most."""
PARTIAL_EXTRA = 16
"""Floats after a partial result's D: the largest score and the sum of exponentials."""
_NEAR = 4096
"""Elements of keys or values that are gone over by all heads before the next: half an L1 cache."""

_score_room = stack(GROUP * BLOCK * 4)
_LOWEST = float("-inf")
_LEAST = -3.0e38


def load_kv(kind: Any, row: int, i: int) -> Any:
    """Vector ``i`` of a cached row; only inside kernels. ``kind``: a tag, "f32" or "bf16"."""
    raise NotImplementedError


def store_kv(kind: Any, row: int, i: int, v: Any) -> None:
    """Store vector ``i`` of a row; only inside kernels."""
    raise NotImplementedError


def kv_bytes(kind: Any) -> int:
    """Bytes per element; only inside kernels."""
    raise NotImplementedError


_LOADS = {
    "f32": lambda kind, row, i: load_f32(row + 64 * i),
    "bf16": lambda kind, row, i: as_float(left(load_u16(row + 32 * i), 16)),
}
_STORES = {
    "f32": lambda kind, row, i, v: store_f32(row + 64 * i, v),
    "bf16": lambda kind, row, i, v: store_bf16(row + 32 * i, v),
}
_BYTES = {"f32": lambda kind: 4, "bf16": lambda kind: 2}
by_format(load_kv)(_LOADS.__getitem__)
by_format(store_kv)(_STORES.__getitem__)
by_format(kv_bytes)(_BYTES.__getitem__)


@inline
def _four_tokens(
    kind: Any, q0: int, q1: int, q2: int, q3: int, k0: int, k1: int, k2: int, k3: int, n: int
) -> Any:
    """Lane 4 t + q: head q times token t, over ``n`` vectors."""
    a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    b0, b1, b2, b3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    c0, c1, c2, c3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    d0, d1, d2, d3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(n):
        w, x = load_f32(q0 + 64 * i), load_f32(q1 + 64 * i)
        y, z = load_f32(q2 + 64 * i), load_f32(q3 + 64 * i)
        k = load_kv(kind, k0, i)
        a0, a1, a2, a3 = fma(w, k, a0), fma(x, k, a1), fma(y, k, a2), fma(z, k, a3)
        k = load_kv(kind, k1, i)
        b0, b1, b2, b3 = fma(w, k, b0), fma(x, k, b1), fma(y, k, b2), fma(z, k, b3)
        k = load_kv(kind, k2, i)
        c0, c1, c2, c3 = fma(w, k, c0), fma(x, k, c1), fma(y, k, c2), fma(z, k, c3)
        k = load_kv(kind, k3, i)
        d0, d1, d2, d3 = fma(w, k, d0), fma(x, k, d1), fma(y, k, d2), fma(z, k, d3)
    return sums_of_16(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)


@inline
def _scores(
    kind: Any, q: int, row: int, last: int, k: int, n: int, dim: int, cap: Any, out: int,
    later: int, each: int,
) -> None:  # fmt: skip
    """Of four heads at ``q``, ``row`` bytes apart and ``last`` the last of them, with ``n`` tokens
    at ``k``; lanes beyond the last token are minus infinity. For every four tokens, ``each`` bytes
    of what comes at ``later`` are asked of memory."""
    q1, q2, q3 = q + min(1, last) * row, q + min(2, last) * row, q + min(3, last) * row
    step = dim * kv_bytes(kind)
    for t in range(0, n, 4):
        k0, end = k + t * step, n - 1 - t
        ask(later + t // 4 * each, each)
        v = _four_tokens(
            kind, q, q1, q2, q3,
            k0, k0 + min(1, end) * step, k0 + min(2, end) * step, k0 + min(3, end) * step,
            dim // 16,
        )  # fmt: skip
        if cap > float32(0.0):
            v = capped(v, cap)
        store_f32(out + 16 * t, first_lanes(v, 4 * (n - t), float32(_LOWEST)))


@inline
def _softmax(scores: int, n: int, out: int, row: int, last: int, dim: int) -> None:
    """Scores of four heads to exponentials; each head's maximum and sum go to its partial. One that
    sees none of the tokens has minus infinity and 0."""
    top = splat(float32(_LOWEST))
    for t in range(0, n, 4):
        top = fmax(load_f32(scores + 16 * t), top)
    top = fmax(top, turn_8(top))
    top = fmax(top, turn_4(top))
    total, finite = splat(float32(0.0)), fmax(top, splat(float32(_LEAST)))
    for t in range(0, n, 4):
        p = exp(fsub(load_f32(scores + 16 * t), finite))
        store_f32(scores + 16 * t, p)
        total = fadd(total, first_lanes(p, 4 * (n - t), float32(0.0)))
    total = fadd(total, turn_8(total))
    total = fadd(total, turn_4(total))
    for i in range(last + 1):
        store_float(out + i * row + 4 * dim, lane(top, i))
        store_float(out + i * row + 4 * dim + 4, lane(total, i))


@inline
def _values_64(
    kind: Any, p: int, v: int, c: int, n: int, step: int, o0: int, o1: int, o2: int, o3: int,
    later: int, each: int,
) -> None:  # fmt: skip
    """Four heads' sums of 64 columns, from vector ``c`` on; asks for memory as ``_values`` does."""
    at = 64 * c
    a0, a1, a2, a3 = load_f32(o0 + at), load_f32(o1 + at), load_f32(o2 + at), load_f32(o3 + at)
    at += 64
    b0, b1, b2, b3 = load_f32(o0 + at), load_f32(o1 + at), load_f32(o2 + at), load_f32(o3 + at)
    at += 64
    c0, c1, c2, c3 = load_f32(o0 + at), load_f32(o1 + at), load_f32(o2 + at), load_f32(o3 + at)
    at += 64
    d0, d1, d2, d3 = load_f32(o0 + at), load_f32(o1 + at), load_f32(o2 + at), load_f32(o3 + at)
    for t in range(n):
        ask(later + t * each, each)
        row, by = v + t * step, p + 16 * t
        w, x, y, z = splat_f32(by), splat_f32(by + 4), splat_f32(by + 8), splat_f32(by + 12)
        u = load_kv(kind, row, c)
        a0, a1, a2, a3 = fma(w, u, a0), fma(x, u, a1), fma(y, u, a2), fma(z, u, a3)
        u = load_kv(kind, row, c + 1)
        b0, b1, b2, b3 = fma(w, u, b0), fma(x, u, b1), fma(y, u, b2), fma(z, u, b3)
        u = load_kv(kind, row, c + 2)
        c0, c1, c2, c3 = fma(w, u, c0), fma(x, u, c1), fma(y, u, c2), fma(z, u, c3)
        u = load_kv(kind, row, c + 3)
        d0, d1, d2, d3 = fma(w, u, d0), fma(x, u, d1), fma(y, u, d2), fma(z, u, d3)
    at = 64 * c
    store_f32(o0 + at, a0), store_f32(o1 + at, a1), store_f32(o2 + at, a2), store_f32(o3 + at, a3)
    at += 64
    store_f32(o0 + at, b0), store_f32(o1 + at, b1), store_f32(o2 + at, b2), store_f32(o3 + at, b3)
    at += 64
    store_f32(o0 + at, c0), store_f32(o1 + at, c1), store_f32(o2 + at, c2), store_f32(o3 + at, c3)
    at += 64
    store_f32(o0 + at, d0), store_f32(o1 + at, d1), store_f32(o2 + at, d2), store_f32(o3 + at, d3)


@inline
def _values_16(
    kind: Any, p: int, v: int, c: int, n: int, step: int, o0: int, o1: int, o2: int, o3: int
) -> None:
    at = 64 * c
    a0, a1, a2, a3 = load_f32(o0 + at), load_f32(o1 + at), load_f32(o2 + at), load_f32(o3 + at)
    for t in range(n):
        by, u = p + 16 * t, load_kv(kind, v + t * step, c)
        a0, a1 = fma(splat_f32(by), u, a0), fma(splat_f32(by + 4), u, a1)
        a2, a3 = fma(splat_f32(by + 8), u, a2), fma(splat_f32(by + 12), u, a3)
    store_f32(o0 + at, a0), store_f32(o1 + at, a1), store_f32(o2 + at, a2), store_f32(o3 + at, a3)


@inline
def _values(
    kind: Any, p: int, v: int, n: int, dim: int, out: int, row: int, last: int,
    later: int, each: int,
) -> None:  # fmt: skip
    """Add ``n`` tokens' values, weighted for four heads. Each 64 columns of a token ask for
    ``each`` bytes of what comes at ``later``."""
    o1, o2 = out + min(1, last) * row, out + min(2, last) * row
    o3, step = out + min(3, last) * row, dim * kv_bytes(kind)
    c, vectors = 0, dim // 16
    while c + 4 <= vectors:
        _values_64(kind, p, v, c, n, step, out, o1, o2, o3, later, each)
        later += n * each
        c += 4
    while c < vectors:
        _values_16(kind, p, v, c, n, step, out, o1, o2, o3)
        c += 1


@inline
def _hide(scores: int, heads: int, group: int, n: int, first: int, end: int) -> None:
    """Minus infinity where a query does not see a token; its weight is then 0 to the bit. Empty
    places are hidden as the last head is."""
    for h in range((heads + 3) // 4 * 4):
        token = min(h, heads - 1) // group
        at = scores + (h - h % 4) * BLOCK * 4 + 4 * (h % 4)
        for t in range(min(n, first + token)):
            store_float(at + 16 * t, float32(_LOWEST))
        for t in range(end + token, n):
            store_float(at + 16 * t, float32(_LOWEST))


@outline
def attend(
    kind: Any, q: int, k: int, v: int, heads: int, dim: int, n: int, cap: Any, out: int,
    group: int, first: int, end: int,
) -> None:  # fmt: skip
    """``heads`` queries (scaled, float32 [heads, dim]) over ``n`` <= BLOCK tokens at ``k`` and
    ``v`` [n, dim] in ``kind``. ``out``: float32 [heads, dim + PARTIAL_EXTRA], per head the sum of
    values weighted with exp(score - largest), the largest score, the sum of the weights.

    ``cap``: scores become cap * tanh(score / cap); 0: they do not. The first ``group`` queries see
    tokens ``first`` .. ``end`` - 1 of these, the next ``group`` those one further, and so on.
    """
    scores, q_row, row = _score_room(), 4 * dim, 4 * (dim + PARTIAL_EXTRA)
    step, near = dim * kv_bytes(kind), max(4, _NEAR // dim // 4 * 4)
    groups = (heads + 3) // 4
    # The next keys come while these are multiplied, and the first values with the last keys.
    each = _lines(4 * step, groups)
    for t in range(0, n, near):
        count, later = min(near, n - t), k + (t + near) * step if t + near < n else v
        for h in range(0, heads, 4):
            last, at = min(3, heads - 1 - h), scores + h * BLOCK * 4 + 16 * t
            _scores(
                kind, q + h * q_row, q_row, last, k + t * step, count, dim, cap, at, later, each
            )
            later += (count + 3) // 4 * each
    if first + (heads - 1) // group > 0 or end < n:
        _hide(scores, heads, group, n, first, end)
    for h in range(0, heads, 4):
        last = min(3, heads - 1 - h)
        _softmax(scores + h * BLOCK * 4, n, out + h * row, row, last, dim)
        for i in range(h, h + last + 1):
            for c in range(0, dim, 16):
                store_f32(out + i * row + 4 * c, splat(float32(0.0)))
    each = _lines(step, groups * max(1, dim // 64))
    for t in range(0, n, near):
        count, later = min(near, n - t), v + (t + near) * step
        if t + near >= n:
            each = 0
        for h in range(0, heads, 4):
            last, p = min(3, heads - 1 - h), scores + h * BLOCK * 4 + 16 * t
            _values(kind, p, v + t * step, count, dim, out + h * row, row, last, later, each)
            later += dim // 64 * count * each
            fence()


@inline
def _lines(nbytes: int, parts: int) -> int:
    """Of a part of so many bytes, in whole cache lines."""
    return (nbytes + 64 * parts - 1) // (64 * parts) * 64


@inline
def _exp(x: Any) -> Any:
    return lane(exp(splat(x)), 0)


@outline
def merge(partials: int, blocks: int, stride: int, dim: int, sink: int, out: int) -> None:
    """A head's blocks, ``stride`` bytes apart, to its output float32 [dim].

    ``sink``: address of a score that takes its share and has no value (gpt-oss); 0: there is none.
    """
    top = load_float(partials + 4 * dim)
    for b in range(1, blocks):
        top = max(top, load_float(partials + b * stride + 4 * dim))
    total = float32(0.0)
    if sink != 0:
        top = max(top, load_float(sink))
        total = _exp(load_float(sink) - top)
    for c in range(0, dim, 16):
        store_f32(out + 4 * c, splat(float32(0.0)))
    for b in range(blocks):
        at = partials + b * stride
        share = _exp(load_float(at + 4 * dim) - top)
        total += share * load_float(at + 4 * dim + 4)
        by = splat(share)
        for c in range(0, dim, 16):
            store_f32(out + 4 * c, fma(by, load_f32(at + 4 * c), load_f32(out + 4 * c)))
    inverse = splat(float32(1.0) / total)
    for c in range(0, dim, 16):
        store_f32(out + 4 * c, fmul(load_f32(out + 4 * c), inverse))
