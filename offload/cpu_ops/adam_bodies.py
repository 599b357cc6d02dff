"""The bodies of the optimizer kernels: one pass over a tile of parameters.

A tile's arrays are read and written once, in tasks that threads take in turn. Lanes never meet
except in the scale of an 8-bit block, which is a maximum: so no partition can change a result.
The last elements of a tile that fill no group are copied to the stack, padded with zeros, treated
like all others and copied back: one code, so one result.

The arithmetic is that of ``torch.optim.AdamW`` with ``foreach=False``, operation by operation
(fused multiply-adds where ATen's vector code has them).
"""

from __future__ import annotations

import enum
from typing import Any

from numba import float32

from offload.cpu_ops.counter_rng import GROUP, words
from offload.cpu_ops.dynamic_map import (
    BLOCK,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
)
from offload.cpu_ops.lanes import fsub, store_bf16
from offload.cpu_ops.tags import by_format, inline
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import (
    as_int,
    bits_float,
    both,
    fadd,
    fdiv,
    fetch_add,
    fma,
    fmul,
    imax,
    int_splat,
    load_f32,
    load_float,
    load_u8,
    max_lanes,
    right,
    splat,
    splat_f32,
    stack,
    store_f32,
    store_float,
    store_i8,
)
from offload.cpu_ops.wide import clear_bytes, copy_bytes, load_bf16, root, store_bf16_random

TASK = 32768
"""Elements that a thread takes at a time, a multiple of every group."""


class Adam(enum.IntEnum):
    """Places in the argument array of an optimizer kernel: addresses unless said otherwise."""

    BARRIER = 0
    COUNT = 1
    """Elements of the tile."""
    GRADIENT = 2
    P = 3
    M = 4
    V = 5
    COPY = 6
    M_SCALES = 7
    V_SCALES = 8
    SEED = 9
    """Bits, not an address; so are the following."""
    STEP = 10
    FIRST = 11
    """Global index of the tile's first element."""
    CONSTANTS = 12
    """float32 in the order of ``adam_step.Constant``, two to a place."""
    NEXT = 24
    """Elements that threads have taken; on a cache line of its own."""
    SIZE = 32


def width(kind: Any) -> int:
    """Bytes of an element: "f32", "bf16" or "none"."""
    raise NotImplementedError


@by_format(width)
def _width(name: str) -> Any:
    nbytes = {"f32": 4, "bf16": 2, "none": 0}[name]
    return lambda kind: nbytes


def load(kind: Any, address: int) -> Any:
    raise NotImplementedError


@by_format(load)
def _load(name: str) -> Any:
    if name == "f32":
        return lambda kind, address: load_f32(address)
    return lambda kind, address: load_bf16(address)


def store(kind: Any, address: int, v: Any) -> None:
    """bfloat16 is rounded to nearest, ties to even."""
    raise NotImplementedError


@by_format(store)
def _store(name: str) -> Any:
    if name == "f32":
        return lambda kind, address, v: store_f32(address, v)
    if name == "bf16":
        return lambda kind, address, v: store_bf16(address, v)
    return lambda kind, address, v: None


@inline
def constants(a: int) -> Any:
    """In registers, in the order of ``adam_step.Constant``."""
    at = a + 8 * Adam.CONSTANTS
    return (
        splat_f32(at), splat_f32(at + 4), splat_f32(at + 8), splat_f32(at + 12),
        splat_f32(at + 16), splat_f32(at + 20), splat_f32(at + 24), splat_f32(at + 28),
        splat_f32(at + 32), splat_f32(at + 36),
    )  # fmt: skip


def with_decay(rule: Any, l2: Any, g: Any, p: Any) -> Any:
    """The gradient as the moments see it; ``rule`` is ``AdamStep.rule``."""
    raise NotImplementedError


@by_format(with_decay)
def _with_decay(name: str) -> Any:
    if name.startswith("l2"):
        return lambda rule, l2, g, p: fma(p, l2, g)
    return lambda rule, l2, g, p: g


def start_of(rule: Any, g: Any, m: Any) -> Any:
    """The end from which m's average is taken."""
    raise NotImplementedError


@by_format(start_of)
def _start_of(name: str) -> Any:
    if name.endswith("gradient"):
        return lambda rule, g, m: g
    return lambda rule, g, m: m


@inline
def moments(rule: Any, k: Any, g: Any, p: Any, m: Any, v: Any) -> Any:
    """(m, v) after the step."""
    clip, _, l2, lerp, beta2, rest2, _, _, _, _ = k
    g = with_decay(rule, l2, fmul(g, clip), p)
    m = fma(lerp, fsub(g, m), start_of(rule, g, m))
    return m, fma(fmul(rest2, g), g, fmul(v, beta2))


