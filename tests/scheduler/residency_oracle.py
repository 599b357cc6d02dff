"""An independent model of memory for the tests of ``Residency``, and plans to try it on.

The oracle knows nothing of rings, slots or caches. It reads instructions only: a ``Fetch`` writes
its destination from the moment it is issued until it has arrived and reads its source for as
long; a ``Drop`` frees. Everything else follows from byte ranges.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload.blocks import ALIGN, BlockKind, BlockSpec, Tier
from offload.scheduler.plan import Home, Plan, TierLayout
from offload.scheduler.residency import Drop, Fetch, Instruction, Residency
from offload.scheduler.trace import Step, Trace


def spec(name: str, pages: int, group: str = "") -> BlockSpec:
    """A block of ``pages`` pages in an arena (a few bytes less of its own)."""
    kind = BlockKind.EXPERT if group else BlockKind.WEIGHT
    return BlockSpec(id=name, kind=kind, tensors=(), nbytes=pages * ALIGN - 17, group=group)


def make_plan(
    steps: Sequence[tuple[str, Sequence[str]]],
    pages: Mapping[str, int],
    *,
    top: Tier = Tier.RAM,
    ring: Mapping[Tier, int],
    pinned: Mapping[Tier, Sequence[str]] | None = None,
    experts: Mapping[str, Sequence[str]] | None = None,
    slots: Mapping[Tier, int] | None = None,
    guess_top_k: int = 0,
) -> Plan:
    """A plan of pages: ``steps`` are (unit, blocks), ``ring`` and ``slots`` sizes by tier,
    ``experts`` the experts of each group; with ``guess_top_k``, so many of them by token, and
    they may be guessed."""
    pinned, experts, slots = pinned or {}, experts or {}, slots or {}
    group_of = {e: g for g, es in experts.items() for e in es}
    blocks = {b: spec(b, n, group_of.get(b, "")) for b, n in pages.items()}
    slot_bytes = max([pages[e] for e in group_of], default=0) * ALIGN
    tiers = {}
    for tier in (Tier.RAM, Tier.DEVICE)[:top]:
        offsets, end = {}, 0
        for b in pinned.get(tier, ()):
            offsets[b] = end
            end += pages[b] * ALIGN
        ring_bytes = ring.get(tier, 0) * ALIGN
        tiers[tier] = TierLayout(
            pinned=offsets,
            ring_base=end,
            ring_bytes=ring_bytes,
            slot_base=end + ring_bytes,
            slot_bytes=slot_bytes,
            slots=slots.get(tier, 0),
        )
    everywhere = {b for t in tiers for b in tiers[t].pinned}

    def home(b: str) -> Home:
        if b in group_of:
            return Home.CACHED
        held = tiers[top].pinned if top == Tier.DEVICE else everywhere
        return Home.PINNED if b in held else Home.STREAMED

    return Plan(
        blocks=blocks,
        trace=Trace([Step(unit=u, blocks=tuple(bs)) for u, bs in steps]),
        groups=tuple(experts),
        compute_tier=top,
        tiers=tiers,
        homes={b: home(b) for b in blocks},
        budgets={t: tiers[t].nbytes for t in tiers},
        reserves={},
        weight_bytes=sum(s.nbytes for s in blocks.values()),
        streamed_bytes_per_pass=0,
        expected_hit_rate=None,
        guesses=guess_top_k > 0,
        top_k=dict.fromkeys(experts, guess_top_k),
    )


@dataclass
class Span:
    """A block's bytes in one tier."""

    start: int
    end: int
    ready: bool = False
    readers: int = 0  # copies up in flight that read it
    failed: bool = False


