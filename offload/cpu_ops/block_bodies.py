"""Regions of attention over a table of blocks: few rows, split over blocks, and many, over rows.

    B sequences, G key heads, R rows per key head (queries times heads that share keys), S segments

A segment is at most BLOCK tokens of one block. ``few`` makes one partial result per (segment, key
head) and, behind a barrier, folds each head's in ascending order; ``many`` gives a thread ROWS
rows of a head, which goes through the segments in the same order. The results are the same.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

from offload.cpu_ops.block_kernels import BLOCK, EXTRA, ROWS, WIDEST, attend, fold
from offload.cpu_ops.block_vectors import multiplier
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.tags import inline, outline, tag
from offload.cpu_ops.tiles import field, wait
from offload.cpu_ops.vectors import bits_float, fetch_add, load_int, stack, store_int32

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
    SEGMENTS = 4
    """int64 [S, Segment.SIZE], of a sequence side by side and in ascending order."""
    COUNT = 5
    RANGES = 6
    """int64 [B, 2]: each sequence's first segment, and the one behind its last."""
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
    """float32 [S, G, R, Dv + EXTRA], for few rows."""
    NEXT = 24
    NEXT_FOLD = 32
    SIZE = 40


class Segment(enum.IntEnum):
    """One row of the segments."""

    KEYS = 0
    """Address of the first head's keys."""
    VALUES = 1
    START = 2
    """Place of the first token in its sequence."""
    TOKENS = 3
    SEQUENCE = 4
    SIZE = 5


@outline
def _segment(mode: Any, a: int, segment: int, head: int, first: int, rows: int, out: int) -> None:
    """Rows ``first`` .. ``first + rows`` of a head over one segment, to partial results."""
    at = field(a, Attend.SEGMENTS) + 8 * Segment.SIZE * segment
    start, n = field(at, Segment.START), field(at, Segment.TOKENS)
    b, window = field(at, Segment.SEQUENCE), field(a, Attend.WINDOW)
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
        field(at, Segment.KEYS) + head * field(a, Attend.KEY_STRIDE),
        field(at, Segment.VALUES) + head * field(a, Attend.VALUE_STRIDE),
        field(a, Attend.SPAN), field(a, Attend.KEY_DIM), field(a, Attend.DIM),
        t0 // 8 * 8, (t1 + 7) // 8 * 8, t1, limits,
        bits_float(field(a, Attend.SCALE)), bits_float(field(a, Attend.CAP)), out,
    )  # fmt: skip


@inline
def few(mode: Any, a: int) -> None:
    """R <= ROWS; every thread of the region runs this."""
    heads, rows, dim = field(a, Attend.KEY_HEADS), field(a, Attend.ROWS), field(a, Attend.DIM)
    size, partials = 4 * rows * (dim + EXTRA), field(a, Attend.PARTIALS)
    task = fetch_add(a + 8 * Attend.NEXT, 1)
    while task < field(a, Attend.COUNT) * heads:
        _segment(mode, a, task // heads, task % heads, 0, rows, partials + task * size)
        task = fetch_add(a + 8 * Attend.NEXT, 1)
    wait(field(a, Attend.BARRIER))
    task = fetch_add(a + 8 * Attend.NEXT_FOLD, 1)
    while task < field(a, Attend.BATCH) * heads:
        b, head = task // heads, task % heads
        of = field(a, Attend.RANGES) + 16 * b
        for s in range(load_int(of), load_int(of + 8)):
            at = partials + (s * heads + head) * size
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
        of = field(a, Attend.RANGES) + 16 * b
        for s in range(load_int(of), load_int(of + 8)):
            _segment(mode, a, s, head, first, count, partial)
            fold(state, partial, count, dim)
        task = fetch_add(a + 8 * Attend.NEXT, 1)


def mode_of(kind: str, *, half_queries: bool, whole: bool, isa: Isa) -> str:
    """How a kernel multiplies (``block_elements``). ``whole``: head sizes are multiples of 64."""
    if kind == "bf16":
        return "bf16dot" if half_queries and multiplier(isa) == "dot" else kind
    dots = kind in ("q8", "q4") and whole and isa is Isa.AVX512VNNI
    return f"{kind}dot" if dots else kind


@functools.cache
def blocks_kernel(mode_name: str, *, chunk: bool) -> Kernel:
    """For few rows, or (``chunk``) for many."""
    mode = tag("kv", mode_name)
    if chunk:

        def blocks_body(arguments: int) -> None:
            many(mode, arguments)
    else:

        def blocks_body(arguments: int) -> None:
            few(mode, arguments)

    what = f"attention over {mode_name} blocks, {'many' if chunk else 'few'} queries"
    return Kernel(blocks_body, what, 4.0)


@functools.cache
def blocks_entry(mode_name: str, *, chunk: bool) -> Entry:
    return blocks_kernel(mode_name, chunk=chunk).entry()
