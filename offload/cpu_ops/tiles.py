"""Tiles: the products of 16 packed rows with a few tokens' activations, and the matrix kernel.

What a kernel takes is one array of int64 (addresses and counts), so that starting it on several
threads is one call with one pointer. Threads take tasks from a counter: which thread computes a
row never changes what is added in which order, so results do not depend on the number of threads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from offload.cpu_ops.activations import quantize_blocks
from offload.cpu_ops.blocks_dot import (
    LARGE,
    block_bytes,
    block_dot,
    block_dot_asking,
    block_dot_four,
    record_stride,
)
from offload.cpu_ops.formats import FORMATS, TILE_ROWS, Activation
from offload.cpu_ops.panels import (
    PANEL_BYTES,
    TILES,
    TOGETHER,
    add_four,
    fill,
    has_panels,
    panel,
    panel_bytes,
)
from offload.cpu_ops.tags import by_format, by_format_and_isa, inline, outline
from offload.cpu_ops.vectors import (
    call,
    fetch_add,
    lane,
    load_f32,
    load_float,
    load_int,
    prefetch,
    splat,
    stack,
    store_f32,
    store_float,
)

GROUP = 8
"""Tokens that a pass over a tile computes at most; more are passes over a tile in cache, or go by
panels (``many``)."""
STREAMS = 4
"""Tiles of a run, for one token. Long ones are read side by side. Measured on two Zen 4 cores, Q4_0
and bf16, of the read stream: one tile 77 %, two 88 %, four 95 %. Asking for every line (0.5 to
8 KiB ahead, one to four tiles) gave at most 92 %: several streams keep the hardware's prefetchers
busy without it."""
LONG_TILE = 36 << 10
"""Bytes. Shorter ones are read in turn, and asked for: hardware has hardly begun to prefetch when a
tile of a few KiB ends. 8 experts of 2048 x 768 in one call: 1.20 of the rate side by side in Q4_0
and MXFP4, 1.17 in Q8_0; 4096 columns in Q4_0, 36 KiB, are 0.97."""
HEAD = 16
"""Cache lines asked for at the start of each tile of the next run of long ones, one run ahead."""
AHEAD = 8 << 10
"""Bytes between what is read of tiles in turn and what is asked for, from one run into the next. So
are K-quants read however long a tile is: a block of theirs is some 400 instructions on 3 KB, and
the hardware sees addresses late. 1.12, 1.18 and 1.32 of four tiles side by side (Q4_K, Q5_K, Q6_K);
2 and 12 KiB are less, into the first cache is much less."""
SUMS = GROUP * TILE_ROWS * 4
"""Bytes between the sums of a tile and of the next."""
MANY = 64
"""Tokens that a panel is used for before the next; more unpack it again."""
MANY_SUMS = MANY * TILE_ROWS * 4
"""As SUMS."""

room = stack(max(STREAMS * SUMS, TILES * MANY_SUMS))


class Gemm(enum.IntEnum):
    """Places in the argument array of the matrix kernel; counters on cache lines of their own."""

    BARRIER = 0
    PACKED = 1
    ROWS = 2
    BLOCKS = 3
    TOKENS = 4
    X = 5
    """float32 [tokens, columns]"""
    RECORDS = 6
    """Scratch for the tokens' records."""
    INPUTS = 7
    """int64 [tokens]: where each token's activations are, as the format reads them."""
    OUT = 8
    OUT_STRIDE = 9
    """Bytes from one token's output to the next."""
    TILES_PER_TASK = 10
    NEXT_RECORD = 16
    NEXT_TILE = 24
    SIZE = 32


def streams_from(fmt: Any) -> int:
    """Bytes of the tiles that are read side by side, at least; only inside kernels."""
    raise NotImplementedError


def _least(name: str) -> Callable[[Any], int]:
    # A float tile by itself is one chain of multiply-adds.
    least = 0 if FORMATS[name].activation is Activation.FLOAT32 else LONG_TILE
    return lambda fmt: least


by_format(streams_from)(_least)


@inline
def _streams(fmt: Any, isa: Any, w: int, blocks: int, x: int, out: int, ahead: int) -> None:
    """Four tiles side by side for one token."""
    for i in range(STREAMS):
        for line in range(HEAD):
            prefetch(ahead + i * blocks * block_bytes(fmt) + 64 * line)
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    n = blocks * block_bytes(fmt)
    for _ in range(blocks):
        a = block_dot(fmt, isa, w, x, a)
        b = block_dot(fmt, isa, w + n, x, b)
        c = block_dot(fmt, isa, w + 2 * n, x, c)
        d = block_dot(fmt, isa, w + 3 * n, x, d)
        w += block_bytes(fmt)
        x += record_stride(fmt)
    store_f32(out, a)
    store_f32(out + SUMS, b)
    store_f32(out + 2 * SUMS, c)
    store_f32(out + 3 * SUMS, d)


