"""One block of 256 columns of a packed tile times the same block of activations: K-quants.

For one token ``(fmt, isa, w, x, acc, then) -> acc``, where ``then`` is an address that the next
block but a few will be read from: its lines are asked for between the products. For four tokens
``(fmt, isa, w, x, acc) -> acc`` with tuples for ``x`` and ``acc``: unpacking takes about as long as
two tokens' products, so four share it. Both add the same integers, which are exact in any order,
and then do the same float operations.

``c``, ``part``, ``i`` and ``j`` are constants where they are passed: shifts by constants are one
instruction, and LLVM does not unroll a loop around so much. A fence before every pair of sub-blocks
keeps it from loading, and then spilling, what later ones need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import float32

from offload.cpu_ops.activations import K_SCALE, K_SUMS16, K_SUMS32
from offload.cpu_ops.byte_vectors import dot2, dot4
from offload.cpu_ops.formats import FORMATS, TILE_ROWS
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    both,
    either,
    even_bytes,
    fence,
    fma,
    fmul,
    iadd,
    imul,
    int_splat,
    left,
    load_i32,
    load_u16,
    odd_bytes,
    prefetch,
    right,
    right_signed,
    splat,
    splat_f32,
    splat_i32,
    to_float,
    widen_f16,
)

NIBBLES = 0x0F0F0F0F
EVEN_BYTES = 0x00FF00FF


@inline
def _ask(address: int, lines: int) -> None:
    for i in range(lines):
        prefetch(address + 64 * i)


@inline
def _half(isa: Any, address: int) -> Any:
    return widen_f16(isa, load_u16(address))


@inline
def _zeros() -> Any:
    return (int_splat(0), int_splat(0), int_splat(0), int_splat(0))


@inline
def _dots(isa: Any, acc: Any, v: Any, x: Any, at: int) -> Any:
    """The dot products of four tokens' bytes at ``x[i] + at``."""
    return (
        dot4(isa, acc[0], v, splat_i32(x[0] + at)),
        dot4(isa, acc[1], v, splat_i32(x[1] + at)),
        dot4(isa, acc[2], v, splat_i32(x[2] + at)),
        dot4(isa, acc[3], v, splat_i32(x[3] + at)),
    )


@inline
def _pairs(isa: Any, acc: Any, v: Any, x: Any, at: int) -> Any:
    """As ``_dots``, of two words."""
    return (
        dot2(isa, acc[0], v, splat_i32(x[0] + at)),
        dot2(isa, acc[1], v, splat_i32(x[1] + at)),
        dot2(isa, acc[2], v, splat_i32(x[2] + at)),
        dot2(isa, acc[3], v, splat_i32(x[3] + at)),
    )


@inline
def _scaled(total: Any, dots: Any, scale: Any) -> Any:
    return iadd(total, imul(dots, scale))


@inline
def _scaled_four(total: Any, dots: Any, scale: Any) -> Any:
    return (
        _scaled(total[0], dots[0], scale),
        _scaled(total[1], dots[1], scale),
        _scaled(total[2], dots[2], scale),
        _scaled(total[3], dots[3], scale),
    )


# ---- q4_k, q5_k: eight sub-blocks of 32 columns, each with a scale and a minimum


@inline
def _byte(v: Any, i: int) -> Any:
    return both(right(v, 8 * i), 255)


@inline
def k_low(w: int) -> Any:
    """Scales (or, one register on, minima) of sub-blocks 0..3, a byte each."""
    return both(load_i32(w), 0x3F3F3F3F)


@inline
def k_high(w: int, rest: Any) -> Any:
    """Of sub-blocks 4..7: four bits in ``rest``, two above those of 0..3."""
    return either(both(rest, NIBBLES), both(right(load_i32(w), 2), 0x30303030))


def k_words(fmt: Any, w: int, c: int, j: int) -> Any:
    """Word j of sub-blocks 2c and 2c + 1, as bytes; only inside kernels."""
    raise NotImplementedError


def _q4_k_words(fmt: Any, w: int, c: int, j: int) -> Any:
    v = load_i32(w + 256 + 512 * c + 64 * j)
    return both(v, NIBBLES), both(right(v, 4), NIBBLES)


def quarter_bytes(fmt: Any) -> int:
    """Of a block of 16 rows; only inside kernels."""
    raise NotImplementedError


def _quarter(name: str) -> Callable[[Any], int]:
    nbytes = TILE_ROWS * FORMATS[name].block_bytes // 4
    return lambda fmt: nbytes


by_format(quarter_bytes)(_quarter)


@inline
def _fifth(high: Any, c: int) -> Any:
    """Bit c of every byte, as bit 4."""
    return both(left(right(high, c), 4), 0x10101010)


def _q5_k_words(fmt: Any, w: int, c: int, j: int) -> Any:
    v, bits = load_i32(w + 768 + 512 * c + 64 * j), load_i32(w + 256 + 64 * j)
    even = either(both(v, NIBBLES), _fifth(bits, 2 * c))
    return even, either(both(right(v, 4), NIBBLES), _fifth(bits, 2 * c + 1))


