"""How keys and values of a block are stored, and how kernels multiply with them.

    T tokens of a block, Dk and Dv head sizes of keys and values

"f32", "bf16": rows [T, D] as they are. "q8", "q4": unsigned integers u with x = low + step * u.
Keys share (step, low) along the tokens of a block, one pair per channel: a few channels of keys
are much larger than the others, at every token. Values, which have no such channels, share them
along the channels, one pair per token. That is KIVI's division (Liu et al., 2024; KVQuant, Hooper
et al., 2024, finds the same). Both pairs leave the inner loops: ``q . k`` is
``(q * step) . u + q . low``, and ``sum p v`` is ``sum (p * step) u + sum p low``.

A quantised record is float32 steps, float32 lows (Dk of each for keys, T for values), then the
integers [T, D]; of "q4" 16 bytes hold 32 channels: low nibbles the first 16, high ones the others.

A *mode* says how a kernel multiplies: the kind's name (float32 multiply-adds); "bf16dot": bfloat16
keys with bfloat16 queries and weights by dot-product instructions; "q8dot", "q4dot": the integers
with queries and weights as integers of 15 bits (SageAttention, Zhang et al., 2024, takes 8 for
queries; here a block's few large channels would drown the others), by products of four bytes:
``x = 128 high + low``, high bytes first, their sums shifted, then low bytes on top.
"""

from __future__ import annotations

from typing import Any

from offload.cpu_ops.block_vectors import (
    dot_bytes,
    dot_pairs,
    load_half,
    load_nibbles,
    load_pairs,
)
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    fma,
    int_splat,
    left,
    load_f32,
    load_i32,
    load_u8,
    load_u16,
    prefetch,
    right,
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


def load_64(mode: Any, row: int, i: int) -> Any:
    """Integers of 64 channels from 64 i on as bytes, quarters at their ``place_of``; only inside
    kernels."""
    raise NotImplementedError


def place_of(mode: Any, quarter: int) -> int:
    """Where ``load_64`` has a quarter of 64 channels; only inside kernels."""
    raise NotImplementedError


def _load_64(mode: Any, row: int, i: int) -> Any:
    return load_i32(row + 64 * i)


def _load_64_nibbles(mode: Any, row: int, i: int) -> Any:
    return load_nibbles(row + 32 * i)


def _same_place(mode: Any, quarter: int) -> int:
    return quarter


def _nibble_place(mode: Any, quarter: int) -> int:
    return quarter // 2 + 2 * (quarter % 2)


