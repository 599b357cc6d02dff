"""One block of a packed tile times the same block of activations, per format.

Each function is ``(fmt, isa, w, x, acc) -> acc``: ``w`` is the address of 16 rows' block, ``x`` of
the activations' record (``activations.py``), ``acc`` the 16 rows' sums so far. Integer parts are
exact; per block the float operations and their order are the same on every instruction set, so
results are equal to the bit. Algebra: with weights ``d * (q - zero)`` and activations ``s * p``
the block adds ``d * s * (sum q p - zero * sum p)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import float32

from offload.cpu_ops.activations import (
    K_SCALE,
    K_SUMS16,
    K_SUMS32,
    SCALE,
    SUM,
    record_bytes,
)
from offload.cpu_ops.byte_vectors import dot4, dot4_wide, look_up, wide_start
from offload.cpu_ops.codecs import IQ4_NL_VALUES, MXFP4_VALUES
from offload.cpu_ops.formats import FORMATS, TILE_ROWS
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    either,
    fence,
    fma,
    fmul,
    iadd,
    imul,
    int_splat,
    left,
    load_f32,
    load_float,
    load_i32,
    load_int32,
    load_u8,
    load_u16,
    right,
    right_signed,
    splat,
    splat_f32,
    splat_i32,
    to_float,
    where_less,
    widen_f16,
)

NIBBLES = 0x0F0F0F0F
MXFP4_ZERO = 12
_mxfp4 = look_up(tuple(v + MXFP4_ZERO for v in MXFP4_VALUES))
_iq4_nl = look_up(tuple(v + 128 for v in IQ4_NL_VALUES))


# ---- float weights: exact products in float32 with one rounding each, columns in order


def f32(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    return fma(load_f32(w), splat_f32(x), acc)


def bf16(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    # Not vdpbf16ps: it would round the activations to bfloat16, flush subnormals, and buys
    # nothing while memory is the limit.
    pair = load_i32(w)
    acc = fma(as_float(left(pair, 16)), splat_f32(x), acc)
    return fma(as_float(both(pair, 0xFFFF0000)), splat_f32(x + 4), acc)


def f16(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    pair = load_i32(w)
    acc = fma(widen_f16(isa, pair), splat_f32(x), acc)
    return fma(widen_f16(isa, right(pair, 16)), splat_f32(x + 4), acc)


# ---- 32 columns, activations per 32


@inline
def _half(isa: Any, address: int) -> Any:
    return widen_f16(isa, load_u16(address))


@inline
def _add(isa: Any, d: Any, dot: Any, x: int, acc: Any) -> Any:
    """acc + d * scale of x * dot"""
    return fma(to_float(dot), fmul(d, splat_f32(x + SCALE)), acc)


@inline
def _add_minimum(m: Any, x: int, acc: Any) -> Any:
    """acc + m * the sum of the activations"""
    total = load_float(x + SCALE) * float32(load_int32(x + SUM))
    return fma(m, splat(total), acc)


@inline
def _dot_nibbles(isa: Any, w: int, x: int, start: Any) -> Any:
    low, high = start, int_splat(0)
    for j in range(4):
        v = load_i32(w + 64 * j)
        low = dot4(isa, low, both(v, NIBBLES), splat_i32(x + 4 * j))
        high = dot4(isa, high, both(right(v, 4), NIBBLES), splat_i32(x + 16 + 4 * j))
    return iadd(low, high)


def q4_0(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    start = int_splat(-8 * load_int32(x + SUM))
    return _add(isa, _half(isa, w), _dot_nibbles(isa, w + 32, x, start), x, acc)


def q4_1(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    acc = _add(isa, _half(isa, w), _dot_nibbles(isa, w + 64, x, int_splat(0)), x, acc)
    return _add_minimum(_half(isa, w + 32), x, acc)


@inline
def _fifth(high: Any, c: int) -> Any:
    """Bit c of every byte, as bit 4."""
    return both(left(right(high, c), 4), 0x10101010)


@inline
def _dot_fives(isa: Any, w: int, x: int, start: Any) -> Any:
    """64 bytes of fifth bits (``packing._twist``), then nibbles."""
    fifths = load_i32(w)
    low, high = start, int_splat(0)
    for j in range(4):
        v = load_i32(w + 64 + 64 * j)
        even = either(both(v, NIBBLES), _fifth(fifths, j))
        odd = either(both(right(v, 4), NIBBLES), _fifth(fifths, 4 + j))
        low = dot4(isa, low, even, splat_i32(x + 4 * j))
        high = dot4(isa, high, odd, splat_i32(x + 16 + 4 * j))
    return iadd(low, high)


def q5_0(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    start = int_splat(-16 * load_int32(x + SUM))
    return _add(isa, _half(isa, w), _dot_fives(isa, w + 32, x, start), x, acc)


def q5_1(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    acc = _add(isa, _half(isa, w), _dot_fives(isa, w + 64, x, int_splat(0)), x, acc)
    return _add_minimum(_half(isa, w + 32), x, acc)


def q8_0(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    low, high = wide_start(isa, load_int32(x + SUM)), int_splat(0)
    for j in range(4):
        low = dot4_wide(isa, low, load_i32(w + 32 + 64 * j), splat_i32(x + 4 * j))
        high = dot4_wide(isa, high, load_i32(w + 288 + 64 * j), splat_i32(x + 16 + 4 * j))
    return _add(isa, _half(isa, w), iadd(low, high), x, acc)


def iq4_nl(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    low, high = wide_start(isa, load_int32(x + SUM)), int_splat(0)
    for j in range(4):
        v = load_i32(w + 32 + 64 * j)
        low = dot4_wide(isa, low, _iq4_nl(isa, both(v, NIBBLES)), splat_i32(x + 4 * j))
        v = _iq4_nl(isa, both(right(v, 4), NIBBLES))
        high = dot4_wide(isa, high, v, splat_i32(x + 16 + 4 * j))
    return _add(isa, _half(isa, w), iadd(low, high), x, acc)


def mxfp4(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    low, high = int_splat(-MXFP4_ZERO * load_int32(x + SUM)), int_splat(0)
    for j in range(4):
        v = load_i32(w + 16 + 64 * j)
        low = dot4(isa, low, _mxfp4(isa, both(v, NIBBLES)), splat_i32(x + 4 * j))
        v = _mxfp4(isa, both(right(v, 4), NIBBLES))
        high = dot4(isa, high, v, splat_i32(x + 16 + 4 * j))
    e = load_u8(w)
    # Half of 2^(e - 127); 2^-128 and 2^-127 are subnormal.
    tiny = where_less(e, 1, int_splat(0x00200000), int_splat(0x00400000))
    d = as_float(where_less(e, 2, tiny, left(iadd(e, int_splat(-1)), 23)))
    return _add(isa, d, iadd(low, high), x, acc)


# ---- 256 columns, activations per 256


@inline
def _byte(v: Any, i: int) -> Any:
    return both(right(v, 8 * i), 255)


@inline
def _k_low(w: int) -> Any:
    """Scales (or, one register on, minima) of sub-blocks 0..3, a byte each."""
    return both(load_i32(w), 0x3F3F3F3F)


@inline
def _k_high(w: int, rest: Any) -> Any:
    """Of sub-blocks 4..7: four bits in ``rest``, two above those of 0..3."""
    return either(both(rest, NIBBLES), both(right(load_i32(w), 2), 0x30303030))


@inline
def _k_minima(total: Any, minima: Any, x: int) -> Any:
    for i in range(4):
        total = iadd(total, imul(_byte(minima, i), splat_i32(x + K_SUMS32 + 4 * i)))
    return total


@inline
def _k_add(isa: Any, w: int, x: int, scaled: Any, acc: Any) -> Any:
    """acc + s * (d * scaled - dmin * sum of minima * sums of x)"""
    minima = _k_minima(int_splat(0), _k_low(w + 128), x)
    rest = right(load_i32(w + 192), 4)
    minima = _k_minima(minima, _k_high(w + 128, rest), x + 16)
    s = splat_f32(x + K_SCALE)
    acc = fma(to_float(scaled), fmul(_half(isa, w), s), acc)
    minus = fmul(splat(float32(-1.0)), to_float(minima))
    return fma(minus, fmul(_half(isa, w + 32), s), acc)


@inline
def _q4_k_pair(isa: Any, total: Any, scales: Any, c: int, w: int, x: int) -> Any:
    """Two sub-blocks: eight registers of nibbles at ``w``, scales in bytes 2c and 2c + 1.

    ``c`` is a constant where this is called, here and below: shifts by constants are one
    instruction, and LLVM does not unroll a loop around so much.
    """
    fence()
    low, high = int_splat(0), int_splat(0)
    for j in range(8):
        v = load_i32(w + 64 * j)
        low = dot4(isa, low, both(v, NIBBLES), splat_i32(x + 4 * j))
        high = dot4(isa, high, both(right(v, 4), NIBBLES), splat_i32(x + 4 * j + 32))
    total = iadd(total, imul(low, _byte(scales, 2 * c)))
    return iadd(total, imul(high, _byte(scales, 2 * c + 1)))


def q4_k(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    scales, more = _k_low(w + 64), _k_high(w + 64, load_i32(w + 192))
    total = _q4_k_pair(isa, int_splat(0), scales, 0, w + 256, x)
    total = _q4_k_pair(isa, total, scales, 1, w + 768, x + 64)
    total = _q4_k_pair(isa, total, more, 0, w + 1280, x + 128)
    total = _q4_k_pair(isa, total, more, 1, w + 1792, x + 192)
    return _k_add(isa, w, x, total, acc)


@inline
def _q5_k_pair(
    isa: Any, total: Any, scales: Any, c: int, w: int, fifths: int, bit: int, x: int
) -> Any:
    """As ``_q4_k_pair``; bits ``bit`` and ``bit + 1`` of the bytes at ``fifths`` belong to it."""
    fence()
    low, high = int_splat(0), int_splat(0)
    for j in range(8):
        v, bits = load_i32(w + 64 * j), load_i32(fifths + 64 * j)
        even = either(both(v, NIBBLES), _fifth(bits, bit))
        odd = either(both(right(v, 4), NIBBLES), _fifth(bits, bit + 1))
        low = dot4(isa, low, even, splat_i32(x + 4 * j))
        high = dot4(isa, high, odd, splat_i32(x + 4 * j + 32))
    total = iadd(total, imul(low, _byte(scales, 2 * c)))
    return iadd(total, imul(high, _byte(scales, 2 * c + 1)))


def q5_k(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    scales, more = _k_low(w + 64), _k_high(w + 64, load_i32(w + 192))
    fifths = w + 256
    total = _q5_k_pair(isa, int_splat(0), scales, 0, w + 768, fifths, 0, x)
    total = _q5_k_pair(isa, total, scales, 1, w + 1280, fifths, 2, x + 64)
    total = _q5_k_pair(isa, total, more, 0, w + 1792, fifths, 4, x + 128)
    total = _q5_k_pair(isa, total, more, 1, w + 2304, fifths, 6, x + 192)
    return _k_add(isa, w, x, total, acc)


@inline
def _signed_byte(v: Any, i: int) -> Any:
    return right_signed(left(v, 24 - 8 * i), 24)


@inline
def _q6_k_pair(isa: Any, total: Any, part: int, scales: int, high: int, x: int, sums: int) -> Any:
    """Two sub-blocks of 16 of a half's 128 columns: quarter ``part >> 1`` and the one two further,
    in each the half ``part & 1``; ``part``, 0..3, is a constant.

    ``scales``: two registers of signed bytes; ``high``: eight registers of upper bits, then
    sixteen of nibbles, a quarter's in the low halves, of the one two further in the high ones.
    """
    fence()
    quarter, h = part >> 1, part & 1
    first, second = 2 * quarter + h, 2 * quarter + h + 4
    low_dot = int_splat(-32 * load_int32(sums + 4 * first))
    high_dot = int_splat(-32 * load_int32(sums + 4 * second))
    for j in range(4):
        v, up = load_i32(high + 512 + 64 * (4 * part + j)), load_i32(high + 64 * (4 * h + j))
        low_up = left(both(right(up, 2 * quarter), 0x03030303), 4)
        high_up = left(both(right(up, 2 * quarter + 4), 0x03030303), 4)
        even, odd = either(both(v, NIBBLES), low_up), either(both(right(v, 4), NIBBLES), high_up)
        low_dot = dot4(isa, low_dot, even, splat_i32(x + 16 * first + 4 * j))
        high_dot = dot4(isa, high_dot, odd, splat_i32(x + 16 * second + 4 * j))
    total = iadd(total, imul(low_dot, _signed_byte(load_i32(scales), first)))
    return iadd(total, imul(high_dot, _signed_byte(load_i32(scales + 64), first)))


@inline
def _q6_k_half(isa: Any, total: Any, scales: int, high: int, x: int, sums: int) -> Any:
    """128 columns."""
    total = _q6_k_pair(isa, total, 0, scales, high, x, sums)
    total = _q6_k_pair(isa, total, 1, scales, high, x, sums)
    total = _q6_k_pair(isa, total, 2, scales, high, x, sums)
    return _q6_k_pair(isa, total, 3, scales, high, x, sums)


def q6_k(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    total = _q6_k_half(isa, int_splat(0), w + 32, w + 288, x, x + K_SUMS16)
    total = _q6_k_half(isa, total, w + 160, w + 1824, x + 128, x + K_SUMS16 + 32)
    return fma(to_float(total), fmul(_half(isa, w), splat_f32(x + K_SCALE)), acc)


# ---- the table


def block_dot(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    """The function of the format; only inside kernels."""
    raise NotImplementedError


def block_bytes(fmt: Any) -> int:
    """Bytes of a block of 16 rows; only inside kernels."""
    raise NotImplementedError


def record_stride(fmt: Any) -> int:
    """Bytes of activations that a block is multiplied with; only inside kernels."""
    raise NotImplementedError


_DOTS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q4_k, q5_k, q6_k)
}


def _constant(value: int) -> Callable[[Any], int]:
    return lambda fmt: value


by_format(block_dot)(_DOTS.__getitem__)
by_format(block_bytes)(lambda name: _constant(TILE_ROWS * FORMATS[name].block_bytes))
by_format(record_stride)(lambda name: _constant(record_bytes(FORMATS[name])))
