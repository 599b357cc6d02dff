"""Regions of attention over a table of blocks: few rows, split over blocks, or many, over rows.

    B sequences, G key heads, R rows per key head (queries times heads that share keys), S segments

A segment is at most BLOCK tokens of one block. ``few`` makes one partial result per (segment, key
head) and, behind a barrier, folds each head's in ascending order; ``many`` gives a thread ROWS
rows of a head, which goes through the segments in the same order. The results are the same; where
heads alone keep all threads busy, ``many`` spares partial results their way between the threads'
caches, which for 8 rows in 4 bits are a seventh of what is read.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

from offload.cpu_ops.block_kernels import BLOCK, EXTRA, ROWS, WIDEST, attend, fold, share_of
from offload.cpu_ops.block_vectors import multiplier
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.lanes import store_bf16
from offload.cpu_ops.tags import inline, outline, tag
from offload.cpu_ops.tiles import field, wait
from offload.cpu_ops.vectors import (
    bits_float,
    fetch_add,
    fmul,
    load_f32,
    load_int,
    splat,
    stack,
    store_f32,
    store_int32,
)

_partial_room = stack(ROWS * (WIDEST + EXTRA) * 4)
_limit_room = stack(2 * ROWS * 4 + 64)


class Attend(enum.IntEnum):
    """Places in the argument array; counters on cache lines of their own."""

    BARRIER = 0
    Q = 1
    """[B, G, R, Dk] float32, or bfloat16 where the mode says so."""
    Q_ROW = 2
    """Bytes of a row."""
    STATE = 3
    """float32 [B, G, R, Dv + EXTRA]"""
    TABLE = 4
    """int64 [blocks, 3]: addresses of keys and values, filled tokens; of all sequences in turn."""
    COUNT = 5
    """Segments of this region, from FIRST on."""
    RANGES = 6
    """int64 [B, 3]: a sequence's first segment, the one behind its last, its first token."""
    BATCH = 7
    KEY_HEADS = 8
    ROWS = 9
    GROUP = 10
    """Query heads per key head: row r is of query r // GROUP."""
    KEY_STRIDE = 11
    """Bytes from one head's keys to the next's, in a block."""
    VALUE_STRIDE = 12
    SPAN = 13
    """Tokens there is room for in a segment."""
    KEY_DIM = 14
    DIM = 15
    SCALE = 16
    """Bits of a float32."""
    CAP = 17
    POSITIONS = 18
    """int64 [B]: the place of the first query among its sequence's tokens."""
    FIRSTS = 19
    """int64 [B]: the first token that is no padding."""
    WINDOW = 20
    """Tokens a query sees, itself included; 0: all."""
    PARTIALS = 21
    """float32 [S, G, R, Dv + EXTRA] for ``few``; 0: ``many``."""
    FIRST = 22
    PARTS = 23
    """Segments of a block."""
    KEY_PART = 24
    """Bytes from one of them to the next, of a head's keys."""
    VALUE_PART = 25
    NEXT = 32
    NEXT_FOLD = 40
    SIZE = 48


class Finish(enum.IntEnum):
    """Arguments of ``finish``."""

    BARRIER = 0
    STATE = 1
    OUT = 2
    """[B, G * group, n, Dv] float32, or bfloat16."""
    HALF = 3
    """1: bfloat16."""
    SINKS = 4
    """Address of float32 [G * group]; 0: none."""
    BATCH = 5
    KEY_HEADS = 6
    ROWS = 7
    GROUP = 8
    DIM = 9
    NEXT = 16
    SIZE = 24


@inline
def _range(a: int, b: int) -> int:
    return field(a, Attend.RANGES) + 24 * b


