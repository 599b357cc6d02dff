"""Full blocks of keys and values to 8 or 4 bits, in one region over heads and parts.

    G key heads, T tokens of a block, D head size

The arithmetic is that of ``block_layout.quantise``, operation for operation, so the bits are the
same. Prefill quantises every token once: numpy, which goes over the block about fifteen times,
took longer than attention to it.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import float32

from offload.cpu_ops import threads
from offload.cpu_ops.block_layout import BlockKind, BlockLayout
from offload.cpu_ops.block_vectors import (
    fmin,
    max_floats,
    min_floats,
    store_nibble_pairs,
    store_pairs,
    store_words,
)
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.lanes import fmax, fsub, store_bf16
from offload.cpu_ops.tags import by_format, inline, tag
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import (
    as_float,
    as_int,
    at_least,
    at_most,
    both,
    either,
    fdiv,
    fetch_add,
    fmul,
    iadd,
    int_splat,
    lane,
    left,
    load_f32,
    nearest,
    splat,
    stack,
    store_float,
    store_i8,
    to_int,
    where_less,
)
from offload.cpu_ops.wide import load_bf16
from offload.errors import OffloadError

Array = npt.NDArray[Any]


class Quantise(enum.IntEnum):
    """Places in the argument array; the counter on a cache line of its own."""

    BARRIER = 0
    KEYS = 1
    """[G, T, Dk] in the source's dtype."""
    VALUES = 2
    TO_KEYS = 3
    """[G, parts] records."""
    TO_VALUES = 4
    HEADS = 5
    PARTS = 6
    SPAN = 7
    """Tokens of a part."""
    KEY_DIM = 8
    DIM = 9
    NEXT = 16
    SIZE = 24


_scale_room = stack(3 * 64)
_tile_room = stack(256)


def load_source(source: Any, at: int) -> Any:
    """16 elements as float32; only inside kernels."""
    raise NotImplementedError


def source_bytes(source: Any) -> int:
    """Of an element; only inside kernels."""
    raise NotImplementedError


def top_of(kind: Any) -> int:
    """The largest integer; only inside kernels."""
    raise NotImplementedError


def code_bytes(kind: Any, dim: int) -> int:
    """Of a token's integers; only inside kernels."""
    raise NotImplementedError


