"""The 8-bit code of optimizer moments: dynamic quantisation.

After Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization",
ICLR 2022, section 1.3 and 2.2: a code's highest set bit is its decade, the bits below it are a
linear fraction in the decade, so that small values keep a digit and large ones keep two. Signed
codes spend one bit on the sign; unsigned ones (the second moment) on the fraction.

Our construction: the magnitude code c in 1 .. 2^B - 1 with highest bit h stands for

    10^(h - B + 1) (0.1 + 0.9 (c - 2^h + 1) / 2^h),        and 0 for 0:

the codes of a decade divide it evenly and end on its upper end. So 1 is a code, of both signs,
neighbouring decades join without a gap, and encoding and decoding are arithmetic on registers
(a decade is a line: value = slope c + offset) where a table of 256 values needs gathers and a
search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import float32

from offload.cpu_ops.tags import inline
from offload.cpu_ops.vectors import (
    as_float,
    as_int,
    both,
    either,
    fadd,
    fma,
    fmul,
    iadd,
    imax,
    imul,
    int_splat,
    left,
    right,
    right_signed,
    splat,
    to_float,
)
from offload.cpu_ops.wide import imin, look_up_8, where_float_less

BLOCK = 256
"""Values that share a scale."""
SIGNED, UNSIGNED = 7, 8
"""Bits of a magnitude."""

_MAGIC = 12582912.0
"""1.5 * 2^23: added to a small float it leaves the nearest integer in the low bits. A NaN does no
harm, where a conversion to int would be undefined."""


def _lines(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(slopes, offsets) of the decades, as float32. Decade 0 is {0, 10^(1 - bits)}."""
    slopes, offsets = [np.float32(10.0 ** (1 - bits))], [np.float32(0)]
    for h in range(1, bits):
        top = 10.0 ** (h - bits + 1)
        slope = np.float32(0.9 * top / 2**h)
        slopes.append(slope)
        offsets.append(np.float32(top - float(slope) * (2 ** (h + 1) - 1)))
    return tuple(map(float, slopes)), tuple(map(float, offsets))


def _inverse(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The lines from values to codes."""
    slopes, offsets = _lines(bits)
    pairs = list(zip(slopes, offsets, strict=True))
    return tuple(1 / s for s, _ in pairs), tuple(-o / s for s, o in pairs)


def code_values(bits: int) -> npt.NDArray[np.float32]:
    """float32 [2^bits]: what each magnitude code stands for; ``bits`` is SIGNED or UNSIGNED."""
    code = np.arange(2**bits)
    decade = np.maximum(np.frexp(code.astype(np.float64))[1] - 1, 0)
    slopes, offsets = (np.array(line)[decade] for line in _lines(bits))
    return np.asarray(code * slopes + offsets, np.float32)


_slope_7, _offset_7 = (look_up_8(t) for t in _lines(SIGNED))
_slope_8, _offset_8 = (look_up_8(t) for t in _lines(UNSIGNED))
_inverse_slope_7, _inverse_offset_7 = (look_up_8(t) for t in _inverse(SIGNED))
_inverse_slope_8, _inverse_offset_8 = (look_up_8(t) for t in _inverse(UNSIGNED))


def _bounds(bits: int) -> tuple[float, ...]:
    """Where a decade ends, upon which x is in it still; the last one does not."""
    return (*(10.0 ** (h - bits + 1) for h in range(bits - 1)), 2.0)


_bound_7, _bound_8 = (look_up_8(_bounds(bits)) for bits in (SIGNED, UNSIGNED))


def device_lines() -> npt.NDArray[np.float32]:
    """float32 [2, 5, 8]: for signed and unsigned codes slopes, offsets, their inverses, and the
    bounds, by decade: what kernels for a card are given."""
    out = np.zeros((2, 5, 8), np.float32)
    for i, bits in enumerate((SIGNED, UNSIGNED)):
        for j, line in enumerate((*_lines(bits), *_inverse(bits), _bounds(bits))):
            out[i, j, : len(line)] = line
    return out


@inline
def _decade(magnitude: Any) -> Any:
    """The highest set bit of each lane's integer, a float; 0 for 0."""
    return imax(iadd(right(as_int(magnitude), 23), int_splat(-127)), int_splat(0))


@inline
def decode_signed(isa: Any, code: Any, scale: Any) -> Any:
    """Codes (one byte per lane) times the block's scale."""
    magnitude = to_float(both(code, 127))
    at = _decade(magnitude)
    value = fma(magnitude, _slope_7(isa, at), _offset_7(isa, at))
    signed = as_float(either(as_int(value), left(both(code, 128), 24)))
    return fmul(signed, scale)


@inline
def decode_unsigned(isa: Any, code: Any, scale: Any) -> Any:
    magnitude = to_float(code)
    at = _decade(magnitude)
    return fmul(fma(magnitude, _slope_8(isa, at), _offset_8(isa, at)), scale)


@inline
def _decade_of(x: Any, levels: int) -> Any:
    """How many of ``levels`` decades begin below x in 0 .. 1, or the next one: from its exponent.

    -77 / 256 is close enough to -log10(2) for floor() to be right on every power of two that
    matters; a binade then has at most one bound to compare with.
    """
    exponent = imul(right(as_int(x), 23), int_splat(77))
    return imax(
        right_signed(iadd(exponent, int_splat(256 * levels - 127 * 77 - 1)), 8), int_splat(0)
    )


@inline
def _passed(x: Any, bound: Any, at: Any) -> Any:
    return where_float_less(bound, x, iadd(at, int_splat(1)), at)


@inline
def _rounded(x: Any, slope: Any, offset: Any) -> Any:
    """The nearest code on the line, in the low bits. Just above a decade's lower end that is the
    last code of the decade below, whose value lies on both lines: no case of its own."""
    return as_int(fadd(fma(x, slope, offset), splat(float32(_MAGIC))))


@inline
def encode_signed(isa: Any, v: Any, inverse: Any) -> Any:
    """The code nearest to v times the inverse of the block's scale, a byte per lane."""
    x = fmul(v, inverse)
    size = as_float(both(as_int(x), 0x7FFFFFFF))
    at = _decade_of(size, SIGNED)
    at = _passed(size, _bound_7(isa, at), at)
    code = _rounded(size, _inverse_slope_7(isa, at), _inverse_offset_7(isa, at))
    return either(both(code, 127), both(right(as_int(x), 24), 128))


@inline
def encode_unsigned(isa: Any, v: Any, inverse: Any) -> Any:
    """As ``encode_signed``, for v >= 0; but what is more than 0 gets code 1 at least.

    A second moment that is rounded to 0 beside a first one that is not makes an update of m / eps.
    """
    x = fmul(v, inverse)
    at = _decade_of(x, UNSIGNED)
    at = _passed(x, _bound_8(isa, at), at)
    code = _rounded(x, _inverse_slope_8(isa, at), _inverse_offset_8(isa, at))
    return imax(both(code, 255), imin(as_int(x), int_splat(1)))