@inline
def _keys(a: int, segment: int, head: int) -> int:
    parts = field(a, Attend.PARTS)
    at = load_int(field(a, Attend.TABLE) + 24 * (segment // parts))
    at += head * field(a, Attend.KEY_STRIDE) + segment % parts * field(a, Attend.KEY_PART)
    return at


@inline
def _values(a: int, segment: int, head: int) -> int:
    parts = field(a, Attend.PARTS)
    at = load_int(field(a, Attend.TABLE) + 24 * (segment // parts) + 8)
    at += head * field(a, Attend.VALUE_STRIDE) + segment % parts * field(a, Attend.VALUE_PART)
    return at


@outline
def _segment(
    mode: Any, a: int, b: int, segment: int, head: int, first: int, rows: int, next_k: int, out: int
) -> None:  # fmt: skip
    """Rows ``first`` .. ``first + rows`` of a head over one segment, to partial results.
    ``next_k``: what will be read next; 0: it is not known."""
    parts, span = field(a, Attend.PARTS), field(a, Attend.SPAN)
    block, part = field(a, Attend.TABLE) + 24 * (segment // parts), segment % parts
    n = min(max(load_int(block + 16) - part * span, 0), span)
    start = load_int(_range(a, b) + 16) + (segment - load_int(_range(a, b))) * span
    window = field(a, Attend.WINDOW)
    position = load_int(field(a, Attend.POSITIONS) + 8 * b)
    padding = load_int(field(a, Attend.FIRSTS) + 8 * b)
    limits, t0, t1 = _limit_room(), BLOCK, 0
    for place in range((rows + 3) // 4 * 4):
        r = min(place, rows - 1)
        here = position + (first + r) // field(a, Attend.GROUP)
        low = max(padding, here - window + 1 if window > 0 else 0)
        low, high = min(max(low - start, 0), n), min(max(here + 1 - start, 0), n)
        store_int32(limits + 4 * place, low)
        store_int32(limits + 4 * (ROWS + place), high)
        if low < high:
            t0, t1 = min(t0, low), max(t1, high)
    heads, all_rows = field(a, Attend.KEY_HEADS), field(a, Attend.ROWS)
    q = field(a, Attend.Q)
    q += ((b * heads + head) * all_rows + first) * field(a, Attend.Q_ROW)
    attend(
        mode, q, rows,
        _keys(a, segment, head),
        _values(a, segment, head),
        span, field(a, Attend.KEY_DIM), field(a, Attend.DIM),
        t0 // 8 * 8, (t1 + 7) // 8 * 8, t1, limits,
        bits_float(field(a, Attend.SCALE)), bits_float(field(a, Attend.CAP)), next_k, out,
    )  # fmt: skip


@inline
def few(mode: Any, a: int) -> None:
    """R <= ROWS; every thread of the region runs this."""
    heads, rows, dim = field(a, Attend.KEY_HEADS), field(a, Attend.ROWS), field(a, Attend.DIM)
    size, partials = 4 * rows * (dim + EXTRA), field(a, Attend.PARTIALS)
    first, count = field(a, Attend.FIRST), field(a, Attend.COUNT)
    task = fetch_add(a + 8 * Attend.NEXT, 1)
    while task < count * heads:
        segment, b = first + task // heads, 0
        while load_int(_range(a, b) + 8) <= segment:
            b += 1
        # The next task is taken now, so that memory is never idle between two.
        following, next_k = fetch_add(a + 8 * Attend.NEXT, 1), 0
        if following < count * heads:
            next_k = _keys(a, first + following // heads, following % heads)
        at = partials + task * size
        _segment(mode, a, b, segment, task % heads, 0, rows, next_k, at)
        task = following
    wait(field(a, Attend.BARRIER))
    task = fetch_add(a + 8 * Attend.NEXT_FOLD, 1)
    while task < field(a, Attend.BATCH) * heads:
        of, head = _range(a, task // heads), task % heads
        for s in range(max(load_int(of), first), min(load_int(of + 8), first + count)):
            at = partials + ((s - first) * heads + head) * size
            fold(field(a, Attend.STATE) + task * size, at, rows, dim)
        task = fetch_add(a + 8 * Attend.NEXT_FOLD, 1)


@inline
def many(mode: Any, a: int) -> None:
    """Any R; every thread of the region runs this."""
    heads, rows, dim = field(a, Attend.KEY_HEADS), field(a, Attend.ROWS), field(a, Attend.DIM)
    tiles, row = (rows + ROWS - 1) // ROWS, 4 * (dim + EXTRA)
    partial = _partial_room()
    task = fetch_add(a + 8 * Attend.NEXT, 1)
    while task < field(a, Attend.BATCH) * heads * tiles:
        # The last rows see most: begun first, so that no thread is left alone with them.
        b, head = task // tiles // heads, task // tiles % heads
        first = (tiles - 1 - task % tiles) * ROWS
        count = min(ROWS, rows - first)
        state = field(a, Attend.STATE) + ((b * heads + head) * rows + first) * row
        behind = load_int(_range(a, b) + 8)
        for s in range(load_int(_range(a, b)), behind):
            next_k = _keys(a, s + 1, head) if s + 1 < behind else 0
            _segment(mode, a, b, s, head, first, count, next_k, partial)
            fold(state, partial, count, dim)
        task = fetch_add(a + 8 * Attend.NEXT, 1)


@inline
def finish(a: int) -> None:
    """Sums divided by their weights; every thread of the region runs this."""
    heads, rows, group = field(a, Finish.KEY_HEADS), field(a, Finish.ROWS), field(a, Finish.GROUP)
    dim, sinks, half = field(a, Finish.DIM), field(a, Finish.SINKS), field(a, Finish.HALF)
    size = 2 if half else 4
    task = fetch_add(a + 8 * Finish.NEXT, 1)
    while task < field(a, Finish.BATCH) * heads:
        for r in range(rows):
            row = field(a, Finish.STATE) + 4 * (task * rows + r) * (dim + EXTRA)
            sink = 0 if sinks == 0 else sinks + 4 * (task % heads * group + r % group)
            by = splat(share_of(row, sink, dim))
            place = (task * group + r % group) * (rows // group) + r // group
            out = field(a, Finish.OUT) + place * dim * size
            for c in range(0, dim, 16):
                v = fmul(by, load_f32(row + 4 * c))
                if half:
                    store_bf16(out + 2 * c, v)
                else:
                    store_f32(out + 4 * c, v)
        task = fetch_add(a + 8 * Finish.NEXT, 1)


@functools.cache
def finish_kernel() -> Kernel:
    def finish_body(arguments: int) -> None:
        finish(arguments)

    return Kernel(finish_body, "attention's last division", 0.5)


@functools.cache
def finish_entry() -> Entry:
    return finish_kernel().entry()


def mode_of(kind: str, *, half_queries: bool, whole: bool, isa: Isa) -> str:
    """How a kernel multiplies (``block_elements``). ``whole``: head sizes are multiples of 64."""
    if kind == "bf16":
        return "bf16dot" if half_queries and multiplier(isa) == "dot" else kind
    dots = kind in ("q8", "q4") and whole and isa is Isa.AVX512VNNI
    return f"{kind}dot" if dots else kind


@functools.cache
def blocks_kernel(mode_name: str) -> Kernel:
    """For few rows and for many: two kernels would compile twice as long."""
    mode = tag("kv", mode_name)

    def blocks_body(arguments: int) -> None:
        if field(arguments, Attend.PARTIALS) == 0:
            many(mode, arguments)
        else:
            few(mode, arguments)

    return Kernel(blocks_body, f"attention over {mode_name} blocks", 6.0)


@functools.cache
def blocks_entry(mode_name: str) -> Entry:
    return blocks_kernel(mode_name).entry()
