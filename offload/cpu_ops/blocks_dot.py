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

from offload.cpu_ops.activations import SCALE, SUM, record_bytes
from offload.cpu_ops.byte_vectors import dot4, dot4_wide, look_up, wide_start
from offload.cpu_ops.codecs import IQ4_NL_VALUES, MXFP4_VALUES
from offload.cpu_ops.formats import FORMATS, TILE_ROWS
from offload.cpu_ops.k_blocks_dot import k_block, k_block_four, q6_k, q6_k_four
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    either,
    fma,
    fmul,
    iadd,
    int_splat,
    left,
    load_f32,
    load_float,
    load_i32,
    load_int32,
    load_u8,
    load_u16,
    prefetch,
    right,
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


# ---- the table


def block_dot(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    """Of formats with small blocks; only inside kernels."""
    raise NotImplementedError


def block_dot_asking(fmt: Any, isa: Any, w: int, x: int, acc: Any, then: int) -> Any:
    """Of every format; asks for a later block, at ``then``. Only inside kernels."""
    raise NotImplementedError


def block_dot_four(fmt: Any, isa: Any, w: int, x: Any, acc: Any) -> Any:
    """Of every format, for four tokens: ``x`` and ``acc`` are tuples. Only inside kernels."""
    raise NotImplementedError


def block_bytes(fmt: Any) -> int:
    """Bytes of a block of 16 rows; only inside kernels."""
    raise NotImplementedError


def record_stride(fmt: Any) -> int:
    """Bytes of activations that a block is multiplied with; only inside kernels."""
    raise NotImplementedError


_DOTS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4)
}


def _each(fmt: Any, isa: Any, w: int, x: Any, acc: Any) -> Any:
    """LLVM loads and unpacks the weights only once."""
    return (
        block_dot(fmt, isa, w, x[0], acc[0]),
        block_dot(fmt, isa, w, x[1], acc[1]),
        block_dot(fmt, isa, w, x[2], acc[2]),
        block_dot(fmt, isa, w, x[3], acc[3]),
    )


LARGE: dict[str, Callable[..., Any]] = {"q4_k": k_block, "q5_k": k_block, "q6_k": q6_k}


def _asking(fmt: Any, isa: Any, w: int, x: int, acc: Any, then: int) -> Any:
    for i in range((block_bytes(fmt) + 63) // 64):
        prefetch(then + 64 * i)
    return block_dot(fmt, isa, w, x, acc)


def _asker(name: str) -> Callable[..., Any]:
    return LARGE.get(name, _asking)


_FOURS: dict[str, Callable[..., Any]] = {
    "q4_k": k_block_four, "q5_k": k_block_four, "q6_k": q6_k_four,
}  # fmt: skip


def _four(name: str) -> Callable[..., Any]:
    return _FOURS.get(name, _each)


def _constant(value: int) -> Callable[[Any], int]:
    return lambda fmt: value


by_format(block_dot)(_DOTS.__getitem__)
by_format(block_dot_asking)(_asker)
by_format(block_dot_four)(_four)
by_format(block_bytes)(lambda name: _constant(TILE_ROWS * FORMATS[name].block_bytes))
by_format(record_stride)(lambda name: _constant(record_bytes(FORMATS[name])))
