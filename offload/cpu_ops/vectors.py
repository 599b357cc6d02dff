"""Vectors of 16 lanes for Numba: two types and the operations that the kernels need.

``I32X16`` holds 16 int32 or 64 bytes, ``F32X16`` 16 float32. Addresses are plain int64. LLVM splits
a vector where registers are shorter, so the same kernel runs on 512, 256 and 128 bits. Operations
that depend on the instruction set take its tag first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

# Numba's own annotations are partial and differ between versions.
_cgutils: Any = cgutils

LANES = 16

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f32, _half = ir.FloatType(), ir.HalfType()


def _vec(n: int, element: Any) -> Any:
    return ir.VectorType(element, n)


_v16i, _v16f, _v32h, _v64b = _vec(16, _i32), _vec(16, _f32), _vec(32, _i16), _vec(64, _i8)


class Vector(types.Type):  # type: ignore[misc, unused-ignore]
    """A register; ``llvm``: its type there."""

    def __init__(self, name: str, llvm_type: Any) -> None:
        self.llvm = llvm_type
        super().__init__(name=name)


class _VectorModel(PrimitiveModel):  # type: ignore[misc, unused-ignore]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call, unused-ignore]


register_model(Vector)(_VectorModel)

I32X16 = Vector("I32x16", _v16i)
F32X16 = Vector("F32x16", _v16f)

_I, _F = types.int64, types.float32
TAG = ISA = None
"""In a list of argument types: a tag, or the instruction set's."""


