"""Packed blocks of 16 rows, unpacked once for the many tokens of a prompt.

What ``blocks_dot`` and ``k_blocks_dot`` unpack for each few tokens is kept here, some blocks of two
tiles at a time, in a *panel* that stays in the first cache while all tokens are multiplied with it,
four at once. The integers and the float operations on them, with their order, are the same: a
token's result does not depend on how many others there are.

Bound, per block of 32 columns, 16 rows and token: 8 byte products and 4 other instructions on the
same units (an addition of two chains of products, a conversion, a product of scales, a multiply-
add), so two thirds of the processor's byte products; unpacked for four tokens at a time Q4_0 needed
8 and 9. The activations of four tokens are loaded once for both tiles: with an operand in memory
for each product, loads were the limit. One chain of products per token and tile would save the
addition and is slower: eight chains do not fill two units for the five cycles that a product takes.
16 chains, eight float sums and what is multiplied take the 32 registers of AVX-512; instruction
sets with 16 have nothing to gain, so panels are for VNNI alone. Measured on two Emerald Rapids
cores, 2048 x 2048 weights and 512 tokens, in Tops/s, before and after: Q4_0 0.54 and 0.74, Q8_0
0.55 and 0.72, Q4_K 0.55 and 0.66, Q5_K 0.47 and 0.67, Q6_K 0.41 and 0.57, MXFP4 0.48 and 0.72.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types

from offload.cpu_ops.activations import (
    K_SCALE,
    K_SUMS16,
    K_SUMS32,
    SCALE,
    SUM,
    ZEROS_8,
    ZEROS_16,
    ZEROS_128,
)
from offload.cpu_ops.blocks_dot import columns, half, scale
from offload.cpu_ops.byte_vectors import dot_vnni, dot_words_vnni
from offload.cpu_ops.k_blocks_dot import (
    EVEN_BYTES,
    k_high,
    k_low,
    k_words,
    signed_byte,
    six_words,
)
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    F32X16,
    I32X16,
    TAG,
    _all,
    _call,
    _f32,
    _i32,
    _i64,
    _load,
    _operation,
    _splat,
    _v16f,
    _v16i,
    as_float,
    both,
    even_bytes,
    fmul,
    load_i32,
    odd_bytes,
    right,
    splat,
    stack,
    store_f32,
    words_times,
)

TOGETHER = 4
"""Tokens that are multiplied at once."""
TILES = 2
"""Tiles of a panel, block after block."""
PANEL_BYTES = 20 << 10
"""Of both tiles, at most: in 32 KiB it leaves room for activations."""

panel = stack(PANEL_BYTES)

SUMS = types.UniTuple(F32X16, TILES * TOGETHER)
"""Of four tokens and the first tile, then of the second."""
_TOTALS = types.UniTuple(I32X16, TILES * TOGETHER)
_RECORDS = types.UniTuple(types.int64, TOGETHER)
_I = types.int64


def fill(fmt: Any, isa: Any, w: int, out: int) -> None:
    """Unpack the block of 16 rows at ``w``; only inside kernels."""
    raise NotImplementedError


def panel_bytes(fmt: Any) -> int:
    """Of a block of a tile; only inside kernels."""
    raise NotImplementedError


def add_four(fmt: Any, p: int, x: Any, sums: Any) -> Any:
    """``sums`` (SUMS) plus the products of the unpacked blocks at ``p``, one of each tile, with the
    records at ``x``, four addresses. Only inside kernels."""
    raise NotImplementedError


@inline
def _store(address: int, v: Any) -> None:
    """64 bytes."""
    store_f32(address, as_float(v))


# ---- what is computed, as LLVM code: a tuple for each step would compile twice as long


def _from(b: Any, address: Any, n: int) -> Any:
    return b.add(address, ir.Constant(_i64, n))


def _vector(b: Any, p: Any, n: int) -> Any:
    return _load(b, _from(b, p, n), _v16i)


def _words(b: Any, x: Sequence[Any], at: int) -> list[Any]:
    """The int32 (or four bytes) at ``at`` of each record, in every lane."""
    return [_splat(b, _load(b, _from(b, record, at), _i32)) for record in x]


def _each(b: Any, values: Any) -> list[Any]:
    """Of a tuple."""
    return [b.extract_value(values, i) for i in range(values.type.count)]


def _none() -> list[Any]:
    return [_all(_v16i, 0)] * TOGETHER


def _added(b: Any, d: Any, totals: Sequence[Any], s: Sequence[Any], sums: Sequence[Any]) -> Any:
    """sums + d * s * totals"""
    return [
        _call(b, "llvm.fma.v16f32", _v16f, b.sitofp(total, _v16f), b.fmul(d, by), to)
        for total, by, to in zip(totals, s, sums, strict=True)
    ]


def _added_both(
    b: Any, name: str, p: Any, d: int, totals: Sequence[Any], s: Sequence[Any], sums: Sequence[Any]
) -> list[Any]:
    """Of both tiles, whose scales are at ``d``."""
    out = []
    for tile in range(TILES):
        scales = _load(b, _from(b, p, tile * PANELS[name].nbytes + d), _v16f)
        of = slice(TOGETHER * tile, TOGETHER * (tile + 1))
        out += _added(b, scales, totals[of], s, sums[of])
    return out


def _floats(b: Any, x: Sequence[Any], at: int) -> list[Any]:
    return [_splat(b, _load(b, _from(b, record, at), _f32)) for record in x]


def _dots(
    b: Any, name: str, p: Any, x: Sequence[Any], words: Sequence[tuple[int, int]],
    start: Sequence[Any], dot: Any = dot_vnni,
) -> list[Any]:  # fmt: skip
    """Of both tiles: ``start`` of a token plus the products of the weights at ``p`` + v with the
    activations at w, for each of ``words``: v, w."""
    totals = [*start] * TILES if len(start) == TOGETHER else [*start]
    for v, w in words:
        activations = _words(b, x, w)
        for tile in range(TILES):
            weights = _vector(b, p, tile * PANELS[name].nbytes + v)
            for i, word in enumerate(activations, TOGETHER * tile):
                totals[i] = dot(b, totals[i], weights, word)
    return totals


# ---- blocks of 32: eight registers of bytes, the scales, the minima


@inline
def _unpack(fmt: Any, isa: Any, w: int, out: int) -> None:
    for j in range(4):
        _store(out + 64 * j, columns(fmt, isa, w, j))
        _store(out + 256 + 64 * j, columns(fmt, isa, w, 4 + j))
    store_f32(out + 512, scale(fmt, isa, w))


def _fill_small(fmt: Any, isa: Any, w: int, out: int) -> None:
    _unpack(fmt, isa, w, out)


def _fill_with_minima(fmt: Any, isa: Any, w: int, out: int) -> None:
    _unpack(fmt, isa, w, out)
    store_f32(out + 576, half(isa, w + 32))


_ZEROS = {
    "q4_0": ZEROS_8, "q5_0": ZEROS_16, "mxfp4": ZEROS_16, "q8_0": ZEROS_128, "iq4_nl": ZEROS_128,
}  # fmt: skip
"""Where in a record the products start from, of formats that store weights plus a zero."""


@_operation(SUMS, TAG, _I, _RECORDS, SUMS)
def _small(b: Any, name: str, p: Any, x: Any, sums: Any) -> Any:
    x, sums = _each(b, x), _each(b, sums)
    zero = _ZEROS.get(name)
    start = _none() if zero is None else _words(b, x, zero)
    low, high = [*start] * TILES, _none() * TILES
    for j in range(4):  # in turns, so that both chains go on
        low = _dots(b, name, p, x, [(64 * j, 4 * j)], low)
        high = _dots(b, name, p, x, [(256 + 64 * j, 16 + 4 * j)], high)
    totals = [b.add(v, w) for v, w in zip(low, high, strict=True)]
    sums = _added_both(b, name, p, 512, totals, _floats(b, x, SCALE), sums)
    if name in _MINIMA:
        s = _floats(b, x, SUM)
        for i in range(TILES * TOGETHER):
            m = _load(b, _from(b, p, i // TOGETHER * PANELS[name].nbytes + 576), _v16f)
            sums[i] = _call(b, "llvm.fma.v16f32", _v16f, m, s[i % TOGETHER], sums[i])
    return sums


def _small_blocks(fmt: Any, p: int, x: Any, sums: Any) -> Any:
    return _small(fmt, p, x, sums)


# ---- blocks of 256: sub-blocks of bytes in order, and a register of scales for each


@_operation(_TOTALS)
def _nothing(b: Any) -> Any:
    return _none() * TILES


@_operation(_TOTALS, TAG, _I, _I, _RECORDS, _I, _TOTALS)
def _sub_block(b: Any, name: str, p: Any, scales: Any, x: Any, at: Any, totals: Any) -> Any:
    """``totals`` plus the scaled products of a sub-block, whose activations are at ``at``."""
    records = [b.add(record, at) for record in _each(b, x)]
    words = 4 if name == "q6_k" else 8
    dots = _dots(b, name, p, records, [(64 * j, 4 * j) for j in range(words)], _none())
    out = []
    for i, total in enumerate(_each(b, totals)):
        s = _vector(b, scales, i // TOGETHER * PANELS[name].nbytes)
        out.append(b.add(total, b.mul(dots[i], s)))
    return out


K_SCALES, K_MINIMA, K_D, K_DMIN = 4096, 4608, 4864, 4928
"""Offsets in a panel of Q4_K and Q5_K; of 32 columns each, 512 bytes of weights before."""


@inline
def _fill_pair(fmt: Any, w: int, c: int, scales: Any, out: int) -> None:
    """Sub-blocks 2c and 2c + 1."""
    for j in range(8):
        even, odd = k_words(fmt, w, c, j)
        _store(out + 1024 * c + 64 * j, even)
        _store(out + 1024 * c + 512 + 64 * j, odd)
    _store(out + K_SCALES + 128 * c, both(right(scales, c % 2 * 16), 255))
    _store(out + K_SCALES + 128 * c + 64, both(right(scales, c % 2 * 16 + 8), 255))


def _fill_k(fmt: Any, isa: Any, w: int, out: int) -> None:
    rest = load_i32(w + 192)
    scales, more = k_low(w + 64), k_high(w + 64, rest)
    _fill_pair(fmt, w, 0, scales, out)
    _fill_pair(fmt, w, 1, scales, out)
    _fill_pair(fmt, w, 2, more, out)
    _fill_pair(fmt, w, 3, more, out)
    low, high = k_low(w + 128), k_high(w + 128, right(rest, 4))
    _store(out + K_MINIMA, both(low, EVEN_BYTES))
    _store(out + K_MINIMA + 64, both(right(low, 8), EVEN_BYTES))
    _store(out + K_MINIMA + 128, both(high, EVEN_BYTES))
    _store(out + K_MINIMA + 192, both(right(high, 8), EVEN_BYTES))
    store_f32(out + K_D, half(isa, w))
    store_f32(out + K_DMIN, fmul(splat(-1.0), half(isa, w + 32)))


@_operation(SUMS, TAG, _I, _RECORDS, _TOTALS, SUMS)
def _k_end(b: Any, name: str, p: Any, x: Any, totals: Any, sums: Any) -> Any:
    """d * s * scaled sums, then -dmin * s * minima: the sign is the scale's here, not the sum's."""
    x, s = _each(b, x), _floats(b, _each(b, x), K_SCALE)
    sums = _added_both(b, name, p, K_D, _each(b, totals), s, _each(b, sums))
    words = [(K_MINIMA + 64 * i, K_SUMS32 + 4 * i) for i in range(4)]
    minima = _dots(b, name, p, x, words, _none(), dot_words_vnni)
    return _added_both(b, name, p, K_DMIN, minima, s, sums)


def _k_block(fmt: Any, p: int, x: Any, sums: Any) -> Any:
    totals = _nothing()
    for i in range(8):
        totals = _sub_block(fmt, p + 512 * i, p + K_SCALES + 64 * i, x, 32 * i, totals)
    return _k_end(fmt, p, x, totals, sums)


SIX_SCALES, SIX_WORDS, SIX_D = 4096, 5120, 5632
"""Offsets in a panel of Q6_K; of 16 columns each, 256 bytes of weights before."""


@inline
def _fill_part(w: int, h: int, part: int, out: int) -> None:
    """Sub-blocks 8h + part and 8h + 4 + part."""
    scales, high, at = w + 32 + 128 * h, w + 288 + 1536 * h, out + 256 * (8 * h + part)
    for j in range(4):
        even, odd = six_words(high, part, j)
        _store(at + 64 * j, even)
        _store(at + 1024 + 64 * j, odd)
    at = out + SIX_SCALES + 64 * (8 * h + part)
    _store(at, signed_byte(load_i32(scales), part))
    _store(at + 256, signed_byte(load_i32(scales + 64), part))


def _fill_six(fmt: Any, isa: Any, w: int, out: int) -> None:
    for h in range(2):
        _fill_part(w, h, 0, out)
        _fill_part(w, h, 1, out)
        _fill_part(w, h, 2, out)
        _fill_part(w, h, 3, out)
    for i in range(4):  # weights are stored plus 32: times -32 the scales are words still
        signed, at = load_i32(w + 32 + 64 * i), out + SIX_WORDS + 128 * i
        _store(at, words_times(even_bytes(signed), -32))
        _store(at + 64, words_times(odd_bytes(signed), -32))
    store_f32(out + SIX_D, half(isa, w))


@_operation(_TOTALS, TAG, _I, _RECORDS)
def _six_start(b: Any, name: str, p: Any, x: Any) -> Any:
    words = [(SIX_WORDS + 64 * i, K_SUMS16 + 4 * i) for i in range(8)]
    return _dots(b, name, p, _each(b, x), words, _none(), dot_words_vnni)


@_operation(SUMS, TAG, _I, _RECORDS, _TOTALS, SUMS)
def _six_end(b: Any, name: str, p: Any, x: Any, totals: Any, sums: Any) -> Any:
    s = _floats(b, _each(b, x), K_SCALE)
    return _added_both(b, name, p, SIX_D, _each(b, totals), s, _each(b, sums))


def _six(fmt: Any, p: int, x: Any, sums: Any) -> Any:
    totals = _six_start(fmt, p, x)
    for i in range(16):
        totals = _sub_block(fmt, p + 256 * i, p + SIX_SCALES + 64 * i, x, 16 * i, totals)
    return _six_end(fmt, p, x, totals, sums)


# ---- the table


class Panel(NamedTuple):
    """Of a format: how a block becomes a panel's, its bytes there, and what multiplies it."""

    fill: Callable[..., Any]
    nbytes: int
    add: Callable[..., Any]


_MINIMA = ("q4_1", "q5_1")
PANELS = {
    **dict.fromkeys(_ZEROS, Panel(_fill_small, 576, _small_blocks)),
    **dict.fromkeys(_MINIMA, Panel(_fill_with_minima, 640, _small_blocks)),
    **dict.fromkeys(("q4_k", "q5_k"), Panel(_fill_k, 4992, _k_block)),
    "q6_k": Panel(_fill_six, 5696, _six),
}


def _constant(value: int) -> Callable[[Any], int]:
    return lambda fmt: value


by_format(fill)(lambda name: PANELS[name].fill)
by_format(add_four)(lambda name: PANELS[name].add)
by_format(panel_bytes)(lambda name: _constant(PANELS[name].nbytes))


def has_panels(format_name: str, isa: str) -> bool:
    """Whether panels are used: of integer formats, where the processor has VNNI."""
    return format_name in PANELS and isa == "avx512vnni"