_LOADS = {
    "f32": lambda mode, row, i: load_f32(row + 64 * i),
    "bf16": lambda mode, row, i: as_float(left(load_u16(row + 32 * i), 16)),
    "q8": lambda mode, row, i: to_float(load_u8(row + 16 * i)),
    "q4": lambda mode, row, i: to_float(both(right(load_u8(row + 16 * (i // 2)), 4 * (i % 2)), 15)),
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
by_format(load_64)(lambda name: _load_64_nibbles if name == "q4dot" else _load_64)
by_format(place_of)(lambda name: _nibble_place if name == "q4dot" else _same_place)


@inline
def ask(at: int, nbytes: int) -> None:
    """Prefetch so many bytes. Inner loops call it for a few lines each: a burst of them would fill
    the processor's list of open requests, and computing would wait as if it had loaded them."""
    stop = at + nbytes
    while at < stop:
        prefetch(at)
        at += 64


def dot_four(mode: Any, q: Any, k: Any, dim: int, sums: Any) -> Any:
    """``sums`` (16: token 4, row 4) plus the products of four rows ``q`` with four tokens ``k``,
    tuples of addresses; only inside kernels."""
    raise NotImplementedError


def _fma_four(mode: Any, q: Any, k: Any, dim: int, sums: Any) -> Any:
    q0, q1, q2, q3 = q
    k0, k1, k2, k3 = k
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = sums
    for i in range(dim // 16):
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
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


def _pairs_four(mode: Any, q: Any, k: Any, dim: int, sums: Any) -> Any:
    q0, q1, q2, q3 = q
    k0, k1, k2, k3 = k
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = sums
    for i in range(dim // 32):
        at = 64 * i
        w, x, y, z = (
            load_pairs(q0 + at), load_pairs(q1 + at), load_pairs(q2 + at), load_pairs(q3 + at)
        )  # fmt: skip
        u = load_pairs(k0 + at)
        a0, a1 = dot_pairs(a0, w, u), dot_pairs(a1, x, u)
        a2, a3 = dot_pairs(a2, y, u), dot_pairs(a3, z, u)
        u = load_pairs(k1 + at)
        b0, b1 = dot_pairs(b0, w, u), dot_pairs(b1, x, u)
        b2, b3 = dot_pairs(b2, y, u), dot_pairs(b3, z, u)
        u = load_pairs(k2 + at)
        c0, c1 = dot_pairs(c0, w, u), dot_pairs(c1, x, u)
        c2, c3 = dot_pairs(c2, y, u), dot_pairs(c3, z, u)
        u = load_pairs(k3 + at)
        d0, d1 = dot_pairs(d0, w, u), dot_pairs(d1, x, u)
        d2, d3 = dot_pairs(d2, y, u), dot_pairs(d3, z, u)
    if dim % 32:
        at = 64 * (dim // 32)
        w, x, y, z = load_half(q0 + at), load_half(q1 + at), load_half(q2 + at), load_half(q3 + at)
        u = load_half(k0 + at)
        a0, a1 = dot_pairs(a0, w, u), dot_pairs(a1, x, u)
        a2, a3 = dot_pairs(a2, y, u), dot_pairs(a3, z, u)
        u = load_half(k1 + at)
        b0, b1 = dot_pairs(b0, w, u), dot_pairs(b1, x, u)
        b2, b3 = dot_pairs(b2, y, u), dot_pairs(b3, z, u)
        u = load_half(k2 + at)
        c0, c1 = dot_pairs(c0, w, u), dot_pairs(c1, x, u)
        c2, c3 = dot_pairs(c2, y, u), dot_pairs(c3, z, u)
        u = load_half(k3 + at)
        d0, d1 = dot_pairs(d0, w, u), dot_pairs(d1, x, u)
        d2, d3 = dot_pairs(d2, y, u), dot_pairs(d3, z, u)
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


def _bytes_four(mode: Any, q: Any, k: Any, dim: int, sums: Any) -> Any:
    """``q``: high bytes [dim], then low ones."""
    q0, q1, q2, q3 = q
    k0, k1, k2, k3 = k
    zero = int_splat(0)
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    c0, c1, c2, c3 = zero, zero, zero, zero
    d0, d1, d2, d3 = zero, zero, zero, zero
    for part in range(2):
        if part:
            a0, a1, a2, a3 = left(a0, 7), left(a1, 7), left(a2, 7), left(a3, 7)
            b0, b1, b2, b3 = left(b0, 7), left(b1, 7), left(b2, 7), left(b3, 7)
            c0, c1, c2, c3 = left(c0, 7), left(c1, 7), left(c2, 7), left(c3, 7)
            d0, d1, d2, d3 = left(d0, 7), left(d1, 7), left(d2, 7), left(d3, 7)
        for i in range(dim // 64):
            at = part * dim + 64 * i
            w, x, y, z = (
                load_i32(q0 + at), load_i32(q1 + at), load_i32(q2 + at), load_i32(q3 + at)
            )  # fmt: skip
            u = load_64(mode, k0, i)
            a0, a1 = dot_bytes(a0, u, w), dot_bytes(a1, u, x)
            a2, a3 = dot_bytes(a2, u, y), dot_bytes(a3, u, z)
            u = load_64(mode, k1, i)
            b0, b1 = dot_bytes(b0, u, w), dot_bytes(b1, u, x)
            b2, b3 = dot_bytes(b2, u, y), dot_bytes(b3, u, z)
            u = load_64(mode, k2, i)
            c0, c1 = dot_bytes(c0, u, w), dot_bytes(c1, u, x)
            c2, c3 = dot_bytes(c2, u, y), dot_bytes(c3, u, z)
            u = load_64(mode, k3, i)
            d0, d1 = dot_bytes(d0, u, w), dot_bytes(d1, u, x)
            d2, d3 = dot_bytes(d2, u, y), dot_bytes(d3, u, z)
    return (
        to_float(a0), to_float(a1), to_float(a2), to_float(a3),
        to_float(b0), to_float(b1), to_float(b2), to_float(b3),
        to_float(c0), to_float(c1), to_float(c2), to_float(c3),
        to_float(d0), to_float(d1), to_float(d2), to_float(d3),
    )  # fmt: skip


_DOTS = {"bf16dot": _pairs_four, "q8dot": _bytes_four, "q4dot": _bytes_four}
by_format(dot_four)(lambda name: _DOTS.get(name, _fma_four))
