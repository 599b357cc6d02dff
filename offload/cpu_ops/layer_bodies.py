"""The kernels of a decoder layer: attention, router and dense feed-forward of one token.

Each is one function that every thread of a region runs, in phases with a barrier between them.
Attention is three, one behind the other in a region (``program.py``): what depends on the formats
of matrices is compiled apart from what depends on how keys and values are kept.
Threads take tasks from counters, one per phase. What is cheap is computed by every thread for
itself, in the same order, rather than by one while the others wait: the scale of a norm is 0.1 us,
a barrier and a line that travels between cores more.

All activations are float32. The arguments are int64: addresses, counts, bits of floats.
"""

from __future__ import annotations

import enum
from typing import Any

from numba import float32

from offload.cpu_ops.activations import quantize_blocks
from offload.cpu_ops.attention import (
    BLOCK,
    PARTIAL_EXTRA,
    attend,
    kv_bytes,
    merge,
)
from offload.cpu_ops.block_kernels import EXTRA, clear_state, divided
from offload.cpu_ops.blocks_dot import block_bytes
from offload.cpu_ops.functions import exp, glu
from offload.cpu_ops.heads import (
    dot,
    multiply,
    rms_scale,
    rotate_half,
    rotate_pairs,
    scale_by,
)
from offload.cpu_ops.lanes import store_bf16
from offload.cpu_ops.routing_choice import choose_experts
from offload.cpu_ops.tags import inline, outline
from offload.cpu_ops.tiles import (
    STREAMS,
    SUMS,
    alone,
    field,
    load_rows,
    room,
    store_rows,
    wait,
)
from offload.cpu_ops.vectors import (
    bits_float,
    fadd,
    fetch_add,
    fmul,
    lane,
    load_f32,
    splat,
    store_f32,
)


class Matrix(enum.IntEnum):
    """Places in the record of a matrix, relative to it."""

    WEIGHT = 0
    BIAS = 1
    """float32 [rows]; 0: none."""
    ROWS = 2
    BLOCKS = 3
    """Blocks per row."""
    COLUMNS = 4
    """Columns of a block."""
    RECORDS = 5
    """Scratch for the input's records if this matrix is the one to make them, else 0."""
    INPUT = 6
    """Address of what the kernel reads: records, or floats."""
    STEP = 7
    """Tiles of a task."""
    SIZE = 8


class Common(enum.IntEnum):
    """Places that all regions share."""

    BARRIER = 0
    X = 1
    """float32 [hidden]: the residual stream, read and, except by the router, added to."""
    HIDDEN = 2
    NORM = 3
    """float32 [hidden]; 0: X of the feed-forward region is already normed and ``INTO`` added to."""
    EPS = 4
    PLUS = 5
    """Bits of what is added to the weights of norms: 0.0, Gemma 1.0."""
    NORMED = 6
    """float32 [hidden]: scratch, or the router's result."""
    UNIT = 7
    """Columns of a task of norms."""
    POST_NORM = 8
    """float32 [hidden]: norm of what is added to the residual stream; 0: none."""
    RESULT = 9
    """Scratch float32 [hidden] for it."""
    A = 16
    """Records of up to four matrices."""
    B = 24
    C = 32
    D = 40
    COUNTERS = 48
    """Eight, each on a cache line of its own."""
    OWN = 112
    """The first place of what only one region has."""


class Attention(enum.IntEnum):
    """The attention region's places; A, B, C, D are the matrices q, k, v, o."""

    Q_OUT = 112
    K_OUT = 113
    V_OUT = 114
    KEY_HEADS = 115
    GROUP = 116
    """Query heads per key head."""
    DIM = 117
    Q_NORM = 118
    """float32 [dim], or [heads * dim] if ``WIDE_NORM``; 0: none."""
    K_NORM = 119
    WIDE_NORM = 120
    """1: one norm over all heads (OLMoE)."""
    ROTARY = 121
    """Columns of a head that are rotated."""
    PAIRS = 122
    """1: interleaved."""
    COS = 123
    SIN = 124
    SCALING = 125
    CAP = 126
    SINKS = 127
    KEYS = 128
    """[key heads, capacity, dim]"""
    VALUES = 129
    CAPACITY = 130
    LENGTH = 131
    """Tokens cached before this one."""
    START = 132
    """The first token that this one sees."""
    PARTIALS = 133
    """Scratch float32 [blocks, heads, dim + PARTIAL_EXTRA]."""
    MERGED = 134
    """Scratch float32 [heads * dim]."""
    MERGE_HEADS = 135
    """Heads of a task of merging: whole blocks of o's input."""
    KV_BYTES = 136
    """Of an element at ``KEYS`` and ``VALUES``: 4, float32, or 2, bfloat16."""
    STATE = 137
    """float32 [heads, dim + EXTRA] of ``block_kernels``, what attention over blocks leaves; 0: it
    leaves ``PARTIALS``."""
    SIZE = 144


