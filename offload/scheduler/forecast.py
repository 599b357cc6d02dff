"""What a plan will do on a machine, by simulation: single tokens, and a prompt.

``planner`` predicts a token with even routing, because it compares many placements; here one
placement is looked at closely: any routing, the first token's time, the bytes on every lane, and
the timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.scheduler.bounds import H2D, READ, lane_seconds
from offload.scheduler.costs import CostModel, Pick
from offload.scheduler.interval import Interval
from offload.scheduler.plan import Plan
from offload.scheduler.simulate import Routing, Simulation, simulate
from offload.scheduler.timeline import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one pass of ``tokens`` tokens. Times in seconds."""

    tokens: int
    pass_s: Interval
    bound_s: float
    """The busiest lane's time: no schedule is faster."""
    lane_s: Mapping[str, float]
    """Busy seconds of each lane."""
    lane_bytes: Mapping[str, float]
    """Bytes that each lane moves."""
    stall_s: float
    """Seconds in which compute waits."""
    hit_rate: float | None
    """Share of the experts used that are above the disk when asked for; None without experts."""

    @property
    def bottleneck(self) -> str:
        """The lane with the most work."""
        return max(self.lane_s, key=lambda lane: self.lane_s[lane])

    @property
    def tokens_per_s(self) -> Interval:
        """Speed; ``low`` is the slow case."""
        p = self.pass_s
        return Interval(low=self.tokens / p.high, mid=self.tokens / p.mid, high=self.tokens / p.low)

    def to_json(self) -> dict[str, object]:
        """As a dict that ``json`` can write."""
        speed = self.tokens_per_s
        return {
            "tokens": self.tokens,
            "pass_s": _interval(self.pass_s),
            "tokens_per_s": _interval(speed),
            "bound_s": self.bound_s,
            "bottleneck": self.bottleneck,
            "lane_s": dict(self.lane_s),
            "lane_bytes": dict(self.lane_bytes),
            "stall_s": self.stall_s,
            "hit_rate": self.hit_rate,
        }


def decode(
    plan: Plan,
    costs: CostModel,
    *,
    passes: int = 4,
    skip: int = 1,
    routing: Routing | None = None,
    hot: Sequence[str] | None = None,
    record: Record | None = None,
    seed: int = 0,
) -> Forecast:
    """Single tokens in the steady state. Arguments as of ``simulate``.

    Raises:
        SchedulerError: the plan gets stuck (a bug).
    """

    def run(pick: Pick) -> Simulation:
        return simulate(
            plan, costs.at(pick), passes=passes, skip=skip, routing=routing, hot=hot, seed=seed,
            record=record if pick is Pick.MID else None,
        )  # fmt: skip

    runs = {pick: run(pick) for pick in Pick}
    mid = runs[Pick.MID]
    times = sorted(r.pass_s for r in runs.values())  # queueing: not strictly monotone in the rates
    return _forecast(mid, 1, Interval(low=times[0], mid=times[1], high=times[2]))


def prefill(
    plan: Plan,
    costs: CostModel,
    tokens: int,
    *,
    routing: Routing | None = None,
    record: Record | None = None,
    seed: int = 0,
) -> Forecast:
    """The first prompt after loading, in one pass: slots and rings are empty.

    The spread is that of its busiest lane, which so long a pass hardly waits beside.

    Raises:
        SchedulerError: the plan gets stuck (a bug).
    """
    mid = simulate(
        plan, costs, passes=1, skip=0, routing=routing, tokens=tokens, hot=(), record=record,
        seed=seed,
    )  # fmt: skip
    bound = {p: max(lane_seconds(plan, costs.at(p), tokens).values()) for p in Pick}
    low, high = (mid.pass_s * bound[p] / bound[Pick.MID] for p in (Pick.FAST, Pick.SLOW))
    return _forecast(mid, tokens, Interval(low=low, mid=mid.pass_s, high=high))


def _forecast(found: Simulation, tokens: int, pass_s: Interval) -> Forecast:
    uses = found.hits + found.misses
    lane_bytes = {READ: found.read_bytes}
    if H2D in found.lane_s:
        lane_bytes[H2D] = found.h2d_bytes
    return Forecast(
        tokens=tokens,
        pass_s=pass_s,
        bound_s=max(found.lane_s.values()),
        lane_s=found.lane_s,
        lane_bytes=lane_bytes,
        stall_s=found.stall_s,
        hit_rate=found.hits / uses if uses else None,
    )


def _interval(found: Interval) -> dict[str, float]:
    return {"low": found.low, "mid": found.mid, "high": found.high}
