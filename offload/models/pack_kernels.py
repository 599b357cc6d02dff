"""Quantising at the speed of a disk: q4_0 and q8_0 rows, compiled, without the GIL.

The values are those of ``codecs.encode_rows`` to the bit; that states the formats in numpy, at
0.14 G weights/s of a core where this does 1.6 (q4_0) and 3.9 (q8_0). A row is quantised in a few
passes while it is in the first-level cache.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.cpu_ops.formats import Format
from offload.errors import CheckpointError
from offload.models.pack_source import Bytes, as_float32

_INFINITE = 0x7F800000
_BLOCK = 32

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_jit
def _load(source: Any, row: int, wide: bool, bits: Any) -> None:
    """One row as the bits of float32."""
    if wide:
        for i in range(bits.shape[0]):
            bits[i] = source[row, i]
    else:
        for i in range(bits.shape[0]):
            bits[i] = np.uint32(source[row, i]) << np.uint32(16)


@_jit
def _magnitudes(signed: Any, unsigned: Any, block: int, above: Any, below: Any) -> Any:
    """Of each block of a row, as bits: the largest value, and the magnitude of the smallest.

    Returns the largest magnitude of all. The row comes as int32 and as uint32: floats of one sign
    are ordered as their bits are, NaN behind infinity; as signed numbers the positive ones are
    the largest, as unsigned the negative ones. So nothing is compared as a float.

    ``block`` is 32, but not for the compiler: a loop of constant length is unrolled before it
    could be vectorised. Nor is one that does not start at 0: 1 instead of 11 G elements/s, both.
    """
    largest = np.int32(0)
    for b in range(above.shape[0]):
        high, low, at = np.int32(0), np.uint32(0), b * block
        for i in range(block):
            value, pattern = signed[at + i], unsigned[at + i]
            high = value if value > high else high
            low = pattern if pattern > low else low
        magnitude = np.int32(low & np.uint32(0x7FFFFFFF))
        above[b] = high
        below[b] = magnitude if low >= np.uint32(0x80000000) else np.int32(0)
        largest = max(largest, max(high, magnitude))
    return largest


@_jit
def _largest(bits: Any, start: int, high: Any, low: Any) -> Any:
    """The element of largest magnitude of a block, as bits; the first one of two."""
    if high == low:
        for i in range(start, start + _BLOCK):
            if np.int32(bits[i] & np.int32(0x7FFFFFFF)) == high:
                return bits[i]
    return high if high > low else np.int32(low | np.int32(-0x80000000))


@_jit
def _put_scales(halves: Any, out: Any, block_bytes: int) -> None:
    """16-bit scales, little-endian, in front of their blocks."""
    for row in range(halves.shape[0]):
        for b in range(halves.shape[1]):
            half = halves[row, b]
            out[row, b * block_bytes] = np.uint8(half & np.uint16(255))
            out[row, b * block_bytes + 1] = np.uint8(half >> np.uint16(8))


@_jit
def _inverse(d: Any) -> Any:
    inverse = np.float32(1) / d
    return inverse if abs(inverse) < np.inf else np.float32(0)


@_jit
def _levels(x: Any, inverse: Any, level: Any) -> None:
    """The levels of a row in q4_0: from 0.5 - eps to 16.5 + eps, so only the upper end is cut."""
    for b in range(inverse.shape[0]):
        by, at = inverse[b], b * _BLOCK
        for i in range(_BLOCK):
            q = np.int32(x[at + i] * by + np.float32(8.5))
            level[at + i] = np.uint8(q if q < 15 else np.int32(15))


@_jit
def _nibbles(level: Any, out: Any, row: int) -> None:
    for b in range(level.shape[0] // _BLOCK):
        at, to = b * _BLOCK, b * 18 + 2
        for i in range(_BLOCK // 2):
            out[row, to + i] = level[at + i] | np.uint8(level[at + 16 + i] << np.uint8(4))


@_jit
def _q4_0(source: Any, wide: bool, out: Any, scales: Any) -> int:
    """Nibbles of every row; returns the first row with a value that is not finite, or -1."""
    columns, blocks = source.shape[1], scales.shape[1]
    x = np.empty(columns, np.float32)
    level = np.empty(columns, np.uint8)
    inverse = np.empty(blocks, np.float32)
    above, below = np.empty(blocks, np.int32), np.empty(blocks, np.int32)
    unsigned, signed, largest = x.view(np.uint32), x.view(np.int32), above.view(np.float32)
    for row in range(source.shape[0]):
        _load(source, row, wide, unsigned)
        if _magnitudes(signed, unsigned, columns // blocks, above, below) >= _INFINITE:
            return row
        for b in range(blocks):
            above[b] = _largest(signed, b * _BLOCK, above[b], below[b])
            scales[row, b] = largest[b] / np.float32(-8)
            inverse[b] = _inverse(scales[row, b])
        _levels(x, inverse, level)
        _nibbles(level, out, row)
    return -1


@_jit
def _integers(x: Any, inverse: Any, out: Any, row: int) -> None:
    """A row in q8_0: rounded, halves away from zero."""
    for b in range(inverse.shape[0]):
        by, at, to = inverse[b], b * _BLOCK, b * 34 + 2
        for i in range(_BLOCK):
            scaled = x[at + i] * by
            q = np.int32(abs(scaled) + np.float32(0.5))
            out[row, to + i] = np.uint8(q if scaled > 0 else -q)


@_jit
def _q8_0(source: Any, wide: bool, out: Any, scales: Any) -> int:
    """Integers of every row; returns as ``_q4_0`` does."""
    columns, blocks = source.shape[1], scales.shape[1]
    x = np.empty(columns, np.float32)
    inverse = np.empty(blocks, np.float32)
    above, below = np.empty(blocks, np.int32), np.empty(blocks, np.int32)
    unsigned, signed, largest = x.view(np.uint32), x.view(np.int32), above.view(np.float32)
    for row in range(source.shape[0]):
        _load(source, row, wide, unsigned)
        if _magnitudes(signed, unsigned, columns // blocks, above, below) >= _INFINITE:
            return row
        for b in range(blocks):
            above[b] = max(above[b], below[b])
            scales[row, b] = largest[b] / np.float32(127)
            inverse[b] = _inverse(scales[row, b])
        _integers(x, inverse, out, row)
    return -1


_KERNELS = {"q4_0": _q4_0, "q8_0": _q8_0}


def encode(format: Format, source_format: str, rows: Bytes, name: str) -> Bytes:
    """GGUF rows of ``format`` (q4_0 or q8_0) from float rows.

    Args:
        rows: ``uint8 [n, row_bytes]`` in ``source_format``: bf16, f16 or f32.
        name: the tensor's, for messages.

    Raises:
        CheckpointError: a weight is NaN or infinite, or too large for a float16 scale.
    """
    wide = source_format != "bf16"
    source = as_float32(source_format, rows).view(np.uint32) if wide else rows.view(np.uint16)
    n, columns = source.shape
    blocks = format.blocks(columns)
    out: Bytes = np.empty((n, format.row_bytes(columns)), np.uint8)
    scales = np.empty((n, blocks), np.float32)
    bad = _KERNELS[format.name](source, wide, out, scales)
    if bad >= 0:
        raise CheckpointError(
            f"{name} has NaN or infinite weights; the checkpoint is damaged: fetch it again"
        )
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        raise CheckpointError(
            f"{name} has weights up to {np.abs(scales).max():.3g} x the levels of {format.name}, "
            "beyond the 65504 of a float16 scale; pack with --quant none"
        )
    _put_scales(halves.view(np.uint16), out, format.block_bytes)
    return out
