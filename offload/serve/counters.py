"""What happened since the server started: counts, sums, histograms, and the speed right now."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Sequence

WINDOW_S = 3.0
"""The speed "now" is a mean over so long."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Histogram:
    """Counts by upper bounds, as Prometheus wants them."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


class Speed:
    """Events per second over the last ``WINDOW_S`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        now = self._clock()
        self._forget(now)
        self._seen.append((now, count))

    def now(self) -> float:
        self._forget(self._clock())
        return sum(count for _, count in self._seen) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._seen and self._seen[0][0] <= now - WINDOW_S:
            self._seen.popleft()


class Counters:
    """Kept by the engine under its lock. Tokens are counted when they are made or read."""

    def __init__(self) -> None:
        self.received = 0
        self.completed = 0
        self.cancelled = 0
        self.failed = 0
        self.rejected = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.new_tokens = 0
        self.passes = 0
        self.queue_s = Histogram()
        self.first_token_s = Histogram()
        self.token_s = Histogram()
        self.new_speed = Speed()
        self.prompt_speed = Speed()