@inline
def moved(k: Any, p: Any, m: Any, v: Any) -> Any:
    """The parameter after the step."""
    _, decay, _, _, _, _, root2, eps, minus_step, _ = k
    below = fadd(fdiv(root(v), root2), eps)
    return fadd(fmul(p, decay), fdiv(fmul(minus_step, m), below))


@inline
def moved_fast(k: Any, p: Any, m: Any, v: Any) -> Any:
    """As ``moved``, with a division less: where states are rounded to 8 bits anyway."""
    _, decay, _, _, _, _, _, eps, minus_step, by_root2 = k
    below = fma(root(v), by_root2, eps)
    return fma(p, decay, fdiv(fmul(minus_step, m), below))


# ---- float32 states

_room_32 = stack(5 * 4 * GROUP)


@inline
def fp32(rule: Any, gradient: Any, copy: Any, a: int) -> None:
    """Master, moments in float32; every thread of the region runs this."""
    count, room = field(a, Adam.COUNT), _room_32()
    k, start = constants(a), fetch_add(a + 8 * Adam.NEXT, TASK)
    while start < count:
        for i in range(start, min(start + TASK, count), GROUP):
            n = min(GROUP, count - i)
            g = field(a, Adam.GRADIENT) + width(gradient) * i
            p, m = field(a, Adam.P) + 4 * i, field(a, Adam.M) + 4 * i
            v, c = field(a, Adam.V) + 4 * i, field(a, Adam.COPY) + width(copy) * i
            g0, p0, m0, v0, c0 = g, p, m, v, c
            if n < GROUP:
                clear_bytes(room, 5 * 4 * GROUP)
                g, p, m, v, c = (
                    room, room + 4 * GROUP, room + 8 * GROUP, room + 12 * GROUP, room + 16 * GROUP
                )  # fmt: skip
                copy_bytes(g, g0, width(gradient) * n)
                copy_bytes(p, p0, 4 * n)
                copy_bytes(m, m0, 4 * n)
                copy_bytes(v, v0, 4 * n)
            for j in range(0, GROUP, 16):
                x = load_f32(p + 4 * j)
                m1, v1 = moments(
                    rule, k, load(gradient, g + width(gradient) * j), x,
                    load_f32(m + 4 * j), load_f32(v + 4 * j),
                )  # fmt: skip
                x = moved(k, x, m1, v1)
                store_f32(m + 4 * j, m1)
                store_f32(v + 4 * j, v1)
                store_f32(p + 4 * j, x)
                store(copy, c + width(copy) * j, x)
            if n < GROUP:
                copy_bytes(p0, p, 4 * n)
                copy_bytes(m0, m, 4 * n)
                copy_bytes(v0, v, 4 * n)
                copy_bytes(c0, c, width(copy) * n)
        start = fetch_add(a + 8 * Adam.NEXT, TASK)


# ---- bfloat16 states

_room_16 = stack(4 * 4 * GROUP)


@inline
def _sixteen(rule: Any, gradient: Any, k: Any, g: int, p: int, m: int, v: int, dice: Any) -> None:
    x = load_bf16(p)
    m1, v1 = moments(rule, k, load(gradient, g), x, load_bf16(m), load_bf16(v))
    # Half of the bits for the weight, half for both moments: their errors then have a part in
    # common, which cancels in m / sqrt(v), and no rounding is less unbiased for it.
    store_bf16_random(p, moved_fast(k, x, m1, v1), dice)
    store_bf16_random(m, m1, right(dice, 16))
    store_bf16_random(v, v1, right(dice, 16))


@inline
def bf16(rule: Any, gradient: Any, a: int) -> None:
    """Master (which is the compute copy) and moments in bfloat16, rounded stochastically."""
    count, room = field(a, Adam.COUNT), _room_16()
    seed, step, first = field(a, Adam.SEED), field(a, Adam.STEP), field(a, Adam.FIRST)
    wide = width(gradient)
    k, start = constants(a), fetch_add(a + 8 * Adam.NEXT, TASK)
    while start < count:
        for i in range(start, min(start + TASK, count), GROUP):
            n = min(GROUP, count - i)
            g, p = field(a, Adam.GRADIENT) + wide * i, field(a, Adam.P) + 2 * i
            m, v = field(a, Adam.M) + 2 * i, field(a, Adam.V) + 2 * i
            g0, p0, m0, v0 = g, p, m, v
            if n < GROUP:
                clear_bytes(room, 4 * 4 * GROUP)
                g, p, m, v = room, room + 4 * GROUP, room + 8 * GROUP, room + 12 * GROUP
                copy_bytes(g, g0, wide * n)
                copy_bytes(p, p0, 2 * n)
                copy_bytes(m, m0, 2 * n)
                copy_bytes(v, v0, 2 * n)
            r0, r1, r2, r3 = words(seed, step, first + i)
            _sixteen(rule, gradient, k, g, p, m, v, r0)
            _sixteen(rule, gradient, k, g + 16 * wide, p + 32, m + 32, v + 32, r1)
            _sixteen(rule, gradient, k, g + 32 * wide, p + 64, m + 64, v + 64, r2)
            _sixteen(rule, gradient, k, g + 48 * wide, p + 96, m + 96, v + 96, r3)
            if n < GROUP:
                copy_bytes(p0, p, 2 * n)
                copy_bytes(m0, m, 2 * n)
                copy_bytes(v0, v, 2 * n)
        start = fetch_add(a + 8 * Adam.NEXT, TASK)


