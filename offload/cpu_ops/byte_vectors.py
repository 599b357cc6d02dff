"""Products and look-ups of the 64 bytes of an ``I32X16``, as each instruction set does them."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm

from offload.cpu_ops.vectors import (
    _I,
    I32X16,
    ISA,
    _all,
    _call,
    _constants,
    _i8,
    _i16,
    _i32,
    _join,
    _load,
    _operation,
    _part,
    _splat,
    _v16i,
    _v32h,
    _v64b,
    _vec,
)


def dot_vnni(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """``acc`` plus the sum of four products per lane, of unsigned bytes with signed ones."""
    if llvm.llvm_version_info[0] >= 22:  # operands typed as what they are; before, as int32
        w, x = b.bitcast(w, _v64b), b.bitcast(x, _v64b)
    return _call(b, "llvm.x86.avx512.vpdpbusd.512", _v16i, acc, w, x)


def dot_words_vnni(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """``acc`` plus the sum of two products of signed words per lane."""
    if llvm.llvm_version_info[0] >= 22:  # as above
        w, x = b.bitcast(w, _v32h), b.bitcast(x, _v32h)
    return _call(b, "llvm.x86.avx512.vpdpwssd.512", _v16i, acc, w, x)


def _dot_generic(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """In shifts and 32-bit products, byte by byte: exact, and legal on every target."""
    for i in range(4):
        wide = b.and_(b.lshr(w, _all(_v16i, 8 * i)), _all(_v16i, 255))
        signed = b.ashr(b.shl(x, _all(_v16i, 24 - 8 * i)), _all(_v16i, 24))
        acc = b.add(acc, b.mul(wide, signed))
    return acc


def _dot_avx2(b: Any, acc: Any, w: Any, x: Any, *, wide: bool) -> Any:
    w, x = b.bitcast(w, _v64b), b.bitcast(x, _v64b)
    if wide:
        w = b.xor(w, _all(_v64b, 0x80))  # the signed number that was stored plus 128
    halves = []
    for first in (0, 32):
        w_half, x_half = _part(b, w, first, 32), _part(b, x, first, 32)
        bytes_ = w_half.type
        if wide:  # |w| * (x with w's sign): a pair is at most 2 * 128 * 127 < 2^15
            x_half = _call(b, "llvm.x86.avx2.psign.b", bytes_, x_half, w_half)
            negative = b.icmp_signed("<", w_half, _all(bytes_, 0))
            w_half = b.select(negative, b.sub(_all(bytes_, 0), w_half), w_half)
        pairs = _call(b, "llvm.x86.avx2.pmadd.ub.sw", _vec(16, _i16), w_half, x_half)
        ones = _all(_vec(16, _i16), 1)
        halves.append(_call(b, "llvm.x86.avx2.pmadd.wd", _vec(8, _i32), pairs, ones))
    return b.add(acc, _join(b, *halves))


@_operation(I32X16, ISA, I32X16, I32X16, I32X16)
def dot4(b: Any, isa: str, acc: Any, w: Any, x: Any) -> Any:
    """acc + the sum of four products per lane: bytes of w in 0..127, of x in -127..127."""
    if isa == "avx512vnni":
        return dot_vnni(b, acc, w, x)
    if isa == "avx2":
        return _dot_avx2(b, acc, w, x, wide=False)
    return _dot_generic(b, acc, w, x)


@_operation(I32X16, ISA, I32X16, I32X16, I32X16)
def dot4_wide(b: Any, isa: str, acc: Any, w: Any, x: Any) -> Any:
    """As ``dot4``, for bytes of w that are integers in -128..127 stored plus 128.

    Together with an ``acc`` that starts at ``wide_start`` the result is the signed product.
    """
    if isa == "avx512vnni":
        return dot_vnni(b, acc, w, x)
    if isa == "avx2":
        return _dot_avx2(b, acc, w, x, wide=True)
    return _dot_generic(b, acc, w, x)


@_operation(I32X16, ISA, I32X16, I32X16, I32X16)
def dot2(b: Any, isa: str, acc: Any, w: Any, x: Any) -> Any:
    """acc + the sum of two products of signed words per lane, -2^15 not among them."""
    if isa == "avx512vnni":
        return dot_words_vnni(b, acc, w, x)
    if isa == "avx2":
        w, x = b.bitcast(w, _v32h), b.bitcast(x, _v32h)
        name, half = "llvm.x86.avx2.pmadd.wd", _vec(8, _i32)
        halves = (_call(b, name, half, _part(b, w, n, 16), _part(b, x, n, 16)) for n in (0, 16))
        return b.add(acc, _join(b, *halves))
    sixteen = _all(_v16i, 16)
    low = b.mul(b.ashr(b.shl(w, sixteen), sixteen), b.ashr(b.shl(x, sixteen), sixteen))
    return b.add(acc, b.add(low, b.mul(b.ashr(w, sixteen), b.ashr(x, sixteen))))


@_operation(I32X16, ISA, _I)
def wide_start(b: Any, isa: str, address: Any) -> Any:
    """The int32 at an address, -128 times the sum of x, where the instruction set multiplies w
    plus 128."""
    return _all(_v16i, 0) if isa == "avx2" else _splat(b, _load(b, address, _i32))


def look_up(values: tuple[int, ...]) -> Any:
    """An operation (isa, v) -> the table's byte for each byte 0..15 of v."""

    @_operation(I32X16, ISA, I32X16)
    def table(b: Any, isa: str, v: Any) -> Any:
        v = b.bitcast(v, _v64b)
        entries = [value & 255 for value in values]
        if isa == "avx512vnni":
            found = _call(
                b, "llvm.x86.avx512.pshuf.b.512", _v64b, _constants(_v64b, entries * 4), v
            )
        elif isa == "avx2":
            half, name = _vec(32, _i8), "llvm.x86.avx2.pshuf.b"
            twice = _constants(half, entries * 2)
            low, high = (_call(b, name, half, twice, _part(b, v, at, 32)) for at in (0, 32))
            found = _join(b, low, high)
        else:
            found = _all(_v64b, entries[0])
            for i, entry in enumerate(entries[1:], 1):
                hit = b.icmp_unsigned("==", v, _all(_v64b, i))
                found = b.select(hit, _all(_v64b, entry), found)
        return b.bitcast(found, _v16i)

    return table
