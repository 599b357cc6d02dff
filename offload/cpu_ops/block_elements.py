"""How keys and values of a block are stored, and how kernels multiply with them.

    T tokens of a block, Dk and Dv head sizes of keys and values

"f32", "bf16": rows [T, D] as they are. "q8", "q4": unsigned integers u with x = low + step * u.
Keys share (step, low) along the tokens of a block, one pair per channel: a few channels of keys
are much larger than the others, at every token. Values, which have no such channels, share them
along the channels, one pair per token. That is KIVI's division (Liu et al., 2024; KVQuant, Hooper
et al., 2024, finds the same). Both pairs leave the inner loops: ``q . k`` is
``(q * step) . u + q . low``, and ``sum p v`` is ``sum (p * step) u + sum p low``.

A quantised record is bfloat16 steps, bfloat16 lows (Dk of each for keys, T for values), then the
integers. Of keys [T / 16, D / 2, 16, 2]: a pair of channels of 16 tokens after the other, of "q4"
two pairs, low nibbles the first. So a register's lanes are tokens and nothing has to be summed
across them, which took as long as the products. Of values [T / 2, D, 2]: channels of two tokens, of
"q4" low nibbles 16 of 32 channels, high ones the others. ``block_layout`` has both in numpy.

A *mode* says how a kernel multiplies: the kind's name (float32 multiply-adds); "bf16dot": bfloat16
keys with bfloat16 queries and weights by dot-product instructions; "q8dot", "q4dot": the integers
with queries and weights as integers of 15 bits (SageAttention, Zhang et al., 2024, takes 8 for
queries; here a block's few large channels would drown the others), by products of pairs of words.
Products of four bytes take as many instructions, two for 15 bits, and need their sums shifted.
"""

from __future__ import annotations

from typing import Any

from numba import float32

from offload.cpu_ops.block_vectors import (
    cross_sums,
    dot_pairs,
    dot_words,
    half_sums,
    load_high_nibbles,
    load_low_nibbles,
    load_pairs,
    load_two,
    load_words,
    quad_0,
    quad_1,
    quad_2,
    quad_3,
)
from offload.cpu_ops.prefetching import ask
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    fadd,
    fma,
    iadd,
    int_splat,
    left,
    load_f32,
    load_i32,
    load_u16,
    right,
    splat,
    splat_f32,
    splat_i32,
    to_float,
)


def load_element(mode: Any, row: int, i: int) -> Any:
    """16 channels from 16 i on as float32; only inside kernels."""
    raise NotImplementedError


def row_bytes(mode: Any, dim: int) -> int:
    """Of one token; only inside kernels."""
    raise NotImplementedError


def quantised(mode: Any) -> bool:
    """Whether there are steps and lows; only inside kernels."""
    raise NotImplementedError


def paired(mode: Any) -> bool:
    """Whether weights are rounded to pairs of bfloat16; only inside kernels."""
    raise NotImplementedError


def integer(mode: Any) -> bool:
    """Whether queries and weights are integers; only inside kernels."""
    raise NotImplementedError


def load_32(mode: Any, row: int, i: int, odd: int) -> Any:
    """32 channels of bfloat16 in pairs: of the 64 from 64 i on one half, or the other if ``odd``.
    Only inside kernels."""
    raise NotImplementedError


def load_two_16(mode: Any, row: int, other: int, i: int, odd: int) -> Any:
    """Of two tokens 16 channels in pairs, from 32 i or, if ``odd``, from 32 i + 16 on; only inside
    kernels."""
    raise NotImplementedError


def dot_32(mode: Any, total: Any, v: Any, w: Any) -> Any:
    """total + the products of pairs; only inside kernels."""
    raise NotImplementedError


def nothing(mode: Any) -> Any:
    """A sum of ``dot_32`` before the first; only inside kernels."""
    raise NotImplementedError