# ---- 8-bit moments

_room_8 = stack(5 * 4 * BLOCK)
_new_moments = stack(2 * 4 * BLOCK)

_INFINITY = 0x7F800000
_SMALLEST = 0x00800000
"""2^-126: below it the inverse is infinite; a block that small counts as zero."""


@inline
def _inverse(top: Any, scale: int) -> Any:
    """Stores the block's scale, from the bits of its largest magnitudes; its inverse.

    One infinity or NaN makes the scale NaN, and with it the block, in this step and the next ones.
    """
    bits = max_lanes(top)
    if bits >= _INFINITY:
        store_float(scale, bits_float(0x7FC00000))
        inverse = float32(0.0)
    elif bits < _SMALLEST:
        store_float(scale, float32(0.0))
        inverse = float32(0.0)
    else:
        store_float(scale, bits_float(bits))
        inverse = float32(1.0) / bits_float(bits)
    return splat(inverse)


@inline
def eight_bit(rule: Any, gradient: Any, copy: Any, isa: Any, a: int) -> None:
    """Master in float32, moments in blocks of 8-bit codes."""
    count, room, fresh = field(a, Adam.COUNT), _room_8(), _new_moments()
    wide = width(gradient)
    k, start = constants(a), fetch_add(a + 8 * Adam.NEXT, TASK)
    while start < count:
        for i in range(start, min(start + TASK, count), BLOCK):
            n = min(BLOCK, count - i)
            g, p = field(a, Adam.GRADIENT) + wide * i, field(a, Adam.P) + 4 * i
            m, v = field(a, Adam.M) + i, field(a, Adam.V) + i
            c = field(a, Adam.COPY) + width(copy) * i
            m_scale = field(a, Adam.M_SCALES) + i // (BLOCK // 4)
            v_scale = field(a, Adam.V_SCALES) + i // (BLOCK // 4)
            g0, p0, m0, v0, c0 = g, p, m, v, c
            if n < BLOCK:
                clear_bytes(room, 5 * 4 * BLOCK)
                g, p, m, v, c = (
                    room, room + 4 * BLOCK, room + 8 * BLOCK, room + 12 * BLOCK, room + 16 * BLOCK
                )  # fmt: skip
                copy_bytes(g, g0, wide * n)
                copy_bytes(p, p0, 4 * n)
                copy_bytes(m, m0, n)
                copy_bytes(v, v0, n)
            m_by, v_by = splat(load_float(m_scale)), splat(load_float(v_scale))
            m_top, v_top = int_splat(0), int_splat(0)
            for j in range(0, BLOCK, 16):
                x = load_f32(p + 4 * j)
                m1, v1 = moments(
                    rule, k, load(gradient, g + wide * j), x,
                    decode_signed(isa, load_u8(m + j), m_by),
                    decode_unsigned(isa, load_u8(v + j), v_by),
                )  # fmt: skip
                x = moved_fast(k, x, m1, v1)
                store_f32(p + 4 * j, x)
                store(copy, c + width(copy) * j, x)
                store_f32(fresh + 4 * j, m1)
                store_f32(fresh + 4 * BLOCK + 4 * j, v1)
                m_top = imax(m_top, both(as_int(m1), 0x7FFFFFFF))
                v_top = imax(v_top, both(as_int(v1), 0x7FFFFFFF))
            m_by, v_by = _inverse(m_top, m_scale), _inverse(v_top, v_scale)
            for j in range(0, BLOCK, 16):
                store_i8(m + j, encode_signed(isa, load_f32(fresh + 4 * j), m_by))
                v1 = load_f32(fresh + 4 * BLOCK + 4 * j)
                store_i8(v + j, encode_unsigned(isa, v1, v_by))
            if n < BLOCK:
                copy_bytes(p0, p, 4 * n)
                copy_bytes(m0, m, n)
                copy_bytes(v0, v, n)
                copy_bytes(c0, c, width(copy) * n)
        start = fetch_add(a + 8 * Adam.NEXT, TASK)
