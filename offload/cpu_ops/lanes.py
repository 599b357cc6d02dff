"""Operations across the 16 lanes of a vector, beside those of ``vectors.py``.

All are plain LLVM vector code with a fixed order of additions, so their results are the same to
the bit on every instruction set.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from offload.cpu_ops.vectors import F32X16, I32X16, LANES, _operation

_i32 = ir.IntType(32)
_v16i, _v16f = ir.VectorType(_i32, LANES), ir.VectorType(ir.FloatType(), LANES)
_I, _F = types.int64, types.float32


def _shuffle(b: Any, v: Any, w: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(v, w, ir.Constant(_v16i, lanes))


def _pairs(b: Any, v: Any, w: Any, width: int) -> Any:
    """Groups of ``width`` lanes in turn from both, each the sum of two neighbouring groups."""
    low: list[int] = []
    high: list[int] = []
    for first in range(0, LANES, 2 * width):
        for source in (0, LANES):
            low += range(source + first, source + first + width)
            high += range(source + first + width, source + first + 2 * width)
    return b.fadd(_shuffle(b, v, w, low), _shuffle(b, v, w, high))


@_operation(F32X16, *[F32X16] * LANES)
def sums_of_16(b: Any, *vectors: Any) -> Any:
    """Lane i: the sum of the lanes of the i-th vector.

    Four rounds that add and interleave at once: 15 additions for 16 sums, where a sum by itself
    takes 4.
    """
    found, width = list(vectors), 1
    while len(found) > 1:
        found = [_pairs(b, found[i], found[i + 1], width) for i in range(0, len(found), 2)]
        width *= 2
    return found[0]


@_operation(_F, F32X16)
def sum_floats(b: Any, v: Any) -> Any:
    """Of all lanes, as a tree: lane i and i + 8, then + 4, + 2, + 1."""
    width = LANES // 2
    while width:
        v = b.fadd(v, _shuffle(b, v, v, [(i + width) % LANES for i in range(LANES)]))
        width //= 2
    return b.extract_element(v, ir.Constant(_i32, 0))


def _turn(by: int) -> Any:
    @_operation(F32X16, F32X16)
    def turn(b: Any, v: Any) -> Any:
        return _shuffle(b, v, v, [(i + by) % LANES for i in range(LANES)])

    return turn


turn_4 = _turn(4)
"""Lane i gets lane i + 4, round the end."""
turn_8 = _turn(8)


@_operation(F32X16, F32X16)
def swap_pairs(b: Any, v: Any) -> Any:
    """Lanes 1, 0, 3, 2, ..."""
    return _shuffle(b, v, v, [i ^ 1 for i in range(LANES)])


@_operation(F32X16, F32X16, F32X16)
def fsub(b: Any, v: Any, w: Any) -> Any:
    return b.fsub(v, w)


@_operation(F32X16, F32X16, F32X16)
def fmax(b: Any, v: Any, w: Any) -> Any:
    """A NaN in ``v`` gives way to ``w``."""
    return b.select(b.fcmp_ordered(">", v, w), v, w)


@_operation(F32X16, F32X16, _I, _F)
def first_lanes(b: Any, v: Any, n: Any, other: Any) -> Any:
    """``v`` in the lanes before ``n``, ``other`` from there on."""
    undefined = ir.Constant(_v16f, ir.Undefined)
    rest = b.insert_element(undefined, other, ir.Constant(_i32, 0))
    rest = b.shuffle_vector(rest, undefined, ir.Constant(_v16i, [0] * LANES))
    count = ir.Constant(_v16i, ir.Undefined)
    count = b.insert_element(count, b.trunc(n, _i32), ir.Constant(_i32, 0))
    count = _shuffle(b, count, count, [0] * LANES)
    place = ir.Constant(_v16i, list(range(LANES)))
    return b.select(b.icmp_signed("<", place, count), v, rest)


@_operation(I32X16, F32X16)
def order_keys(b: Any, v: Any) -> Any:
    """Integers that compare as the floats do; NaN without a sign is above all else."""
    bits = b.bitcast(v, _v16i)
    sign = b.ashr(bits, ir.Constant(_v16i, [31] * LANES))
    return b.xor(bits, b.and_(sign, ir.Constant(_v16i, [0x7FFFFFFF] * LANES)))


@_operation(types.void, _I, I32X16)
def store_i32(b: Any, address: Any, v: Any) -> None:
    """64 bytes."""
    b.store(v, b.inttoptr(address, _v16i.as_pointer()), align=1)


@_operation(types.void, _I, F32X16)
def store_bf16(b: Any, address: Any, v: Any) -> None:
    """32 bytes: rounded to nearest, ties to even; NaN stays NaN."""
    bits = b.bitcast(v, _v16i)
    sixteen, one = ir.Constant(_v16i, [16] * LANES), ir.Constant(_v16i, [1] * LANES)
    odd = b.and_(b.lshr(bits, sixteen), one)
    rounded = b.add(b.add(bits, odd), ir.Constant(_v16i, [0x7FFF] * LANES))
    quiet = b.or_(bits, ir.Constant(_v16i, [0x400000] * LANES))
    rounded = b.select(b.fcmp_unordered("uno", v, v), quiet, rounded)
    of = ir.VectorType(ir.IntType(16), LANES)
    words = b.trunc(b.lshr(rounded, sixteen), of)
    b.store(words, b.inttoptr(address, of.as_pointer()), align=1)


@_operation(types.void, _I, _I)
def store_int(b: Any, address: Any, value: Any) -> None:
    """An int64."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)