@inline
def _in_turn(
    fmt: Any, isa: Any, w: int, tiles: int, blocks: int, x: int, out: int, ahead: int
) -> None:
    """Tiles one after the other for one token."""
    end = w + tiles * blocks * block_bytes(fmt)
    for i in range(tiles):
        acc, at = splat(0.0), x
        for _ in range(blocks):
            then = w + AHEAD
            if then >= end:
                then += ahead - end
            acc = block_dot_asking(fmt, isa, w, at, acc, then)
            w += block_bytes(fmt)
            at += record_stride(fmt)
        store_f32(out + i * SUMS, acc)


@outline
def _small_blocks(
    fmt: Any, isa: Any, w: int, tiles: int, blocks: int, x: int, out: int, ahead: int
) -> None:
    if tiles == STREAMS and blocks * block_bytes(fmt) >= streams_from(fmt):
        _streams(fmt, isa, w, blocks, x, out, ahead)
    else:
        _in_turn(fmt, isa, w, tiles, blocks, x, out, ahead)


@outline
def _large_blocks(
    fmt: Any, isa: Any, w: int, tiles: int, blocks: int, x: int, out: int, ahead: int
) -> None:
    _in_turn(fmt, isa, w, tiles, blocks, x, out, ahead)


def alone(
    fmt: Any, isa: Any, w: int, tiles: int, blocks: int, x: int, out: int, ahead: int
) -> None:
    """Up to STREAMS tiles for one token; only inside kernels."""
    raise NotImplementedError


def _small(
    fmt: Any, isa: Any, w: int, tiles: int, blocks: int, x: int, out: int, ahead: int
) -> None:
    _small_blocks(fmt, isa, w, tiles, blocks, x, out, ahead)


def _large(
    fmt: Any, isa: Any, w: int, tiles: int, blocks: int, x: int, out: int, ahead: int
) -> None:
    _large_blocks(fmt, isa, w, tiles, blocks, x, out, ahead)


def _alone(name: str) -> Callable[..., None]:
    return _large if name in LARGE else _small


by_format(alone)(_alone)


@inline
def _four(
    fmt: Any, isa: Any, w: int, blocks: int, x0: int, x1: int, x2: int, x3: int, out: int
) -> None:
    """Four tokens at once."""
    acc = (splat(0.0), splat(0.0), splat(0.0), splat(0.0))
    for _ in range(blocks):
        acc = block_dot_four(fmt, isa, w, (x0, x1, x2, x3), acc)
        w += block_bytes(fmt)
        x0 += record_stride(fmt)
        x1 += record_stride(fmt)
        x2 += record_stride(fmt)
        x3 += record_stride(fmt)
    store_f32(out, acc[0])
    store_f32(out + 64, acc[1])
    store_f32(out + 128, acc[2])
    store_f32(out + 192, acc[3])


@inline
def _tile(fmt: Any, isa: Any, w: int, blocks: int, inputs: int, n: int, out: int) -> None:
    t = 0
    while t < n:
        if n - t == 1:
            alone(fmt, isa, w, 1, blocks, load_int(inputs + 8 * t), out + 64 * t, w)
            t += 1
        else:  # the last of fewer than four fills the empty places, its copies are not read
            last = n - 1
            _four(
                fmt, isa, w, blocks,
                load_int(inputs + 8 * t),
                load_int(inputs + 8 * min(t + 1, last)),
                load_int(inputs + 8 * min(t + 2, last)),
                load_int(inputs + 8 * min(t + 3, last)),
                out + 64 * t,
            )  # fmt: skip
            t += 4


@outline
def products(
    fmt: Any,
    isa: Any,
    w: int,
    tiles: int,
    blocks: int,
    inputs: int,
    n: int,
    out: int,
    ahead: int,
) -> None:
    """float32 [tiles, GROUP, 16] at ``out``: the products of at most STREAMS tiles at ``w`` and of
    n <= GROUP tokens, whose activations' addresses are at ``inputs``. A token's result depends
    neither on ``n`` nor on ``tiles``. ``ahead``: the tiles that will be asked for next."""
    if n == 1:
        alone(fmt, isa, w, tiles, blocks, load_int(inputs), out, ahead)
    else:
        for i in range(tiles):
            _tile(fmt, isa, w + i * blocks * block_bytes(fmt), blocks, inputs, n, out + i * SUMS)


