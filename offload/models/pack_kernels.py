"""Quantising at the speed of a disk: q4_0 and q8_0 rows, compiled, without the GIL.

The values are those of ``codecs.encode_rows`` to the bit; that states the formats in numpy, at a
twentieth of the speed. A row is quantised block by block while it is in the first-level cache.
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
def _largest(bits: Any) -> Any:
    """Magnitude and value, as bits, of the element of largest magnitude; the first one of two.

    Floats of one sign are ordered as their bits are, NaN behind infinity: no comparison of floats.
    """
    magnitude = np.int32(0)
    top = np.int32(-0x80000000)
    for i in range(_BLOCK):
        b = np.int32(bits[i])
        magnitude = max(magnitude, b & np.int32(0x7FFFFFFF))
        top = max(top, b)
    if top != magnitude:
        return magnitude, magnitude | np.int32(-0x80000000)
    for i in range(_BLOCK):
        b = np.int32(bits[i])
        if b & np.int32(0x7FFFFFFF) == magnitude:
            return magnitude, b
    return magnitude, magnitude


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
def _inverse(d: Any) -> Any:
    inverse = np.float32(1) / d
    return inverse if abs(inverse) < np.inf else np.float32(0)


@_jit
def _q4_0(source: Any, wide: bool, out: Any, scales: Any) -> int:
    """Nibbles of every row; returns the first row with a value that is not finite, or -1."""
    columns = source.shape[1]
    x = np.empty(columns, np.float32)
    bits = x.view(np.uint32)
    value = np.empty(1, np.int32)
    level = np.empty(_BLOCK, np.uint8)
    for row in range(source.shape[0]):
        _load(source, row, wide, bits)
        for b in range(columns // _BLOCK):
            at = b * _BLOCK
            magnitude, value[0] = _largest(bits[at : at + _BLOCK].view(np.int32))
            if magnitude >= _INFINITE:
                return row
            d = value.view(np.float32)[0] / np.float32(-8)
            inverse = _inverse(d)
            scales[row, b] = d
            for i in range(_BLOCK):
                q = x[at + i] * inverse + np.float32(8.5)
                level[i] = np.uint8(np.int32(min(max(q, np.float32(0)), np.float32(15))))
            for i in range(16):
                out[row, b * 18 + 2 + i] = level[i] | (level[i + 16] << np.uint8(4))
    return -1


@_jit
def _q8_0(source: Any, wide: bool, out: Any, scales: Any) -> int:
    columns = source.shape[1]
    x = np.empty(columns, np.float32)
    bits = x.view(np.uint32)
    value = np.empty(1, np.int32)
    for row in range(source.shape[0]):
        _load(source, row, wide, bits)
        for b in range(columns // _BLOCK):
            at = b * _BLOCK
            magnitude = np.int32(0)
            for i in range(_BLOCK):
                magnitude = max(magnitude, np.int32(bits[at + i] & np.uint32(0x7FFFFFFF)))
            if magnitude >= _INFINITE:
                return row
            value[0] = magnitude
            d = value.view(np.float32)[0] / np.float32(127)
            inverse = _inverse(d)
            scales[row, b] = d
            for i in range(_BLOCK):
                scaled = x[at + i] * inverse
                q = np.int32(abs(scaled) + np.float32(0.5))
                out[row, b * 34 + 2 + i] = np.uint8(q if scaled > 0 else -q)
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
    out.reshape(n, blocks, format.block_bytes)[:, :, :2] = halves.view(np.uint8).reshape(
        n, blocks, 2
    )
    return out
