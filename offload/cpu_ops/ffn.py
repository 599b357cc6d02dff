"""The feed-forward layer of routed experts in one parallel region.

Three phases with a barrier between them: gate and up of every expert with the gated activation,
quantising the result, then down with the weighted sum over experts. Experts are given by the
addresses of their bundles, which lie anywhere in memory. Within a task a thread reads one
contiguous run of tiles after the other.
"""

from __future__ import annotations

import enum
from typing import Any

from numba import float32

from offload.cpu_ops.blocks_dot import block_bytes
from offload.cpu_ops.functions import glu
from offload.cpu_ops.tags import inline
from offload.cpu_ops.tiles import (
    GROUP,
    MANY,
    MANY_SUMS,
    STREAMS,
    SUMS,
    TILES,
    field,
    load_rows,
    many,
    many_products,
    products,
    quantize_all,
    room,
    store_rows,
    wait,
)
from offload.cpu_ops.vectors import (
    bits_float,
    fadd,
    fetch_add,
    fma,
    load_f32,
    load_float,
    splat,
)


class Ffn(enum.IntEnum):
    """Places in the argument array. A *slot* is a (token, expert) pair, sorted by expert."""

    BARRIER = 0
    EXPERTS = 1
    BASES = 2
    """int64 [experts]: addresses of bundles."""
    STARTS = 3
    """int64 [experts + 1]: the first slot of each expert."""
    SLOT_TOKENS = 4
    """int64 [slots]"""
    SLOT_WEIGHTS = 5
    """float32 [slots]"""
    TOKENS = 6
    X = 7
    """float32 [tokens, hidden]"""
    X_RECORDS = 8
    X_INPUTS = 9
    """int64 [slots]: where the slot's token's activations are."""
    H = 10
    """Scratch float32 [slots, inner]."""
    H_RECORDS = 11
    H_INPUTS = 12
    """int64 [slots]: where the slot's inner activations are."""
    OUT = 13
    OUT_STRIDE = 14
    HIDDEN = 15
    INNER = 16
    HIDDEN_BLOCKS = 17
    INNER_BLOCKS = 18
    GATE = 19
    """Offsets in a bundle; of a bias -1 if there is none."""
    UP = 20
    DOWN = 21
    GATE_BIAS = 22
    UP_BIAS = 23
    DOWN_BIAS = 24
    INNER_STEP = 25
    """Tiles of a task."""
    HIDDEN_STEP = 26
    GLU = 27
    ALPHA = 28
    """Bits of a float32."""
    LIMIT = 29
    ADD = 30
    """1: the experts are added to what OUT holds."""
    NEXT_X = 32
    NEXT_INNER = 40
    NEXT_H = 48
    NEXT_HIDDEN = 56
    SIZE = 64


@inline
def _biased(v: Any, base: int, offset: int, row: int, n: int) -> Any:
    if offset >= 0:
        v = fadd(v, load_rows(base + offset + 4 * row, n))
    return v


@inline
def _tiles_at(a: int, expert: int, offset: int, tile: int, tile_bytes: int) -> int:
    """Address of a tile of an expert's matrix."""
    return field(field(a, Ffn.BASES), expert) + field(a, offset) + tile * tile_bytes


@inline
def _gate_up(
    a: int, fmt: Any, isa: Any, expert: int, first: int, last: int, sums: int, after: int
) -> None:
    """Tiles ``first..last`` of an expert: the gate's into H, then the up's over them. ``after``:
    the tiles this thread reads next."""
    inner, blocks = field(a, Ffn.INNER), field(a, Ffn.HIDDEN_BLOCKS)
    base = field(field(a, Ffn.BASES), expert)
    start, end = field(field(a, Ffn.STARTS), expert), field(field(a, Ffn.STARTS), expert + 1)
    alpha, limit = bits_float(field(a, Ffn.ALPHA)), bits_float(field(a, Ffn.LIMIT))
    tile_bytes = blocks * block_bytes(fmt)
    gate, up = base + field(a, Ffn.GATE), base + field(a, Ffn.UP)
    for tile in range(first, last, STREAMS):
        count = min(STREAMS, last - tile)
        following = after if tile + STREAMS >= last else gate + (tile + STREAMS) * tile_bytes
        for projection in range(2):
            at_w = (gate if projection == 0 else up) + tile * tile_bytes
            ahead = up + tile * tile_bytes if projection == 0 else following
            bias = field(a, Ffn.GATE_BIAS + projection)
            for s0 in range(start, end, GROUP):
                n = min(GROUP, end - s0)
                inputs = field(a, Ffn.X_INPUTS) + 8 * s0
                products(fmt, isa, at_w, count, blocks, inputs, n, sums, ahead)
                for i in range(count * n):
                    t, s = i // n, s0 + i % n
                    row = 16 * (tile + t)
                    at = field(a, Ffn.H) + 4 * (s * inner + row)
                    v = load_f32(sums + t * SUMS + 64 * (i % n))
                    v = _biased(v, base, bias, row, inner - row)
                    if projection == 1:
                        g = load_rows(at, inner - row)
                        v = glu(field(a, Ffn.GLU), g, v, alpha, limit)
                    store_rows(at, v, inner - row)


