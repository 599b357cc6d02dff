"""What lies between the matrices of a decoder layer, for many tokens at once: of a prompt, or of
several sequences.

    T tokens, H hidden size, G query heads per key head, D head size

Every token gets to the bit what the regions of single tokens (``layer_bodies.py``) give it: the
same functions in the same order, over rows instead of one. The arguments are those of a region,
with ``Rows`` behind them; the products between are ``prefill.linear``'s.
"""

from __future__ import annotations

import enum
from typing import Any

from numba import float32

from offload.cpu_ops.attention import BLOCK, PARTIAL_EXTRA, attend, kv_bytes, merge, store_kv
from offload.cpu_ops.functions import exp
from offload.cpu_ops.heads import dot, multiply, rms_scale, scale_by
from offload.cpu_ops.layer_bodies import (
    Attention,
    Common,
    Matrix,
    Router,
    prepare,
    seen_from,
    wide_norm,
)
from offload.cpu_ops.routing_choice import choose_experts
from offload.cpu_ops.tags import inline
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import (
    bits_float,
    fadd,
    fetch_add,
    fmul,
    lane,
    load_f32,
    load_float,
    splat,
    store_f32,
    store_float,
)

_NOT_HIDDEN = -(1 << 30)


class Rows(enum.IntEnum):
    """Places behind a region's own."""

    TOKENS = 144
    INPUT = 145
    """float32 [T, H]"""
    OUTPUT = 146
    """float32: norms, routing and results [T, H], or attention's [T, heads * D]."""
    BIAS = 147
    """float32 [H] that is added to INPUT; 0: none."""
    SHARE_INPUT = 148
    """float32 [T, H]: what ``Mlp.SHARE`` is multiplied with."""
    SHARE = 149
    """float32 [H]; 0: none."""
    QUERIES = 150
    """Scratch float32 [key heads, T, G, D]: ready to attend."""
    TABLE_STRIDE = 151
    """Bytes from one token's cosines (and sines) to the next's."""
    WINDOW = 152
    """Tokens that are seen, the present one included; 0: all."""
    TOGETHER = 153
    """Tokens whose queries attend together."""
    WORKER_BYTES = 154
    """Of the scratch of each thread, at ``SCRATCH``."""
    SCRATCH = 155
    Q_BIAS = 156
    K_BIAS = 157
    V_BIAS = 158
    CACHES = 159
    """int64 [T, 3], for tokens of several sequences: where each one's keys and values are, and how
    many tokens are cached there before it; 0: all are of the cache at ``Attention.KEYS``."""
    NEXT = 160
    NEXT_WORKER = 168
    SIZE = 176


@inline
def _next(a: int) -> int:
    task: int = fetch_add(a + 8 * Rows.NEXT, 1)
    return task


@inline
def _scratch(a: int) -> int:
    """This thread's own."""
    worker = fetch_add(a + 8 * Rows.NEXT_WORKER, 1)
    at: int = field(a, Rows.SCRATCH) + worker * field(a, Rows.WORKER_BYTES)
    return at


@inline
def _keys(a: int, t: int) -> int:
    table: int = field(a, Rows.CACHES)
    keys: int = field(a, Attention.KEYS) if table == 0 else field(table, 3 * t)
    return keys


@inline
def _values(a: int, t: int) -> int:
    table: int = field(a, Rows.CACHES)
    values: int = field(a, Attention.VALUES) if table == 0 else field(table, 3 * t + 1)
    return values


@inline
def _cached(a: int, t: int) -> int:
    """Tokens of its sequence before token ``t``."""
    table: int = field(a, Rows.CACHES)
    before: int = field(a, Attention.LENGTH) + t if table == 0 else field(table, 3 * t + 2)
    return before


# The first argument is how keys and values are cached, or only names the sources in the disk
# cache's key.