IN_COUNTERS = slice(Common.COUNTERS, Common.COUNTERS + 32)
ATTEND_COUNTERS = slice(IN_COUNTERS.stop, IN_COUNTERS.stop + 8)
OUT_COUNTERS = slice(ATTEND_COUNTERS.stop, Common.OWN)
"""Those of ``attention_in``, ``attend_cached`` and ``attention_out``."""


class Router(enum.IntEnum):
    """The router region's places; A is its matrix."""

    LOGITS = 112
    SCORING = 113
    TOP_K = 114
    RENORM = 115
    FACTOR = 116
    CHOICE_BIAS = 117
    GROUPS = 118
    KEEP_GROUPS = 119
    SCRATCH = 120
    IDS = 121
    WEIGHTS = 122
    SIZE = 128


class Mlp(enum.IntEnum):
    """The feed-forward region's places; A, B, C are the matrices gate, up, down."""

    INNER = 112
    """Scratch float32 [inner]."""
    GLU = 113
    ALPHA = 114
    LIMIT = 115
    INTO = 116
    """float32 [hidden] that the result is added to: X, or what a shared expert adds to."""
    SHARE = 117
    """float32 [hidden]: the result is weighted with sigmoid(SHARE * input); 0: it is not."""
    SIZE = 128


@inline
def _take(a: int, phase: int, n: int) -> int:
    first: int = fetch_add(a + 8 * (Common.COUNTERS + 8 * phase), n)
    return first


