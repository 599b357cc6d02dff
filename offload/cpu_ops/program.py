"""Many kernels in one parallel region: a whole token instead of a part of a layer.

    H hidden size, E experts, k of them chosen

Leaving a region for Python and entering the next costs some 60 us, of which the processors' share
is 3: checks, addresses, a foreign call. With three regions per layer that was a sixth of a small
MoE model's token. Where nothing has to be asked between two kernels, every thread calls one after
the other, with a barrier between; their arguments are made once and a token patches a few.

The kernels are the same compiled functions as alone, so results are the same bits.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops import threads
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.kernels import Floats, address_of, check_floats
from offload.cpu_ops.kv_cache import aligned
from offload.cpu_ops.lanes import store_int
from offload.cpu_ops.tags import inline, tag
from offload.cpu_ops.threads import Arguments
from offload.cpu_ops.tiles import field, wait
from offload.cpu_ops.vectors import (
    call_with,
    fadd,
    fetch_add,
    load_f32,
    load_float,
    load_int,
    store_f32,
    store_float,
)

_GRAIN = 512
"""Floats that a thread adds at a time."""


class Run(enum.IntEnum):
    """Places in a program's arguments."""

    BARRIER = 0
    COUNT = 1
    STEPS = 2
    """int64 [count, 3]: a kernel's address, that of its arguments, and that of an int64 which the
    kernel makes other than 0 if the next one must not run; 0: it always may."""
    DONE = 3
    """Gets the number of steps that have run."""
    SIZE = 8


class Pick(enum.IntEnum):
    """Of what turns a router's choice into an expert kernel's arguments."""

    BARRIER = 0
    TOP_K = 1
    IDS = 2
    """int64 [k], in any order."""
    WEIGHTS = 3
    """float32 [k]"""
    TABLE = 4
    """int64 [experts]: where each expert's bundle lies; 0: nowhere."""
    BASES = 5
    """int64 [k]: gets the addresses of the chosen, by ascending number."""
    SORTED = 6
    """float32 [k]: gets their weights."""
    MISSING = 7
    """Gets 1 if one of the chosen is nowhere (its address is 0), else 0."""
    NEXT = 8
    SIZE = 16


class Add(enum.IntEnum):
    """Of adding one vector to another."""

    BARRIER = 0
    HIDDEN = 1
    X = 2
    """float32 [hidden]: added to."""
    OUT = 3
    """float32 [hidden]"""
    NEXT = 8
    SIZE = 16


# The first argument, a tag, only names the sources in the disk cache's key.


@inline
def run_steps(_: Any, a: int) -> None:
    """Every thread of the region runs this."""
    steps, barrier, count = field(a, Run.STEPS), field(a, Run.BARRIER), field(a, Run.COUNT)
    done, stop = 0, 0
    while done < count and stop == 0:
        at = steps + 24 * done
        call_with(load_int(at), load_int(at + 8))
        wait(barrier)
        # Only the step before has written it: a thread that is ahead is in one that does not.
        if load_int(at + 16) != 0:
            stop = load_int(load_int(at + 16))
        done += 1
    store_int(a + 8 * Run.DONE, done)  # the same from every thread


@inline
def pick_experts(_: Any, a: int) -> None:
    """By ascending number, as every eager loop takes them. One thread does it."""
    if fetch_add(a + 8 * Pick.NEXT, 1) == 0:
        bases, weights = field(a, Pick.BASES), field(a, Pick.SORTED)
        k = field(a, Pick.TOP_K)
        for i in range(k):
            expert = load_int(field(a, Pick.IDS) + 8 * i)
            weight = load_float(field(a, Pick.WEIGHTS) + 4 * i)
            at = i
            while at > 0 and load_int(bases + 8 * (at - 1)) > expert:
                store_int(bases + 8 * at, load_int(bases + 8 * (at - 1)))
                store_float(weights + 4 * at, load_float(weights + 4 * (at - 1)))
                at -= 1
            store_int(bases + 8 * at, expert)
            store_float(weights + 4 * at, weight)
        missing = 0
        for i in range(k):
            expert = load_int(bases + 8 * i)
            place = load_int(field(a, Pick.TABLE) + 8 * expert)
            store_int(bases + 8 * i, place)
            if place == 0:
                missing = 1
        store_int(a + 8 * Pick.MISSING, missing)