# ---- many tokens


@outline
def _with_panel(
    fmt: Any, isa: Any, p: int, blocks: int, inputs: int, n: int, at: int, out: int, fresh: bool
) -> None:
    """Four tokens: what ``blocks`` unpacked blocks of two tiles add to the sums at ``out``; ``at``:
    bytes of records before theirs. The last of fewer tokens fills the empty places."""
    two = out + MANY_SUMS
    sums = (
        splat(0.0), splat(0.0), splat(0.0), splat(0.0),
        splat(0.0), splat(0.0), splat(0.0), splat(0.0),
    )  # fmt: skip
    if not fresh:
        sums = (
            load_f32(out), load_f32(out + 64), load_f32(out + 128), load_f32(out + 192),
            load_f32(two), load_f32(two + 64), load_f32(two + 128), load_f32(two + 192),
        )  # fmt: skip
    last = inputs + 8 * (n - 1)
    x0, x1 = load_int(inputs) + at, load_int(min(inputs + 8, last)) + at
    x2, x3 = load_int(min(inputs + 16, last)) + at, load_int(min(inputs + 24, last)) + at
    for _ in range(blocks):
        sums = add_four(fmt, p, (x0, x1, x2, x3), sums)
        p += TILES * panel_bytes(fmt)
        x0 += record_stride(fmt)
        x1 += record_stride(fmt)
        x2 += record_stride(fmt)
        x3 += record_stride(fmt)
    for i in range(TOGETHER):
        store_f32(out + 64 * i, sums[i])
        store_f32(two + 64 * i, sums[TOGETHER + i])


def many_products(
    fmt: Any, isa: Any, w: int, between: int, blocks: int, inputs: int, n: int, out: int, ahead: int
) -> None:
    """As ``products``, of two tiles that lie ``between`` bytes apart and of at most MANY tokens:
    float32 [TILES, MANY, 16]. ``ahead``: bytes from each tile to the one that takes its place next.
    Only inside kernels, and only where ``many`` says so."""
    raise NotImplementedError


