"""Quantising at the speed of a disk: q4_0 and q8_0 rows, compiled, without the GIL.

The values are those of ``codecs.encode_rows`` to the bit (q4_0: with its search for scales); that
states the formats in numpy, at some hundredths of this module's rate. What a loop reads stays in
the first-level cache. Nothing depends on threads or instruction sets: no float is added in another
order than written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.cpu_ops import kernel_cache
from offload.cpu_ops.codecs import Q4_0_EXTREMES
from offload.cpu_ops.formats import Format
from offload.errors import CheckpointError
from offload.models.pack_source import Bytes, as_float32

_INFINITE = 0x7F800000
_SUBNORMAL = 0x38800000
"""2^-14: what is smaller is subnormal in float16."""
_TOO_LARGE = 0x47800000
"""65536, which float16 lacks."""
_BLOCK = 32
_LANES = 64
"""Blocks that are quantised to q4_0 side by side: 8 KiB of floats."""
_EXTREMES = np.array(Q4_0_EXTREMES, np.float32)

_jit = kernel_cache.kept


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
def _to_halves(raw: Any, halves: Any) -> None:
    """Nearest float16, ties to even, infinite from 65520 on; float32, as are the arguments."""
    for b in range(raw.shape[0]):
        # Subnormal ones are multiples of 2^-24, the last place of floats from 0.5 to 1.
        halves[b] = (abs(raw[b]) + np.float32(0.5)) - np.float32(0.5)
    bits, out = raw.view(np.uint32), halves.view(np.uint32)
    for b in range(raw.shape[0]):
        magnitude = bits[b] & np.uint32(0x7FFFFFFF)
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        half = (magnitude + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
        half = half if half < np.uint32(_TOO_LARGE) else np.uint32(_INFINITE)
        half = half if magnitude >= np.uint32(_SUBNORMAL) else out[b]
        out[b] = half | (bits[b] & np.uint32(0x80000000))


@_jit
def _level(x: Any, inverse: Any) -> Any:
    q = np.int32(x * inverse + np.float32(8.5))
    q = q if q < np.int32(15) else np.int32(15)
    return q if q > np.int32(0) else np.int32(0)


@_jit
def _try_scales(x: Any, d: Any, inverse: Any, error: Any, least: Any, best: Any) -> None:
    """Keep the scales ``d`` where they give a smaller squared error than the best so far.

    Blocks are columns of ``x`` [32, lanes], flat so that the compiler knows the stride: a lane of a
    register is a block, and sums need no other order to be vectors. Eight terms for each time that
    the sums are loaded and stored.
    """
    for b in range(d.shape[0]):
        inverse[b] = _inverse(d[b])
        error[b] = np.float32(0)
    for i in range(0, _BLOCK, 8):
        for b in range(d.shape[0]):
            total = error[b]
            for j in range(8):
                value = x[(i + j) * _LANES + b]
                level = np.float32(_level(value, inverse[b])) - np.float32(8)
                difference = value - d[b] * level
                total += difference * difference
            error[b] = total
    for b in range(d.shape[0]):
        better = error[b] < least[b]
        least[b] = error[b] if better else least[b]
        best[b] = d[b] if better else best[b]


@_jit
def _refit(x: Any, inverse: Any, best: Any, d: Any, above: Any, below: Any) -> None:
    """The best scales for the levels that ``best`` gives: sum(x level) / sum(level^2)."""
    for b in range(d.shape[0]):
        inverse[b] = _inverse(best[b])
        above[b] = below[b] = np.float32(0)
    for i in range(_BLOCK):
        for b in range(d.shape[0]):
            value = x[i * _LANES + b]
            level = np.float32(_level(value, inverse[b])) - np.float32(8)
            above[b] += value * level
            below[b] += level * level
    for b in range(d.shape[0]):
        d[b] = above[b] / below[b] if below[b] > np.float32(0) else best[b]


@_jit
def _nibbles(x: Any, inverse: Any, best: Any, out: Any) -> None:
    """Levels of columns 0..15 in the low, 16..31 in the high halves of a block's 16 bytes."""
    for b in range(best.shape[0]):
        inverse[b] = _inverse(best[b])
    for i in range(_BLOCK // 2):
        for b in range(best.shape[0]):
            low = _level(x[i * _LANES + b], inverse[b])
            high = _level(x[(i + 16) * _LANES + b], inverse[b])
            out[b, i + 2] = np.uint8(low | (high << np.int32(4)))


@_jit
def _q4_0(source: Any, wide: bool, out: Any, scales: Any) -> int:
    """Nibbles of every block; returns the first row with a value that is not finite, or -1.

    The search of ``codecs``, for ``_LANES`` blocks at a time, whatever the length of a row.
    """
    columns, blocks = source.shape[1], scales.size
    block = columns // scales.shape[1]
    values, packed = source.reshape(-1, block), out.reshape(blocks, -1)
    flat = scales.reshape(-1)
    patterns = np.empty(_LANES * _BLOCK, np.uint32)
    floats, signed = patterns.view(np.float32), patterns.view(np.int32)
    across = np.empty(_BLOCK * _LANES, np.float32)
    above, below = np.empty(_LANES, np.int32), np.empty(_LANES, np.int32)
    largest = above.view(np.float32)
    all_raw, all_d = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    all_inverse, all_error = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    all_least = np.empty(_LANES, np.float32)
    infinite = np.float32(np.inf)
    for first in range(0, blocks, _LANES):
        n = min(_LANES, blocks - first)
        for b in range(n):
            _load(values, first + b, wide, patterns[b * _BLOCK : (b + 1) * _BLOCK])
        if _magnitudes(signed, patterns, block, above[:n], below[:n]) >= _INFINITE:
            row: int = first * _BLOCK // columns
            return row
        for b in range(n):
            above[b] = _largest(signed, b * _BLOCK, above[b], below[b])
            for i in range(_BLOCK):
                across[i * _LANES + b] = floats[b * _BLOCK + i]
        raw, d, inverse = all_raw[:n], all_d[:n], all_inverse[:n]
        error, least, best = all_error[:n], all_least[:n], flat[first : first + n]
        for k in range(_EXTREMES.shape[0]):
            for b in range(n):
                raw[b] = largest[b] / _EXTREMES[k]
            _to_halves(raw, d)
            if k == 0:  # nothing is better than a scale that float16 lacks: it is refused
                for b in range(n):
                    best[b] = raw[b]
                    least[b] = infinite if abs(d[b]) < infinite else -infinite
            _try_scales(across, d, inverse, error, least, best)
        _refit(across, inverse, best, raw, error, d)
        _to_halves(raw, d)
        _try_scales(across, d, inverse, error, least, best)
        _nibbles(across, inverse, best, packed[first : first + n])
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
