"""Activations as the kernels read them: integers with a scale, or float32 as they are.

A *record* is what one block of weights is multiplied with, in one piece:

* ``q8_32``: 32 int8, float32 scale, float32 scale times the sum of the integers, and int32 minus 8,
  16 and 128 times the sum: what weights that are stored plus such a zero start from;
* ``q8_256``: 256 int8, float32 scale, 16 int16 sums per 16, 8 int16 sums per 32 integers. Sums lie
  in the order 0, 2, 1, 3, 4, 6, 5, 7 ...: a pair of words meets what even, or odd, bytes of a
  register of scales become.

The scale is the largest magnitude / 127, the integers are rounded to nearest, as llama.cpp's
``q8_0`` and ``q8_K`` do. The scale of ``q8_32`` is then rounded to the 11 bits of a float16, as
there: 2^-12 is nothing beside the integers' own rounding, and the two then differ in the order of
sums only. It keeps
float32's range, which llama.cpp's does not. A NaN or an infinity makes the scale NaN, so that it
reaches the output.
"""

from __future__ import annotations

from typing import Any

from numba import float32

from offload.cpu_ops.formats import FORMATS, Activation, Format
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_int,
    bits_float,
    both,
    fmul,
    iadd,
    imax,
    int_splat,
    load_f32,
    max_lanes,
    nearest,
    splat,
    store_float,
    store_i8,
    store_int16,
    store_int32,
    sum_lanes,
    to_int,
)

SCALE, SUM, ZEROS_8, ZEROS_16, ZEROS_128 = 32, 36, 40, 44, 48
"""Offsets in a record of ``q8_32``; the last ones by the weights' zero."""
K_SCALE, K_SUMS16, K_SUMS32 = 256, 260, 292
"""Offsets in a record of ``q8_256``."""

_K_RECORD = 320
"""A cache line's multiple."""
_RECORD = {Activation.Q8_32: 52, Activation.Q8_256: _K_RECORD}
_INFINITY = 0x7F800000
_SMALLEST = 4e-37
"""Below it 127 / x is infinite in float32; a block that small counts as zero."""
_NAN = float("nan")


def record_bytes(fmt: Format) -> int:
    """Bytes of activations per block of weights."""
    return _RECORD.get(fmt.activation, 4 * fmt.block)


def scratch_bytes(fmt: Format, columns: int) -> int:
    """Bytes of the records of one token; 0 if the kernels read float32 directly."""
    if fmt.activation is Activation.FLOAT32:
        return 0
    return fmt.blocks(columns) * record_bytes(fmt)


@inline
def _largest(x: int, n: int) -> int:
    """The bits of the largest magnitude of n floats. As integers they compare like floats, NaN
    above everything, and unlike a float maximum this compiles to vectors without fast-math."""
    top = int_splat(0)
    for i in range(0, n, 16):
        top = imax(top, both(as_int(load_f32(x + 4 * i)), 0x7FFFFFFF))
    bits: int = max_lanes(top)
    return bits


@inline
def _scales(bits: int) -> Any:
    """(scale, its inverse) of a block whose largest magnitude has these bits."""
    top = bits_float(bits)
    if bits >= _INFINITY:
        return float32(_NAN), float32(0.0)
    if top < float32(_SMALLEST):
        return float32(0.0), float32(0.0)
    return top / float32(127.0), float32(127.0) / top


@inline
def _to_11_bits(scale: float) -> float:
    """To nearest, ties to even, of what is not negative; NaN stays NaN. In integers, because
    Veltkamp's splitting overflows for large ones."""
    bits = max_lanes(as_int(splat(scale)))
    rounded: float = bits_float((bits + 0xFFF + ((bits >> 13) & 1)) & 0x7FFFE000)
    return rounded


@inline
def _integers(x: int, inverse: Any, out: int) -> Any:
    """16 columns to int8; returns their integers."""
    q = to_int(nearest(fmul(load_f32(x), splat(inverse))))
    store_i8(out, q)
    return q


@inline
def quantize_32(x: int, out: int) -> None:
    bits = _largest(x, 32)
    scale, inverse = _scales(bits)
    if bits >= _INFINITY:  # 0 * infinity is no integer
        for i in range(0, 32, 16):
            store_i8(out + i, int_splat(0))
        total = 0
    else:
        low = _integers(x, inverse, out)
        high = _integers(x + 64, inverse, out + 16)
        total = sum_lanes(iadd(low, high))
    scale = _to_11_bits(scale)
    store_float(out + SCALE, scale)
    store_float(out + SUM, scale * float32(total))
    store_int32(out + ZEROS_8, -8 * total)
    store_int32(out + ZEROS_16, -16 * total)
    store_int32(out + ZEROS_128, -128 * total)


@inline
def _place(i: int) -> int:
    """Bytes before the sum of sub-block i: those of 1 and 2 of each four are exchanged."""
    return 2 * (i // 4 * 4 + i % 2 * 2 + i // 2 % 2)


@inline
def quantize_256(x: int, out: int) -> None:
    bits = _largest(x, 256)
    scale, inverse = _scales(bits)
    for i in range(8):
        first, second = 0, 0
        if bits >= _INFINITY:
            store_i8(out + 32 * i, int_splat(0))
            store_i8(out + 32 * i + 16, int_splat(0))
        else:
            first = sum_lanes(_integers(x + 128 * i, inverse, out + 32 * i))
            second = sum_lanes(_integers(x + 128 * i + 64, inverse, out + 32 * i + 16))
        store_int16(out + K_SUMS16 + _place(2 * i), first)
        store_int16(out + K_SUMS16 + _place(2 * i + 1), second)
        store_int16(out + K_SUMS32 + _place(i), first + second)
    store_float(out + K_SCALE, scale)


def quantize_blocks(fmt: Any, x: int, first: int, last: int, out: int) -> None:
    """Make records ``first..last`` of the floats at ``x``; only inside kernels."""
    raise NotImplementedError


def _none(fmt: Any, x: int, first: int, last: int, out: int) -> None:
    pass


def _per_32(fmt: Any, x: int, first: int, last: int, out: int) -> None:
    for i in range(first, last):
        quantize_32(x + 128 * i, out + 52 * i)


def _per_256(fmt: Any, x: int, first: int, last: int, out: int) -> None:
    for i in range(first, last):
        quantize_256(x + 1024 * i, out + _K_RECORD * i)


_QUANTIZERS = {
    Activation.FLOAT32: _none,
    Activation.Q8_32: _per_32,
    Activation.Q8_256: _per_256,
}


def _quantizer(name: str) -> Any:
    return _QUANTIZERS[FORMATS[name].activation]


by_format(quantize_blocks)(_quantizer)
