"""Vectors of 16 lanes of 64 bits, and what optimizer kernels need beside ``vectors.py``.

``I64X16`` holds 16 int64, ``F64X16`` 16 float64. All is plain LLVM vector code except
``look_up_8``, and that only moves bits: results are the same on every instruction set.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from offload.cpu_ops.vectors import (
    F32X16,
    I32X16,
    ISA,
    LANES,
    Vector,
    _call,
    _join,
    _operation,
    _part,
)

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f32, _f64 = ir.FloatType(), ir.DoubleType()
_v16i, _v16f = ir.VectorType(_i32, LANES), ir.VectorType(_f32, LANES)
_v16l, _v16d = ir.VectorType(_i64, LANES), ir.VectorType(_f64, LANES)
_I, _F, _D = types.int64, types.float32, types.float64

I64X16 = Vector("I64x16", _v16l)
F64X16 = Vector("F64x16", _v16d)


def _splat(b: Any, value: Any, of: Any) -> Any:
    undefined = ir.Constant(of, ir.Undefined)
    one = b.insert_element(undefined, value, ir.Constant(_i32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(_v16i, [0] * LANES))


def _all(of: Any, value: Any) -> Any:
    return ir.Constant(of, [value] * LANES)


# ---- 64-bit integers


@_operation(I64X16, _I)
def count_from(b: Any, first: Any) -> Any:
    """first, first + 1, ..."""
    return b.add(_splat(b, first, _v16l), ir.Constant(_v16l, list(range(LANES))))


@_operation(I64X16, _I)
def long_splat(b: Any, value: Any) -> Any:
    return _splat(b, value, _v16l)


@_operation(I64X16, I64X16, _I)
def product_32(b: Any, v: Any, factor: Any) -> Any:
    """The low half of each lane times ``factor`` < 2^32: all 64 bits."""
    return b.mul(b.and_(v, _all(_v16l, 0xFFFFFFFF)), _splat(b, factor, _v16l))


@_operation(I64X16, I64X16)
def high_half(b: Any, v: Any) -> Any:
    return b.lshr(v, _all(_v16l, 32))


@_operation(I64X16, I64X16, I64X16)
def differ(b: Any, v: Any, w: Any) -> Any:
    """v xor w"""
    return b.xor(v, w)


@_operation(I32X16, I64X16)
def low_words(b: Any, v: Any) -> Any:
    """The low half of each lane."""
    return b.trunc(v, _v16i)


# ---- float64


@_operation(F64X16, F64X16, F32X16)
def add_squares(b: Any, total: Any, v: Any) -> Any:
    """total + v^2. The square of a float32 is exact in float64: fused or not is the same."""
    wide = b.fpext(v, _v16d)
    return _call(b, "llvm.fmuladd.v16f64", _v16d, wide, wide, total)


@_operation(F64X16)
def no_squares(b: Any) -> Any:
    return _all(_v16d, 0.0)


@_operation(F64X16, F64X16, F64X16)
def add_wide(b: Any, v: Any, w: Any) -> Any:
    return b.fadd(v, w)


@_operation(_D, F64X16)
def sum_wide(b: Any, v: Any) -> Any:
    """Of all lanes, as a tree: lane i and i + 8, then + 4, + 2, + 1."""
    width = LANES // 2
    while width:
        turned = ir.Constant(_v16i, [(i + width) % LANES for i in range(LANES)])
        v = b.fadd(v, b.shuffle_vector(v, v, turned))
        width //= 2
    return b.extract_element(v, ir.Constant(_i32, 0))


@_operation(types.void, _I, _D)
def store_double(b: Any, address: Any, value: Any) -> None:
    b.store(value, b.inttoptr(address, _f64.as_pointer()), align=8)


# ---- float32


@_operation(F32X16, F32X16)
def root(b: Any, v: Any) -> Any:
    """The square root, correctly rounded."""
    return _call(b, "llvm.sqrt.v16f32", _v16f, v)


@_operation(I32X16, F32X16, F32X16, I32X16, I32X16)
def where_float_less(b: Any, v: Any, w: Any, yes: Any, no: Any) -> Any:
    """A NaN is not less."""
    return b.select(b.fcmp_ordered("<", v, w), yes, no)


@_operation(I32X16, I32X16, I32X16)
def imin(b: Any, v: Any, w: Any) -> Any:
    return b.select(b.icmp_signed("<", v, w), v, w)


# ---- memory


@_operation(F32X16, _I)
def load_bf16(b: Any, address: Any) -> Any:
    """32 bytes."""
    of = ir.VectorType(_i16, LANES)
    words = b.load(b.inttoptr(address, of.as_pointer()), align=1)
    return b.bitcast(b.shl(b.zext(words, _v16i), _all(_v16i, 16)), _v16f)


@_operation(types.void, _I, F32X16, I32X16)
def store_bf16_random(b: Any, address: Any, v: Any, dice: Any) -> None:
    """32 bytes: rounded away from zero if the low half of ``v`` plus the 16 low bits of ``dice``
    carries, else towards it. Exact values and infinities stay, NaN stays NaN."""
    sixteen, low = _all(_v16i, 16), _all(_v16i, 0xFFFF)
    bits = b.bitcast(v, _v16i)
    rounded = b.add(bits, b.and_(dice, low))
    quiet = b.or_(bits, _all(_v16i, 0x400000))
    rounded = b.select(b.fcmp_unordered("uno", v, v), quiet, rounded)
    of = ir.VectorType(_i16, LANES)
    b.store(b.trunc(b.lshr(rounded, sixteen), of), b.inttoptr(address, of.as_pointer()), align=1)


@_operation(types.void, _I, _I, _I)
def copy_bytes(b: Any, target: Any, source: Any, n: Any) -> None:
    """Memory that does not overlap."""
    pointer, bit = _i8.as_pointer(), ir.IntType(1)
    to, at = b.inttoptr(target, pointer), b.inttoptr(source, pointer)
    _call(b, "llvm.memcpy.p0i8.p0i8.i64", ir.VoidType(), to, at, n, ir.Constant(bit, 0))


@_operation(types.void, _I, _I)
def clear_bytes(b: Any, target: Any, n: Any) -> None:
    at, bit = b.inttoptr(target, _i8.as_pointer()), ir.IntType(1)
    zero = ir.Constant(_i8, 0)
    _call(b, "llvm.memset.p0i8.i64", ir.VoidType(), at, zero, n, ir.Constant(bit, 0))


# ---- tables


def look_up_8(values: tuple[float, ...]) -> Any:
    """An operation (isa, v) -> the table's float32 for each lane, an integer 0..7."""
    entries = [float(v) for v in values] + [0.0] * (8 - len(values))

    @_operation(F32X16, ISA, I32X16)
    def table(b: Any, isa: str, v: Any) -> Any:
        if isa == "avx512vnni":
            twice = ir.Constant(_v16f, entries * 2)
            return _call(b, "llvm.x86.avx512.permvar.sf.512", _v16f, twice, v)
        if isa == "avx2":
            half = ir.VectorType(_f32, 8)
            once, name = ir.Constant(half, entries), "llvm.x86.avx2.permps"
            return _join(b, *(_call(b, name, half, once, _part(b, v, at, 8)) for at in (0, 8)))
        found = _all(_v16f, entries[0])
        for i, entry in enumerate(entries[1 : len(values)], 1):
            hit = b.icmp_signed("==", v, _all(_v16i, i))
            found = b.select(hit, _all(_v16f, entry), found)
        return found

    return table
