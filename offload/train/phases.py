"""What each phase of a step costs: its seconds, and what counters count meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from offload.scheduler.timeline import PASSES, Record

FORWARD, BACKWARD = "forward", "backward"


class Phases:
    """Splits a step at the turns from forward to backward and back. Read and written on one thread
    at a time."""

    def __init__(self, counters: Callable[[], Mapping[str, float]] = dict) -> None:
        """``counters``: figures that only grow, by name."""
        self.counters = counters
        self.seconds: dict[str, float] = {}
        self.counted: dict[str, dict[str, float]] = {}
        """Phase -> by how much each counter grew in it."""
        self.record: Record | None = None
        """Set: told of each phase of each step."""
        self._steps = 0
        self._now = ""
        self._since = 0.0
        self._before: Mapping[str, float] = {}

    def begin(self) -> None:
        """A step begins, with its forward."""
        self.seconds = {FORWARD: 0.0, BACKWARD: 0.0}
        self.counted = {FORWARD: {}, BACKWARD: {}}
        self._steps += 1
        self._now = FORWARD
        self._since, self._before = time.perf_counter(), self.counters()

    def enter(self, phase: str) -> None:
        """From now on it is ``phase``; nothing where it was."""
        if phase != self._now:
            self.end()
            self._now = phase

    def end(self) -> None:
        """Count up to now."""
        now, counters = time.perf_counter(), self.counters()
        self.seconds[self._now] += now - self._since
        if self.record is not None:
            self.record(PASSES, f"step {self._steps} {self._now}", self._since, now, 0)
        counted = self.counted[self._now]
        for name, value in counters.items():
            counted[name] = counted.get(name, 0) + value - self._before[name]
        self._since, self._before = now, counters