_LOADS = {
    "f32": lambda mode, row, i: load_f32(row + 64 * i),
    "bf16": lambda mode, row, i: as_float(left(load_u16(row + 32 * i), 16)),
}
_LOADS["bf16dot"] = _LOADS["bf16"]
_ROWS = {
    "f32": lambda mode, dim: 4 * dim,
    "bf16": lambda mode, dim: 2 * dim,
    "bf16dot": lambda mode, dim: 2 * dim,
    "q8": lambda mode, dim: dim,
    "q4": lambda mode, dim: dim // 2,
    "q8dot": lambda mode, dim: dim,
    "q4dot": lambda mode, dim: dim // 2,
}


def _yes(mode: Any) -> bool:
    return True


def _no(mode: Any) -> bool:
    return False


by_format(load_element)(_LOADS.__getitem__)
by_format(row_bytes)(_ROWS.__getitem__)
by_format(quantised)(lambda name: _yes if name.startswith("q") else _no)
by_format(paired)(lambda name: _yes if name == "bf16dot" else _no)
by_format(integer)(lambda name: _yes if name in ("q8dot", "q4dot") else _no)
by_format(load_32)(lambda name: lambda mode, row, i, odd: load_pairs(row + 128 * i + 64 * odd))


def load_pair_16(mode: Any, row: int, i: int, quarter: int) -> Any:
    """Of two quantised tokens in pairs 16 of the 64 channels from 64 i on; only inside kernels."""
    raise NotImplementedError