def _operation(returns: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of ``emit(builder, *values)``; a tag arrives as its name. A tuple is
    returned as a list."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(_context: Any, *given: Any) -> Any:
            if len(given) != len(arguments):
                raise TypeError(f"{emit.__name__} takes {len(arguments)} arguments")
            wanted = [g if a is ISA else a for a, g in zip(arguments, given, strict=True)]

            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                named = [
                    g.choice if a is ISA else v
                    for a, g, v in zip(arguments, given, values, strict=True)
                ]
                value = emit(builder, *named)
                if isinstance(value, list):
                    return context.make_tuple(builder, signature.return_type, value)
                return context.get_dummy_value() if value is None else value

            return returns(*wanted), codegen

        names = ["context", *(f"a{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        typing.__name__ = emit.__name__
        typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typing)

    return decorate


# ---- helpers that emit IR


def _call(b: Any, name: str, returns: Any, *arguments: Any) -> Any:
    function = ir.FunctionType(returns, [a.type for a in arguments])
    return b.call(_cgutils.get_or_insert_function(b.module, function, name), arguments)


def _at(b: Any, address: Any, of: Any) -> Any:
    return b.inttoptr(address, of.as_pointer())


def _load(b: Any, address: Any, of: Any) -> Any:
    return b.load(_at(b, address, of), align=1)


def _constants(of: Any, values: Any) -> Any:
    return ir.Constant(of, list(values))


def _all(of: Any, value: Any) -> Any:
    return _constants(of, [value] * of.count)


def _splat(b: Any, value: Any) -> Any:
    of = _vec(LANES, value.type)
    undefined = ir.Constant(of, ir.Undefined)
    one = b.insert_element(undefined, value, ir.Constant(_i32, 0))
    return b.shuffle_vector(one, undefined, _all(_v16i, 0))


def _int(b: Any, value: Any) -> Any:
    """An int64 argument as a splat of int32."""
    return _splat(b, b.trunc(value, _i32))


def _part(b: Any, v: Any, first: int, count: int) -> Any:
    undefined = ir.Constant(v.type, ir.Undefined)
    return b.shuffle_vector(
        v, undefined, _constants(_vec(count, _i32), range(first, first + count))
    )


def _join(b: Any, low: Any, high: Any) -> Any:
    n = low.type.count
    return b.shuffle_vector(low, high, _constants(_vec(2 * n, _i32), range(2 * n)))


# ---- memory


@_operation(I32X16, _I)
def load_i32(b: Any, address: Any) -> Any:
    """64 bytes."""
    return _load(b, address, _v16i)


@_operation(I32X16, _I)
def load_u8(b: Any, address: Any) -> Any:
    """16 bytes, widened."""
    return b.zext(_load(b, address, _vec(16, _i8)), _v16i)


@_operation(F32X16, _I)
def load_f32(b: Any, address: Any) -> Any:
    return _load(b, address, _v16f)


@_operation(I32X16, _I)
def load_u16(b: Any, address: Any) -> Any:
    """16 words of 16 bits, widened."""
    return b.zext(_load(b, address, _vec(16, _i16)), _v16i)


@_operation(F32X16, ISA, I32X16)
def widen_f16(b: Any, isa: str, bits: Any) -> Any:
    """The float16 in the low half of each lane; the high halves are ignored. Exact."""
    if isa != "portable":
        return b.fpext(b.bitcast(b.trunc(bits, _vec(16, _i16)), _vec(16, _half)), _v16f)
    # In integers: without a conversion instruction LLVM calls a routine of compiler-rt per lane,
    # which is not linked into a JIT. Exponents are rebased by a multiplication, which also
    # normalises subnormals; infinities and NaN get the highest exponent by hand.
    magnitude = b.shl(b.and_(bits, _all(_v16i, 0x7FFF)), _all(_v16i, 13))
    value = b.fmul(b.bitcast(magnitude, _v16f), _all(_v16f, 2.0**112))
    special = b.icmp_unsigned(">=", magnitude, _all(_v16i, 0x7C00 << 13))
    high = b.or_(magnitude, _all(_v16i, 0x7F800000))
    out = b.select(special, high, b.bitcast(value, _v16i))
    sign = b.shl(b.and_(bits, _all(_v16i, 0x8000)), _all(_v16i, 16))
    return b.bitcast(b.or_(out, sign), _v16f)


@_operation(types.void, _I, F32X16)
def store_f32(b: Any, address: Any, v: Any) -> None:
    b.store(v, _at(b, address, _v16f), align=1)


@_operation(types.void, _I, I32X16)
def store_i8(b: Any, address: Any, v: Any) -> None:
    """The low bytes of the lanes: 16 bytes."""
    of = _vec(16, _i8)
    b.store(b.trunc(v, of), _at(b, address, of), align=1)


@_operation(I32X16, _I)
def splat_i32(b: Any, address: Any) -> Any:
    """The int32 (or four bytes) at an address in every lane."""
    return _splat(b, _load(b, address, _i32))


@_operation(F32X16, _I)
def splat_f32(b: Any, address: Any) -> Any:
    return _splat(b, _load(b, address, _f32))


@_operation(_I, _I)
def load_int(b: Any, address: Any) -> Any:
    return _load(b, address, _i64)


@_operation(_F, _I)
def load_float(b: Any, address: Any) -> Any:
    return _load(b, address, _f32)


@_operation(types.void, _I, _F)
def store_float(b: Any, address: Any, value: Any) -> None:
    b.store(value, _at(b, address, _f32), align=1)


@_operation(types.void, _I, _I)
def store_int32(b: Any, address: Any, value: Any) -> None:
    b.store(b.trunc(value, _i32), _at(b, address, _i32), align=1)


@_operation(types.void, _I)
def prefetch(b: Any, address: Any) -> None:
    """Into the second cache. A hint: any address will do, also one that is not mapped."""
    hint = [ir.Constant(_i32, n) for n in (0, 2, 1)]
    _call(b, "llvm.prefetch.p0i8", ir.VoidType(), _at(b, address, _i8), *hint)


@_operation(types.void, _I, _I)
def store_int16(b: Any, address: Any, value: Any) -> None:
    b.store(b.trunc(value, _i16), _at(b, address, _i16), align=1)


@_operation(_I, _I, _I)
def fetch_add(b: Any, address: Any, n: Any) -> Any:
    """Add to the int64 at an address, atomically; the value before."""
    return b.atomic_rmw("add", _at(b, address, _i64), n, "monotonic")


@_operation(types.void)
def fence(b: Any) -> None:
    """For the compiler only: nothing loaded before is kept for after.

    Without it LLVM finds that the tiles of a stream are multiplied with the same activations,
    broadcasts them all once and spills hundreds of registers to memory.
    """
    function = ir.FunctionType(ir.VoidType(), [])
    b.asm(function, "", "~{memory}", [], True)


@_operation(types.void, _I)
def call(b: Any, address: Any) -> None:
    """Call a C function without arguments."""
    function = ir.FunctionType(ir.VoidType(), [])
    b.call(b.inttoptr(address, function.as_pointer()), [])


@_operation(types.void, _I, _I)
def call_with(b: Any, address: Any, argument: Any) -> None:
    """Call a C function of one int64."""
    function = ir.FunctionType(ir.VoidType(), [argument.type])
    b.call(b.inttoptr(address, function.as_pointer()), [argument])


def stack(nbytes: int) -> Any:
    """An operation () -> the address of ``nbytes`` of the kernel's stack, 64-aligned.

    One place per call site, however often it runs.
    """

    @_operation(_I)
    def place(b: Any) -> Any:
        with b.goto_entry_block():  # not alloca_once: it stores zeros, element by element
            room = b.alloca(ir.ArrayType(_i8, nbytes))
        room.align = 64
        return b.ptrtoint(room, _i64)

    return place


# ---- integers


@_operation(I32X16, _I)
def int_splat(b: Any, value: Any) -> Any:
    return _int(b, value)


@_operation(I32X16, I32X16, _I)
def both(b: Any, v: Any, mask: Any) -> Any:
    """v & mask"""
    return b.and_(v, _int(b, mask))


@_operation(I32X16, I32X16, I32X16)
def either(b: Any, v: Any, w: Any) -> Any:
    """v | w"""
    return b.or_(v, w)


@_operation(I32X16, I32X16, _I)
def left(b: Any, v: Any, n: Any) -> Any:
    return b.shl(v, _int(b, n))


@_operation(I32X16, I32X16, _I)
def right(b: Any, v: Any, n: Any) -> Any:
    """Logical shift."""
    return b.lshr(v, _int(b, n))


@_operation(I32X16, I32X16, _I)
def right_signed(b: Any, v: Any, n: Any) -> Any:
    return b.ashr(v, _int(b, n))


@_operation(I32X16, I32X16, I32X16)
def iadd(b: Any, v: Any, w: Any) -> Any:
    return b.add(v, w)


@_operation(I32X16, I32X16, I32X16)
def imul(b: Any, v: Any, w: Any) -> Any:
    return b.mul(v, w)


@_operation(I32X16, I32X16, I32X16)
def imax(b: Any, v: Any, w: Any) -> Any:
    return b.select(b.icmp_signed(">", v, w), v, w)


@_operation(I32X16, I32X16, _I, I32X16, I32X16)
def where_less(b: Any, v: Any, bound: Any, yes: Any, no: Any) -> Any:
    return b.select(b.icmp_signed("<", v, _int(b, bound)), yes, no)


@_operation(_I, I32X16)
def sum_lanes(b: Any, v: Any) -> Any:
    return b.sext(_call(b, "llvm.vector.reduce.add.v16i32", _i32, v), _i64)


@_operation(_I, I32X16)
def max_lanes(b: Any, v: Any) -> Any:
    return b.sext(_call(b, "llvm.vector.reduce.smax.v16i32", _i32, v), _i64)


@_operation(I32X16, I32X16)
def even_bytes(b: Any, v: Any) -> Any:
    """Signed bytes 0 and 2 of each lane as its two words."""
    eight = _all(_v32h, 8)
    return b.bitcast(b.ashr(b.shl(b.bitcast(v, _v32h), eight), eight), _v16i)


@_operation(I32X16, I32X16)
def odd_bytes(b: Any, v: Any) -> Any:
    """Signed bytes 1 and 3 of each lane as its two words."""
    return b.bitcast(b.ashr(b.bitcast(v, _v32h), _all(_v32h, 8)), _v16i)


@_operation(I32X16, I32X16, _I)
def words_times(b: Any, v: Any, factor: Any) -> Any:
    """The 32 words of 16 bits times a number; what does not fit is lost."""
    words = b.insert_element(
        ir.Constant(_v32h, ir.Undefined), b.trunc(factor, _i16), ir.Constant(_i32, 0)
    )
    words = b.shuffle_vector(words, words, _all(_vec(32, _i32), 0))
    return b.bitcast(b.mul(b.bitcast(v, _v32h), words), _v16i)


# ---- floats


@_operation(F32X16, _F)
def splat(b: Any, value: Any) -> Any:
    return _splat(b, value)


@_operation(F32X16, F32X16, F32X16, F32X16)
def fma(b: Any, v: Any, w: Any, plus: Any) -> Any:
    return _call(b, "llvm.fma.v16f32", _v16f, v, w, plus)


@_operation(F32X16, F32X16, F32X16)
def fmul(b: Any, v: Any, w: Any) -> Any:
    return b.fmul(v, w)


@_operation(F32X16, F32X16, F32X16)
def fadd(b: Any, v: Any, w: Any) -> Any:
    return b.fadd(v, w)


@_operation(F32X16, F32X16, F32X16)
def fdiv(b: Any, v: Any, w: Any) -> Any:
    return b.fdiv(v, w)


@_operation(F32X16, F32X16, _F)
def at_most(b: Any, v: Any, bound: Any) -> Any:
    """NaN stays NaN."""
    limit = _splat(b, bound)
    return b.select(b.fcmp_ordered(">", v, limit), limit, v)


@_operation(F32X16, F32X16, _F)
def at_least(b: Any, v: Any, bound: Any) -> Any:
    """NaN stays NaN."""
    limit = _splat(b, bound)
    return b.select(b.fcmp_ordered("<", v, limit), limit, v)


@_operation(F32X16, F32X16)
def nearest(b: Any, v: Any) -> Any:
    """Round to the nearest integer, ties to even."""
    return _call(b, "llvm.rint.v16f32", _v16f, v)


@_operation(F32X16, I32X16)
def to_float(b: Any, v: Any) -> Any:
    return b.sitofp(v, _v16f)


@_operation(I32X16, F32X16)
def to_int(b: Any, v: Any) -> Any:
    """Of integers in range."""
    return b.fptosi(v, _v16i)


@_operation(F32X16, I32X16)
def as_float(b: Any, v: Any) -> Any:
    """The same bits."""
    return b.bitcast(v, _v16f)


@_operation(I32X16, F32X16)
def as_int(b: Any, v: Any) -> Any:
    """The same bits."""
    return b.bitcast(v, _v16i)


@_operation(_F, _I)
def bits_float(b: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an integer."""
    return b.bitcast(b.trunc(bits, _i32), _f32)


@_operation(_F, F32X16, _I)
def lane(b: Any, v: Any, i: Any) -> Any:
    return b.extract_element(v, b.trunc(i, _i32))
