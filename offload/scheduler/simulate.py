"""A plan on a virtual clock: the real residency state machine, lanes made of arithmetic.

The same ``Residency`` that drives the executor decides here what is fetched, dropped and waited
for, so that a prediction contains its stalls, and a plan that would get stuck gets stuck here.
Lanes are servers with a rate (``virtual_clock``); computation is the host thread, which asks for a
unit's blocks, waits until they are there, runs, and routes to experts one after the other in
ascending order.

``record`` hears what every lane does when; see ``timeline``.

What is pinned in the compute tier never moves and is left out, which makes the cost of a
simulation that of the streamed blocks: about 15 µs for each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload.blocks import Tier
from offload.scheduler.bounds import (
    COMPUTE,
    H2D,
    READ,
    dense_seconds,
    distinct,
    experts_of,
    host_seconds,
    row_bytes,
)
from offload.scheduler.costs import CostModel
from offload.scheduler.guesses import guess_count
from offload.scheduler.plan import Home, Plan
from offload.scheduler.residency import Instruction, Residency
from offload.scheduler.timeline import CPU, EXPERTS, PASSES, Record
from offload.scheduler.virtual_clock import VirtualClock

Routing = Callable[[int, str], Sequence[str]]
"""(pass number, group) → the experts that the pass uses there, in the order of use."""

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
    if plan.split is not None or plan.computed_in_ram(tokens):
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
        self._clock = VirtualClock(plan, self._residency, costs, record)
        self._cpu = _CpuLane(self._clock, self._residency, record)
        self._owed: dict[str, float] = {}  # fractions of misses by group
        self._drawn: dict[str, list[str]] = {}  # what a layer will use, drawn ahead to be guessed
        self._resident_uses = 0.0
        dense_s, host_s = (of(plan, costs, tokens) for of in (dense_seconds, host_seconds))
        in_ram = plan.computed_in_ram(tokens)
        self._host_s = 0.0  # that the CPU has computed of dense blocks
        self._steps = [
            (
                step,
                [
                    b
                    for b in dict.fromkeys(step.blocks)
                    if plan.homes[b] is Home.STREAMED and b not in in_ram
                ],
                sum(
                    costs.read_s(math.ceil(row_bytes(plan.blocks[b]) * tokens))
                    for b in dict.fromkeys(step.blocks)
                    if plan.homes[b] is Home.BY_ROW
                ),
                dense_s(step),
                host_s(step),
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

    # -- the program ----------------------------------------------------------------------

    def warm_up(self, hot: Sequence[str] | None) -> None:
        """Load what RAM keeps and fill the slots, outside of time."""
        clock = self._clock
        clock.at_once = True
        clock.submit(self._residency.start())
        clock.settle()
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
        clock.settle()
        clock.start()

    def one_pass(self, number: int, routing: Routing | None) -> None:
        residency, clock = self._residency, self._clock
        began = clock.now
        for step, blocks, rows_s, compute_s, host_s in self._steps:
            ticket, out = residency.need(step.unit, blocks)
            clock.submit(out)
            clock.pause(rows_s, f"rows for {step.unit}")
            clock.wait(lambda t=ticket: not residency.missing(t), step.unit)  # type: ignore[misc]
            clock.compute(compute_s, COMPUTE, step.unit)
            if host_s:  # in turns with the device: each needs what the other has computed
                self._host_s += host_s
                clock.compute(host_s, CPU, step.unit)
            if step.group:
                self._route(number, step.group, routing)
            clock.submit(residency.done(ticket))
        self._passes += 1
        clock.note(PASSES, f"pass {number}", began)

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
            self._clock.compute(sum(map(expert_s, chosen)), EXPERTS, group)
        elif self._plan.split is not None and self._tokens <= self._plan.split.rows:
            self._run_split(group, chosen, expert_s, tokens_each)
        else:
            ahead = self._ahead(group, number, routing)
            self._run_experts(group, chosen, expert_s, ahead)

    def _ahead(
        self, group: str, number: int, routing: Routing | None
    ) -> list[tuple[str, list[str]]]:
        """The next layers' experts, some of them guessed wrong; none without guesses."""
        if not self._plan.guesses or self._tokens > 1:
            return []
        at = self._plan.groups.index(group) + 1
        # The layer after the next one, too, as long as the disk is what guesses are for.
        far = 2 if self._plan.compute_tier is Tier.RAM else 1
        return [
            (after, self._guessed(after, number, routing))
            for after in self._plan.groups[at : at + far]
        ]

    def _guessed(self, after: str, number: int, routing: Routing | None) -> list[str]:
        rng, experts = self._rng, self._groups[after]
        if routing is None:
            used = self._drawn.get(after)
            if used is None:
                count = distinct(len(experts), self._plan.top_k[after], self._tokens)
                used = self._drawn[after] = self._draw(after, count)
        else:
            used = list(routing(number, after))
        known = set(used)
        others = [b for b in experts if b not in known]
        precision = self._costs.guess_precision
        return [
            b if rng.random() < precision or not others else rng.choice(others)
            for b in rng.sample(used, guess_count(len(used)))
        ]

    def _run_experts(
        self,
        group: str,
        experts: Sequence[str],
        expert_s: Callable[[str], float],
        ahead: Sequence[tuple[str, list[str]]] = (),
    ) -> None:
        self._clock.submit(self._residency.route(group, experts))
        for i, (after, likely) in enumerate(ahead):
            self._clock.submit(self._residency.guess(after, likely, far=i > 0))
        self._compute_experts(experts, expert_s)
        self._clock.submit(self._residency.end_route())

    def _compute_experts(self, experts: Sequence[str], expert_s: Callable[[str], float]) -> None:
        """One after the other, each when it is where compute runs."""
        clock = self._clock
        for expert in experts:
            clock.wait(lambda e=expert: self._acquired(e), expert)  # type: ignore[misc]
            clock.compute(expert_s(expert), EXPERTS, expert)
            clock.submit(self._residency.release(expert))

    def _run_split(
        self,
        group: str,
        experts: Sequence[str],
        expert_s: Callable[[str], float],
        tokens_each: float,
    ) -> None:
        """A layer whose experts the device and the CPU share, as ``Executor.split_route``."""
        residency, blocks, clock = self._residency, self._plan.blocks, self._clock
        price = self._costs.beside_card().expert_s
        load = max(1, round(tokens_each))
        clock.submit(residency.route(group, experts, None, dict.fromkeys(experts, load)))
        schedule = residency.schedule
        # Latencies of the way down and up again, once per expert: the copies themselves are tiny.
        hand_over_s = 2 * self._costs.copy_latency_s
        self._cpu.take(
            () if schedule is None else schedule.cpu,
            lambda b: price(blocks[b], tokens_each) + hand_over_s,
        )
        self._compute_experts(experts if schedule is None else schedule.device, expert_s)
        clock.wait(lambda: self._cpu.idle, f"the CPU in {group}")
        clock.submit(residency.end_route())

    def _acquired(self, expert: str) -> bool:
        there, out = self._residency.acquire(expert)
        self._clock.submit(out)
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

    def read_totals(self) -> tuple[float, ...]:
        """Now and everything counted so far."""
        clock = self._clock
        disk, up = clock.disk, clock.up
        return (
            clock.now,
            disk.worked_s,
            up.worked_s,
            clock.computed_s - self._host_s,
            clock.stalled_s,
            disk.nbytes + self._row_bytes * self._passes,
            up.nbytes,
            self._residency.hits + self._resident_uses,
            self._residency.misses,
            self._cpu.worked_s + self._host_s,
        )


