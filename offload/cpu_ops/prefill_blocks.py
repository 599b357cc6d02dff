"""Packed blocks of 16 rows to their values, row by row in memory: every format.

Each function is ``(fmt, kind, how, isa, w, out, stride)``: the blocks at ``w`` become 16 rows of
``step_columns`` values at ``out``, ``stride`` bytes apart. ``kind`` is what is written, "bf16" or
"f32"; ``how``: ``prefill_vectors.rounding``. A value is one fused multiply-add of a byte, a scale
and an offset, arranged so that products are exact in float32 and only what the reference rounds
is rounded: float32 output equals ``codecs.decode_rows`` (but for the sign of zeros).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import float32

from offload.cpu_ops.byte_vectors import look_up
from offload.cpu_ops.codecs import IQ4_NL_VALUES, MXFP4_VALUES
from offload.cpu_ops.formats import FORMATS, TILE_ROWS
from offload.cpu_ops.prefill_vectors import bf16_pair, store_transposed
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_float,
    as_int,
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
    right,
    right_signed,
    splat,
    to_float,
    where_less,
    widen_f16,
)

GROUP_COLUMNS = 32
"""Columns written at once: a cache line of bfloat16 in each of 16 rows."""

_NIBBLES = 0x0F0F0F0F
_TABLE_ZERO = 128
_MXFP4_ZERO = 12
_mxfp4 = look_up(tuple(v + _MXFP4_ZERO for v in MXFP4_VALUES))
_iq4_nl = look_up(tuple(v + _TABLE_ZERO for v in IQ4_NL_VALUES))


# ---- what is written


@inline
def _value(v: Any, i: int, d: Any, m: Any) -> Any:
    """d * byte i of v + m; ``i`` is a constant wherever this is called."""
    return fma(to_float(both(right(v, 8 * i), 255)), d, m)


@inline
def _word(v: Any, i: int, d: Any, m: Any) -> Any:
    return as_int(_value(v, i, d, m))


@inline
def _two(how: Any, v: Any, i: int, d: Any, m: Any) -> Any:
    return bf16_pair(how, _value(v, i, d, m), _value(v, i + 1, d, m))


def store_bytes(
    kind: Any, how: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any,
    d0: Any, m0: Any, d1: Any, m1: Any, out: int, stride: int,
) -> None:  # fmt: skip
    """32 columns in the bytes of eight registers; the first 16 are ``d0 * byte + m0``, the others
    ``d1 * byte + m1``. Only inside kernels."""
    raise NotImplementedError


def _store_bytes_bf16(
    kind: Any, how: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any,
    d0: Any, m0: Any, d1: Any, m1: Any, out: int, stride: int,
) -> None:  # fmt: skip
    store_transposed(
        out, stride,
        _two(how, a, 0, d0, m0), _two(how, a, 2, d0, m0),
        _two(how, b, 0, d0, m0), _two(how, b, 2, d0, m0),
        _two(how, c, 0, d0, m0), _two(how, c, 2, d0, m0),
        _two(how, d, 0, d0, m0), _two(how, d, 2, d0, m0),
        _two(how, e, 0, d1, m1), _two(how, e, 2, d1, m1),
        _two(how, f, 0, d1, m1), _two(how, f, 2, d1, m1),
        _two(how, g, 0, d1, m1), _two(how, g, 2, d1, m1),
        _two(how, h, 0, d1, m1), _two(how, h, 2, d1, m1),
    )  # fmt: skip


@inline
def _store_words(a: Any, b: Any, c: Any, d: Any, s: Any, m: Any, out: int, stride: int) -> None:
    """16 columns of float32."""
    store_transposed(
        out, stride,
        _word(a, 0, s, m), _word(a, 1, s, m), _word(a, 2, s, m), _word(a, 3, s, m),
        _word(b, 0, s, m), _word(b, 1, s, m), _word(b, 2, s, m), _word(b, 3, s, m),
        _word(c, 0, s, m), _word(c, 1, s, m), _word(c, 2, s, m), _word(c, 3, s, m),
        _word(d, 0, s, m), _word(d, 1, s, m), _word(d, 2, s, m), _word(d, 3, s, m),
    )  # fmt: skip


def _store_bytes_f32(
    kind: Any, how: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any,
    d0: Any, m0: Any, d1: Any, m1: Any, out: int, stride: int,
) -> None:  # fmt: skip
    _store_words(a, b, c, d, d0, m0, out, stride)
    _store_words(e, f, g, h, d1, m1, out + 64, stride)


by_format(store_bytes)({"bf16": _store_bytes_bf16, "f32": _store_bytes_f32}.__getitem__)


# ---- float weights: a register is a column of float32, or a pair of columns of 16 bits


def column(fmt: Any, isa: Any, w: int, i: int) -> Any:
    """float32 of column ``i``, a constant; only inside kernels."""
    raise NotImplementedError


def _column_f32(fmt: Any, isa: Any, w: int, i: int) -> Any:
    return load_f32(w + 64 * i)


def _column_f16(fmt: Any, isa: Any, w: int, i: int) -> Any:
    return widen_f16(isa, right(load_i32(w + 64 * (i >> 1)), 16 * (i & 1)))


def _column_bf16(fmt: Any, isa: Any, w: int, i: int) -> Any:
    word = load_i32(w + 64 * (i >> 1))
    return as_float(left(right(word, 16 * (i & 1)), 16))


by_format(column)({"f32": _column_f32, "f16": _column_f16, "bf16": _column_bf16}.__getitem__)


@inline
def _columns_two(fmt: Any, how: Any, isa: Any, w: int, i: int) -> Any:
    return bf16_pair(how, column(fmt, isa, w, 2 * i), column(fmt, isa, w, 2 * i + 1))


@inline
def _columns_word(fmt: Any, isa: Any, w: int, i: int) -> Any:
    return as_int(column(fmt, isa, w, i))


def store_columns(kind: Any, fmt: Any, how: Any, isa: Any, w: int, out: int, s: int) -> None:
    """32 columns of float weights; only inside kernels."""
    raise NotImplementedError


def _store_columns_bf16(kind: Any, fmt: Any, how: Any, isa: Any, w: int, out: int, s: int) -> None:
    store_transposed(
        out, s,
        _columns_two(fmt, how, isa, w, 0), _columns_two(fmt, how, isa, w, 1),
        _columns_two(fmt, how, isa, w, 2), _columns_two(fmt, how, isa, w, 3),
        _columns_two(fmt, how, isa, w, 4), _columns_two(fmt, how, isa, w, 5),
        _columns_two(fmt, how, isa, w, 6), _columns_two(fmt, how, isa, w, 7),
        _columns_two(fmt, how, isa, w, 8), _columns_two(fmt, how, isa, w, 9),
        _columns_two(fmt, how, isa, w, 10), _columns_two(fmt, how, isa, w, 11),
        _columns_two(fmt, how, isa, w, 12), _columns_two(fmt, how, isa, w, 13),
        _columns_two(fmt, how, isa, w, 14), _columns_two(fmt, how, isa, w, 15),
    )  # fmt: skip


def _store_columns_f32(kind: Any, fmt: Any, how: Any, isa: Any, w: int, out: int, s: int) -> None:
    for half in range(2):
        at, from_ = out + 64 * half, w + half * (step_bytes(fmt) // 2)
        store_transposed(
            at, s,
            _columns_word(fmt, isa, from_, 0), _columns_word(fmt, isa, from_, 1),
            _columns_word(fmt, isa, from_, 2), _columns_word(fmt, isa, from_, 3),
            _columns_word(fmt, isa, from_, 4), _columns_word(fmt, isa, from_, 5),
            _columns_word(fmt, isa, from_, 6), _columns_word(fmt, isa, from_, 7),
            _columns_word(fmt, isa, from_, 8), _columns_word(fmt, isa, from_, 9),
            _columns_word(fmt, isa, from_, 10), _columns_word(fmt, isa, from_, 11),
            _columns_word(fmt, isa, from_, 12), _columns_word(fmt, isa, from_, 13),
            _columns_word(fmt, isa, from_, 14), _columns_word(fmt, isa, from_, 15),
        )  # fmt: skip


by_format(store_columns)({"bf16": _store_columns_bf16, "f32": _store_columns_f32}.__getitem__)


def _floats(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    store_columns(kind, fmt, how, isa, w, out, stride)


# ---- blocks of 32 columns


@inline
def _half(isa: Any, address: int) -> Any:
    return widen_f16(isa, load_u16(address))


@inline
def _low(w: int, j: int) -> Any:
    return both(load_i32(w + 64 * j), _NIBBLES)


@inline
def _high(w: int, j: int) -> Any:
    return both(right(load_i32(w + 64 * j), 4), _NIBBLES)


@inline
def _nibbles(kind: Any, how: Any, w: int, d: Any, m: Any, out: int, stride: int) -> None:
    store_bytes(
        kind, how, _low(w, 0), _low(w, 1), _low(w, 2), _low(w, 3),
        _high(w, 0), _high(w, 1), _high(w, 2), _high(w, 3), d, m, d, m, out, stride,
    )  # fmt: skip


@inline
def _times(d: Any, factor: Any) -> Any:
    return fmul(d, splat(float32(factor)))


def q4_0(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    d = _half(isa, w)
    _nibbles(kind, how, w + 32, d, _times(d, -8.0), out, stride)


def q4_1(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    _nibbles(kind, how, w + 64, _half(isa, w), _half(isa, w + 32), out, stride)


@inline
def _bit(bits: Any, c: int) -> Any:
    """Bit c of every byte, as bit 4."""
    return both(left(right(bits, c), 4), 0x10101010)


@inline
def _fives(kind: Any, how: Any, w: int, d: Any, m: Any, out: int, stride: int) -> None:
    """64 bytes of fifth bits (``packing._twist``), then nibbles."""
    up, q = load_i32(w), w + 64
    store_bytes(
        kind, how,
        either(_low(q, 0), _bit(up, 0)), either(_low(q, 1), _bit(up, 1)),
        either(_low(q, 2), _bit(up, 2)), either(_low(q, 3), _bit(up, 3)),
        either(_high(q, 0), _bit(up, 4)), either(_high(q, 1), _bit(up, 5)),
        either(_high(q, 2), _bit(up, 6)), either(_high(q, 3), _bit(up, 7)),
        d, m, d, m, out, stride,
    )  # fmt: skip


def q5_0(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    d = _half(isa, w)
    _fives(kind, how, w + 32, d, _times(d, -16.0), out, stride)


def q5_1(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    _fives(kind, how, w + 64, _half(isa, w), _half(isa, w + 32), out, stride)


def q8_0(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    d, q = _half(isa, w), w + 32
    m = _times(d, -128.0)
    store_bytes(
        kind, how, load_i32(q), load_i32(q + 64), load_i32(q + 128), load_i32(q + 192),
        load_i32(q + 256), load_i32(q + 320), load_i32(q + 384), load_i32(q + 448),
        d, m, d, m, out, stride,
    )  # fmt: skip


def iq4_nl(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    d, q = _half(isa, w), w + 32
    m = _times(d, -_TABLE_ZERO)
    store_bytes(
        kind, how,
        _iq4_nl(isa, _low(q, 0)), _iq4_nl(isa, _low(q, 1)),
        _iq4_nl(isa, _low(q, 2)), _iq4_nl(isa, _low(q, 3)),
        _iq4_nl(isa, _high(q, 0)), _iq4_nl(isa, _high(q, 1)),
        _iq4_nl(isa, _high(q, 2)), _iq4_nl(isa, _high(q, 3)), d, m, d, m, out, stride,
    )  # fmt: skip


def mxfp4(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    e, q = load_u8(w), w + 16
    # Half of 2^(e - 127); 2^-128 and 2^-127 are subnormal.
    tiny = where_less(e, 1, int_splat(0x00200000), int_splat(0x00400000))
    d = as_float(where_less(e, 2, tiny, left(iadd(e, int_splat(-1)), 23)))
    m = _times(d, -_MXFP4_ZERO)
    store_bytes(
        kind, how,
        _mxfp4(isa, _low(q, 0)), _mxfp4(isa, _low(q, 1)),
        _mxfp4(isa, _low(q, 2)), _mxfp4(isa, _low(q, 3)),
        _mxfp4(isa, _high(q, 0)), _mxfp4(isa, _high(q, 1)),
        _mxfp4(isa, _high(q, 2)), _mxfp4(isa, _high(q, 3)), d, m, d, m, out, stride,
    )  # fmt: skip


# ---- blocks of 256 columns


@inline
def _scaled(d: Any, v: Any, i: int) -> Any:
    return fmul(d, to_float(both(right(v, 8 * i), 255)))


@inline
def _k_low(w: int) -> Any:
    """Scales (or, one register on, minima) of sub-blocks 0..3, a byte each."""
    return both(load_i32(w), 0x3F3F3F3F)


@inline
def _k_high(w: int, rest: Any) -> Any:
    """Of sub-blocks 4..7: four bits in ``rest``, two above those of 0..3."""
    return either(both(rest, _NIBBLES), both(right(load_i32(w), 2), 0x30303030))


@inline
def _k_scale(w: int, c: int) -> Any:
    """The register with the scales of pair ``c`` of sub-blocks, a constant."""
    return _k_low(w + 64) if c < 2 else _k_high(w + 64, load_i32(w + 192))


@inline
def _k_minimum(w: int, c: int) -> Any:
    return _k_low(w + 128) if c < 2 else _k_high(w + 128, right(load_i32(w + 192), 4))


@inline
def _q4_k_pair(kind: Any, how: Any, isa: Any, w: int, c: int, out: int, stride: int) -> None:
    """Sub-blocks 2c and 2c + 1: the low and the high halves of eight registers."""
    d, minus, q, i = _half(isa, w), _times(_half(isa, w + 32), -1.0), w + 256 + 512 * c, c % 2 * 2
    s, m = _scaled(d, _k_scale(w, c), i), _scaled(minus, _k_minimum(w, c), i)
    at = out + 64 * c * kind_bytes(kind)
    store_bytes(
        kind, how, _low(q, 0), _low(q, 1), _low(q, 2), _low(q, 3),
        _low(q, 4), _low(q, 5), _low(q, 6), _low(q, 7), s, m, s, m, at, stride,
    )  # fmt: skip
    s, m = _scaled(d, _k_scale(w, c), i + 1), _scaled(minus, _k_minimum(w, c), i + 1)
    store_bytes(
        kind, how, _high(q, 0), _high(q, 1), _high(q, 2), _high(q, 3),
        _high(q, 4), _high(q, 5), _high(q, 6), _high(q, 7), s, m, s, m,
        at + 32 * kind_bytes(kind), stride,
    )  # fmt: skip


def q4_k(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    _q4_k_pair(kind, how, isa, w, 0, out, stride)
    _q4_k_pair(kind, how, isa, w, 1, out, stride)
    _q4_k_pair(kind, how, isa, w, 2, out, stride)
    _q4_k_pair(kind, how, isa, w, 3, out, stride)


@inline
def _five_low(q: int, up: int, j: int, c: int) -> Any:
    return either(_low(q, j), _bit(load_i32(up + 64 * j), c))


@inline
def _five_high(q: int, up: int, j: int, c: int) -> Any:
    return either(_high(q, j), _bit(load_i32(up + 64 * j), c))


@inline
def _q5_k_pair(kind: Any, how: Any, isa: Any, w: int, c: int, out: int, stride: int) -> None:
    """As ``_q4_k_pair``; bits 2c and 2c + 1 of the bytes at ``up`` belong to it."""
    d, minus, i = _half(isa, w), _times(_half(isa, w + 32), -1.0), c % 2 * 2
    up, q, b = w + 256, w + 768 + 512 * c, 2 * c
    s, m = _scaled(d, _k_scale(w, c), i), _scaled(minus, _k_minimum(w, c), i)
    at = out + 64 * c * kind_bytes(kind)
    store_bytes(
        kind, how, _five_low(q, up, 0, b), _five_low(q, up, 1, b), _five_low(q, up, 2, b),
        _five_low(q, up, 3, b), _five_low(q, up, 4, b), _five_low(q, up, 5, b),
        _five_low(q, up, 6, b), _five_low(q, up, 7, b), s, m, s, m, at, stride,
    )  # fmt: skip
    b = 2 * c + 1
    s, m = _scaled(d, _k_scale(w, c), i + 1), _scaled(minus, _k_minimum(w, c), i + 1)
    store_bytes(
        kind, how, _five_high(q, up, 0, b), _five_high(q, up, 1, b), _five_high(q, up, 2, b),
        _five_high(q, up, 3, b), _five_high(q, up, 4, b), _five_high(q, up, 5, b),
        _five_high(q, up, 6, b), _five_high(q, up, 7, b), s, m, s, m,
        at + 32 * kind_bytes(kind), stride,
    )  # fmt: skip


def q5_k(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    _q5_k_pair(kind, how, isa, w, 0, out, stride)
    _q5_k_pair(kind, how, isa, w, 1, out, stride)
    _q5_k_pair(kind, how, isa, w, 2, out, stride)
    _q5_k_pair(kind, how, isa, w, 3, out, stride)


@inline
def _six(high: int, c: int, j: int) -> Any:
    """Word j of quarter ``c``: nibbles, and two upper bits from the bytes at ``high``."""
    nibbles = right(load_i32(high + 512 + 64 * (8 * (c & 1) + j)), 4 * (c >> 1))
    upper = left(both(right(load_i32(high + 64 * j), 2 * c), 0x03030303), 4)
    return either(both(nibbles, _NIBBLES), upper)


@inline
def _q6_k_quarter(
    kind: Any, how: Any, d: Any, scales: int, high: int, c: int, out: int, stride: int
) -> None:
    """32 columns, two sub-blocks of 16 with signed scales."""
    s = load_i32(scales + 64 * (c >> 1))
    i = 2 * (c & 1)
    d0 = fmul(d, to_float(right_signed(left(s, 24 - 8 * i), 24)))
    d1 = fmul(d, to_float(right_signed(left(s, 16 - 8 * i), 24)))
    store_bytes(
        kind, how, _six(high, c, 0), _six(high, c, 1), _six(high, c, 2), _six(high, c, 3),
        _six(high, c, 4), _six(high, c, 5), _six(high, c, 6), _six(high, c, 7),
        d0, _times(d0, -32.0), d1, _times(d1, -32.0),
        out + 32 * c * kind_bytes(kind), stride,
    )  # fmt: skip


def q6_k(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    d = _half(isa, w)
    for half in range(2):
        scales, high = w + 32 + 128 * half, w + 288 + 1536 * half
        at = out + 128 * half * kind_bytes(kind)
        _q6_k_quarter(kind, how, d, scales, high, 0, at, stride)
        _q6_k_quarter(kind, how, d, scales, high, 1, at, stride)
        _q6_k_quarter(kind, how, d, scales, high, 2, at, stride)
        _q6_k_quarter(kind, how, d, scales, high, 3, at, stride)


# ---- the tables


def write_block(fmt: Any, kind: Any, how: Any, isa: Any, w: int, out: int, stride: int) -> None:
    """The function of the format; only inside kernels."""
    raise NotImplementedError


def step_columns(fmt: Any) -> int:
    """Columns that ``write_block`` writes; only inside kernels."""
    raise NotImplementedError


def step_bytes(fmt: Any) -> int:
    """Bytes of a tile that it reads; only inside kernels."""
    raise NotImplementedError


def kind_bytes(kind: Any) -> int:
    """Bytes of a value; only inside kernels."""
    raise NotImplementedError


_WRITERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("f32", "f16", "bf16"), _floats),
    **{f.__name__: f for f in (q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q4_k, q5_k, q6_k)},
}


def _constant(value: int) -> Callable[[Any], int]:
    return lambda _: value


def _step_bytes(name: str) -> Callable[[Any], int]:
    fmt = FORMATS[name]
    return _constant(TILE_ROWS * fmt.block_bytes * max(fmt.block, GROUP_COLUMNS) // fmt.block)


by_format(write_block)(_WRITERS.__getitem__)
by_format(step_columns)(lambda name: _constant(max(FORMATS[name].block, GROUP_COLUMNS)))
by_format(step_bytes)(_step_bytes)
by_format(kind_bytes)(lambda name: _constant({"bf16": 2, "f32": 4}[name]))