@outline
def _by_panels(
    fmt: Any, isa: Any, w: int, between: int, blocks: int, inputs: int, n: int, out: int, ahead: int
) -> None:
    p, most = panel(), PANEL_BYTES // TILES // panel_bytes(fmt)
    for first in range(0, blocks, most):
        count, at = min(most, blocks - first), w + first * block_bytes(fmt)
        for b in range(count):
            for i in range(TILES):
                tile = at + i * between
                for line in range((block_bytes(fmt) + 63) // 64):
                    prefetch(tile + ahead + 64 * line)
                fill(fmt, isa, tile, p + (TILES * b + i) * panel_bytes(fmt))
            at += block_bytes(fmt)
        for t in range(0, n, TOGETHER):
            _with_panel(
                fmt, isa, p, count, inputs + 8 * t, n - t,
                first * record_stride(fmt), out + 64 * t, first == 0,
            )  # fmt: skip


def _panels(
    fmt: Any, isa: Any, w: int, between: int, blocks: int, inputs: int, n: int, out: int, ahead: int
) -> None:
    _by_panels(fmt, isa, w, between, blocks, inputs, n, out, ahead)


def _never(
    fmt: Any, isa: Any, w: int, between: int, blocks: int, inputs: int, n: int, out: int, ahead: int
) -> None:
    pass


by_format_and_isa(many_products)(lambda name, isa: _panels if has_panels(name, isa) else _never)


def many(fmt: Any, isa: Any, tokens: int) -> bool:
    """Whether so many tokens are multiplied by ``many_products``; only inside kernels."""
    raise NotImplementedError


by_format_and_isa(many)(
    lambda name, isa: (
        (lambda fmt, isa, tokens: tokens > TOGETHER)
        if has_panels(name, isa)
        else (lambda fmt, isa, tokens: False)
    )
)


@inline
def load_rows(address: int, n: int) -> Any:
    """Up to 16 floats; lanes from ``n`` on repeat the first."""
    if n >= 16:
        return load_f32(address)
    at = room()
    for i in range(16):
        store_float(at + 4 * i, load_float(address + (4 * i if i < n else 0)))
    return load_f32(at)


@inline
def store_rows(address: int, v: Any, n: int) -> None:
    """The first ``n`` lanes, 16 at most."""
    if n >= 16:
        store_f32(address, v)
    else:
        for i in range(n):
            store_float(address + 4 * i, lane(v, i))


@inline
def wait(barrier: int) -> None:
    """For all threads of the region; nothing where there is one."""
    if barrier != 0:
        call(barrier)


@inline
def quantize_all(fmt: Any, x: int, blocks: int, out: int, counter: int) -> None:
    """This thread's share of ``blocks`` records of contiguous floats."""
    grain = 16
    first = fetch_add(counter, grain)
    while first < blocks:
        quantize_blocks(fmt, x, first, min(first + grain, blocks), out)
        first = fetch_add(counter, grain)


@inline
def field(arguments: int, i: int) -> int:
    value: int = load_int(arguments + 8 * i)
    return value


@inline
def _few(fmt: Any, isa: Any, arguments: int, first: int, last: int, blocks: int, sums: int) -> None:
    """Tiles ``first..last``: those of a run for eight tokens after eight."""
    packed, out = field(arguments, Gemm.PACKED), field(arguments, Gemm.OUT)
    tokens, inputs = field(arguments, Gemm.TOKENS), field(arguments, Gemm.INPUTS)
    stride, rows = field(arguments, Gemm.OUT_STRIDE), field(arguments, Gemm.ROWS)
    tile_bytes = blocks * block_bytes(fmt)
    for tile in range(first, last, STREAMS):
        count, w = min(STREAMS, last - tile), packed + tile * tile_bytes
        for t0 in range(0, tokens, GROUP):
            n = min(GROUP, tokens - t0)
            products(fmt, isa, w, count, blocks, inputs + 8 * t0, n, sums, w + STREAMS * tile_bytes)
            for i in range(count):
                for t in range(n):
                    at = out + (t0 + t) * stride + 64 * (tile + i)
                    v = load_f32(sums + i * SUMS + 64 * t)
                    store_rows(at, v, rows - 16 * (tile + i))


@inline
def _many(
    fmt: Any, isa: Any, arguments: int, first: int, last: int, blocks: int, sums: int
) -> None:
    """Tiles ``first..last``: all of them for some tokens, whose activations stay in the second
    cache, then for the next. A single tile is its own neighbour."""
    packed, out = field(arguments, Gemm.PACKED), field(arguments, Gemm.OUT)
    tokens, inputs = field(arguments, Gemm.TOKENS), field(arguments, Gemm.INPUTS)
    stride, rows = field(arguments, Gemm.OUT_STRIDE), field(arguments, Gemm.ROWS)
    tile_bytes = blocks * block_bytes(fmt)
    for t0 in range(0, tokens, MANY):
        n = min(MANY, tokens - t0)
        for tile in range(first, last, TILES):
            count = min(TILES, last - tile)
            many_products(
                fmt, isa, packed + tile * tile_bytes, (count - 1) * tile_bytes, blocks,
                inputs + 8 * t0, n, sums, TILES * tile_bytes if tile + TILES < last else 0,
            )  # fmt: skip
            for i in range(count):
                for t in range(n):
                    at = out + (t0 + t) * stride + 64 * (tile + i)
                    v = load_f32(sums + i * MANY_SUMS + 64 * t)
                    store_rows(at, v, rows - 16 * (tile + i))


@inline
def gemm(fmt: Any, isa: Any, arguments: int) -> None:
    """out[t, r] = sum over columns of W[r] * x[t]; every thread of the region runs this."""
    blocks, tokens = field(arguments, Gemm.BLOCKS), field(arguments, Gemm.TOKENS)
    if field(arguments, Gemm.RECORDS) != 0:
        quantize_all(
            fmt, field(arguments, Gemm.X), tokens * blocks, field(arguments, Gemm.RECORDS),
            arguments + 8 * Gemm.NEXT_RECORD,
        )  # fmt: skip
        wait(field(arguments, Gemm.BARRIER))
    tiles, step = (field(arguments, Gemm.ROWS) + 15) // 16, field(arguments, Gemm.TILES_PER_TASK)
    sums = room()
    first = fetch_add(arguments + 8 * Gemm.NEXT_TILE, step)
    while first < tiles:
        last = min(first + step, tiles)
        if many(fmt, isa, tokens):
            _many(fmt, isa, arguments, first, last, blocks, sums)
        else:
            _few(fmt, isa, arguments, first, last, blocks, sums)
        first = fetch_add(arguments + 8 * Gemm.NEXT_TILE, step)
