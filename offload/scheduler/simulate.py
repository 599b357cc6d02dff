"""A plan on a virtual clock: the real residency state machine, lanes made of arithmetic.

The same ``Residency`` that drives the executor decides here what is fetched, dropped and waited
for, so that a prediction contains its stalls, and a plan that would get stuck gets stuck here.
Lanes are servers with a rate: the disk serves requests in order, those on demand before those
ahead of time, ``queue_depth`` of them in flight, so that their latencies overlap; copies to the
device likewise; computation is the host thread, which asks for a unit's blocks, waits until they
are there, runs, and routes to experts one after the other in ascending order.

Where the disk's bytes arrive in the memory that compute reads, either slows the other down: what
is computed while a read is under way, by the measured share; reads, which are priced when they
begin, by the share of time that compute has been busy so far.

``record`` hears what every lane does when; see ``timeline``.

What is pinned in the compute tier never moves and is left out, which makes the cost of a
simulation that of the streamed blocks: about 15 µs for each.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.bounds import (
    COMPUTE,
    H2D,
    READ,
    dense_seconds,
    distinct,
    experts_of,
    row_bytes,
)
from offload.scheduler.costs import CostModel
from offload.scheduler.guesses import guess_count
from offload.scheduler.lane import Lane
from offload.scheduler.plan import Home, Plan
from offload.scheduler.residency import Fetch, Instruction, Residency
from offload.scheduler.timeline import CPU, EXPERTS, PASSES, WAITS, Record

Routing = Callable[[int, str], Sequence[str]]
"""(pass number, group) → the experts that the pass uses there, in the order of use."""

_INSTANT_S = 1e-12
"""Less is rounding."""

MAX_EXPERTS = 4096
"""Beyond, the default routing simulates the same share of fewer experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Means of the passes that count: usually all but the first, which starts with empty rings."""

    pass_s: float
    lane_s: dict[str, float]
    """Busy seconds of each lane."""
    stall_s: float
    """Seconds in which compute waited."""
    read_bytes: float
    """Bytes from disk."""
    h2d_bytes: float
    """Bytes copied to the device."""
    hits: float
    """Experts used that were above the disk when asked for."""
    misses: float


def simulate(
    plan: Plan,
    costs: CostModel,
    *,
    passes: int = 3,
    routing: Routing | None = None,
    tokens: float = 1,
    seed: int = 0,
    skip: int = 1,
    hot: Sequence[str] | None = None,
    record: Record | None = None,
) -> Simulation:
    """Run ``passes`` passes of ``tokens`` tokens each over the plan's trace.

    Args:
        passes: more than ``skip``.
        routing: without it, experts are drawn evenly by a seeded generator, so that a layer hits
            as often as the plan expects: the spread of a random draw would need hundreds of
            passes to average out.
        skip: how many passes do not count at first: the very first one fills the rings.
        hot: experts that the slots hold at first, the likeliest first; none of them: the slots are
            empty, as after loading. None: some of every layer.
        record: hears of everything that takes time; its clock starts with the first pass.

    Raises:
        SchedulerError: the plan gets stuck (a bug).
    """
    if not 0 <= skip < passes:
        raise ValueError(f"one pass to fill the rings and one to measure, got {passes}")
    if routing is None:
        plan = _thinned(plan, tokens)
    run = _Run(plan, costs, tokens, random.Random(seed), record)
    run.warm_up(hot)
    first = run.read_totals()
    for i in range(passes):
        if i == skip:
            first = run.read_totals()
        run.one_pass(i, routing)
    n = passes - skip
    total = [(b - a) / n for a, b in zip(first, run.read_totals(), strict=True)]
    pass_s, read_s, h2d_s, compute_s, stall_s, read_bytes, h2d_bytes, hits, misses, cpu_s = total
    lane_s = {READ: read_s, COMPUTE: compute_s}
    if Tier.DEVICE in plan.tiers:
        lane_s[H2D] = h2d_s
    if plan.split is not None:
        lane_s[CPU] = cpu_s
    return Simulation(
        # The ring may still gain or lose a little from pass to pass; no steady state is faster
        # than its busiest lane.
        pass_s=max(pass_s, *lane_s.values()),
        lane_s=lane_s,
        stall_s=stall_s,
        read_bytes=read_bytes,
        h2d_bytes=h2d_bytes,
        hits=hits,
        misses=misses,
    )


class _Run:
    """The host thread, the lanes and the clock."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        tokens: float,
        rng: random.Random,
        record: Record | None = None,
    ) -> None:
        top = plan.compute_tier
        still = plan.tiers[top].pinned
        self._plan = plan
        self._costs = costs
        self._tokens = tokens
        self._rng = rng
        self._groups = experts_of(plan)
        moving = {
            t: replace(a, pinned={b: o for b, o in a.pinned.items() if b not in still})
            for t, a in plan.tiers.items()
        }
        self._residency = Residency(replace(plan, tiers=moving))
        self._lanes = {
            Tier.RAM: Lane(
                READ, costs.read_busy_s, costs.read_latency_s, costs.queue_depth, record
            ),
            Tier.DEVICE: Lane(
                H2D, costs.copy_up_busy_s, costs.copy_latency_s, costs.queue_depth, record
            ),
        }
        self._record = record
        beside = top is Tier.RAM
        self._compute_beside = costs.hardware.gemv_beside if beside else 1.0
        self._read_beside = costs.hardware.read_beside if beside else 1.0
        self._arrivals: list[tuple[float, int, Fetch | _CpuEnd]] = []
        self._sequence = 0
        self._at_once = False  # experts arrive in no time (warm-up)
        self._owed: dict[str, float] = {}  # fractions of misses by group
        self._drawn: dict[str, list[str]] = {}  # what a layer will use, drawn ahead to be guessed
        self._now = self._computed_s = self._stalled_s = 0.0
        self._active_s = 0.0  # spent computing, what the disk's traffic adds included
        self._resident_uses = 0.0
        dense_s = dense_seconds(plan, costs, tokens)
        self._steps = [
            (
                step,
                [b for b in dict.fromkeys(step.blocks) if plan.homes[b] is Home.STREAMED],
                sum(
                    costs.read_s(math.ceil(row_bytes(plan.blocks[b]) * tokens))
                    for b in dict.fromkeys(step.blocks)
                    if plan.homes[b] is Home.BY_ROW
                ),
                dense_s(step),
            )
            for step in plan.trace
        ]
        self._row_bytes = sum(
            row_bytes(plan.blocks[b]) * tokens
            for step in plan.trace
            for b in dict.fromkeys(step.blocks)
            if plan.homes[b] is Home.BY_ROW
        )
        self._passes = 0
        self._cpu_todo: list[str] = []  # experts for the CPU that have not begun
        self._cpu_busy = False
        self._cpu_s = 0.0
        self._cpu_cost: Callable[[str], float] = lambda _: 0.0

    # -- the program ----------------------------------------------------------------------

    def warm_up(self, hot: Sequence[str] | None) -> None:
        """Load what RAM keeps and fill the slots, outside of time."""
        self._at_once = True
        record, self._record = self._record, None
        self._submit(self._residency.start())
        while self._arrivals:
            self._arrive()
        slots = max((a.slots for a in self._plan.tiers.values()), default=0)
        if slots and hot is not None:
            # The likeliest last: an empty cache fills in any order, a full one forgets the first.
            blocks = self._plan.blocks
            for expert in reversed([b for b in hot if self._plan.homes[b] is Home.CACHED][:slots]):
                self._run_experts(blocks[expert].group, [expert], lambda _: 0.0)
        elif slots and self._groups:
            longest = max(map(len, self._groups.values()))
            filled = 0
            for i in range(longest):
                for group, experts in self._groups.items():
                    if i < len(experts) and filled < slots:
                        self._run_experts(group, [experts[i]], lambda _: 0.0)
                        filled += 1
        while self._arrivals:
            self._arrive()
        self._at_once = False
        self._now = self._stalled_s = 0.0
        self._record = record
        self._pump()

    def one_pass(self, number: int, routing: Routing | None) -> None:
        residency = self._residency
        began = self._now
        for step, blocks, rows_s, compute_s in self._steps:
            ticket, out = residency.need(step.unit, blocks)
            self._submit(out)
            self._pause(rows_s, step.unit)
            self._wait(lambda t=ticket: not residency.missing(t), step.unit)  # type: ignore[misc]
            self._compute(compute_s, COMPUTE, step.unit)
            if step.group:
                self._route(number, step.group, routing)
            self._submit(residency.done(ticket))
        self._passes += 1
        self._note(PASSES, f"pass {number}", began)

    def _route(self, number: int, group: str, routing: Routing | None) -> None:
        experts = self._groups[group]
        k = self._plan.top_k[group]
        used = distinct(len(experts), k, self._tokens)
        if routing is None:
            chosen = self._drawn.pop(group, None) or self._draw(group, used)
        else:
            chosen = list(routing(number, group))
        if not chosen:
            return
        blocks, price = self._plan.blocks, self._costs.expert_s
        tokens_each = self._tokens * k / len(chosen)

        def expert_s(expert: str) -> float:
            return price(blocks[expert], tokens_each)

        if self._plan.homes[experts[0]] is Home.PINNED:
            self._resident_uses += len(chosen)
            self._compute(sum(map(expert_s, chosen)), EXPERTS, group)
        elif self._plan.split is not None and self._tokens <= self._plan.split.rows:
            self._run_split(group, chosen, expert_s, tokens_each)
        else:
            ahead = self._ahead(group, number, routing)
            self._run_experts(group, chosen, expert_s, ahead)

    def _ahead(
        self, group: str, number: int, routing: Routing | None
    ) -> tuple[str, list[str]] | None:
        """The next layer's experts, some of them guessed wrong; None without guesses."""
        groups = self._plan.groups
        at = groups.index(group) + 1
        if not self._plan.guesses or self._tokens > 1 or at == len(groups):
            return None
        after, rng = groups[at], self._rng
        experts = self._groups[after]
        if routing is None:
            used = self._draw(after, distinct(len(experts), self._plan.top_k[after], self._tokens))
            self._drawn[after] = used
        else:
            used = list(routing(number, after))
        known = set(used)
        others = [b for b in experts if b not in known]
        precision = self._costs.guess_precision
        return after, [
            b if rng.random() < precision or not others else rng.choice(others)
            for b in rng.sample(used, guess_count(len(used)))
        ]

    def _run_experts(
        self,
        group: str,
        experts: Sequence[str],
        expert_s: Callable[[str], float],
        ahead: tuple[str, list[str]] | None = None,
    ) -> None:
        residency = self._residency
        self._submit(residency.route(group, experts))
        if ahead is not None:
            self._submit(residency.guess(*ahead))
        for expert in experts:
            self._wait(lambda e=expert: self._acquired(e), expert)  # type: ignore[misc]
            self._compute(expert_s(expert), EXPERTS, expert)
            self._submit(residency.release(expert))
        self._submit(residency.end_route())

    def _run_split(
        self,
        group: str,
        experts: Sequence[str],
        expert_s: Callable[[str], float],
        tokens_each: float,
    ) -> None:
        """A layer whose experts the device and the CPU share, as ``Executor.split_route``."""
        residency, blocks = self._residency, self._plan.blocks
        price = self._costs.beside_card().expert_s
        load = max(1, round(tokens_each))
        self._submit(residency.route(group, experts, None, dict.fromkeys(experts, load)))
        schedule = residency.schedule
        # Latencies of the way down and up again, once per expert: the copies themselves are tiny.
        hand_over_s = 2 * self._costs.copy_latency_s
        self._cpu_cost = lambda b: price(blocks[b], tokens_each) + hand_over_s
        self._cpu_todo = list(schedule.cpu) if schedule is not None else []
        self._start_cpu()
        for expert in schedule.device if schedule is not None else experts:
            self._wait(lambda e=expert: self._acquired(e), expert)  # type: ignore[misc]
            self._compute(expert_s(expert), EXPERTS, expert)
            self._submit(residency.release(expert))
        self._wait(lambda: not self._cpu_todo and not self._cpu_busy, f"the CPU in {group}")
        self._submit(residency.end_route())

    def _start_cpu(self) -> None:
        """Begin the first of the CPU's experts that is in RAM, if the CPU is free."""
        if self._cpu_busy:
            return
        for expert in self._cpu_todo:
            there, out = self._residency.hold_below(expert)
            if there:
                self._cpu_todo.remove(expert)
                self._submit(out)
                break
        else:
            return
        seconds = self._cpu_cost(expert)
        self._cpu_busy = True
        self._cpu_s += seconds
        self._sequence += 1
        heapq.heappush(self._arrivals, (self._now + seconds, self._sequence, _CpuEnd(expert)))
        if self._record is not None:
            self._record(CPU, expert, self._now, self._now + seconds, 0)

    def _acquired(self, expert: str) -> bool:
        there, out = self._residency.acquire(expert)
        self._submit(out)
        return there

    def _draw(self, group: str, used: float) -> list[str]:
        """Experts of a layer, in order: as many misses as expected (fractions are owed to the
        layer's next pass), drawn from the absent and the present ones."""
        experts = self._groups[group]
        n = min(len(experts), max(1, round(used)))
        where, tiers = self._residency.where, self._plan.tiers
        if self._plan.homes[experts[0]] is Home.PINNED:
            return self._rng.sample(experts, n)
        present = [b for b in experts if any(where(b, t) is not None for t in tiers)]
        known = set(present)
        absent = [b for b in experts if b not in known]
        owed = self._owed.get(group, self._rng.random())
        owed += n * (1.0 - (self._plan.expected_hit_rate or 0.0))
        misses = max(n - len(present), min(int(owed), len(absent), n))
        self._owed[group] = owed - misses if abs(owed - misses) < 1.0 else 0.0
        chosen = {*self._rng.sample(absent, misses), *self._rng.sample(present, n - misses)}
        return [b for b in experts if b in chosen]

    # -- the clock ------------------------------------------------------------------------

    def _note(self, lane: str, name: str, began: float) -> None:
        if self._record is not None and self._now > began:
            self._record(lane, name, began, self._now, 0)

    def _compute(self, seconds: float, lane: str, name: str) -> None:
        self._computed_s += seconds
        began, left = self._now, seconds
        disk = self._lanes[Tier.RAM]
        while left > _INSTANT_S:
            busy = disk.busy_until() > self._now
            speed = self._compute_beside if busy else 1.0
            end = self._now + left / speed
            change = disk.busy_until() if busy else end
            due = self._arrivals[0][0] if self._arrivals else end
            stop = max(self._now, min(end, change, due))
            left -= (stop - self._now) * speed
            self._now = stop
            while self._arrivals and self._arrivals[0][0] <= stop:
                self._arrive()
        self._active_s += self._now - began
        self._note(lane, name, began)

    def _pause(self, seconds: float, name: str) -> None:
        began = self._now
        self._stalled_s += seconds
        self._pass(seconds)
        self._note(WAITS, f"rows for {name}", began)

    def _pass(self, seconds: float) -> None:
        end = self._now + seconds
        while self._arrivals and self._arrivals[0][0] <= end:
            self._arrive()
        self._now = end

    def _wait(self, until: Callable[[], bool], name: str) -> None:
        start = self._now
        while not until():
            if not self._arrivals:
                raise SchedulerError("compute waits, and nothing is on its way: the plan is stuck")
            self._arrive()
        self._stalled_s += self._now - start
        self._note(WAITS, name, start)

    def _arrive(self) -> None:
        at, _, fetch = heapq.heappop(self._arrivals)
        self._now = max(self._now, at)
        if isinstance(fetch, _CpuEnd):
            self._cpu_busy = False
            self._submit(self._residency.release_below(fetch.expert))
            self._start_cpu()
            return
        if at >= 0.0:
            self._lanes[fetch.dst].flying -= 1
        self._submit(self._residency.arrived(fetch.block, fetch.dst))
        if self._cpu_todo:
            self._start_cpu()

    def _submit(self, out: Sequence[Instruction]) -> None:
        for fetch in out:
            if not isinstance(fetch, Fetch):
                continue
            if self._at_once and not self._is_ahead(fetch):
                self._sequence += 1
                heapq.heappush(self._arrivals, (-1.0, self._sequence, fetch))
            else:
                self._lanes[fetch.dst].add(fetch, self._plan.blocks[fetch.block].nbytes)
        if not self._at_once:
            self._pump()

    def _is_ahead(self, fetch: Fetch) -> bool:
        """Whether it fills a ring: those start empty when the clock does."""
        return (
            self._plan.homes[fetch.block] is Home.STREAMED
            and fetch.block not in self._plan.tiers[fetch.dst].pinned
        )

    def _pump(self) -> None:
        busy = self._active_s / self._now if self._now > 0.0 else 0.0
        pace = 1.0 - (1.0 - self._read_beside) * min(1.0, busy)
        for tier, lane in self._lanes.items():
            while (begun := lane.begin(self._now, pace if tier is Tier.RAM else 1.0)) is not None:
                self._sequence += 1
                heapq.heappush(self._arrivals, (begun[0], self._sequence, begun[1]))

    def read_totals(self) -> tuple[float, ...]:
        """Now and everything counted so far."""
        disk, up = self._lanes[Tier.RAM], self._lanes[Tier.DEVICE]
        return (
            self._now,
            disk.worked_s,
            up.worked_s,
            self._computed_s,
            self._stalled_s,
            disk.nbytes + self._row_bytes * self._passes,
            up.nbytes,
            self._residency.hits + self._resident_uses,
            self._residency.misses,
            self._cpu_s,
        )