@inline
def _records(fmt: Any, m: int, x: int, first: int, last: int) -> None:
    """Quantise columns ``first..last`` of ``x`` for a matrix, if it is the one to do so."""
    if field(m, Matrix.RECORDS) != 0:
        columns = field(m, Matrix.COLUMNS)
        quantize_blocks(fmt, x, first // columns, last // columns, field(m, Matrix.RECORDS))


@inline
def _normalise(f0: Any, f1: Any, f2: Any, a: int, matrices: int) -> None:
    """X to NORMED, and to records for the first ``matrices`` matrices."""
    x, n, unit = field(a, Common.X), field(a, Common.HIDDEN), field(a, Common.UNIT)
    normed, weight = x, field(a, Common.NORM)
    scale = float32(1.0)
    if weight != 0:
        normed = field(a, Common.NORMED)
        scale = rms_scale(x, n, bits_float(field(a, Common.EPS)))
    first = _take(a, 0, unit)
    while first < n:
        last = min(first + unit, n)
        if weight != 0:
            at, plus = 4 * first, bits_float(field(a, Common.PLUS))
            scale_by(x + at, last - first, scale, weight + at, plus, normed + at)
        _records(f0, a + 8 * Common.A, normed, first, last)
        if matrices > 1:
            _records(f1, a + 8 * Common.B, normed, first, last)
        if matrices > 2:
            _records(f2, a + 8 * Common.C, normed, first, last)
        first = _take(a, 0, unit)
    wait(field(a, Common.BARRIER))


@outline
def _project(
    fmt: Any, isa: Any, m: int, first: int, last: int, out: int, add: int, by: Any
) -> None:
    """Rows of tiles ``first..last`` to ``out``: (W x + bias) * by, plus ``add`` if it is not 0."""
    rows, blocks, bias = field(m, Matrix.ROWS), field(m, Matrix.BLOCKS), field(m, Matrix.BIAS)
    tile_bytes, sums, factor = blocks * block_bytes(fmt), room(), splat(by)
    for tile in range(first, last, STREAMS):
        count, w = min(STREAMS, last - tile), field(m, Matrix.WEIGHT) + tile * tile_bytes
        ahead = w + STREAMS * tile_bytes
        alone(fmt, isa, w, count, blocks, field(m, Matrix.INPUT), sums, ahead)
        for i in range(count):
            row = 16 * (tile + i)
            v, left = load_f32(sums + i * SUMS), rows - row
            if bias != 0:
                v = fadd(v, load_rows(bias + 4 * row, left))
            v = fmul(v, factor)
            if add != 0:
                v = fadd(load_rows(add + 4 * row, left), v)
            store_rows(out + 4 * row, v, left)


@inline
def _tasks(m: int) -> int:
    tiles, step = (field(m, Matrix.ROWS) + 15) // 16, field(m, Matrix.STEP)
    return (tiles + step - 1) // step


@inline
def _project_task(fmt: Any, isa: Any, m: int, task: int, out: int, add: int, by: Any) -> None:
    tiles, step = (field(m, Matrix.ROWS) + 15) // 16, field(m, Matrix.STEP)
    _project(fmt, isa, m, task * step, min((task + 1) * step, tiles), out, add, by)


@inline
def _to_residual(fmt: Any, isa: Any, a: int, m: int, phase: int, into: int, by: Any) -> None:
    """Matrix ``m`` to the residual stream, through the norm of results if there is one."""
    post, barrier = field(a, Common.POST_NORM), field(a, Common.BARRIER)
    result = into if post == 0 else field(a, Common.RESULT)
    add = into if post == 0 else 0
    task = _take(a, phase, 1)
    while task < _tasks(m):
        _project_task(fmt, isa, m, task, result, add, by)
        task = _take(a, phase, 1)
    if post != 0:
        wait(barrier)
        n, unit, plus = field(a, Common.HIDDEN), field(a, Common.UNIT), field(a, Common.PLUS)
        scale = splat(rms_scale(result, n, bits_float(field(a, Common.EPS))))
        first = _take(a, phase + 1, unit)
        while first < n:
            for i in range(first, min(first + unit, n), 16):
                v = fmul(load_f32(result + 4 * i), scale)
                weight = fadd(load_f32(post + 4 * i), splat(bits_float(plus)))
                store_f32(into + 4 * i, fadd(load_f32(into + 4 * i), fmul(v, weight)))
            first = _take(a, phase + 1, unit)


@inline
def seen_from(start: int, block: int) -> int:
    """The first token of a block that is looked at by who sees those from ``start`` on: whole
    registers from the block's own first one, whichever token asks."""
    return block + max(0, start - block) // 4 * 4


@inline
def prepare(a: int, x: int, head: int, norm: int, cos: int, sin: int) -> int:
    """A head's norm and rotation, in place; returns where it is."""
    dim, rotary = field(a, Attention.DIM), field(a, Attention.ROTARY)
    at, eps = x + 4 * head * dim, bits_float(field(a, Common.EPS))
    if norm != 0 and field(a, Attention.WIDE_NORM) == 0:
        scale_by(at, dim, rms_scale(at, dim, eps), norm, bits_float(field(a, Common.PLUS)), at)
    if field(a, Attention.PAIRS) != 0:
        rotate_pairs(at, rotary, cos, sin)
    else:
        rotate_half(at, rotary, cos, sin)
    return at


@inline
def wide_norm(a: int, x: int, n: int, norm: int) -> None:
    scale, plus = rms_scale(x, n, bits_float(field(a, Common.EPS))), field(a, Common.PLUS)
    scale_by(x, n, scale, norm, bits_float(plus), x)


@inline
def _store_row(width: int, to: int, x: int, dim: int) -> None:
    """float32 [dim] to a row of the cache, of ``width`` bytes per element."""
    for i in range(dim // 16):
        v = load_f32(x + 64 * i)
        if width == 2:
            store_bf16(to + 32 * i, v)
        else:
            store_f32(to + 64 * i, v)


@inline
def _heads(a: int) -> None:
    """Queries ready to attend, keys and values to the cache."""
    key_heads, dim = field(a, Attention.KEY_HEADS), field(a, Attention.DIM)
    heads = key_heads * field(a, Attention.GROUP)
    q, k, v = field(a, Attention.Q_OUT), field(a, Attention.K_OUT), field(a, Attention.V_OUT)
    q_norm, k_norm = field(a, Attention.Q_NORM), field(a, Attention.K_NORM)
    if field(a, Attention.WIDE_NORM) != 0:
        task = _take(a, 3, 1)
        while task < 2:
            if task == 0:
                wide_norm(a, q, heads * dim, q_norm)
            else:
                wide_norm(a, k, key_heads * dim, k_norm)
            task = _take(a, 3, 1)
        wait(field(a, Common.BARRIER))
    scaling, width = bits_float(field(a, Attention.SCALING)), field(a, Attention.KV_BYTES)
    cos, sin, state = field(a, Attention.COS), field(a, Attention.SIN), field(a, Attention.STATE)
    head = _take(a, 2, 1)
    while head < heads + key_heads:
        if head < heads:
            multiply(prepare(a, q, head, q_norm, cos, sin), dim, scaling)
            if state != 0:
                clear_state(state + 4 * head * (dim + EXTRA), dim)
        else:
            head -= heads
            at = prepare(a, k, head, k_norm, cos, sin)
            to = (head * field(a, Attention.CAPACITY) + field(a, Attention.LENGTH)) * dim * width
            _store_row(width, field(a, Attention.KEYS) + to, at, dim)
            _store_row(width, field(a, Attention.VALUES) + to, v + 4 * head * dim, dim)
        head = _take(a, 2, 1)


@inline
def attend_cached(kind: Any, a: int) -> None:
    """Every (key head, block of tokens) to its partial result."""
    dim, group = field(a, Attention.DIM), field(a, Attention.GROUP)
    key_heads, end = field(a, Attention.KEY_HEADS), field(a, Attention.LENGTH) + 1
    start, cap = field(a, Attention.START), bits_float(field(a, Attention.CAP))
    first_block = start // BLOCK
    blocks = (end + BLOCK - 1) // BLOCK - first_block
    row, partial = dim * kv_bytes(kind), 4 * (dim + PARTIAL_EXTRA)
    task = _take(a, 4, 1)
    while task < key_heads * blocks:
        head, block = task // blocks, task % blocks
        first = seen_from(start, (first_block + block) * BLOCK)
        last = min(end, (first_block + block + 1) * BLOCK)
        at = (head * field(a, Attention.CAPACITY) + first) * row
        out = (block * key_heads + head) * group * partial
        attend(
            kind, field(a, Attention.Q_OUT) + 4 * head * group * dim,
            field(a, Attention.KEYS) + at, field(a, Attention.VALUES) + at,
            group, dim, last - first, cap, field(a, Attention.PARTIALS) + out,
            group, max(0, start - first), last - first,
        )  # fmt: skip
        task = _take(a, 4, 1)


@inline
def _merge(fmt: Any, a: int) -> None:
    """Heads' outputs, and their records for o."""
    dim, unit = field(a, Attention.DIM), field(a, Attention.MERGE_HEADS)
    heads = field(a, Attention.KEY_HEADS) * field(a, Attention.GROUP)
    first_block = field(a, Attention.START) // BLOCK
    blocks = (field(a, Attention.LENGTH) + BLOCK) // BLOCK - first_block
    partial, merged = 4 * (dim + PARTIAL_EXTRA), field(a, Attention.MERGED)
    sinks, state = field(a, Attention.SINKS), field(a, Attention.STATE)
    first = _take(a, 5, unit)
    while first < heads:
        for head in range(first, first + unit):
            sink, out = sinks + 4 * head if sinks != 0 else 0, merged + 4 * head * dim
            if state != 0:
                divided(state + 4 * head * (dim + EXTRA), sink, dim, out)
            else:
                at = field(a, Attention.PARTIALS) + head * partial
                merge(at, blocks, heads * partial, dim, sink, out)
        _records(fmt, a + 8 * Common.D, merged, first * dim, (first + unit) * dim)
        first = _take(a, 5, unit)
    wait(field(a, Common.BARRIER))


@inline
def attention_in(qf: Any, kf: Any, vf: Any, isa: Any, a: int) -> None:
    """The norm of X, its queries ready to attend; its key and value go to the cache."""
    one = float32(1.0)
    _normalise(qf, kf, vf, a, 3)
    q, k, v = a + 8 * Common.A, a + 8 * Common.B, a + 8 * Common.C
    to_k, to_v = _tasks(q), _tasks(q) + _tasks(k)
    task = _take(a, 1, 1)
    while task < to_v + _tasks(v):
        if task < to_k:
            _project_task(qf, isa, q, task, field(a, Attention.Q_OUT), 0, one)
        elif task < to_v:
            _project_task(kf, isa, k, task - to_k, field(a, Attention.K_OUT), 0, one)
        else:
            _project_task(vf, isa, v, task - to_v, field(a, Attention.V_OUT), 0, one)
        task = _take(a, 1, 1)
    wait(field(a, Common.BARRIER))
    _heads(a)


@inline
def attention_out(of: Any, isa: Any, a: int) -> None:
    """X plus what has been attended to."""
    _merge(of, a)
    _to_residual(of, isa, a, a + 8 * Common.D, 6, field(a, Common.X), float32(1.0))


@inline
def router(fmt: Any, isa: Any, a: int) -> None:
    """The norm of X, and the experts it goes to."""
    _normalise(fmt, fmt, fmt, a, 1)
    m = a + 8 * Common.A
    task = _take(a, 1, 1)
    while task < _tasks(m):
        _project_task(fmt, isa, m, task, field(a, Router.LOGITS), 0, float32(1.0))
        task = _take(a, 1, 1)
    wait(field(a, Common.BARRIER))
    if _take(a, 2, 1) == 0:
        choose_experts(
            field(a, Router.SCORING), field(a, Router.LOGITS), field(m, Matrix.ROWS),
            field(a, Router.TOP_K), field(a, Router.RENORM), bits_float(field(a, Router.FACTOR)),
            field(a, Router.CHOICE_BIAS), field(a, Router.GROUPS), field(a, Router.KEEP_GROUPS),
            field(a, Router.SCRATCH), field(a, Router.IDS), field(a, Router.WEIGHTS),
        )  # fmt: skip


@inline
def _gate_up(fmt: Any, down: Any, isa: Any, a: int) -> None:
    """Inner activations task by task, each with its own records for the down projection."""
    gate, up = a + 8 * Common.A, a + 8 * Common.B
    rows, inner = field(gate, Matrix.ROWS), field(a, Mlp.INNER)
    step, kind = 16 * field(gate, Matrix.STEP), field(a, Mlp.GLU)
    alpha, limit = bits_float(field(a, Mlp.ALPHA)), bits_float(field(a, Mlp.LIMIT))
    ups = room()
    task = _take(a, 1, 1)
    while task < _tasks(gate):
        first, last = task * step, min((task + 1) * step, rows)
        _project_task(fmt, isa, gate, task, inner, 0, float32(1.0))
        for row in range(first, last, 16 * STREAMS):
            tile, end = row // 16, (min(row + 16 * STREAMS, last) + 15) // 16
            # To rows of its own: of a matrix that starts at this row.
            _project(fmt, isa, up, tile, end, ups - 4 * row, 0, float32(1.0))
            for r in range(row, min(row + 16 * STREAMS, last), 16):
                g, u = load_rows(inner + 4 * r, last - r), load_rows(ups + 4 * (r - row), last - r)
                store_rows(inner + 4 * r, glu(kind, g, u, alpha, limit), last - r)
        _records(down, a + 8 * Common.C, inner, first, last)
        task = _take(a, 1, 1)
    wait(field(a, Common.BARRIER))


@inline
def dense_mlp(fmt: Any, down: Any, isa: Any, a: int) -> None:
    """INTO plus down(glu(gate x, up x)) of the norm of X, or of X itself."""
    _normalise(fmt, fmt, fmt, a, 2)
    _gate_up(fmt, down, isa, a)
    by, share = float32(1.0), field(a, Mlp.SHARE)
    if share != 0:
        x = field(a, Common.X) if field(a, Common.NORM) == 0 else field(a, Common.NORMED)
        z = dot(share, x, field(a, Common.HIDDEN))
        by = lane(exp(splat(float32(0.0) - z)), 0)
        by = float32(1.0) / (float32(1.0) + by)
    _to_residual(down, isa, a, a + 8 * Common.C, 2, field(a, Mlp.INTO), by)
