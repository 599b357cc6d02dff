"""Vector operations of attention over blocks: dot products of bfloat16 pairs, and the shuffles
that bring their operands into place.

A lane ``4 t + r`` of a "quad" holds what belongs to token t of four and row r of four. All but the
dot product is plain LLVM vector code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from offload.cpu_ops.byte_vectors import dot_words_vnni
from offload.cpu_ops.isa import Isa, features
from offload.cpu_ops.prefill_vectors import _convert
from offload.cpu_ops.vectors import F32X16, I32X16, LANES, _call, _operation

_i16, _i32 = ir.IntType(16), ir.IntType(32)
_v16i, _v16f = ir.VectorType(_i32, LANES), ir.VectorType(ir.FloatType(), LANES)
_v8i = ir.VectorType(_i32, 8)
_v16h, _v32h = ir.VectorType(_i16, 16), ir.VectorType(_i16, 32)
_v32b, _v64b = (ir.VectorType(ir.IntType(8), n) for n in (32, 64))
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


@_operation(I32X16, _I, _I)
def load_two(b: Any, address: Any, other: Any) -> Any:
    """16 bfloat16 of two rows."""
    v, w = (_load(b, a, _v8i) for a in (address, other))
    return _order(b, v, w, list(range(16)))


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


# ---- integers in pairs


@_operation(I32X16, I32X16, I32X16, I32X16)
def dot_words(b: Any, total: Any, v: Any, w: Any) -> Any:
    """total + the sum of two products of signed words per lane."""
    return dot_words_vnni(b, total, v, w)


@_operation(I32X16, _I)
def load_words(b: Any, address: Any) -> Any:
    """32 bytes, widened to words."""
    return b.bitcast(b.zext(_load(b, address, _v32b), _v32h), _v16i)


@_operation(I32X16, _I)
def load_low_nibbles(b: Any, address: Any) -> Any:
    """Of 32 bytes, as words."""
    words = b.zext(_load(b, address, _v32b), _v32h)
    return b.bitcast(b.and_(words, ir.Constant(_v32h, [15] * 32)), _v16i)


@_operation(I32X16, _I)
def load_high_nibbles(b: Any, address: Any) -> Any:
    words = b.zext(_load(b, address, _v32b), _v32h)
    return b.bitcast(b.lshr(words, ir.Constant(_v32h, [4] * 32)), _v16i)


@_operation(I32X16, I32X16, I32X16)
def token_words(b: Any, v: Any, w: Any) -> Any:
    """As ``token_pairs``, of integers that fit into words."""
    v, w = (b.bitcast(x, _v32h) for x in (v, w))
    order = [n for j in range(2) for r in range(4) for n in (16 * j + 2 * r, 16 * j + 8 + 2 * r)]
    return b.bitcast(_order(b, v, w, order + [n + 32 for n in order]), _v16i)


@_operation(types.void, _I, I32X16)
def store_words(b: Any, address: Any, v: Any) -> None:
    """The low words of the lanes: 32 bytes."""
    b.store(b.trunc(v, _v16h), b.inttoptr(address, _v16h.as_pointer()), align=1)


_v128h = ir.VectorType(_i16, 128)


def _pairs_of_tile(b: Any, tile: Any) -> list[Any]:
    """From bytes [16 tokens, 16 channels] of each pair of channels the words of all tokens, four
    times four of them transposed."""
    words = _load(b, tile, _v128h)
    return [
        _order(b, words, words, [8 * (4 * (lane % 4) + lane // 4) + pair for lane in range(16)])
        for pair in range(8)
    ]


def _store_all(b: Any, address: Any, vectors: list[Any]) -> None:
    for i, v in enumerate(vectors):
        at = b.add(address, ir.Constant(address.type, 32 * i))
        b.store(v, b.inttoptr(at, _v16h.as_pointer()), align=1)


@_operation(types.void, _I, _I)
def store_pairs(b: Any, tile: Any, address: Any) -> None:
    """16 tokens of 16 channels, a byte each, as ``block_layout.pack_keys`` has them in 8 bits."""
    _store_all(b, address, _pairs_of_tile(b, tile))


@_operation(types.void, _I, _I)
def store_nibble_pairs(b: Any, tile: Any, address: Any) -> None:
    """As ``store_pairs`` in 4 bits."""
    pairs, four = _pairs_of_tile(b, tile), ir.Constant(_v16h, [4] * 16)
    both = [
        b.or_(low, b.shl(high, four)) for low, high in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    _store_all(b, address, both)


# ---- quads


def _from_second(b: Any, v: Any, w: Any, width: int) -> Any:
    """``w`` in the lanes whose number has the bit ``width``. The mask is hidden from LLVM, which
    otherwise takes shuffles for some of these; blends run beside the multiplications."""
    bits = sum(1 << i for i in range(LANES) if i & width)
    function = ir.FunctionType(_i16, [_i16])
    mask = b.asm(function, "", "=r,0", [ir.Constant(_i16, bits)], False)
    return b.select(b.bitcast(mask, ir.VectorType(ir.IntType(1), LANES)), w, v)


def _cross(b: Any, vectors: Any, add: Any, *, masks: bool) -> Any:
    """Half the shuffles of ``lanes.sums_of_16``: of two vectors each keeps half of its lanes in
    place, and only the other halves move. ``masks``: there are registers for them."""
    found, width = list(vectors), len(vectors) // 2
    while width:
        summed = []
        for v, w in zip(found[:width], found[width:], strict=True):
            if masks and width in (8, 2):
                stay = _from_second(b, v, w, width)
            else:
                stay = _order(b, v, w, [i + (LANES if i & width else 0) for i in range(LANES)])
            move = [(i ^ width) + (LANES if i & width else 0) for i in range(LANES)]
            summed.append(add(stay, _order(b, v, w, move)))
        found, width = summed, width // 2
    return found[0]


@_operation(F32X16, *[F32X16] * LANES)
def cross_sums(b: Any, *vectors: Any) -> Any:
    """Lane i: the sum of the lanes of the i-th vector, added as one tree for all i."""
    return _cross(b, vectors, b.fadd, masks=False)


@_operation(F32X16, *[F32X16] * 8)
def half_sums(b: Any, *vectors: Any) -> Any:
    """Lanes i and i + 8: the sums of the lower and the upper eight lanes of the i-th vector; for
    AVX-512."""
    return _cross(b, vectors, b.fadd, masks=True)


def _blocks_of_four(which: int) -> Any:
    """From four rows' sums of 16 tokens the quad of the ``which``-th of each four lanes."""
    low = [n for k in range(4) for n in (4 * k + which // 2 * 2, 16 + 4 * k + which // 2 * 2)]
    pairs = [n for i in range(0, 8, 2) for n in (low[i], low[i + 1], low[i] + 1, low[i + 1] + 1)]
    order = [n + 2 * (which % 2) for k in range(0, 16, 4) for n in (k, k + 1, k + 16, k + 17)]

    def emit(b: Any, v: Any, w: Any, x: Any, y: Any) -> Any:
        return _order(b, _order(b, v, w, pairs), _order(b, x, y, pairs), order)

    return emit


_FOUR = (F32X16, F32X16, F32X16, F32X16)


@_operation(F32X16, *_FOUR)
def quad_0(b: Any, v: Any, w: Any, x: Any, y: Any) -> Any:
    """Lanes 0, 4, 8, 12 of each row's sums: four tokens in a row as ``block_layout.pack_keys``
    leaves them; the others follow."""
    return _blocks_of_four(0)(b, v, w, x, y)


@_operation(F32X16, *_FOUR)
def quad_1(b: Any, v: Any, w: Any, x: Any, y: Any) -> Any:
    return _blocks_of_four(1)(b, v, w, x, y)


@_operation(F32X16, *_FOUR)
def quad_2(b: Any, v: Any, w: Any, x: Any, y: Any) -> Any:
    return _blocks_of_four(2)(b, v, w, x, y)


@_operation(F32X16, *_FOUR)
def quad_3(b: Any, v: Any, w: Any, x: Any, y: Any) -> Any:
    return _blocks_of_four(3)(b, v, w, x, y)


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


@_operation(_F, F32X16)
def min_floats(b: Any, v: Any) -> Any:
    """Of all lanes."""
    return _call(b, "llvm.vector.reduce.fmin.v16f32", ir.FloatType(), v)


@_operation(F32X16, F32X16, F32X16)
def fmin(b: Any, v: Any, w: Any) -> Any:
    """A NaN in ``v`` gives way to ``w``."""
    return b.select(b.fcmp_ordered("<", v, w), v, w)