@dataclass(frozen=True, slots=True)
class _CpuEnd:
    """The CPU has computed an expert."""

    expert: str


def _thinned(plan: Plan, tokens: float) -> Plan:
    """The same shares of fewer experts, if there are very many."""
    groups = experts_of(plan)
    total = sum(map(len, groups.values()))
    cached = any(plan.homes[e[0]] is Home.CACHED for e in groups.values() if e)
    if total <= MAX_EXPERTS or not cached:
        return plan
    keep: set[str] = set()
    for group, experts in groups.items():
        used = distinct(len(experts), plan.top_k.get(group, 1), tokens)
        n = max(math.ceil(len(experts) * MAX_EXPERTS / total), math.ceil(2 * used))
        keep.update(experts[:n])
    gone = {b for experts in groups.values() for b in experts if b not in keep}
    share = len(keep) / total
    least = 1 + max(plan.top_k.values())
    return replace(
        plan,
        blocks={b: s for b, s in plan.blocks.items() if b not in gone},
        homes={b: h for b, h in plan.homes.items() if b not in gone},
        tiers={
            t: replace(
                a,
                pinned={b: o for b, o in a.pinned.items() if b not in gone},
                slots=min(a.slots, max(least, round(a.slots * share))),
            )
            for t, a in plan.tiers.items()
        },
    )
