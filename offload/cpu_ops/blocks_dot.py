"""One block of a packed tile times the same block of activations, per format.

Each function is ``(fmt, isa, w, x, acc) -> acc``: ``w`` is the address of 16 rows' block, ``x`` of
the activations' record (``activations.py``), ``acc`` the 16 rows' sums so far. Integer parts are
exact; per block the float operations and their order are the same on every instruction set, so
results are equal to the bit. Algebra: with weights ``d * (q - zero)`` and activations ``s * p``
the block adds ``d * s * (sum q p - zero * sum p)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from offload.cpu_ops.activations import SCALE, SUM, ZEROS_8, ZEROS_16, ZEROS_128, record_bytes
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
    load_i32,
    load_u8,
    load_u16,
    prefetch,
    right,
    splat_f32,
    splat_i32,
    to_float,
    where_less,
    widen_f16,
)

NIBBLES = 0x0F0F0F0F
MXFP4_ZERO = 16
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


# ---- 32 columns, activations per 32: what each format is


def columns(fmt: Any, isa: Any, w: int, j: int) -> Any:
    """Weights of columns 4j .. 4j + 3, unsigned bytes; only inside kernels."""
    raise NotImplementedError


def scale(fmt: Any, isa: Any, w: int) -> Any:
    """float32 scales of the rows; only inside kernels."""
    raise NotImplementedError


def zero(fmt: Any, isa: Any, x: int) -> Any:
    """What the sum of products starts at: minus the weights' zero times the sum of the
    activations' integers. Only inside kernels."""
    raise NotImplementedError


def dot(fmt: Any, isa: Any, acc: Any, v: Any, x: Any) -> Any:
    """``dot4`` or ``dot4_wide``; only inside kernels."""
    raise NotImplementedError


def minimum(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    """acc, plus the rows' minima times the sum of the activations where there are such; only
    inside kernels."""
    raise NotImplementedError


@inline
def half(isa: Any, address: int) -> Any:
    return widen_f16(isa, load_u16(address))


@inline
def _nibbles(w: int, j: int) -> Any:
    v = load_i32(w + 64 * (j & 3))
    return both(right(v, 4) if j > 3 else v, NIBBLES)


def _columns_4(at: int) -> Callable[..., Any]:
    def nibbles(fmt: Any, isa: Any, w: int, j: int) -> Any:
        return _nibbles(w + at, j)

    return nibbles


@inline
def _fifth(high: Any, c: int) -> Any:
    """Bit c of every byte, as bit 4."""
    return both(left(right(high, c), 4), 0x10101010)


def _columns_5(at: int) -> Callable[..., Any]:
    def fives(fmt: Any, isa: Any, w: int, j: int) -> Any:
        """64 bytes of fifth bits (``packing._twist``), then nibbles."""
        return either(_nibbles(w + at + 64, j), _fifth(load_i32(w + at), j))

    return fives


def _columns_8(fmt: Any, isa: Any, w: int, j: int) -> Any:
    return load_i32(w + 32 + 64 * j)


def _columns_iq4_nl(fmt: Any, isa: Any, w: int, j: int) -> Any:
    return _iq4_nl(isa, _nibbles(w + 32, j))


def _columns_mxfp4(fmt: Any, isa: Any, w: int, j: int) -> Any:
    return _mxfp4(isa, _nibbles(w + 16, j))


def _scale_half(fmt: Any, isa: Any, w: int) -> Any:
    return half(isa, w)


def _scale_mxfp4(fmt: Any, isa: Any, w: int) -> Any:
    e = load_u8(w)
    # Half of 2^(e - 127); 2^-128 and 2^-127 are subnormal.
    tiny = where_less(e, 1, int_splat(0x00200000), int_splat(0x00400000))
    return as_float(where_less(e, 2, tiny, left(iadd(e, int_splat(-1)), 23)))


def _from(field: int) -> Callable[..., Any]:
    def times(fmt: Any, isa: Any, x: int) -> Any:
        return splat_i32(x + field)

    return times


def _from_nothing(fmt: Any, isa: Any, x: int) -> Any:
    return int_splat(0)


def _from_wide(fmt: Any, isa: Any, x: int) -> Any:
    return wide_start(isa, x + ZEROS_128)


def _dot_narrow(fmt: Any, isa: Any, acc: Any, v: Any, x: Any) -> Any:
    return dot4(isa, acc, v, x)


def _dot_wide(fmt: Any, isa: Any, acc: Any, v: Any, x: Any) -> Any:
    return dot4_wide(isa, acc, v, x)


def _no_minimum(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    return acc


def _add_minimum(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    return fma(half(isa, w + 32), splat_f32(x + SUM), acc)


class _Small(NamedTuple):
    """A format of blocks of 32: see the functions of these names."""

    columns: Callable[..., Any]
    zero: Callable[..., Any]
    scale: Callable[..., Any] = _scale_half
    dot: Callable[..., Any] = _dot_narrow
    minimum: Callable[..., Any] = _no_minimum


SMALL = {
    "q4_0": _Small(_columns_4(32), _from(ZEROS_8)),
    "q4_1": _Small(_columns_4(64), _from_nothing, minimum=_add_minimum),
    "q5_0": _Small(_columns_5(32), _from(ZEROS_16)),
    "q5_1": _Small(_columns_5(64), _from_nothing, minimum=_add_minimum),
    "q8_0": _Small(_columns_8, _from_wide, dot=_dot_wide),
    "iq4_nl": _Small(_columns_iq4_nl, _from_wide, dot=_dot_wide),
    "mxfp4": _Small(_columns_mxfp4, _from(ZEROS_16), _scale_mxfp4),
}

by_format(columns)(lambda name: SMALL[name].columns)
by_format(scale)(lambda name: SMALL[name].scale)
by_format(zero)(lambda name: SMALL[name].zero)
by_format(dot)(lambda name: SMALL[name].dot)
by_format(minimum)(lambda name: SMALL[name].minimum)


# ---- 32 columns: one block


@inline
def _add(fmt: Any, isa: Any, w: int, d: Any, total: Any, x: int, acc: Any) -> Any:
    """acc + d * scale of x * total"""
    acc = fma(to_float(total), fmul(d, splat_f32(x + SCALE)), acc)
    return minimum(fmt, isa, w, x, acc)


def small(fmt: Any, isa: Any, w: int, x: int, acc: Any) -> Any:
    """For one token: two chains of products, and each is half as long to wait for."""
    low, high = zero(fmt, isa, x), int_splat(0)
    for j in range(4):
        low = dot(fmt, isa, low, columns(fmt, isa, w, j), splat_i32(x + 4 * j))
        high = dot(fmt, isa, high, columns(fmt, isa, w, 4 + j), splat_i32(x + 16 + 4 * j))
    return _add(fmt, isa, w, scale(fmt, isa, w), iadd(low, high), x, acc)


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
    **{f.__name__: f for f in (f32, f16, bf16)},
    **dict.fromkeys(SMALL, small),
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
