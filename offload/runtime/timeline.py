"""Records what the lanes of a real run do, into room taken once.

A ring: the newest spans stay, so that a long run ends with its latest tokens. Writing one is an
increment and five stores (about a microsecond), from any thread and without a lock: the counter's
``next`` is one step of the interpreter, so no two threads get the same place. A span is a moment
in which it is incomplete; readers come after the run, or see at worst one torn span.

Times are ``time.perf_counter()``.
"""

from __future__ import annotations

import itertools
import sys
import time
from array import array

from offload.scheduler.timeline import (
    COMPUTE,
    EXPERTS,
    LANES,
    PASSES,
    WAITS,
    Span,
    Timeline,
    arrange,
)

CAPACITY = 2**17
"""Spans: some 130 tokens of 32 layers with 8 experts each."""

_NUMBER = {lane: i for i, lane in enumerate(LANES)}


class Recorder:
    """See the module's text. Its ``add`` is a ``scheduler.timeline.Record``."""

    __slots__ = ("_count", "_ends", "_lanes", "_mask", "_names", "_nbytes", "_next", "_starts",
                 "capacity")  # fmt: skip

    def __init__(self, capacity: int = CAPACITY) -> None:
        """``capacity``: spans, a power of two.

        Raises:
            ValueError: it is none.
        """
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"room for {capacity} spans is no power of two")
        self.capacity = capacity
        self._mask = capacity - 1
        self._next = itertools.count().__next__
        self._count = 0
        # Filled, and not only asked for: the pages are there before the budget is weighed.
        self._starts = array("d", bytes(8 * capacity))
        self._ends = array("d", bytes(8 * capacity))
        self._nbytes = array("q", bytes(8 * capacity))
        self._lanes = array("b", bytes(capacity))
        self._names: list[str] = [""] * capacity

    @property
    def ring_bytes(self) -> int:
        """Memory that the ring takes; the names in it are the plan's own strings."""
        parts = (self._starts, self._ends, self._nbytes, self._lanes, self._names)
        return sum(map(sys.getsizeof, parts))

    def add(self, lane: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """One span."""
        n = self._next()
        i = n & self._mask
        self._starts[i] = start_s
        self._ends[i] = end_s
        self._nbytes[i] = nbytes
        self._lanes[i] = _NUMBER[lane]
        self._names[i] = name
        self._count = n + 1

    def timeline(self) -> Timeline:
        """What has been recorded so far, times from the first span's beginning."""
        count = self._count
        kept = min(count, self.capacity)
        zero = min(self._starts[:kept], default=0.0)
        spans = [
            Span(
                LANES[self._lanes[i]],
                self._names[i],
                self._starts[i] - zero,
                self._ends[i] - zero,
                self._nbytes[i],
            )
            for i in ((count - kept + j) & self._mask for j in range(kept))
        ]
        return arrange(spans, count - kept)


class Story:
    """What the computing thread does: one thing at a time. Belongs to that thread.

    A unit that runs is interrupted by waits and by its experts, and goes on after them, so its
    spans in ``compute`` are what is left: all that is no wait and no expert.
    """

    __slots__ = ("_first", "_lane", "_name", "_pass_s", "_passes", "_record", "_since", "_units")

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.add
        self._units: list[str] = []
        self._lane = self._name = ""
        self._since = 0.0
        self._first = ""
        self._passes = 0
        self._pass_s = 0.0

    def begins(self, unit: str) -> None:
        """A unit is entered; one pass ends where the first unit comes again."""
        if not self._first:
            self._first = unit
        if unit == self._first and not self._units:
            self._end_pass()
        self._units.append(unit)
        self._turn(COMPUTE, unit)

    def ends(self) -> None:
        """It has been left. Nothing, if none is known: after an error both sides may say so."""
        if self._units:
            self._units.pop()
        self.goes_on()

    def waits(self, what: str) -> None:
        """It stands still for ``what``."""
        self._turn(WAITS, what)

    def expert(self, name: str) -> None:
        """It computes an expert, until it is told something else."""
        self._turn(EXPERTS, name)

    def goes_on(self) -> None:
        """With the unit that it was in, if any."""
        if self._units:
            self._turn(COMPUTE, self._units[-1])
        else:
            self._turn("", "")

    def finish(self) -> None:
        """The run is over."""
        self._units.clear()
        self._turn("", "")
        self._end_pass()
        self._pass_s = 0.0

    def _end_pass(self) -> None:
        now = time.perf_counter()
        if self._pass_s:
            self._record(PASSES, f"pass {self._passes}", self._pass_s, now)
        self._passes, self._pass_s = self._passes + 1, now

    def _turn(self, lane: str, name: str) -> None:
        now = time.perf_counter()
        if self._lane:
            self._record(self._lane, self._name, self._since, now)
        self._lane, self._name, self._since = lane, name, now
