"""A lane of the simulator: one server, made of arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from offload.scheduler.residency import Fetch
from offload.scheduler.timeline import Record


class Lane:
    """One server: requests in order, demand first, ``depth`` in flight, latencies overlap."""

    __slots__ = ("_busy_s", "_demand", "_depth", "_free_at", "_latency_s", "_prefetch", "_record",
                 "flying", "name", "nbytes", "worked_s")  # fmt: skip

    def __init__(
        self,
        name: str,
        busy_s: Callable[[float], float],
        latency_s: float,
        depth: int,
        record: Record | None = None,
    ) -> None:
        self.name = name
        self._record = record
        self._busy_s = busy_s
        self._latency_s = latency_s
        self._depth = depth
        self._demand: deque[tuple[Fetch, int]] = deque()
        self._prefetch: deque[tuple[Fetch, int]] = deque()
        self._free_at = 0.0
        self.flying = 0
        self.nbytes = 0
        self.worked_s = 0.0

    def add(self, fetch: Fetch, nbytes: int) -> None:
        (self._demand if fetch.demand else self._prefetch).append((fetch, nbytes))

    def busy_until(self) -> float:
        """When what has begun will have been served."""
        return self._free_at

    def begin(self, now: float, pace: float = 1.0) -> tuple[float, Fetch] | None:
        """Start the next request: (time of arrival, request), or None if none can start. ``pace``:
        the share of its rate that the lane has."""
        queue = self._demand or self._prefetch
        if not queue or self.flying >= self._depth:
            return None
        fetch, nbytes = queue.popleft()
        busy_s = self._busy_s(nbytes) / pace
        begun = max(self._free_at, now)
        self._free_at = begun + busy_s
        if self._record is not None:
            self._record(self.name, fetch.block, begun, self._free_at, nbytes)
        self.flying += 1
        self.nbytes += nbytes
        self.worked_s += busy_s
        return self._free_at + self._latency_s, fetch