@inline
def _gate_up_many(
    a: int, fmt: Any, isa: Any, expert: int, first: int, last: int, sums: int
) -> None:
    """The same for many tokens of an expert: a tile of the gate's and the up's beside it."""
    inner, blocks = field(a, Ffn.INNER), field(a, Ffn.HIDDEN_BLOCKS)
    base = field(field(a, Ffn.BASES), expert)
    start, end = field(field(a, Ffn.STARTS), expert), field(field(a, Ffn.STARTS), expert + 1)
    alpha, limit = bits_float(field(a, Ffn.ALPHA)), bits_float(field(a, Ffn.LIMIT))
    gate, between = base + field(a, Ffn.GATE), field(a, Ffn.UP) - field(a, Ffn.GATE)
    for s0 in range(start, end, MANY):
        n = min(MANY, end - s0)
        for tile in range(first, last):
            tile_bytes, row = blocks * block_bytes(fmt), 16 * tile
            many_products(
                fmt, isa, gate + tile * tile_bytes, between, blocks,
                field(a, Ffn.X_INPUTS) + 8 * s0, n, sums, tile_bytes if tile + 1 < last else 0,
            )  # fmt: skip
            at = field(a, Ffn.H) + 4 * (s0 * inner + row)
            for t in range(n):
                g, v = load_f32(sums + 64 * t), load_f32(sums + MANY_SUMS + 64 * t)
                g = _biased(g, base, field(a, Ffn.GATE_BIAS), row, inner - row)
                v = _biased(v, base, field(a, Ffn.UP_BIAS), row, inner - row)
                v = glu(field(a, Ffn.GLU), g, v, alpha, limit)
                store_rows(at + 4 * t * inner, v, inner - row)


@inline
def _add_slot(a: int, base: int, slot: int, row: int, v: Any) -> None:
    """The sums ``v`` of 16 rows, weighted, to the output of the slot's token."""
    left = field(a, Ffn.HIDDEN) - row
    token = field(field(a, Ffn.SLOT_TOKENS), slot)
    at = field(a, Ffn.OUT) + token * field(a, Ffn.OUT_STRIDE) + 4 * row
    v = _biased(v, base, field(a, Ffn.DOWN_BIAS), row, left)
    weight = load_float(field(a, Ffn.SLOT_WEIGHTS) + 4 * slot)
    store_rows(at, fma(splat(weight), v, load_rows(at, left)), left)


@inline
def _down_few(
    a: int, fmt: Any, isa: Any, expert: int, first: int, last: int, sums: int, after: int
) -> None:
    blocks, base = field(a, Ffn.INNER_BLOCKS), field(field(a, Ffn.BASES), expert)
    start, end = field(field(a, Ffn.STARTS), expert), field(field(a, Ffn.STARTS), expert + 1)
    w, tile_bytes = base + field(a, Ffn.DOWN), blocks * block_bytes(fmt)
    for tile in range(first, last, STREAMS):
        count, at_w = min(STREAMS, last - tile), w + tile * tile_bytes
        ahead = after if tile + STREAMS >= last else at_w + STREAMS * tile_bytes
        for s0 in range(start, end, GROUP):
            n = min(GROUP, end - s0)
            inputs = field(a, Ffn.H_INPUTS) + 8 * s0
            products(fmt, isa, at_w, count, blocks, inputs, n, sums, ahead)
            for t in range(count):
                for i in range(n):
                    v = load_f32(sums + t * SUMS + 64 * i)
                    _add_slot(a, base, s0 + i, 16 * (tile + t), v)


