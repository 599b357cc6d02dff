"""Vector operations of attention over blocks: dot products of bfloat16 pairs, and the shuffles
that bring their operands into place.

A lane ``4 t + r`` of a "quad" holds what belongs to token t of four and row r of four. All but the
dot product is plain LLVM vector code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from offload.cpu_ops.byte_vectors import dot_vnni
from offload.cpu_ops.isa import Isa, features
from offload.cpu_ops.prefill_vectors import _convert
from offload.cpu_ops.vectors import F32X16, I32X16, LANES, _call, _operation

_i16, _i32 = ir.IntType(16), ir.IntType(32)
_v16i, _v16f = ir.VectorType(_i32, LANES), ir.VectorType(ir.FloatType(), LANES)
_v16h, _v32h = ir.VectorType(_i16, 16), ir.VectorType(_i16, 32)
_v16b, _v32b, _v64b = (ir.VectorType(ir.IntType(8), n) for n in (16, 32, 64))
_I, _F = types.int64, types.float32


def multiplier(isa: Isa) -> str:
    """How bfloat16 is multiplied with that instruction set on this processor: "dot" products of
    pairs (AVX512-BF16) or "fma" in float32."""
    return "dot" if isa is Isa.AVX512VNNI and "avx512bf16" in features() else "fma"


def _order(b: Any, v: Any, w: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(v, w, ir.Constant(ir.VectorType(_i32, len(lanes)), lanes))


def _load(b: Any, address: Any, of: Any) -> Any:
    return b.load(b.inttoptr(address, of.as_pointer()), align=1)


# ---- bfloat16 pairs


@_operation(I32X16, _I)
def load_pairs(b: Any, address: Any) -> Any:
    """32 bfloat16: 64 bytes."""
    return _load(b, address, _v16i)


@_operation(I32X16, _I)
def load_half(b: Any, address: Any) -> Any:
    """16 bfloat16, then zeros: no byte behind the 32 is read."""
    half = _load(b, address, _v16h)
    return b.bitcast(_order(b, half, ir.Constant(_v16h, [0] * 16), list(range(32))), _v16i)


@_operation(F32X16, F32X16, I32X16, I32X16)
def dot_pairs(b: Any, total: Any, v: Any, w: Any) -> Any:
    """total + the sum of two products per lane, as VDPBF16PS rounds; subnormals are zeros."""
    return _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", _v16f, total, v, w)


def _woven(first: int) -> list[int]:
    """Words ``first`` .. ``first + 3`` of each 128 bits, from two rows in turn."""
    return [8 * k + first + j for k in range(4) for j in range(4)]


def _weave(b: Any, v: Any, w: Any, first: int) -> Any:
    order = [n for i in _woven(first) for n in (i, i + 32)]
    return b.bitcast(_order(b, b.bitcast(v, _v32h), b.bitcast(w, _v32h), order), _v16i)


@_operation(I32X16, I32X16, I32X16)
def weave_low(b: Any, v: Any, w: Any) -> Any:
    """Words 0..3 of each 128 bits of two rows, in pairs: one instruction. With ``weave_high`` the
    columns of sums come out of order, which ``in_order_low`` and ``in_order_high`` mend once."""
    return _weave(b, v, w, 0)


@_operation(I32X16, I32X16, I32X16)
def weave_high(b: Any, v: Any, w: Any) -> Any:
    return _weave(b, v, w, 4)


_WHERE = {column: lane for lane, column in enumerate([*_woven(0), *_woven(4)])}


@_operation(F32X16, F32X16, F32X16)
def in_order_low(b: Any, low: Any, high: Any) -> Any:
    """Columns 0..15 from the sums of woven rows."""
    return _order(b, low, high, [_WHERE[c] for c in range(16)])


@_operation(F32X16, F32X16, F32X16)
def in_order_high(b: Any, low: Any, high: Any) -> Any:
    return _order(b, low, high, [_WHERE[c] for c in range(16, 32)])


@_operation(I32X16, _I, _I)
def weave_half(b: Any, row: Any, next_row: Any) -> Any:
    """16 columns of two rows in pairs, in order."""
    v, w = _load(b, row, _v16h), _load(b, next_row, _v16h)
    return b.bitcast(_order(b, v, w, [n for i in range(16) for n in (i, i + 16)]), _v16i)


@_operation(I32X16, F32X16, F32X16)
def token_pairs(b: Any, v: Any, w: Any) -> Any:
    """Two quads of weights, eight tokens, rounded to bfloat16: lane 4 j + r holds tokens 2 j and
    2 j + 1 of row r."""
    order = [n for j in range(4) for r in range(4) for n in (8 * j + r, 8 * j + 4 + r)]
    halves = _convert(b, v, w)
    return b.bitcast(_order(b, halves, halves, order), _v16i)


# ---- integers of four tokens


@_operation(I32X16, I32X16, I32X16, I32X16)
def dot_bytes(b: Any, total: Any, v: Any, w: Any) -> Any:
    """total + the sum of four products per lane: bytes of ``v`` in 0..255, of ``w`` signed."""
    return dot_vnni(b, total, v, w)


@_operation(I32X16, _I)
def load_nibbles(b: Any, address: Any) -> Any:
    """64 integers of 4 bits as bytes, from 32 bytes: the low nibbles, then the high ones."""
    half = _load(b, address, _v32b)
    both = _order(b, half, half, list(range(32)) * 2)
    shifts = ir.Constant(_v32h, [0] * 16 + [4] * 16)
    words = b.lshr(b.bitcast(both, _v32h), shifts)
    return b.bitcast(b.and_(words, ir.Constant(_v32h, [0x0F0F] * 32)), _v16i)


def _four_woven(b: Any, rows: Any, half: int, second: int) -> Any:
    """Bytes of four rows in turn: of each 128 bits those from ``8 half + 4 second`` on."""
    eight = [16 * k + 8 * half + j for k in range(4) for j in range(8)]
    order = [n for i in eight for n in (i, i + 64)]
    r0, r1, r2, r3 = (b.bitcast(row, _v64b) for row in rows)
    v = b.bitcast(_order(b, r0, r1, order), _v32h)
    w = b.bitcast(_order(b, r2, r3, order), _v32h)
    four = [8 * k + 4 * second + j for k in range(4) for j in range(4)]
    return b.bitcast(_order(b, v, w, [n for i in four for n in (i, i + 32)]), _v16i)


def _weaver(half: int, second: int) -> Any:
    @_operation(I32X16, I32X16, I32X16, I32X16, I32X16)
    def four_woven(b: Any, *rows: Any) -> Any:
        return _four_woven(b, rows, half, second)

    return four_woven


four_woven_0, four_woven_1 = _weaver(0, 0), _weaver(0, 1)
"""Bytes 0..3, and 4..7, of each 128 bits of four rows: a lane is one channel of four tokens."""
four_woven_2, four_woven_3 = _weaver(1, 0), _weaver(1, 1)


def _quarters(nibbles: bool) -> Any:
    @_operation(types.void, _I, F32X16, F32X16, F32X16, F32X16)
    def store_quarters(b: Any, address: Any, *sums: Any) -> None:
        low, high = (_order(b, v, w, list(range(32))) for v, w in (sums[:2], sums[2:]))
        places = (0, 2, 1, 3) if nibbles else (0, 1, 2, 3)
        for place, k in enumerate(places):
            order = [16 * v + 4 * k + i for v in range(4) for i in range(4)]
            at = b.add(address, ir.Constant(ir.IntType(64), 64 * place))
            b.store(_order(b, low, high, order), b.inttoptr(at, _v16f.as_pointer()), align=1)

    return store_quarters


store_quarters = _quarters(nibbles=False)
"""The sums of ``four_woven_0`` .. ``_3`` as 64 channels in order."""
store_quarters_of_nibbles = _quarters(nibbles=True)


@_operation(types.void, _I, I32X16)
def store_tokens(b: Any, address: Any, v: Any) -> None:
    """The low bytes of a quad: 16 bytes, a row's four tokens side by side."""
    narrow = b.trunc(v, _v16b)
    order = [4 * t + r for r in range(4) for t in range(4)]
    b.store(_order(b, narrow, narrow, order), b.inttoptr(address, _v16b.as_pointer()), align=1)


