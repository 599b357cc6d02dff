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

A *mode* says how a kernel multiplies: the kind's name (float32 multiply-adds), or "bf16dot":
bfloat16 keys with bfloat16 queries and weights by dot-product instructions.
"""

from __future__ import annotations

from typing import Any

from offload.cpu_ops.block_vectors import dot_pairs, load_half, load_pairs
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    as_float,
    both,
    fma,
    left,
    load_f32,
    load_u8,
    load_u16,
    prefetch,
    right,
    to_float,
)

AHEAD = 4096
"""Bytes from a row that is read to what is asked for."""


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


_LOADS = {
    "f32": lambda mode, row, i: load_f32(row + 64 * i),
    "bf16": lambda mode, row, i: as_float(left(load_u16(row + 32 * i), 16)),
    "q8": lambda mode, row, i: to_float(load_u8(row + 16 * i)),
    "q4": lambda mode, row, i: to_float(
        both(right(load_u8(row + 16 * (i // 2)), 4 * (i % 2)), 15)
    ),
}
_LOADS["bf16dot"] = _LOADS["bf16"]
_ROWS = {
    "f32": lambda mode, dim: 4 * dim,
    "bf16": lambda mode, dim: 2 * dim,
    "bf16dot": lambda mode, dim: 2 * dim,
    "q8": lambda mode, dim: dim,
    "q4": lambda mode, dim: dim // 2,
}


def _yes(mode: Any) -> bool:
    return True


def _no(mode: Any) -> bool:
    return False


by_format(load_element)(_LOADS.__getitem__)
by_format(row_bytes)(_ROWS.__getitem__)
by_format(quantised)(lambda name: _yes if name in ("q8", "q4") else _no)
by_format(paired)(lambda name: _yes if name == "bf16dot" else _no)


@inline
def ask(at: int, nbytes: int, end: int, other: int) -> None:
    """Prefetch ``nbytes`` that lie AHEAD of ``at``; beyond ``end`` what starts at ``other``."""
    at += AHEAD
    if at >= end:
        at += other - end
    for line in range(0, nbytes, 64):
        prefetch(at + line)


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


by_format(dot_four)(lambda name: _pairs_four if name == "bf16dot" else _fma_four)