class _CpuLane:
    """The CPU beside a device: computes experts where they lie in RAM, one at a time."""

    def __init__(self, clock: VirtualClock, residency: Residency, record: Record | None) -> None:
        self.worked_s = 0.0
        self._clock, self._residency, self._record = clock, residency, record
        self._todo: list[str] = []  # what has not begun
        self._busy = False
        self._cost: Callable[[str], float] = lambda _: 0.0
        clock.arrived = self._begin

    @property
    def idle(self) -> bool:
        """Whether all are done."""
        return not self._todo and not self._busy

    def take(self, experts: Sequence[str], cost: Callable[[str], float]) -> None:
        """Compute experts, each as soon as it is there, for ``cost`` seconds."""
        self._todo, self._cost = list(experts), cost
        self._begin()

    def _begin(self) -> None:
        """The first that is in RAM, if the CPU is free."""
        if self._busy:
            return
        for expert in self._todo:
            there, out = self._residency.hold_below(expert)
            if there:
                self._start(expert, out)
                return

    def _start(self, expert: str, out: Sequence[Instruction]) -> None:
        self._todo.remove(expert)
        self._clock.submit(out)
        now, seconds = self._clock.now, self._cost(expert)
        self._busy = True
        self.worked_s += seconds
        self._clock.later(seconds, partial(self._end, expert))
        if self._record is not None:
            self._record(CPU, expert, now, now + seconds, 0)

    def _end(self, expert: str) -> None:
        self._busy = False
        self._clock.submit(self._residency.release_below(expert))
        self._begin()


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