def _pair_of_nibbles(mode: Any, row: int, i: int, quarter: int) -> Any:
    at = row + 64 * i + 32 * (quarter // 2)
    if quarter % 2:
        return load_high_nibbles(at)
    return load_low_nibbles(at)


_PAIRS = {
    "q8dot": lambda mode, row, i, quarter: load_words(row + 128 * i + 32 * quarter),
    "q4dot": _pair_of_nibbles,
}
by_format(load_pair_16)(_PAIRS.__getitem__)


def _load_two_halves(mode: Any, row: int, other: int, i: int, odd: int) -> Any:
    at = 64 * i + 32 * odd
    return load_two(row + at, other + at)


by_format(load_two_16)(lambda name: _load_two_halves)
_DOTS_32 = {True: lambda mode, total, v, w: dot_pairs(total, v, w),
            False: lambda mode, total, v, w: dot_words(total, v, w)}  # fmt: skip
_NOTHING = {True: lambda mode: splat(float32(0.0)), False: lambda mode: int_splat(0)}
by_format(dot_32)(lambda name: _DOTS_32[name == "bf16dot"])
by_format(nothing)(lambda name: _NOTHING[name == "bf16dot"])


def channels(mode: Any) -> int:
    """Of a step of ``dot_eight``; only inside kernels."""
    raise NotImplementedError


def step_tokens(mode: Any) -> int:
    """Of a step of ``add_values``; only inside kernels."""
    raise NotImplementedError


def _sixteen(mode: Any) -> int:
    return 16


def _thirty_two(mode: Any) -> int:
    return 32


def _one(mode: Any) -> int:
    return 1


def _two(mode: Any) -> int:
    return 2


by_format(channels)(lambda name: _thirty_two if name.endswith("dot") else _sixteen)
by_format(step_tokens)(lambda name: _one if name in ("f32", "bf16") else _two)


def dot_eight(mode: Any, q: Any, k: Any, dim: int, later: int, each: int) -> Any:
    """Products of four rows ``q`` with eight tokens ``k``, tuples of addresses, as two quads. The
    rows of modes that multiply pairs are as ``block_queries.twice`` leaves them. Memory is asked
    for ``each`` bytes from ``later`` on in every step of four tokens' ``channels``. Only inside
    kernels."""
    raise NotImplementedError


def _fma_eight(mode: Any, q: Any, k: Any, dim: int, later: int, each: int) -> Any:
    k0, k1, k2, k3, k4, k5, k6, k7 = k
    first = _fma_four(mode, q, (k0, k1, k2, k3), dim, later, each)
    return first, _fma_four(mode, q, (k4, k5, k6, k7), dim, later + dim // 16 * each, each)


@inline
def _fma_four(mode: Any, q: Any, k: Any, dim: int, later: int, each: int) -> Any:
    q0, q1, q2, q3 = q
    k0, k1, k2, k3 = k
    zero = splat(float32(0.0))
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
    for i in range(dim // 16):
        ask(later, each)
        later += each
        w, x = load_f32(q0 + 64 * i), load_f32(q1 + 64 * i)
        y, z = load_f32(q2 + 64 * i), load_f32(q3 + 64 * i)
        u = load_element(mode, k0, i)
        a0, a1, a2, a3 = fma(w, u, a0), fma(x, u, a1), fma(y, u, a2), fma(z, u, a3)
        u = load_element(mode, k1, i)
        b0, b1, b2, b3 = fma(w, u, b0), fma(x, u, b1), fma(y, u, b2), fma(z, u, b3)
        u = load_element(mode, k2, i)
        c0, c1, c2, c3 = fma(w, u, c0), fma(x, u, c1), fma(y, u, c2), fma(z, u, c3)
        u = load_element(mode, k3, i)
        d0, d1, d2, d3 = fma(w, u, d0), fma(x, u, d1), fma(y, u, d2), fma(z, u, d3)
    return cross_sums(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)


@inline
def _dot_one(mode: Any, u: Any, row: Any, sums: Any) -> Any:
    w, x, y, z = row
    a0, a1, a2, a3 = sums
    a0, a1 = dot_32(mode, a0, w, u), dot_32(mode, a1, x, u)
    return a0, a1, dot_32(mode, a2, y, u), dot_32(mode, a3, z, u)


@inline
def _dot_twos(mode: Any, q: Any, k: Any, i: int, odd: int, sums: Any) -> Any:
    q0, q1, q2, q3 = q
    k0, k1, k2, k3, k4, k5, k6, k7 = k
    a, b, c, d = sums
    at = 128 * i + 64 * odd
    rows = load_i32(q0 + at), load_i32(q1 + at), load_i32(q2 + at), load_i32(q3 + at)
    # Two by two so that ``half_sums`` has tokens in order.
    a = _dot_one(mode, load_two_16(mode, k0, k2, i, odd), rows, a)
    b = _dot_one(mode, load_two_16(mode, k1, k3, i, odd), rows, b)
    c = _dot_one(mode, load_two_16(mode, k4, k6, i, odd), rows, c)
    return a, b, c, _dot_one(mode, load_two_16(mode, k5, k7, i, odd), rows, d)


def _pairs_eight(mode: Any, q: Any, k: Any, dim: int, later: int, each: int) -> Any:
    """Two tokens in a register: sums of sixteen lanes would take twice the shuffles, and as long
    again to wait for."""
    zero = nothing(mode)
    none = (zero, zero, zero, zero)
    sums = (none, none, none, none)
    for i in range(dim // 32):
        ask(later, each)
        sums = _dot_twos(mode, q, k, i, 0, sums)
        ask(later + each, each)
        sums = _dot_twos(mode, q, k, i, 1, sums)
        later += 2 * each
    if dim % 32:
        sums = _dot_twos(mode, q, k, dim // 32, 0, sums)
    a, b, c, d = sums
    return _quad(a, b), _quad(c, d)


@inline
def _quad(a: Any, b: Any) -> Any:
    """Sums of four rows, of tokens 0 and 2, and of 1 and 3."""
    a0, a1, a2, a3 = a
    b0, b1, b2, b3 = b
    return half_sums(a0, a1, a2, a3, b0, b1, b2, b3)


by_format(dot_eight)(lambda name: _pairs_eight if name.endswith("dot") else _fma_eight)


def dot_sixteen(mode: Any, q: Any, k: int, dim: int, later: int, each: int) -> Any:
    """Products of four rows ``q`` with sixteen quantised tokens at ``k``, as four quads. Otherwise
    as ``dot_eight``. Only inside kernels."""
    raise NotImplementedError


@inline
def _four_quads(a: Any, b: Any, c: Any, d: Any) -> Any:
    return quad_0(a, b, c, d), quad_1(a, b, c, d), quad_2(a, b, c, d), quad_3(a, b, c, d)


@inline
def _words_of_pair(q: Any, i: int, u: Any, sums: Any) -> Any:
    q0, q1, q2, q3 = q
    a, b, c, d = sums
    a, b = dot_words(a, splat_i32(q0 + 4 * i), u), dot_words(b, splat_i32(q1 + 4 * i), u)
    return a, b, dot_words(c, splat_i32(q2 + 4 * i), u), dot_words(d, splat_i32(q3 + 4 * i), u)


@inline
def _sums_of_words(v: Any, w: Any) -> Any:
    a, b, c, d = v
    e, f, g, h = w
    a, b, c, d = iadd(a, e), iadd(b, f), iadd(c, g), iadd(d, h)
    return _four_quads(to_float(a), to_float(b), to_float(c), to_float(d))


def _words_q8(mode: Any, q: Any, k: int, dim: int, later: int, each: int) -> Any:
    zero = int_splat(0)
    even = odd = (zero, zero, zero, zero)
    for i in range(0, dim // 2, 4):
        ask(later, each)
        later += each
        even = _words_of_pair(q, i, load_words(k + 32 * i), even)
        odd = _words_of_pair(q, i + 1, load_words(k + 32 * i + 32), odd)
        even = _words_of_pair(q, i + 2, load_words(k + 32 * i + 64), even)
        odd = _words_of_pair(q, i + 3, load_words(k + 32 * i + 96), odd)
    return _sums_of_words(even, odd)


def _words_q4(mode: Any, q: Any, k: int, dim: int, later: int, each: int) -> Any:
    zero = int_splat(0)
    even = odd = (zero, zero, zero, zero)
    for i in range(0, dim // 2, 4):
        ask(later, each)
        later += each
        at = k + 16 * i
        even = _words_of_pair(q, i, load_low_nibbles(at), even)
        odd = _words_of_pair(q, i + 1, load_high_nibbles(at), odd)
        even = _words_of_pair(q, i + 2, load_low_nibbles(at + 32), even)
        odd = _words_of_pair(q, i + 3, load_high_nibbles(at + 32), odd)
    return _sums_of_words(even, odd)


@inline
def _channel(q: Any, c: int, u: Any, sums: Any) -> Any:
    q0, q1, q2, q3 = q
    a, b, x, y = sums
    u = to_float(u)
    a, b = fma(splat_f32(q0 + 4 * c), u, a), fma(splat_f32(q1 + 4 * c), u, b)
    return a, b, fma(splat_f32(q2 + 4 * c), u, x), fma(splat_f32(q3 + 4 * c), u, y)


def _floats_q8(mode: Any, q: Any, k: int, dim: int, later: int, each: int) -> Any:
    zero = splat(float32(0.0))
    even = odd = (zero, zero, zero, zero)
    for i in range(dim // 2):
        if i % 2 == 0:
            ask(later, each)
            later += each
        u = load_u16(k + 32 * i)
        even = _channel(q, 2 * i, both(u, 255), even)
        odd = _channel(q, 2 * i + 1, right(u, 8), odd)
    return _sums_of_floats(even, odd)


def _floats_q4(mode: Any, q: Any, k: int, dim: int, later: int, each: int) -> Any:
    zero = splat(float32(0.0))
    even = odd = (zero, zero, zero, zero)
    for i in range(dim // 4):
        ask(later, each)
        later += each
        u, c = load_u16(k + 32 * i), 4 * i
        even = _channel(q, c, both(u, 15), even)
        odd = _channel(q, c + 1, both(right(u, 8), 15), odd)
        even = _channel(q, c + 2, both(right(u, 4), 15), even)
        odd = _channel(q, c + 3, right(u, 12), odd)
    return _sums_of_floats(even, odd)


@inline
def _sums_of_floats(v: Any, w: Any) -> Any:
    a, b, c, d = v
    e, f, g, h = w
    return _four_quads(fadd(a, e), fadd(b, f), fadd(c, g), fadd(d, h))


_SIXTEEN = {"q8dot": _words_q8, "q4dot": _words_q4, "q8": _floats_q8, "q4": _floats_q4}
by_format(dot_sixteen)(_SIXTEEN.__getitem__)