# ---- quads


@_operation(F32X16, *[F32X16] * LANES)
def cross_sums(b: Any, *vectors: Any) -> Any:
    """Lane i: the sum of the lanes of the i-th vector, added as one tree for all i.

    Half the shuffles of ``lanes.sums_of_16``: of two vectors each keeps half of its lanes in
    place, and only the other halves move.
    """
    found, width = list(vectors), LANES // 2
    while width:
        summed = []
        for v, w in zip(found[:width], found[width:], strict=True):
            stay = [i + (LANES if i & width else 0) for i in range(LANES)]
            move = [(i ^ width) + (LANES if i & width else 0) for i in range(LANES)]
            summed.append(b.fadd(_order(b, v, w, stay), _order(b, v, w, move)))
        found, width = summed, width // 2
    return found[0]


def _spread(element: Any, pick: list[int]) -> Any:
    def emit(b: Any, address: Any) -> Any:
        four = _load(b, address, ir.VectorType(element, 4))
        return _order(b, four, four, pick)

    return emit


_BY_ROW, _BY_TOKEN = [i % 4 for i in range(LANES)], [i // 4 for i in range(LANES)]


@_operation(F32X16, _I)
def row_floats(b: Any, address: Any) -> Any:
    """One float32 per row to all tokens."""
    return _spread(ir.FloatType(), _BY_ROW)(b, address)


@_operation(F32X16, _I)
def token_bf16(b: Any, address: Any) -> Any:
    """One bfloat16 per token to all rows."""
    four = _spread(_i16, _BY_TOKEN)(b, address)
    sixteen = ir.Constant(_v16i, [16] * LANES)
    return b.bitcast(b.shl(b.zext(four, _v16i), sixteen), _v16f)


@_operation(F32X16, F32X16)
def finite(b: Any, v: Any) -> Any:
    """0 for infinities and NaN: memory behind the last token may hold anything."""
    exponent = ir.Constant(_v16i, [0x7F800000] * LANES)
    special = b.icmp_unsigned("==", b.and_(b.bitcast(v, _v16i), exponent), exponent)
    return b.select(special, ir.Constant(_v16f, [0.0] * LANES), v)


@_operation(I32X16, _I)
def row_limits(b: Any, address: Any) -> Any:
    """One int32 per row, less the token's place among the four."""
    limits = _spread(_i32, _BY_ROW)(b, address)
    return b.sub(limits, ir.Constant(_v16i, _BY_TOKEN))


@_operation(F32X16, F32X16, I32X16, I32X16, _I)
def visible(b: Any, v: Any, low: Any, high: Any, t: Any) -> Any:
    """``v`` where low <= t < high, else minus infinity; limits of ``row_limits``."""
    token = b.insert_element(ir.Constant(_v16i, ir.Undefined), b.trunc(t, _i32), _i32(0))
    token = _order(b, token, token, [0] * LANES)
    inside = b.and_(b.icmp_signed("<=", low, token), b.icmp_signed("<", token, high))
    return b.select(inside, v, ir.Constant(_v16f, [float("-inf")] * LANES))


@_operation(F32X16, F32X16, F32X16)
def unless_lowest(b: Any, score: Any, weight: Any) -> Any:
    """``weight``, or 0 where the score is minus infinity."""
    lowest = ir.Constant(_v16f, [float("-inf")] * LANES)
    zero = ir.Constant(_v16f, [0.0] * LANES)
    return b.select(b.fcmp_ordered("==", score, lowest), zero, weight)


@_operation(_F, F32X16)
def max_floats(b: Any, v: Any) -> Any:
    """Of all lanes."""
    return _call(b, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), v)