@inline
def norm_rows(_: Any, a: int) -> None:
    """OUTPUT = norm(INPUT)"""
    n, eps = field(a, Common.HIDDEN), bits_float(field(a, Common.EPS))
    plus, weight = bits_float(field(a, Common.PLUS)), field(a, Common.NORM)
    t = _next(a)
    while t < field(a, Rows.TOKENS):
        x = field(a, Rows.INPUT) + 4 * n * t
        scale_by(x, n, rms_scale(x, n, eps), weight, plus, field(a, Rows.OUTPUT) + 4 * n * t)
        t = _next(a)


@inline
def _add_bias(x: int, n: int, bias: int) -> None:
    if bias != 0:
        for i in range(0, n, 16):
            store_f32(x + 4 * i, fadd(load_f32(x + 4 * i), load_f32(bias + 4 * i)))


@inline
def heads_rows(kind: Any, a: int) -> None:
    """Queries ready to attend, keys and values to the cache."""
    key_heads, dim = field(a, Attention.KEY_HEADS), field(a, Attention.DIM)
    group, tokens = field(a, Attention.GROUP), field(a, Rows.TOKENS)
    queries, keys = key_heads * group * dim, key_heads * dim
    scaling, row = bits_float(field(a, Attention.SCALING)), dim * kv_bytes(kind)
    q_norm, k_norm = field(a, Attention.Q_NORM), field(a, Attention.K_NORM)
    t = _next(a)
    while t < tokens:
        q = field(a, Attention.Q_OUT) + 4 * queries * t
        k, v = field(a, Attention.K_OUT) + 4 * keys * t, field(a, Attention.V_OUT) + 4 * keys * t
        cos = field(a, Attention.COS) + t * field(a, Rows.TABLE_STRIDE)
        sin = field(a, Attention.SIN) + t * field(a, Rows.TABLE_STRIDE)
        _add_bias(q, queries, field(a, Rows.Q_BIAS))
        _add_bias(k, keys, field(a, Rows.K_BIAS))
        _add_bias(v, keys, field(a, Rows.V_BIAS))
        if field(a, Attention.WIDE_NORM) != 0:
            wide_norm(a, q, queries, q_norm)
            wide_norm(a, k, keys, k_norm)
        for head in range(key_heads * group):
            at = prepare(a, q, head, q_norm, cos, sin)
            multiply(at, dim, scaling)
            to = (head // group * tokens + t) * group + head % group
            for i in range(0, dim, 16):
                store_f32(field(a, Rows.QUERIES) + 4 * (to * dim + i), load_f32(at + 4 * i))
        for head in range(key_heads):
            at = prepare(a, k, head, k_norm, cos, sin)
            to = (head * field(a, Attention.CAPACITY) + _cached(a, t)) * row
            for i in range(dim // 16):
                store_kv(kind, _keys(a, t) + to, i, load_f32(at + 64 * i))
                value = load_f32(v + 4 * head * dim + 64 * i)
                store_kv(kind, _values(a, t) + to, i, value)
        t = _next(a)


@inline
def _attend(kind: Any, a: int, head: int, t0: int, count: int, partials: int) -> None:
    """Tokens ``t0`` .. ``t0 + count``, of one sequence, of one key head to their outputs."""
    dim, group = field(a, Attention.DIM), field(a, Attention.GROUP)
    heads, window = field(a, Attention.KEY_HEADS) * group, field(a, Rows.WINDOW)
    here, rows = _cached(a, t0), count * group
    start, end = max(0, here + 1 - window) if window != 0 else 0, here + count
    first_block, row = start // BLOCK, dim * kv_bytes(kind)
    blocks, partial = (end + BLOCK - 1) // BLOCK - first_block, 4 * (dim + PARTIAL_EXTRA)
    q = field(a, Rows.QUERIES) + 4 * (head * field(a, Rows.TOKENS) + t0) * group * dim
    for b in range(blocks):
        block = (first_block + b) * BLOCK
        first, last = seen_from(start, block), min(end, block + BLOCK)
        at = (head * field(a, Attention.CAPACITY) + first) * row
        hidden = here + 1 - window - first if window != 0 else _NOT_HIDDEN
        attend(
            kind, q, _keys(a, t0) + at, _values(a, t0) + at, rows, dim,
            last - first, bits_float(field(a, Attention.CAP)), partials + b * rows * partial,
            group, hidden, here + 1 - first,
        )  # fmt: skip
    sinks = field(a, Attention.SINKS)
    for r in range(rows):
        mine = head * group + r % group
        out = field(a, Rows.OUTPUT) + 4 * ((t0 + r // group) * heads + mine) * dim
        sink = sinks + 4 * mine if sinks != 0 else 0
        merge(partials + r * partial, blocks, rows * partial, dim, sink, out)


@inline
def attend_rows(kind: Any, a: int) -> None:
    """Every (few tokens, key head): the last tokens, which see the most, first."""
    key_heads, together = field(a, Attention.KEY_HEADS), field(a, Rows.TOGETHER)
    tokens, partials = field(a, Rows.TOKENS), _scratch(a)
    groups = (tokens + together - 1) // together
    task = _next(a)
    while task < groups * key_heads:
        t0 = (groups - 1 - task % groups) * together
        _attend(kind, a, task // groups, t0, min(together, tokens - t0), partials)
        task = _next(a)


@inline
def add_rows(_: Any, a: int) -> None:
    """OUTPUT += post_norm((INPUT + BIAS) * share), each where there is one."""
    n, post = field(a, Common.HIDDEN), field(a, Common.POST_NORM)
    eps, plus = bits_float(field(a, Common.EPS)), splat(bits_float(field(a, Common.PLUS)))
    share = field(a, Rows.SHARE)
    t = _next(a)
    while t < field(a, Rows.TOKENS):
        x, out = field(a, Rows.INPUT) + 4 * n * t, field(a, Rows.OUTPUT) + 4 * n * t
        by = float32(1.0)
        if share != 0:
            z = dot(share, field(a, Rows.SHARE_INPUT) + 4 * n * t, n)
            by = lane(exp(splat(float32(0.0) - z)), 0)
            by = float32(1.0) / (float32(1.0) + by)
        _add_bias(x, n, field(a, Rows.BIAS))
        factor = splat(by)
        if post == 0:
            for i in range(0, n, 16):
                v = fmul(load_f32(x + 4 * i), factor)
                store_f32(out + 4 * i, fadd(load_f32(out + 4 * i), v))
        else:
            for i in range(0, n, 16):
                store_f32(x + 4 * i, fmul(load_f32(x + 4 * i), factor))
            scale = splat(rms_scale(x, n, eps))
            for i in range(0, n, 16):
                v, weight = fmul(load_f32(x + 4 * i), scale), fadd(load_f32(post + 4 * i), plus)
                store_f32(out + 4 * i, fadd(load_f32(out + 4 * i), fmul(v, weight)))
        t = _next(a)


@inline
def choose_rows(_: Any, a: int) -> None:
    """Logits at INPUT [T, E] to IDS int64 [T, k], best first, and WEIGHTS float32 [T, k]."""
    m, k = a + 8 * Common.A, field(a, Router.TOP_K)
    experts, bias = field(m, Matrix.ROWS), field(m, Matrix.BIAS)
    logits = _scratch(a)
    choice = logits + 4 * ((experts + 15) // 16 * 16)
    t = _next(a)
    while t < field(a, Rows.TOKENS):
        for i in range(experts):
            v = load_float(field(a, Rows.INPUT) + 4 * (t * experts + i))
            if bias != 0:
                v = v + load_float(bias + 4 * i)
            store_float(logits + 4 * i, v)
        choose_experts(
            field(a, Router.SCORING), logits, experts, k, field(a, Router.RENORM),
            bits_float(field(a, Router.FACTOR)), field(a, Router.CHOICE_BIAS),
            field(a, Router.GROUPS), field(a, Router.KEEP_GROUPS), choice,
            field(a, Router.IDS) + 8 * k * t, field(a, Router.WEIGHTS) + 4 * k * t,
        )  # fmt: skip
        t = _next(a)
