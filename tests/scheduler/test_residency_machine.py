"""Random histories of ``Residency`` under an independent oracle (see ``residency_oracle``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from residency_oracle import Harness, make_plan

from offload.blocks import ALIGN, Tier
from offload.scheduler.plan import Plan
from offload.scheduler.policy import NAMES
from offload.scheduler.split import Site, SplitCosts
from offload.scheduler.trace import Step, Trace

MAX_TICKETS = 3


@st.composite
def plans(draw: st.DrawFn, *, shared: bool = True) -> Plan:
    """Small plans at the edge: rings as small as the largest step, slots from one up."""
    top = draw(st.sampled_from([Tier.RAM, Tier.DEVICE]))
    weights = [f"w{i}" for i in range(draw(st.integers(1, 7)))]
    pages = {b: draw(st.integers(1, 4)) for b in weights}
    steps = [
        (f"u{i}", draw(st.lists(st.sampled_from(weights), max_size=4, unique=True)))
        for i in range(draw(st.integers(1, 6)))
    ]
    if not shared:  # a block is in one step only
        seen: set[str] = set()
        for i, (unit, blocks) in enumerate(steps):
            steps[i] = (unit, [b for b in blocks if b not in seen])
            seen.update(blocks)
    elif draw(st.booleans()):  # a unit that runs twice in a pass
        steps.append(steps[0])
    experts = {
        f"g{i}": [f"g{i}e{j}" for j in range(draw(st.integers(1, 5)))]
        for i in range(draw(st.integers(0, 3)))
    }
    pages |= {e: draw(st.integers(1, 2)) for es in experts.values() for e in es}
    tiers = [Tier.RAM, Tier.DEVICE][:top]
    pinned = {
        t: [b for b in pages if draw(st.integers(0, 4)) == 0] if draw(st.booleans()) else []
        for t in tiers
    }
    tight = draw(st.booleans())
    spare = 0 if tight else draw(st.integers(1, 12))
    streamed = [b for b in weights if b not in pinned[top]]
    ring = {top: max(sum(pages[b] for b in bs if b in streamed) for _, bs in steps) + spare}
    if top == Tier.DEVICE:
        passing = [b for b in weights if b not in pinned[Tier.RAM]]
        passing += [b for b in pinned[top] if b not in pinned[Tier.RAM]]
        spare = 0 if tight else draw(st.integers(1, 12))
        ring[Tier.RAM] = max([pages[b] for b in passing], default=0) + spare
    plan = make_plan(
        steps,
        pages,
        top=top,
        ring=ring,
        pinned=pinned,
        experts=experts,
        slots={t: draw(st.integers(1, 6)) for t in tiers} if experts else {},
        guess_top_k=draw(st.sampled_from([0, 1, 2, 5])) if experts else 0,
    )
    kept = draw(st.frozensets(st.sampled_from([e for es in experts.values() for e in es] or [""])))
    split = None
    if top == Tier.DEVICE and experts and draw(st.booleans()):
        split = replace(SplitCosts.assumed(ALIGN, 8), move_s=draw(st.sampled_from([0.0, 2.0])))
    return replace(
        plan,
        expert_policy=draw(st.sampled_from(NAMES)),
        kept=dict.fromkeys(tiers, kept),
        split=split,
    )


class ResidencyMachine(RuleBasedStateMachine):
    """Events in any order that an executor could cause, and some that it should not."""

    @initialize(plan=plans())
    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.h = Harness(plan)
        self.units = {s.unit: s.blocks for s in plan.trace}
        self.order = [s.unit for s in plan.trace]  # of the current trace
        self.at = 0
        self.groups = {g: [b for b, s in plan.blocks.items() if s.group == g] for g in plan.groups}
        self.routed: list[str] = []
        self.below: list[str] = []  # held in RAM, for the CPU

    # -- weights --------------------------------------------------------------------------

    def room_for(self, blocks: tuple[str, ...]) -> bool:
        layout = self.plan.tiers[self.plan.compute_tier]
        size = sum(self.plan.blocks[b].slot_nbytes for b in blocks if b not in layout.pinned)
        return size <= layout.ring_bytes

    @precondition(lambda self: len(self.h.tickets) < MAX_TICKETS)
    @rule()
    def need_next(self) -> None:
        unit = self.order[self.at % len(self.order)]
        self.at += 1
        self.h.need(unit, self.units[unit])

    @precondition(lambda self: len(self.h.tickets) < MAX_TICKETS)
    @rule(data=st.data())
    def need_out_of_order(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.units)))
        self.h.need(unit, self.units[unit])

    @precondition(lambda self: len(self.h.tickets) < MAX_TICKETS)
    @rule(data=st.data())
    def need_unknown(self, data: st.DataObject) -> None:
        weights = sorted(b for b, s in self.plan.blocks.items() if not s.group)
        blocks = tuple(data.draw(st.lists(st.sampled_from(weights), max_size=4)))
        if self.room_for(tuple(set(blocks))):
            self.h.need("stranger", blocks)

    @precondition(lambda self: self.h.ready)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        self.h.done(data.draw(st.sampled_from(sorted(self.h.ready))))

    @precondition(lambda self: self.h.tickets)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.h.done(data.draw(st.sampled_from(sorted(self.h.tickets))))

    @precondition(lambda self: not self.h.tickets)
    @rule(data=st.data())
    def retrace(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.units)), max_size=6))
        trace = Trace([Step(unit=u, blocks=self.units[u]) for u in names])
        self.order, self.at = names or self.order, 0
        self.h.note(self.h.residency.retrace(trace))
        assert self.h.residency.trace is trace

    # -- transfers ------------------------------------------------------------------------

    @precondition(lambda self: self.h.oracle.flights)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.h.arrive(*data.draw(st.sampled_from(sorted(self.h.oracle.flights))))

    @precondition(lambda self: self.h.oracle.flights)
    @rule()
    def arrive_all(self) -> None:
        for flight in list(self.h.oracle.flights):
            self.h.arrive(*flight)

    @precondition(lambda self: self.h.oracle.flights)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        block, tier = data.draw(st.sampled_from(sorted(self.h.oracle.flights)))
        before = self.h.oracle.fetches.copy()
        self.h.fail(block, tier)
        again = self.h.oracle.fetches[block, Tier.RAM] - before[block, Tier.RAM]
        assert not again or len(self.h.tickets) > len(self.h.broken), "read again unasked"

    @rule(pick=st.sampled_from([min, max, lambda fs: fs[0], lambda fs: fs[-1]]))
    def settle(self, pick: Callable[[list[tuple[str, Tier]]], tuple[str, Tier]]) -> None:
        self.h.settle(pick)

    @rule()
    def finish(self) -> None:
        self.h.finish()

    # -- experts --------------------------------------------------------------------------

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def route(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.groups)))
        self.routed = data.draw(
            st.lists(st.sampled_from(self.groups[group]), min_size=1, max_size=7)
        )
        counted = data.draw(st.booleans())
        self.h.route(group, self.routed, Counter(self.routed) if counted else None)

    @precondition(lambda self: self.plan.split is not None and self.routed)
    @rule(data=st.data())
    def hold_below(self, data: st.DataObject) -> None:
        sites = self.h.residency.sites
        mine = [b for b in self.routed if sites.get(b) is Site.CPU]
        if mine and self.h.hold_below(expert := data.draw(st.sampled_from(mine))):
            self.routed.remove(expert)
            self.below.append(expert)

    @precondition(lambda self: self.below)
    @rule()
    def release_below(self) -> None:
        self.h.release_below(self.below.pop())

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def guess(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.groups)))
        experts = data.draw(st.lists(st.sampled_from(self.groups[group]), max_size=7))
        live = {b: self.h.oracle.ready_at(b) for b in self.routed}
        self.h.guess(group, experts, far=data.draw(st.booleans()))
        for b, at in live.items():
            assert at is None or self.h.oracle.ready_at(b) == at, "a guess displaced a wanted one"

    @precondition(lambda self: self.routed)
    @rule(data=st.data())
    def acquire_next(self, data: st.DataObject) -> None:
        expert = self.routed.pop(0)
        if not self.h.acquire(expert):
            self.routed.insert(0, expert)
        elif data.draw(st.booleans()):
            self.h.release(expert)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def acquire_any(self, data: st.DataObject) -> None:
        experts = sorted(e for es in self.groups.values() for e in es)
        self.h.acquire(data.draw(st.sampled_from(experts)))

    @precondition(lambda self: self.routed)
    @rule()
    def acquire_all(self) -> None:
        there = all(self.h.oracle.ready_at(e) is not None for e in self.routed)
        assert self.h.acquire_all(self.routed) == there

    @precondition(lambda self: self.h.holds)
    @rule()
    def release_all(self) -> None:
        self.h.release_all()

    @precondition(lambda self: self.h.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.h.release(data.draw(st.sampled_from(sorted(self.h.holds))))

    @rule()
    def end_route(self) -> None:
        self.routed = []
        self.h.note(self.h.residency.end_route())

    # -- the end --------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.finish()
        while self.below:
            self.h.release_below(self.below.pop())
        self.h.note(self.h.residency.end_route())
        for _ in range(2):
            for unit in self.order:
                self.h.run_unit(unit, self.units[unit])
            for group, experts in self.groups.items():
                self.h.run_experts(group, experts)
        self.h.settle()
        assert self.h.residency.held() == []


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
