"""Compiled parts of prefill: dequantising tiles, the gated activation, and the weighted sum.

Products between them are torch's or ``gemm``'s. As elsewhere in this package a kernel takes one
array of int64, its threads take tasks from a counter, and no value depends on which thread made it.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

from offload.cpu_ops.entries import Entry, Kernel, compile_seconds
from offload.cpu_ops.formats import TILE_ROWS, get_format
from offload.cpu_ops.functions import glu
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.prefill_blocks import kind_bytes, step_bytes, step_columns, write_block
from offload.cpu_ops.prefill_vectors import rounding
from offload.cpu_ops.tags import inline, tag
from offload.cpu_ops.tiles import field, load_rows, store_rows
from offload.cpu_ops.vectors import (
    bits_float,
    fadd,
    fetch_add,
    fma,
    load_f32,
    load_float,
    load_int,
    splat,
    stack,
    store_f32,
)

_tail = stack(4 * 32 * TILE_ROWS)


class Tiles(enum.IntEnum):
    """Arguments of ``dequantize_tiles``."""

    BARRIER = 0
    PACKED = 1
    """Address of the first tile."""
    TILES = 2
    COLUMNS = 3
    TILE_BYTES = 4
    OUT = 5
    STRIDE = 6
    """Bytes from one row to the next."""
    NEXT = 8
    SIZE = 16


@inline
def dequantize_tiles(fmt: Any, kind: Any, how: Any, isa: Any, a: int) -> None:
    """16 rows per tile, padding rows included; columns up to the next multiple of 32 are 0."""
    tiles, columns, stride = (
        field(a, Tiles.TILES), field(a, Tiles.COLUMNS), field(a, Tiles.STRIDE)
    )  # fmt: skip
    steps, rest = columns // step_columns(fmt), columns % step_columns(fmt)
    tile = fetch_add(a + 8 * Tiles.NEXT, 1)
    while tile < tiles:
        w = field(a, Tiles.PACKED) + tile * field(a, Tiles.TILE_BYTES)
        out = field(a, Tiles.OUT) + TILE_ROWS * tile * stride
        for _ in range(steps):
            write_block(fmt, kind, how, isa, w, out, stride)
            w += step_bytes(fmt)
            out += step_columns(fmt) * kind_bytes(kind)
        if rest:  # of float weights: in blocks of their own a row has no such end
            words, at = rest * (step_bytes(fmt) // 64) // step_columns(fmt), _tail()
            for i in range(step_bytes(fmt) // 64):
                v = load_f32(w + 64 * i) if i < words else splat(0.0)
                store_f32(at + 64 * i, v)
            write_block(fmt, kind, how, isa, at, out, stride)
        tile = fetch_add(a + 8 * Tiles.NEXT, 1)


class Gate(enum.IntEnum):
    """Arguments of ``activate``: gate and up of some tokens."""

    BARRIER = 0
    GATE = 1
    UP = 2
    STRIDE = 3
    """Bytes from one token to the next in both."""
    GATE_BIAS = 4
    """Address of float32 biases, 0: none."""
    UP_BIAS = 5
    COLUMNS = 6
    OUT = 7
    OUT_STRIDE = 8
    TOKENS = 9
    GLU = 10
    ALPHA = 11
    """Bits of a float32."""
    LIMIT = 12
    NEXT = 16
    SIZE = 24


@inline
def _plus(v: Any, bias: int, column: int, n: int) -> Any:
    if bias != 0:
        v = fadd(v, load_rows(bias + 4 * column, n))
    return v


@inline
def activate(a: int) -> None:
    """glu(gate + bias, up + bias) of float32; whole registers are read and written, so rows must be
    padded to multiples of 16."""
    alpha, limit = bits_float(field(a, Gate.ALPHA)), bits_float(field(a, Gate.LIMIT))
    columns = field(a, Gate.COLUMNS)
    token = fetch_add(a + 8 * Gate.NEXT, 1)
    while token < field(a, Gate.TOKENS):
        at = token * field(a, Gate.STRIDE)
        out = field(a, Gate.OUT) + token * field(a, Gate.OUT_STRIDE)
        for c in range(0, columns, 16):
            g = load_f32(field(a, Gate.GATE) + at + 4 * c)
            u = load_f32(field(a, Gate.UP) + at + 4 * c)
            g = _plus(g, field(a, Gate.GATE_BIAS), c, columns - c)
            u = _plus(u, field(a, Gate.UP_BIAS), c, columns - c)
            h = glu(field(a, Gate.GLU), g, u, alpha, limit)
            store_f32(out + 4 * c, h)
        token = fetch_add(a + 8 * Gate.NEXT, 1)


class Sum(enum.IntEnum):
    """Arguments of ``accumulate``."""

    BARRIER = 0
    VALUES = 1
    STRIDE = 2
    COLUMNS = 3
    TOKENS = 4
    """int64 [n]: the rows of ``out``, distinct."""
    WEIGHTS = 5
    """float32 [n]"""
    COUNT = 6
    OUT = 7
    OUT_STRIDE = 8
    NEXT = 16
    SIZE = 24


@inline
def accumulate(a: int) -> None:
    """out[tokens[i]] = fma(weights[i], values[i], out[tokens[i]]) of float32, as ``ffn._down``
    adds; whole registers of values are read."""
    columns = field(a, Sum.COLUMNS)
    i = fetch_add(a + 8 * Sum.NEXT, 1)
    while i < field(a, Sum.COUNT):
        at = field(a, Sum.VALUES) + i * field(a, Sum.STRIDE)
        token = load_int(field(a, Sum.TOKENS) + 8 * i)
        out = field(a, Sum.OUT) + token * field(a, Sum.OUT_STRIDE)
        weight = splat(load_float(field(a, Sum.WEIGHTS) + 4 * i))
        for c in range(0, columns, 16):
            v = load_f32(at + 4 * c)
            v = fma(weight, v, load_rows(out + 4 * c, columns - c))
            store_rows(out + 4 * c, v, columns - c)
        i = fetch_add(a + 8 * Sum.NEXT, 1)


@functools.cache
def dequantize_kernel(format_name: str, kind_name: str, isa: Isa) -> Kernel:
    """``dequantize_tiles`` of a format to "bf16" or "f32"."""
    fmt, kind = tag("format", get_format(format_name).name), tag("kind", kind_name)
    how, instructions = tag("rounding", rounding(isa)), tag("isa", isa.value)

    def dequantize_body(arguments: int) -> None:
        dequantize_tiles(fmt, kind, how, instructions, arguments)

    what = f"dequantising {format_name} for {isa.value}"
    return Kernel(dequantize_body, what, compile_seconds(2.0, format_name))


@functools.cache
def dequantize_entry(format_name: str, kind_name: str, isa: Isa) -> Entry:
    return dequantize_kernel(format_name, kind_name, isa).entry()


@functools.cache
def activate_kernel() -> Kernel:
    """``activate``."""

    def activate_body(arguments: int) -> None:
        activate(arguments)

    return Kernel(activate_body, "gated activation", 0.4)


@functools.cache
def activate_entry() -> Entry:
    return activate_kernel().entry()


@functools.cache
def accumulate_kernel() -> Kernel:
    """``accumulate``."""

    def accumulate_body(arguments: int) -> None:
        accumulate(arguments)

    return Kernel(accumulate_body, "weighted sum", 0.3)


@functools.cache
def accumulate_entry() -> Entry:
    return accumulate_kernel().entry()
