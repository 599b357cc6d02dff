"""One block of a packed tile, unpacked once into registers, times the same block of many tokens.

``blocks_dot`` is made for one token, where reading the weights is the limit. Here multiplying is:
of Zen 4's four vector pipes two multiply, so what counts per block of 32 columns and token is its
eight ``vpdpbusd`` and two float products, and everything else has to stay off them or be done once
per block. Weights and scales live in nine or ten registers through a loop over tokens, activations
are broadcast from memory inside the instruction, sums stay in the first cache.

Results are those of ``blocks_dot`` to the bit: integers are exact, floats come in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.cpu_ops.activations import SUM
from offload.cpu_ops.blocks_dot import (
    NIBBLES,
    add_minimum,
    add_scaled,
    fifth,
    half,
    iq4_nl_values,
    mxfp4_scale,
    mxfp4_values,
)
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.vectors import (
    both,
    dot4,
    dot4_wide,
    either,
    iadd,
    int_splat,
    isub,
    left,
    load_i32,
    load_int32,
    right,
    splat_i32,
    wide_start,
)

Held = Any
"""Eight registers of integers, columns ascending by fours; the scales; the minima, or the scales
again where a format has none."""


# ---- unpacking


@inline
def _low(w: int, j: int) -> Any:
    return both(load_i32(w + 64 * j), NIBBLES)


@inline
def _high(w: int, j: int) -> Any:
    return both(right(load_i32(w + 64 * j), 4), NIBBLES)


@inline
def _nibbles(w: int) -> Any:
    return (
        _low(w, 0), _low(w, 1), _low(w, 2), _low(w, 3),
        _high(w, 0), _high(w, 1), _high(w, 2), _high(w, 3),
    )  # fmt: skip


@inline
def _fives(w: int) -> Any:
    """64 bytes of fifth bits (``packing._twist``), then nibbles."""
    f = load_i32(w)
    v = _nibbles(w + 64)
    return (
        either(v[0], fifth(f, 0)), either(v[1], fifth(f, 1)),
        either(v[2], fifth(f, 2)), either(v[3], fifth(f, 3)),
        either(v[4], fifth(f, 4)), either(v[5], fifth(f, 5)),
        either(v[6], fifth(f, 6)), either(v[7], fifth(f, 7)),
    )  # fmt: skip


@inline
def _bytes(w: int) -> Any:
    return (
        load_i32(w), load_i32(w + 64), load_i32(w + 128), load_i32(w + 192),
        load_i32(w + 256), load_i32(w + 320), load_i32(w + 384), load_i32(w + 448),
    )  # fmt: skip


@inline
def _looked_up(isa: Any, table: Any, w: int) -> Any:
    v = _nibbles(w)
    return (
        table(isa, v[0]), table(isa, v[1]), table(isa, v[2]), table(isa, v[3]),
        table(isa, v[4]), table(isa, v[5]), table(isa, v[6]), table(isa, v[7]),
    )  # fmt: skip


def _hold_q4_0(fmt: Any, isa: Any, w: int) -> Held:
    d = half(isa, w)
    return _nibbles(w + 32), d, d


def _hold_q4_1(fmt: Any, isa: Any, w: int) -> Held:
    return _nibbles(w + 64), half(isa, w), half(isa, w + 32)


def _hold_q5_0(fmt: Any, isa: Any, w: int) -> Held:
    d = half(isa, w)
    return _fives(w + 32), d, d


def _hold_q5_1(fmt: Any, isa: Any, w: int) -> Held:
    return _fives(w + 64), half(isa, w), half(isa, w + 32)


def _hold_q8_0(fmt: Any, isa: Any, w: int) -> Held:
    d = half(isa, w)
    return _bytes(w + 32), d, d


def _hold_iq4_nl(fmt: Any, isa: Any, w: int) -> Held:
    d = half(isa, w)
    return _looked_up(isa, iq4_nl_values, w + 32), d, d


def _hold_mxfp4(fmt: Any, isa: Any, w: int) -> Held:
    d = mxfp4_scale(w)
    return _looked_up(isa, mxfp4_values, w + 16), d, d


# ---- multiplying


@inline
def _dot(fmt: Any, isa: Any, v: Any, x: int) -> Any:
    """Two chains, as half the latency needs half the instructions in flight."""
    a, b = int_splat(0), int_splat(0)
    a, b = times(fmt, isa, a, v[0], splat_i32(x)), times(fmt, isa, b, v[4], splat_i32(x + 16))
    a, b = times(fmt, isa, a, v[1], splat_i32(x + 4)), times(fmt, isa, b, v[5], splat_i32(x + 20))
    a, b = times(fmt, isa, a, v[2], splat_i32(x + 8)), times(fmt, isa, b, v[6], splat_i32(x + 24))
    a, b = times(fmt, isa, a, v[3], splat_i32(x + 12)), times(fmt, isa, b, v[7], splat_i32(x + 28))
    return iadd(a, b)


@inline
def _dots(fmt: Any, isa: Any, v: Any, u: Any, x: int) -> Any:
    """Of two tiles with the same activations: four chains in turn, each broadcast used twice."""
    zero = int_splat(0)
    c, d = splat_i32(x), splat_i32(x + 16)
    a0, b0 = times(fmt, isa, zero, v[0], c), times(fmt, isa, zero, u[0], c)
    a1, b1 = times(fmt, isa, zero, v[4], d), times(fmt, isa, zero, u[4], d)
    c, d = splat_i32(x + 4), splat_i32(x + 20)
    a0, b0 = times(fmt, isa, a0, v[1], c), times(fmt, isa, b0, u[1], c)
    a1, b1 = times(fmt, isa, a1, v[5], d), times(fmt, isa, b1, u[5], d)
    c, d = splat_i32(x + 8), splat_i32(x + 24)
    a0, b0 = times(fmt, isa, a0, v[2], c), times(fmt, isa, b0, u[2], c)
    a1, b1 = times(fmt, isa, a1, v[6], d), times(fmt, isa, b1, u[6], d)
    c, d = splat_i32(x + 12), splat_i32(x + 28)
    a0, b0 = times(fmt, isa, a0, v[3], c), times(fmt, isa, b0, u[3], c)
    a1, b1 = times(fmt, isa, a1, v[7], d), times(fmt, isa, b1, u[7], d)
    return iadd(a0, a1), iadd(b0, b1)


@inline
def held_dot(fmt: Any, isa: Any, held: Held, x: int, acc: Any) -> Any:
    """``block_dot`` on what ``hold`` gave."""
    return finish(fmt, isa, held, _dot(fmt, isa, held[0], x), x, acc)


@inline
def held_dots(fmt: Any, isa: Any, one: Held, two: Held, x: int, a: Any, b: Any) -> Any:
    """``held_dot`` of two tiles: both sums."""
    dots = _dots(fmt, isa, one[0], two[0], x)
    return finish(fmt, isa, one, dots[0], x, a), finish(fmt, isa, two, dots[1], x, b)


# Corrections are shifts of what is broadcast: products of integers and broadcasts from an integer
# register both go through the pipes that multiply.


def _zero_8(fmt: Any, isa: Any, held: Held, dot: Any, x: int, acc: Any) -> Any:
    return add_scaled(isa, held[1], isub(dot, left(splat_i32(x + SUM), 3)), x, acc)


def _zero_12(fmt: Any, isa: Any, held: Held, dot: Any, x: int, acc: Any) -> Any:
    total = splat_i32(x + SUM)
    twelve = iadd(left(total, 3), left(total, 2))
    return add_scaled(isa, held[1], isub(dot, twelve), x, acc)


def _zero_16(fmt: Any, isa: Any, held: Held, dot: Any, x: int, acc: Any) -> Any:
    return add_scaled(isa, held[1], isub(dot, left(splat_i32(x + SUM), 4)), x, acc)


def _zero_128(fmt: Any, isa: Any, held: Held, dot: Any, x: int, acc: Any) -> Any:
    return add_scaled(isa, held[1], iadd(dot, wide_start(isa, load_int32(x + SUM))), x, acc)


def _minimum(fmt: Any, isa: Any, held: Held, dot: Any, x: int, acc: Any) -> Any:
    return add_minimum(held[2], x, add_scaled(isa, held[1], dot, x, acc))


# ---- the table


def hold(fmt: Any, isa: Any, w: int) -> Held:
    """The block at ``w``, unpacked; only inside kernels."""
    raise NotImplementedError


def times(fmt: Any, isa: Any, acc: Any, w: Any, x: Any) -> Any:
    """acc + four products per lane; only inside kernels."""
    raise NotImplementedError


def finish(fmt: Any, isa: Any, held: Held, dot: Any, x: int, acc: Any) -> Any:
    """acc + scales * (dot - zero point), and the minima; only inside kernels."""
    raise NotImplementedError


def _times(fmt: Any, isa: Any, acc: Any, w: Any, x: Any) -> Any:
    return dot4(isa, acc, w, x)


def _times_wide(fmt: Any, isa: Any, acc: Any, w: Any, x: Any) -> Any:
    return dot4_wide(isa, acc, w, x)


_HELD: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "q4_0": (_hold_q4_0, _times, _zero_8),
    "q4_1": (_hold_q4_1, _times, _minimum),
    "q5_0": (_hold_q5_0, _times, _zero_16),
    "q5_1": (_hold_q5_1, _times, _minimum),
    "q8_0": (_hold_q8_0, _times_wide, _zero_128),
    "iq4_nl": (_hold_iq4_nl, _times_wide, _zero_128),
    "mxfp4": (_hold_mxfp4, _times, _zero_12),
}

HELD = frozenset(_HELD)
"""Formats that have all three. The others' blocks of 256 columns are 64 registers of integers, and
blocks of floats are one register with nothing to unpack."""

by_format(hold)(lambda name: _HELD[name][0])
by_format(times)(lambda name: _HELD[name][1])
by_format(finish)(lambda name: _HELD[name][2])