by_format(k_words)({"q4_k": _q4_k_words, "q5_k": _q5_k_words}.__getitem__)


@inline
def _k_pair(fmt: Any, isa: Any, total: Any, scales: Any, c: int, w: int, x: int, then: int) -> Any:
    """Sub-blocks 2c and 2c + 1, whose scales are two bytes of ``scales``."""
    fence()
    _ask(then + quarter_bytes(fmt) * c, quarter_bytes(fmt) // 64)
    low, high = int_splat(0), int_splat(0)
    for j in range(8):
        even, odd = k_words(fmt, w, c, j)
        low = dot4(isa, low, even, splat_i32(x + 64 * c + 4 * j))
        high = dot4(isa, high, odd, splat_i32(x + 64 * c + 4 * j + 32))
    total = _scaled(total, low, _byte(scales, c % 2 * 2))
    return _scaled(total, high, _byte(scales, c % 2 * 2 + 1))


@inline
def _k_pair_four(fmt: Any, isa: Any, total: Any, scales: Any, c: int, w: int, x: Any) -> Any:
    fence()
    low, high = _zeros(), _zeros()
    for j in range(8):
        fence()
        even, odd = k_words(fmt, w, c, j)
        low = _dots(isa, low, even, x, 64 * c + 4 * j)
        high = _dots(isa, high, odd, x, 64 * c + 4 * j + 32)
    total = _scaled_four(total, low, _byte(scales, c % 2 * 2))
    return _scaled_four(total, high, _byte(scales, c % 2 * 2 + 1))


@inline
def _k_add(d: Any, dmin: Any, x: int, scaled: Any, minima: Any, acc: Any) -> Any:
    """acc + s * (d * scaled - dmin * minima)"""
    s = splat_f32(x + K_SCALE)
    acc = fma(to_float(scaled), fmul(d, s), acc)
    minus = fmul(splat(float32(-1.0)), to_float(minima))
    return fma(minus, fmul(dmin, s), acc)


def k_block(fmt: Any, isa: Any, w: int, x: int, acc: Any, then: int) -> Any:
    rest = load_i32(w + 192)
    scales, more = k_low(w + 64), k_high(w + 64, rest)
    total = _k_pair(fmt, isa, int_splat(0), scales, 0, w, x, then)
    total = _k_pair(fmt, isa, total, scales, 1, w, x, then)
    total = _k_pair(fmt, isa, total, more, 2, w, x, then)
    total = _k_pair(fmt, isa, total, more, 3, w, x, then)
    low, high, at = k_low(w + 128), k_high(w + 128, right(rest, 4)), x + K_SUMS32
    minima = dot2(isa, int_splat(0), both(low, EVEN_BYTES), splat_i32(at))
    minima = dot2(isa, minima, both(right(low, 8), EVEN_BYTES), splat_i32(at + 4))
    minima = dot2(isa, minima, both(high, EVEN_BYTES), splat_i32(at + 8))
    minima = dot2(isa, minima, both(right(high, 8), EVEN_BYTES), splat_i32(at + 12))
    return _k_add(_half(isa, w), _half(isa, w + 32), x, total, minima, acc)


def k_block_four(fmt: Any, isa: Any, w: int, x: Any, acc: Any) -> Any:
    rest = load_i32(w + 192)
    scales, more = k_low(w + 64), k_high(w + 64, rest)
    total = _k_pair_four(fmt, isa, _zeros(), scales, 0, w, x)
    total = _k_pair_four(fmt, isa, total, scales, 1, w, x)
    total = _k_pair_four(fmt, isa, total, more, 2, w, x)
    total = _k_pair_four(fmt, isa, total, more, 3, w, x)
    low, high = k_low(w + 128), k_high(w + 128, right(rest, 4))
    minima = _pairs(isa, _zeros(), both(low, EVEN_BYTES), x, K_SUMS32)
    minima = _pairs(isa, minima, both(right(low, 8), EVEN_BYTES), x, K_SUMS32 + 4)
    minima = _pairs(isa, minima, both(high, EVEN_BYTES), x, K_SUMS32 + 8)
    minima = _pairs(isa, minima, both(right(high, 8), EVEN_BYTES), x, K_SUMS32 + 12)
    d, dmin = _half(isa, w), _half(isa, w + 32)
    return (
        _k_add(d, dmin, x[0], total[0], minima[0], acc[0]),
        _k_add(d, dmin, x[1], total[1], minima[1], acc[1]),
        _k_add(d, dmin, x[2], total[2], minima[2], acc[2]),
        _k_add(d, dmin, x[3], total[3], minima[3], acc[3]),
    )


# ---- q6_k: sixteen sub-blocks of 16 columns with signed scales, weights stored plus 32
#
# A block is d, four registers of scales and two halves of 128 columns; a half is eight registers of
# upper bits, then sixteen of nibbles, those of a quarter of the half in the low halves of their
# bytes, of the quarter two further in the high ones.


@inline
def signed_byte(v: Any, i: int) -> Any:
    return right_signed(left(v, 24 - 8 * i), 24)


@inline
def six_words(high: int, part: int, j: int) -> Any:
    """Word j of the two sub-blocks of ``part``, 0..3, of the half at ``high``: in quarter
    ``part >> 1`` and in the one two further, the half ``part & 1``."""
    shift = part >> 1 << 1
    v, up = load_i32(high + 512 + 64 * (4 * part + j)), load_i32(high + 64 * (4 * (part & 1) + j))
    even = both(left(right(up, shift), 4), 0x30303030)
    odd = both(left(right(up, shift + 4), 4), 0x30303030)
    return either(both(v, NIBBLES), even), either(both(right(v, 4), NIBBLES), odd)


@inline
def _six_scales(scales: int, part: int) -> Any:
    return signed_byte(load_i32(scales), part), signed_byte(load_i32(scales + 64), part)


@inline
def _q6_k_pair(isa: Any, total: Any, part: int, scales: int, high: int, x: int, then: int) -> Any:
    fence()
    _ask(then + 448 * part, 7)
    low_dot, high_dot = int_splat(0), int_splat(0)
    for j in range(4):
        even, odd = six_words(high, part, j)
        low_dot = dot4(isa, low_dot, even, splat_i32(x + 16 * part + 4 * j))
        high_dot = dot4(isa, high_dot, odd, splat_i32(x + 16 * part + 4 * j + 64))
    first, second = _six_scales(scales, part)
    return _scaled(_scaled(total, low_dot, first), high_dot, second)


@inline
def _q6_k_pair_four(
    isa: Any, total: Any, part: int, scales: int, high: int, x: Any, at: int
) -> Any:
    fence()
    low_dot, high_dot = _zeros(), _zeros()
    for j in range(4):
        even, odd = six_words(high, part, j)
        low_dot = _dots(isa, low_dot, even, x, at + 16 * part + 4 * j)
        high_dot = _dots(isa, high_dot, odd, x, at + 16 * part + 4 * j + 64)
    first, second = _six_scales(scales, part)
    return _scaled_four(_scaled_four(total, low_dot, first), high_dot, second)


@inline
def _q6_k_add(d: Any, x: int, total: Any, sums: Any, acc: Any) -> Any:
    """acc + d * s * (total - 32 * sums of x, scaled)"""
    total = iadd(total, imul(sums, int_splat(-32)))
    return fma(to_float(total), fmul(d, splat_f32(x + K_SCALE)), acc)


def q6_k(fmt: Any, isa: Any, w: int, x: int, acc: Any, then: int) -> Any:
    total = int_splat(0)
    for half in range(2):
        scales, high, at = w + 32 + 128 * half, w + 288 + 1536 * half, x + 128 * half
        total = _q6_k_pair(isa, total, 0, scales, high, at, then)
        total = _q6_k_pair(isa, total, 1, scales, high, at, then)
        total = _q6_k_pair(isa, total, 2, scales, high, at, then)
        total = _q6_k_pair(isa, total, 3, scales, high, at, then)
        then += 1680
    sums = int_splat(0)
    for i in range(4):
        signed, at = load_i32(w + 32 + 64 * i), x + K_SUMS16 + 8 * i
        sums = dot2(isa, sums, even_bytes(signed), splat_i32(at))
        sums = dot2(isa, sums, odd_bytes(signed), splat_i32(at + 4))
    return _q6_k_add(_half(isa, w), x, total, sums, acc)


def q6_k_four(fmt: Any, isa: Any, w: int, x: Any, acc: Any) -> Any:
    total = _zeros()
    for half in range(2):
        scales, high, at = w + 32 + 128 * half, w + 288 + 1536 * half, 128 * half
        total = _q6_k_pair_four(isa, total, 0, scales, high, x, at)
        total = _q6_k_pair_four(isa, total, 1, scales, high, x, at)
        total = _q6_k_pair_four(isa, total, 2, scales, high, x, at)
        total = _q6_k_pair_four(isa, total, 3, scales, high, x, at)
    sums = _zeros()
    for i in range(4):
        signed = load_i32(w + 32 + 64 * i)
        sums = _pairs(isa, sums, even_bytes(signed), x, K_SUMS16 + 8 * i)
        sums = _pairs(isa, sums, odd_bytes(signed), x, K_SUMS16 + 8 * i + 4)
    d = _half(isa, w)
    return (
        _q6_k_add(d, x[0], total[0], sums[0], acc[0]),
        _q6_k_add(d, x[1], total[1], sums[1], acc[1]),
        _q6_k_add(d, x[2], total[2], sums[2], acc[2]),
        _q6_k_add(d, x[3], total[3], sums[3], acc[3]),
    )