class Oracle:
    """Byte ranges of every tier, derived from the instructions alone."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.spans: dict[Tier, dict[str, Span]] = {t: {} for t in plan.tiers}
        self.flights: dict[tuple[str, Tier], Fetch] = {}
        self.guarded: Counter[str] = Counter()  # what compute reads now, in the compute tier
        self.fetches: Counter[tuple[str, Tier]] = Counter()
        self.latest: deque[Instruction] = deque(maxlen=24)

    def apply(self, instructions: Iterable[Instruction]) -> None:
        for what in instructions:
            self.latest.append(what)
            if isinstance(what, Fetch):
                self._fetch(what)
            else:
                assert isinstance(what, Drop)
                self._drop(what)

    def _fetch(self, f: Fetch) -> None:
        block, tier = f.block, f.dst
        layout = self.plan.tiers[tier]
        assert f.src == tier - 1
        start, end = f.dst_offset, f.dst_offset + self.plan.blocks[block].slot_nbytes
        assert start >= 0, f
        assert end <= layout.nbytes, f"{f} ends beyond the arena of {layout.nbytes} bytes"
        assert block not in self.spans[tier], f"{f}: the block is there already"
        for other, s in self.spans[tier].items():
            assert end <= s.start or s.end <= start, f"{f} overwrites {other} {s}"
        if tier == Tier.RAM:
            assert f.src_offset is None
        else:
            below = self.spans[Tier.RAM].get(block)
            assert below is not None, f"{f} copies up what is not in RAM"
            assert below.ready, f"{f} copies up before it has arrived"
            assert below.start == f.src_offset
            below.readers += 1
        assert (block in layout.pinned) == (start < layout.ring_base), f"{f}: not where pinned"
        assert layout.pinned.get(block, start) == start
        self.spans[tier][block] = Span(start, end)
        self.flights[block, tier] = f
        self.fetches[block, tier] += 1

    def _drop(self, d: Drop) -> None:
        s = self.spans[d.tier].pop(d.block)
        assert s.start == d.offset
        assert s.ready or s.failed, f"{d} while its fetch is in flight"
        assert not s.readers, f"{d} while a copy up reads it"
        if d.tier == self.plan.compute_tier:
            assert not self.guarded[d.block], f"{d} while compute reads it"

    def land(self, block: str, tier: Tier, *, ok: bool = True) -> None:
        """A fetch has ended: call before the event is given to the residency."""
        del self.flights[block, tier]
        s = self.spans[tier][block]
        s.ready, s.failed = ok, not ok
        if tier == Tier.DEVICE:
            self.spans[Tier.RAM][block].readers -= 1

    def ready_at(self, block: str) -> int | None:
        """Where compute can read the block, if it can."""
        s = self.spans[self.plan.compute_tier].get(block)
        return s.start if s is not None and s.ready else None


class Harness:
    """A residency under the oracle's eyes: every event validates both."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.residency = Residency(plan)
        self.oracle = Oracle(plan)
        self.tickets: dict[int, tuple[str, ...]] = {}
        self.ready: set[int] = set()
        self.broken: set[int] = set()  # tickets that got an error and must give up
        self.holds: Counter[str] = Counter()  # acquired experts
        self.note(self.residency.start())

    def note(self, instructions: Sequence[Instruction]) -> None:
        self.oracle.apply(instructions)
        self.residency.validate()
        assert self.residency.in_flight() == len(self.oracle.flights)
        for ticket, blocks in self.tickets.items():
            missing = self.residency.missing(ticket)
            if ticket in self.ready:
                assert not missing, f"ticket {ticket} was ready and lost {missing}"
            elif not missing:
                self.ready.add(ticket)
                self.oracle.guarded.update(blocks)
            if ticket in self.ready:
                for b in blocks:
                    self.check_there(b)
        for b in self.holds:
            self.check_there(b)

    def check_there(self, block: str) -> None:
        at = self.oracle.ready_at(block)
        assert at is not None, f"{block} is used before it has arrived"
        assert self.residency.where(block) == at

    def need(self, unit: str, blocks: Sequence[str]) -> int:
        ticket, out = self.residency.need(unit, blocks)
        self.tickets[ticket] = tuple(dict.fromkeys(blocks))
        self.note(out)
        return ticket

    def done(self, ticket: int) -> None:
        blocks = self.tickets.pop(ticket)
        if ticket in self.ready:
            self.ready.discard(ticket)
            self.oracle.guarded.subtract(blocks)
        self.broken.discard(ticket)
        self.note(self.residency.done(ticket))

    def arrive(self, block: str, tier: Tier) -> None:
        self.oracle.land(block, tier)
        self.note(self.residency.arrived(block, tier))

    def fail(self, block: str, tier: Tier) -> None:
        for ticket, blocks in self.tickets.items():
            if ticket not in self.ready and block in self.residency.missing(ticket):
                assert block in blocks
                self.broken.add(ticket)
        self.oracle.land(block, tier, ok=False)
        self.note(self.residency.failed(block, tier, "no such luck"))

    def route(
        self, group: str, experts: Sequence[str], loads: Mapping[str, int] | None = None
    ) -> None:
        self.note(self.residency.route(group, experts, None, loads))

    def hold_below(self, expert: str) -> bool:
        there, out = self.residency.hold_below(expert)
        span = self.oracle.spans[Tier.RAM].get(expert)
        assert there == (span is not None and span.ready)
        if there and span is not None:
            span.readers += 1
        self.note(out)
        return there

    def release_below(self, expert: str) -> None:
        self.oracle.spans[Tier.RAM][expert].readers -= 1
        self.note(self.residency.release_below(expert))

    def guess(self, group: str, experts: Sequence[str], *, far: bool = False) -> None:
        self.note(self.residency.guess(group, experts, far=far))

    def acquire(self, expert: str) -> bool:
        there, out = self.residency.acquire(expert)
        if there:
            assert not out
            self.oracle.guarded[expert] += 1
            self.holds[expert] += 1
        self.note(out)
        return there

    def acquire_all(self, experts: Sequence[str]) -> bool:
        offsets = self.residency.acquire_all(experts)
        if offsets is None:
            return False
        assert offsets == [self.oracle.ready_at(e) for e in experts]
        self.oracle.guarded.update(experts)
        self.holds.update(experts)
        self.note([])
        return True

    def release_all(self) -> None:
        experts = list(self.holds.elements())
        for e in experts:
            self._let_go(e)
        self.note(self.residency.release_all(experts))

    def release(self, expert: str) -> None:
        self._let_go(expert)
        self.note(self.residency.release(expert))

    def _let_go(self, expert: str) -> None:
        self.oracle.guarded[expert] -= 1
        self.holds[expert] -= 1
        if not self.holds[expert]:
            del self.holds[expert]

    # -- liveness -------------------------------------------------------------------------

    def settle(self, pick: Callable[[list[tuple[str, Tier]]], tuple[str, Tier]] = min) -> None:
        """Deliver until nothing is in flight. Whatever compute is doing meanwhile, that must
        end: fetching the same bytes over and over would not."""
        budget = 60 + 12 * len(self.plan.blocks)
        while self.oracle.flights:
            budget -= 1
            assert budget, f"fetches go on for ever, unasked: {list(self.oracle.latest)}"
            self.arrive(*pick(list(self.oracle.flights)))

    def finish(self) -> None:
        """Everyone does what they can until no ticket and no hold is left."""
        for ticket in sorted(self.broken):
            self.done(ticket)
        for expert, n in list(self.holds.items()):
            for _ in range(n):
                self.release(expert)
        while self.tickets:
            self.settle()
            able = sorted(self.ready)
            assert able, f"no ticket of {self.tickets} ever becomes ready"
            self.done(able[0])

    def run_unit(self, unit: str, blocks: Sequence[str]) -> None:
        ticket = self.need(unit, blocks)
        self.settle()
        assert ticket in self.ready, f"{unit} waits for ever for {self.residency.missing(ticket)}"
        self.done(ticket)

    def run_experts(self, group: str, experts: Sequence[str]) -> None:
        self.route(group, experts)
        for e in experts:
            if not self.acquire(e):
                self.settle()
                assert self.acquire(e), f"{e} never comes"
            self.release(e)
        self.note(self.residency.end_route())