_SOURCES = {"f32": lambda source, at: load_f32(at), "bf16": lambda source, at: load_bf16(at)}
_WIDTHS = {"f32": lambda source: 4, "bf16": lambda source: 2}
_TOPS = {"q8": lambda kind: 255, "q4": lambda kind: 15}
_CODES = {"q8": lambda kind, dim: dim, "q4": lambda kind, dim: dim // 2}
by_format(load_source)(_SOURCES.__getitem__)
by_format(source_bytes)(_WIDTHS.__getitem__)
by_format(top_of)(_TOPS.__getitem__)
by_format(code_bytes)(_CODES.__getitem__)


@inline
def _cut(bits: Any) -> Any:
    return as_float(both(bits, -65536))


@inline
def _down(x: Any) -> Any:
    """The next bfloat16 that is no larger."""
    bits = as_int(x)
    return _cut(where_less(bits, 1, iadd(bits, int_splat(0xFFFF)), bits))


@inline
def _up(x: Any) -> Any:
    bits = as_int(x)
    return _cut(where_less(bits, 1, bits, iadd(bits, int_splat(0xFFFF))))


@inline
def _step(kind: Any, low: Any, high: Any) -> Any:
    return _up(fdiv(fsub(high, low), splat(float32(top_of(kind)))))


@inline
def _inverse(step: Any) -> Any:
    """1 / step, or 0."""
    found = as_int(fdiv(splat(float32(1.0)), step))
    return as_float(where_less(as_int(step), 1, int_splat(0), found))


@inline
def _code(kind: Any, x: Any, low: Any, inverse: Any) -> Any:
    x = nearest(fmul(fsub(x, low), inverse))
    return to_int(at_least(at_most(x, float32(top_of(kind))), float32(0.0)))


def store_values(kind: Any, at: int, c: int, codes: Any, before: Any) -> None:
    """16 channels from ``c`` on of two tokens at ``at``, words of a byte of each; ``before``: the
    16 channels before them. Only inside kernels."""
    raise NotImplementedError


def _store_bytes(kind: Any, at: int, c: int, codes: Any, before: Any) -> None:
    store_words(at + 2 * c, codes)


def _store_nibbles(kind: Any, at: int, c: int, codes: Any, before: Any) -> None:
    if c % 32:
        store_words(at + c - 16, either(before, left(codes, 4)))


def store_keys(kind: Any, tile: int, to: int) -> None:
    """16 channels, a byte each, of 16 tokens as ``block_layout.pack_keys`` has them; only inside
    kernels."""
    raise NotImplementedError


_STORE_KEYS = {
    "q8": lambda kind, tile, to: store_pairs(tile, to),
    "q4": lambda kind, tile, to: store_nibble_pairs(tile, to),
}
by_format(store_keys)(_STORE_KEYS.__getitem__)
by_format(store_values)({"q8": _store_bytes, "q4": _store_nibbles}.__getitem__)


@inline
def _keys(kind: Any, source: Any, x: int, to: int, span: int, dim: int) -> None:
    """One pair of step and low per channel, 16 tokens at a time."""
    row, codes, room = source_bytes(source) * dim, to + 4 * dim, _tile_room()
    for c in range(0, dim, 16):
        at = x + source_bytes(source) * c
        low = load_source(source, at)
        high = low
        for t in range(1, span):
            v = load_source(source, at + t * row)
            low, high = fmin(v, low), fmax(v, high)
        low = _down(low)
        step = _step(kind, low, high)
        store_bf16(to + 2 * c, step)
        store_bf16(to + 2 * (dim + c), low)
        inverse = _inverse(step)
        for t in range(0, span, 16):
            for i in range(16):
                v = load_source(source, at + (t + i) * row)
                store_i8(room + 16 * i, _code(kind, v, low, inverse))
            store_keys(kind, room, codes + t * code_bytes(kind, dim) + 16 * code_bytes(kind, c))


@inline
def _values(kind: Any, source: Any, x: int, to: int, span: int, dim: int) -> None:
    """One pair per token, 16 tokens at a time."""
    row, codes, room = source_bytes(source) * dim, to + 4 * span, _scale_room()
    for first in range(0, span, 16):
        for i in range(16):
            at = x + (first + i) * row
            low = load_source(source, at)
            high = low
            for c in range(16, dim, 16):
                v = load_source(source, at + source_bytes(source) * c)
                low, high = fmin(v, low), fmax(v, high)
            store_float(room + 4 * i, min_floats(low))
            store_float(room + 64 + 4 * i, max_floats(high))
        lows = _down(load_f32(room))
        steps = _step(kind, lows, load_f32(room + 64))
        store_bf16(to + 2 * first, steps)
        store_bf16(to + 2 * (span + first), lows)
        inverses = _inverse(steps)
        for i in range(0, 16, 2):
            at, out = x + (first + i) * row, codes + (first + i) * code_bytes(kind, dim)
            low, inverse = splat(lane(lows, i)), splat(lane(inverses, i))
            next_low, next_inverse = splat(lane(lows, i + 1)), splat(lane(inverses, i + 1))
            before = int_splat(0)
            for c in range(0, dim, 16):
                here = at + source_bytes(source) * c
                code = _code(kind, load_source(source, here), low, inverse)
                after = _code(kind, load_source(source, here + row), next_low, next_inverse)
                code = either(code, left(after, 8))
                store_values(kind, out, c, code, before)
                before = code


@inline
def quantise_part(kind: Any, source: Any, a: int) -> None:
    """Every thread of the region runs this; a task is a part of a head's keys or values."""
    heads, parts, span = field(a, Quantise.HEADS), field(a, Quantise.PARTS), field(a, Quantise.SPAN)
    key_dim, dim, width = field(a, Quantise.KEY_DIM), field(a, Quantise.DIM), source_bytes(source)
    key_record = 4 * key_dim + span * code_bytes(kind, key_dim)
    value_record = 4 * span + span * code_bytes(kind, dim)
    count = heads * parts
    task = fetch_add(a + 8 * Quantise.NEXT, 1)
    while task < 2 * count:
        if task < count:
            x = field(a, Quantise.KEYS) + task * span * key_dim * width
            _keys(kind, source, x, field(a, Quantise.TO_KEYS) + task * key_record, span, key_dim)
        else:
            i = task - count
            x = field(a, Quantise.VALUES) + i * span * dim * width
            _values(kind, source, x, field(a, Quantise.TO_VALUES) + i * value_record, span, dim)
        task = fetch_add(a + 8 * Quantise.NEXT, 1)


@functools.cache
def quantise_kernel(kind_name: str, source_name: str) -> Kernel:
    """``kind_name``: "q8" or "q4"; ``source_name``: "f32" or "bf16"."""
    kind, source = tag("kv", kind_name), tag("number", source_name)

    def quantise_body(arguments: int) -> None:
        quantise_part(kind, source, arguments)

    return Kernel(quantise_body, f"quantising {source_name} blocks to {kind_name}", 1.0)


@functools.cache
def quantise_entry(kind_name: str, source_name: str) -> Entry:
    return quantise_kernel(kind_name, source_name).entry()


def quantise_block(
    layout: BlockLayout, keys: Array, values: Array, block: npt.NDArray[np.uint8]
) -> None:
    """Write a full block of a quantised ``layout`` from keys [G, T, Dk] and values [G, T, Dv], both
    float32 or the bits of bfloat16 as uint16, contiguous.

    Raises:
        OffloadError: shapes or dtypes are not the layout's.
    """
    wanted = [(layout.key_heads, layout.tokens, d) for d in (layout.key_dim, layout.dim)]
    whole = keys.flags.c_contiguous and values.flags.c_contiguous and block.flags.c_contiguous
    if (
        layout.kind not in (BlockKind.Q8, BlockKind.Q4)
        or [keys.shape, values.shape] != wanted
        or keys.dtype != values.dtype
        or keys.dtype not in (np.float32, np.uint16)
        or not whole
        or block.nbytes != layout.nbytes
    ):
        raise OffloadError(
            f"keys {keys.dtype} {list(keys.shape)} and values {values.dtype} {list(values.shape)} "
            f"must be contiguous {[list(w) for w in wanted]} in float32, or bfloat16 as uint16, to "
            f"be quantised to {block.nbytes} of {layout.nbytes} bytes in {layout.kind.value}"
        )
    a = np.zeros(Quantise.SIZE, np.int64)
    a[Quantise.KEYS], a[Quantise.VALUES] = address_of(keys), address_of(values)
    a[Quantise.TO_KEYS] = address_of(block)
    a[Quantise.TO_VALUES] = address_of(block) + layout.values_at
    a[Quantise.HEADS], a[Quantise.PARTS] = layout.key_heads, layout.parts
    a[Quantise.SPAN], a[Quantise.KEY_DIM], a[Quantise.DIM] = layout.span, layout.key_dim, layout.dim
    entry = quantise_entry(layout.kind.value, "f32" if keys.dtype == np.float32 else "bf16")
    threads.run(entry.call, entry.address, a)
