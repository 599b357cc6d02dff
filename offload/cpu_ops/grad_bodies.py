"""The bodies of the kernels on gradients: squares, accumulation, scaling.

As in ``adam_bodies.py`` threads take tasks in turn, and a tile's last elements are copied to the
stack and padded with zeros.
"""

from __future__ import annotations

import enum
from typing import Any

from offload.cpu_ops.adam_bodies import load, store, width
from offload.cpu_ops.tags import inline
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import (
    fadd,
    fetch_add,
    fmul,
    load_f32,
    splat_f32,
    stack,
    store_f32,
)
from offload.cpu_ops.wide import (
    add_squares,
    add_wide,
    clear_bytes,
    copy_bytes,
    no_squares,
    store_double,
    sum_wide,
)

CHUNK = 4096
"""Elements of which one sum of squares is made."""
GROUP = 64
TASK = 4 * CHUNK


class Grad(enum.IntEnum):
    """Places in the argument array of a gradient kernel: addresses unless said otherwise."""

    BARRIER = 0
    COUNT = 1
    GRADIENT = 2
    OUT = 3
    """float64 per chunk, or the float32 accumulator."""
    FACTOR = 4
    """The bits of a float32."""
    NEXT = 8
    """Elements that threads have taken."""
    SIZE = 16


_room = stack(2 * 4 * GROUP)


@inline
def squares(kind: Any, a: int) -> None:
    """One float64 per chunk. Lane l of accumulator k adds the squares of elements
    64 i + 16 k + l for i = 0, 1, ...; then ((0 + 1) + (2 + 3)), then lanes as a tree.
    No float32 overflows it: a sum is finite if and only if all elements are."""
    count, wide, room = field(a, Grad.COUNT), width(kind), _room()
    start = fetch_add(a + 8 * Grad.NEXT, TASK)
    while start < count:
        for chunk in range(start, min(start + TASK, count), CHUNK):
            s0, s1, s2, s3 = no_squares(), no_squares(), no_squares(), no_squares()
            for i in range(chunk, min(chunk + CHUNK, count), GROUP):
                at, n = field(a, Grad.GRADIENT) + wide * i, count - i
                if n < GROUP:
                    clear_bytes(room, wide * GROUP)
                    copy_bytes(room, at, wide * n)
                    at = room
                v0, v1 = load(kind, at), load(kind, at + 16 * wide)
                v2, v3 = load(kind, at + 32 * wide), load(kind, at + 48 * wide)
                s0, s1 = add_squares(s0, v0), add_squares(s1, v1)
                s2, s3 = add_squares(s2, v2), add_squares(s3, v3)
            total = sum_wide(add_wide(add_wide(s0, s1), add_wide(s2, s3)))
            store_double(field(a, Grad.OUT) + 8 * (chunk // CHUNK), total)
        start = fetch_add(a + 8 * Grad.NEXT, TASK)


@inline
def accumulate(kind: Any, a: int) -> None:
    """float32 accumulator += gradient"""
    count, wide, room = field(a, Grad.COUNT), width(kind), _room()
    start = fetch_add(a + 8 * Grad.NEXT, TASK)
    while start < count:
        for i in range(start, min(start + TASK, count), GROUP):
            n = min(GROUP, count - i)
            g, out = field(a, Grad.GRADIENT) + wide * i, field(a, Grad.OUT) + 4 * i
            out0 = out
            if n < GROUP:
                clear_bytes(room, 8 * GROUP)
                copy_bytes(room, g, wide * n)
                copy_bytes(room + 4 * GROUP, out, 4 * n)
                g, out = room, room + 4 * GROUP
            for j in range(0, GROUP, 16):
                total = fadd(load_f32(out + 4 * j), load(kind, g + wide * j))
                store_f32(out + 4 * j, total)
            if n < GROUP:
                copy_bytes(out0, out, 4 * n)
        start = fetch_add(a + 8 * Grad.NEXT, TASK)


@inline
def scale(kind: Any, a: int) -> None:
    """gradient *= factor, rounded to nearest"""
    count, wide, room = field(a, Grad.COUNT), width(kind), _room()
    factor = splat_f32(a + 8 * Grad.FACTOR)
    start = fetch_add(a + 8 * Grad.NEXT, TASK)
    while start < count:
        for i in range(start, min(start + TASK, count), GROUP):
            n = min(GROUP, count - i)
            g = field(a, Grad.GRADIENT) + wide * i
            g0 = g
            if n < GROUP:
                clear_bytes(room, wide * GROUP)
                copy_bytes(room, g, wide * n)
                g = room
            for j in range(0, GROUP, 16):
                store(kind, g + wide * j, fmul(load(kind, g + wide * j), factor))
            if n < GROUP:
                copy_bytes(g0, g, wide * n)
        start = fetch_add(a + 8 * Grad.NEXT, TASK)