@inline
def _down_many(a: int, fmt: Any, isa: Any, expert: int, first: int, last: int, sums: int) -> None:
    blocks, base = field(a, Ffn.INNER_BLOCKS), field(field(a, Ffn.BASES), expert)
    start, end = field(field(a, Ffn.STARTS), expert), field(field(a, Ffn.STARTS), expert + 1)
    w, tile_bytes = base + field(a, Ffn.DOWN), blocks * block_bytes(fmt)
    for s0 in range(start, end, MANY):
        n, inputs = min(MANY, end - s0), field(a, Ffn.H_INPUTS) + 8 * s0
        for tile in range(first, last, TILES):
            count, at_w = min(TILES, last - tile), w + tile * tile_bytes
            many_products(
                fmt, isa, at_w, (count - 1) * tile_bytes, blocks, inputs, n, sums,
                TILES * tile_bytes if tile + TILES < last else 0,
            )  # fmt: skip
            for t in range(count):
                for i in range(n):
                    v = load_f32(sums + t * MANY_SUMS + 64 * i)
                    _add_slot(a, base, s0 + i, 16 * (tile + t), v)


@inline
def _down(a: int, fmt: Any, isa: Any, first: int, last: int, sums: int) -> None:
    """Rows of tiles ``first..last``: zero (or what is there), then expert by expert in the given
    order."""
    out, stride = field(a, Ffn.OUT), field(a, Ffn.OUT_STRIDE)
    tile_bytes = field(a, Ffn.INNER_BLOCKS) * block_bytes(fmt)
    for t in range(0 if field(a, Ffn.ADD) != 0 else field(a, Ffn.TOKENS)):
        for tile in range(first, last):
            at = out + t * stride + 64 * tile
            store_rows(at, splat(float32(0.0)), field(a, Ffn.HIDDEN) - 16 * tile)
    experts, starts = field(a, Ffn.EXPERTS), field(a, Ffn.STARTS)
    for expert in range(experts):
        if many(fmt, isa, field(starts, expert + 1) - field(starts, expert)):
            _down_many(a, fmt, isa, expert, first, last, sums)
        else:
            after = _tiles_at(a, min(expert + 1, experts - 1), Ffn.DOWN, first, tile_bytes)
            _down_few(a, fmt, isa, expert, first, last, sums, after)


@inline
def expert_ffn(gate_up: Any, down: Any, isa: Any, a: int) -> None:
    """Every thread of the region runs this; ``a`` is the address of the arguments (``Ffn``)."""
    if field(a, Ffn.X_RECORDS) != 0:
        blocks = field(a, Ffn.TOKENS) * field(a, Ffn.HIDDEN_BLOCKS)
        quantize_all(gate_up, field(a, Ffn.X), blocks, field(a, Ffn.X_RECORDS), a + 8 * Ffn.NEXT_X)
        wait(field(a, Ffn.BARRIER))
    sums, experts = room(), field(a, Ffn.EXPERTS)
    step, tiles = field(a, Ffn.INNER_STEP), (field(a, Ffn.INNER) + 15) // 16
    per_expert = (tiles + step - 1) // step
    tasks, tile_bytes = experts * per_expert, field(a, Ffn.HIDDEN_BLOCKS) * block_bytes(gate_up)
    # A task is taken while the one before is computed, so that its first bytes can be asked for:
    # each run of tiles starts at full speed.
    task = fetch_add(a + 8 * Ffn.NEXT_INNER, 1)
    while task < tasks:
        then = fetch_add(a + 8 * Ffn.NEXT_INNER, 1)
        seen = min(then, tasks - 1)
        after = _tiles_at(a, seen // per_expert, Ffn.GATE, seen % per_expert * step, tile_bytes)
        expert, first = task // per_expert, task % per_expert * step
        last, starts = min(first + step, tiles), field(a, Ffn.STARTS)
        if many(gate_up, isa, field(starts, expert + 1) - field(starts, expert)):
            _gate_up_many(a, gate_up, isa, expert, first, last, sums)
        else:
            _gate_up(a, gate_up, isa, expert, first, last, sums, after)
        task = then
    wait(field(a, Ffn.BARRIER))
    if field(a, Ffn.H_RECORDS) != 0:
        slots = field(field(a, Ffn.STARTS), experts)
        blocks = slots * field(a, Ffn.INNER_BLOCKS)
        quantize_all(down, field(a, Ffn.H), blocks, field(a, Ffn.H_RECORDS), a + 8 * Ffn.NEXT_H)
        wait(field(a, Ffn.BARRIER))
    step, tiles = field(a, Ffn.HIDDEN_STEP), (field(a, Ffn.HIDDEN) + 15) // 16
    first = fetch_add(a + 8 * Ffn.NEXT_HIDDEN, step)
    while first < tiles:
        _down(a, down, isa, first, min(first + step, tiles), sums)
        first = fetch_add(a + 8 * Ffn.NEXT_HIDDEN, step)