@inline
def add_vectors(_: Any, a: int) -> None:
    """X += OUT."""
    n, x, out = field(a, Add.HIDDEN), field(a, Add.X), field(a, Add.OUT)
    first = fetch_add(a + 8 * Add.NEXT, _GRAIN)
    while first < n:
        for i in range(first, min(first + _GRAIN, n), 16):
            store_f32(x + 4 * i, fadd(load_f32(x + 4 * i), load_f32(out + 4 * i)))
        first = fetch_add(a + 8 * Add.NEXT, _GRAIN)


@functools.cache
def run_kernel() -> Kernel:
    sources = tag("program", "run")

    def run_steps_body(arguments: int) -> None:
        run_steps(sources, arguments)

    return Kernel(run_steps_body, "kernels one after the other", 0.5)


@functools.cache
def pick_kernel() -> Kernel:
    sources = tag("program", "pick")

    def pick_experts_body(arguments: int) -> None:
        pick_experts(sources, arguments)

    return Kernel(pick_experts_body, "addresses of chosen experts", 0.7)


@functools.cache
def add_kernel() -> Kernel:
    sources = tag("program", "add")

    def add_vectors_body(arguments: int) -> None:
        add_vectors(sources, arguments)

    return Kernel(add_vectors_body, "addition of vectors", 0.7)


def program_kernels() -> list[Kernel]:
    """What a program needs beside the kernels that it runs."""
    return [run_kernel(), pick_kernel(), add_kernel()]


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel with its arguments."""

    entry: Entry
    arguments: Arguments
    counters: Arguments
    """The part of the arguments that is zero when the kernel starts."""
    keep: object = None
    """What owns the memory that the arguments point to."""
    stop: int = 0
    """Address of what the kernel makes other than 0 if the next step must not run; 0: nothing."""


def pick_step(
    ids: npt.NDArray[np.int64],
    weights: Floats,
    table: npt.NDArray[np.int64],
    bases: npt.NDArray[np.int64],
    in_order: Floats,
) -> Step:
    """``bases`` [k] and ``in_order`` [k] get the addresses (``table`` [E]) and the weights of the
    experts ``ids`` [k] with ``weights`` [k], by ascending number. The program stops behind it if
    one of them is nowhere."""
    a = aligned((Pick.SIZE,), np.int64)
    a[Pick.TOP_K : Pick.SORTED + 1] = (
        len(ids), address_of(ids), address_of(weights), address_of(table), address_of(bases),
        address_of(in_order),
    )  # fmt: skip
    keep = (ids, weights, table, bases, in_order)
    stop = address_of(a[Pick.MISSING :])
    return Step(pick_kernel().entry(), a, a[Pick.NEXT : Pick.NEXT + 1], keep, stop)


def add_step(x: Floats, out: Floats) -> Step:
    """``x`` += ``out``, both [H], H a multiple of 16."""
    check_floats("x", x, out.shape, written=True)
    a = aligned((Add.SIZE,), np.int64)
    a[Add.HIDDEN : Add.OUT + 1] = len(x), address_of(x), address_of(out)
    return Step(add_kernel().entry(), a, a[Add.NEXT : Add.NEXT + 1], (x, out))


class Program:
    """Steps in order. Calls must not overlap, nor with calls of what the steps were made from."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        table = [(s.entry.address, address_of(s.arguments), s.stop) for s in self.steps]
        self._table = np.array(table, np.int64).reshape(-1, 3)
        self._start = int(self._table.ctypes.data)
        self._a = aligned((Run.SIZE,), np.int64)
        self._entry = run_kernel().entry()
        self._barrier: int | None = None

    def run(self, first: int = 0, last: int | None = None) -> int:
        """Steps ``first`` .. ``last`` - 1 in one region, or up to the one that stops it; returns
        the step to go on with."""
        last = len(self.steps) if last is None else last
        if first == last:
            return last
        barrier = threads.barrier()
        if barrier != self._barrier:
            for step in self.steps:
                step.arguments[threads.BARRIER] = barrier
            self._barrier = barrier
        for step in self.steps[first:last]:
            step.counters.fill(0)
        self._a[Run.COUNT] = last - first
        self._a[Run.STEPS] = self._start + 24 * first
        threads.run(self._entry.call, self._entry.address, self._a)
        return first + int(self._a[Run.DONE])


__all__ = [
    "Program",
    "Step",
    "add_step",
    "pick_step",
    "program_kernels",
]
