"""From lanes that are rows to rows in memory: bfloat16 pairs and the transposition of words.

Both are emitted as plain shuffles, which LLVM lowers to unpack and 128-bit shuffle instructions on
AVX-512, to their halves on AVX2, and to whatever else there is.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from offload.cpu_ops.isa import Isa, features
from offload.cpu_ops.vectors import F32X16, I32X16, ISA, _operation

# Numba's own annotations are partial and differ between versions.
_cgutils: Any = cgutils

_i16, _i32 = ir.IntType(16), ir.IntType(32)
_v16i, _v16f = ir.VectorType(_i32, 16), ir.VectorType(ir.FloatType(), 16)


class _BFloat(ir.Type):  # type: ignore[misc, unused-ignore]
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _convert(b: Any, low: Any, high: Any) -> Any:
    """32 bfloat16 as int16, by the instruction."""
    name, of = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(_BFloat(), 32)
    function = ir.FunctionType(of, [_v16f, _v16f])
    out = b.call(_cgutils.get_or_insert_function(b.module, function, name), [high, low])
    return b.bitcast(out, ir.VectorType(_i16, 32))


def rounding(isa: Isa) -> str:
    """How float32 becomes bfloat16 with that instruction set on this processor: by the
    "instruction" of AVX512-BF16, or in "integer" arithmetic with the same results."""
    return "instruction" if isa is Isa.AVX512VNNI and "avx512bf16" in features() else "integer"


def _words(value: int) -> Any:
    return ir.Constant(_v16i, [value] * 16)


def _shuffle(b: Any, v: Any, w: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(v, w, ir.Constant(ir.VectorType(_i32, len(lanes)), lanes))


def _rounded(b: Any, v: Any) -> Any:
    """Bits of float32 whose upper half is the nearest bfloat16, ties to even; subnormals are
    zeros and NaN is one NaN, as the instruction has them."""
    bits = b.bitcast(v, _v16i)
    odd = b.and_(b.lshr(bits, _words(16)), _words(1))
    out = b.add(bits, b.add(odd, _words(0x7FFF)))
    tiny = b.icmp_unsigned("==", b.and_(bits, _words(0x7F800000)), _words(0))
    out = b.select(tiny, b.and_(bits, _words(0x80000000)), out)
    return b.select(b.fcmp_unordered("uno", v, v), b.or_(bits, _words(0x00400000)), out)


@_operation(I32X16, ISA, F32X16, F32X16)
def bf16_pair(b: Any, how: str, even: Any, odd: Any) -> Any:
    """Two columns as bfloat16, the first in the low half of each lane; ``how``: ``rounding``."""
    if how == "instruction":
        halves = _convert(b, even, odd)
        order = [n for i in range(16) for n in (i, i + 16)]
        return b.bitcast(_shuffle(b, halves, halves, order), _v16i)
    low = b.lshr(_rounded(b, even), _words(16))
    return b.or_(low, b.and_(_rounded(b, odd), _words(0xFFFF0000)))


@_operation(types.void, types.int64, ISA, F32X16)
def store_bf16(b: Any, address: Any, how: str, v: Any) -> None:
    """16 bfloat16 in a row: 32 bytes."""
    narrow = ir.VectorType(_i16, 16)
    if how == "instruction":
        halves = _convert(b, v, v)
        out = _shuffle(b, halves, halves, list(range(16)))
    else:
        out = b.trunc(b.lshr(_rounded(b, v), _words(16)), narrow)
    b.store(out, b.inttoptr(address, narrow.as_pointer()), align=1)


def _transpose(b: Any, r: list[Any]) -> list[Any]:
    """16 vectors of 16 words, rows for columns: four rounds of sixteen two-input shuffles, the
    first two inside 128 bits."""
    low32 = [n + 4 * i for i in range(4) for n in (0, 16, 1, 17)]
    high32 = [n + 2 for n in low32]
    low64 = [n + 4 * i for i in range(4) for n in (0, 1, 16, 17)]
    high64 = [n + 2 for n in low64]
    t = [_shuffle(b, r[i], r[i + 1], o) for i in range(0, 16, 2) for o in (low32, high32)]
    u = [
        _shuffle(b, t[4 * g + i], t[4 * g + i + 2], o)
        for g in range(4)
        for i in range(2)
        for o in (low64, high64)
    ]

    def quarters(v: Any, w: Any, first: int) -> Any:
        """128-bit quarters ``first`` and ``first + 2`` of both."""
        picks = [first, first + 2, first + 4, first + 6]
        return _shuffle(b, v, w, [4 * q + i for q in picks for i in range(4)])

    rows: list[Any] = [None] * 16
    for c in range(4):
        for odd in range(2):
            left = quarters(u[c], u[4 + c], odd)
            right = quarters(u[8 + c], u[12 + c], odd)
            rows[4 * odd + c] = quarters(left, right, 0)
            rows[4 * (odd + 2) + c] = quarters(left, right, 1)
    return rows


@_operation(types.void, types.int64, types.int64, *[I32X16] * 16)
def store_transposed(b: Any, out: Any, stride: Any, *words: Any) -> None:
    """Word i of row r (lane r of ``words[i]``) to ``out + r * stride + 4 * i``."""
    for r, v in enumerate(_transpose(b, list(words))):
        at = b.add(out, b.mul(stride, ir.Constant(ir.IntType(64), r)))
        b.store(v, b.inttoptr(at, _v16i.as_pointer()), align=1)
