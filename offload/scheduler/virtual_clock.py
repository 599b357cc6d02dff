"""Virtual time: what is on its way on the lanes arrives while compute computes, or waits.

The disk serves requests in order, those on demand before those ahead of time, ``queue_depth`` of
them in flight; copies to the device likewise. Where the disk's bytes arrive in the memory that
compute reads, either slows the other down: what is computed while a read is under way, by the
measured share; reads, which are priced when they begin, by the share of time that compute has been
busy so far. And each block that has come has cost compute a little.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.bounds import H2D, READ
from offload.scheduler.costs import CostModel
from offload.scheduler.lane import Lane
from offload.scheduler.plan import Home, Plan
from offload.scheduler.residency import Fetch, Instruction, Residency
from offload.scheduler.timeline import WAITS, Record

_INSTANT_S = 1e-12
"""Less is rounding."""


class VirtualClock:
    """The lanes of a plan, and the time at which the host thread is.

    Attributes:
        now, computed_s, stalled_s: seconds since ``start``.
        at_once: what is fetched arrives in no time (before the clock starts).
        arrived: called when something has come.
    """

    def __init__(
        self, plan: Plan, residency: Residency, costs: CostModel, record: Record | None
    ) -> None:
        """``record``: hears of what every lane does when."""
        self.now = self.computed_s = self.stalled_s = 0.0
        self.at_once = False
        self.arrived: Callable[[], None] = lambda: None
        self.disk = Lane(READ, costs.read_busy_s, costs.read_latency_s, costs.queue_depth, record)
        self.up = Lane(H2D, costs.copy_up_busy_s, costs.copy_latency_s, costs.queue_depth, record)
        self._lanes = {Tier.RAM: self.disk, Tier.DEVICE: self.up}
        self._plan, self._residency, self._record = plan, residency, record
        beside = plan.compute_tier is Tier.RAM
        self._compute_beside = costs.hardware.gemv_beside if beside else 1.0
        self._read_beside = costs.hardware.read_beside if beside else 1.0
        self._fetch_s = costs.fetch_s + costs.crowd_s if beside else 0.0
        self._owed_s = 0.0  # what blocks that have come have cost, and nobody has spent yet
        self._due: list[tuple[float, int, Fetch | Callable[[], None]]] = []
        self._sequence = 0
        self._active_s = 0.0  # spent computing, what the disk's traffic adds included

    def start(self) -> None:
        """Time begins: what was under way has come, and what was asked for since begins now."""
        self.at_once = False
        self.now = self.stalled_s = 0.0
        self._pump()

    # -- the host thread ------------------------------------------------------------------

    def compute(self, seconds: float, lane: str, name: str) -> None:
        """Compute for so long, and longer while the disk works in the same memory; what it took to
        fetch the blocks that have come since is added."""
        seconds += self._owed_s
        self._owed_s = 0.0
        self.computed_s += seconds
        began, left = self.now, seconds
        while left > _INSTANT_S:
            busy = self.disk.busy_until() > self.now
            speed = self._compute_beside if busy else 1.0
            end = self.now + left / speed
            change = self.disk.busy_until() if busy else end
            due = self._due[0][0] if self._due else end
            stop = max(self.now, min(end, change, due))
            left -= (stop - self.now) * speed
            self.now = stop
            while self._due and self._due[0][0] <= stop:
                self._arrive()
        self._active_s += self.now - began
        self.note(lane, name, began)

    def pause(self, seconds: float, name: str) -> None:
        """Wait for so long."""
        began, end = self.now, self.now + seconds
        self.stalled_s += seconds
        while self._due and self._due[0][0] <= end:
            self._arrive()
        self.now = end
        self.note(WAITS, name, began)

    def wait(self, until: Callable[[], bool], name: str) -> None:
        """Wait for what is on its way. Raises SchedulerError: nothing is."""
        start = self.now
        while not until():
            if not self._due:
                raise SchedulerError("compute waits, and nothing is on its way: the plan is stuck")
            self._arrive()
        self.stalled_s += self.now - start
        self.note(WAITS, name, start)

    def settle(self) -> None:
        """Until nothing is on its way."""
        while self._due:
            self._arrive()

    # -- lanes ----------------------------------------------------------------------------

    def submit(self, out: Sequence[Instruction]) -> None:
        """Begin what the residency has decided."""
        for fetch in out:
            if not isinstance(fetch, Fetch):
                continue
            if self.at_once and not self._is_ahead(fetch):
                self._push(-1.0, fetch)
            else:
                self._lanes[fetch.dst].add(fetch, self._plan.blocks[fetch.block].nbytes)
        if not self.at_once:
            self._pump()

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        """Have somebody called in so many seconds: what another lane does ends."""
        self._push(self.now + seconds, then)

    def note(self, lane: str, name: str, began: float) -> None:
        """Record what has taken until now, but for what comes before the clock starts."""
        if self._record is not None and not self.at_once and self.now > began:
            self._record(lane, name, began, self.now, 0)

    def _is_ahead(self, fetch: Fetch) -> bool:
        """Whether it fills a ring: those start empty when the clock does."""
        return (
            self._plan.homes[fetch.block] is Home.STREAMED
            and fetch.block not in self._plan.tiers[fetch.dst].pinned
        )

    def _push(self, at: float, what: Fetch | Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (at, self._sequence, what))

    def _pump(self) -> None:
        busy = self._active_s / self.now if self.now > 0.0 else 0.0
        pace = 1.0 - (1.0 - self._read_beside) * min(1.0, busy)
        for tier, lane in self._lanes.items():
            while (begun := lane.begin(self.now, pace if tier is Tier.RAM else 1.0)) is not None:
                self._push(*begun)

    def _arrive(self) -> None:
        at, _, what = heapq.heappop(self._due)
        self.now = max(self.now, at)
        if not isinstance(what, Fetch):
            what()
            return
        if at >= 0.0:
            self._lanes[what.dst].flying -= 1
            if what.dst is Tier.RAM:
                self._owed_s += self._fetch_s
        self.submit(self._residency.arrived(what.block, what.dst))
        self.arrived()


__all__ = ["VirtualClock"]
