"""Models, machines and an oracle for the tests of the planner.

The oracle shares no code with the planner: it adds up bytes and intervals of the finished plan,
and it plays the executor on the real ``Residency``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import strategies as st

from offload.blocks import BlockKind, BlockSpec, Tier, layout
from offload.scheduler.costs import CostModel
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate
from offload.scheduler.plan import Home, Plan
from offload.scheduler.planner import PlanRequest
from offload.scheduler.residency import Fetch, Residency
from offload.scheduler.trace import Step, Trace

PAGE = 4096


def rate(median: float, spread: float = 0.05, unit: str = BYTES_PER_S) -> Rate:
    return Rate(
        median=median, low=median * (1 - spread), high=median * (1 + spread), n=5, unit=unit
    )


def machine(
    *, ssd: float = 1.5e9, gemv: float = 20e9, h2d: float = 10e9, spread: float = 0.05
) -> Hardware:
    return Hardware(
        ssd_read=rate(ssd, spread),
        ssd_write=rate(1e9),
        ssd_mixed=rate(1e9),
        ram_read=rate(30e9),
        memcpy=rate(10e9),
        matmul={"bfloat16": rate(1e12, spread, FLOP_PER_S)},
        gemv={"bfloat16": rate(gemv, spread)},
        h2d=rate(h2d, spread),
        d2h=rate(h2d, spread),
        cores=2,
        ram_bytes=2**34,
        name="test",
    )


def block(
    name: str,
    pages: int,
    *,
    short: int = 0,
    kind: BlockKind = BlockKind.WEIGHT,
    group: str = "",
) -> BlockSpec:
    """A bfloat16 matrix with 16 rows that takes ``pages`` pages, the last one short of 32 ×
    ``short`` bytes."""
    return layout(name, kind, [("w", "bfloat16", (16, pages * PAGE // 32 - short))], group)


def dense(layers: int, per_layer: int, pages: int) -> tuple[dict[str, BlockSpec], list[Step]]:
    """``layers`` equal steps of ``per_layer`` equal blocks."""
    blocks: dict[str, BlockSpec] = {}
    steps = []
    for i in range(layers):
        ids = tuple(f"l{i}.{j}" for j in range(per_layer))
        blocks |= {b: block(b, pages) for b in ids}
        steps.append(Step(unit=f"l{i}", blocks=ids))
    return blocks, steps


def moe(
    layers: int, experts: int, top_k: int, *, pages: int = 4, dense_pages: int = 2
) -> PlanRequest:
    """A request with a generous RAM budget; every layer has one dense block and its experts."""
    blocks, bare = dense(layers, 1, dense_pages)
    groups: dict[str, tuple[str, ...]] = {}
    steps = []
    for step in bare:
        group = f"{step.unit}.experts"
        groups[group] = tuple(f"{group}.{e}" for e in range(experts))
        blocks |= {b: block(b, pages, kind=BlockKind.EXPERT, group=group) for b in groups[group]}
        steps.append(Step(unit=step.unit, blocks=step.blocks, group=group))
    return PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        experts=groups,
        top_k=dict.fromkeys(groups, top_k),
        budgets={Tier.RAM: 2**40},
        costs=CostModel(hardware=machine()),
    )


@st.composite
def requests(draw: st.DrawFn, *, costs: bool | None = None) -> PlanRequest:
    """Any small model on any machine; budgets are drawn by the test."""
    blocks: dict[str, BlockSpec] = {}
    steps: list[Step] = []
    groups: dict[str, tuple[str, ...]] = {}
    top_k: dict[str, int] = {}

    def new(name: str, **kw: object) -> str:
        pages, short = draw(st.integers(1, 40)), draw(st.sampled_from([0, 1, 100]))
        blocks[name] = block(name, pages, short=short, **kw)  # type: ignore[arg-type]
        return name

    with_shared, with_embed, with_experts = draw(st.tuples(*[st.booleans()] * 3))
    shared = [new("shared")] if with_shared else []
    embed = [new("embed")] if with_embed else []
    if embed:
        steps.append(Step(unit="embed", blocks=tuple(embed)))
    for i in range(draw(st.integers(1, 6))):
        ids = [new(f"l{i}.{j}") for j in range(draw(st.integers(0, 4)))]
        if bool(shared) and draw(st.booleans()):
            ids.append("shared")
        group = ""
        if with_experts and draw(st.booleans()):
            group = f"g{i}"
            groups[group] = tuple(
                new(f"{group}.{e}", kind=BlockKind.EXPERT, group=group)
                for e in range(draw(st.integers(1, 8)))
            )
            top_k[group] = draw(st.integers(1, len(groups[group])))
        steps.append(Step(unit=f"l{i}", blocks=tuple(ids), group=group))
    if draw(st.booleans()):
        new("off the trace")
    weights = [b for b in blocks if blocks[b].kind is BlockKind.WEIGHT and b != "embed"]
    always: set[str] = set()
    if bool(weights) and draw(st.booleans()):
        always = draw(st.sets(st.sampled_from(weights)))
    hardware = machine(
        ssd=draw(st.sampled_from([1e8, 1.5e9, 1e10])),
        gemv=draw(st.sampled_from([1e8, 2e9, 2e10])),
        h2d=draw(st.sampled_from([1e9, 1e10])),
    )
    top = draw(st.sampled_from([Tier.RAM, Tier.DEVICE]))
    reserves = {Tier.RAM: {"KV": draw(st.integers(0, 10 * PAGE))}}
    if top == Tier.DEVICE:
        reserves[top] = {"activations": draw(st.integers(0, 10 * PAGE))}
    return PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        experts=groups,
        top_k=top_k,
        always=frozenset(always),
        by_row=frozenset(embed),
        budgets={Tier.RAM: 2**40, Tier.DEVICE: 2**40},
        reserves=reserves,
        compute_tier=top,
        costs=CostModel(hardware=hardware)
        if (draw(st.booleans()) if costs is None else costs)
        else None,
        overhead_s=draw(st.sampled_from([0.0, 1e-4])),
    )


def pages_of(spec: BlockSpec) -> int:
    """Bytes of the block in whole pages."""
    return (spec.nbytes + PAGE - 1) // PAGE * PAGE


def check_placement(plan: Plan, request: PlanRequest) -> None:
    """Every rule about where bytes may be, from the plan's numbers alone."""
    assert set(plan.homes) == set(request.blocks)
    tiers = [Tier.RAM] if request.compute_tier == Tier.RAM else [Tier.RAM, Tier.DEVICE]
    assert list(plan.tiers) == tiers
    top = plan.tiers[request.compute_tier]
    for tier, a in plan.tiers.items():
        ranges = [(o, o + pages_of(plan.blocks[b]), b) for b, o in a.pinned.items()]
        ranges += [(a.ring_base, a.ring_base + a.ring_bytes, "ring")]
        ranges += [
            (a.slot_base + i * a.slot_bytes, a.slot_base + (i + 1) * a.slot_bytes, f"slot {i}")
            for i in range(a.slots)
        ]
        end = 0
        for start, stop, name in sorted(ranges):
            assert start % PAGE == 0, name
            assert start >= end, f"{name} overlaps"
            end = max(end, stop)
        reserved = sum(request.reserves.get(tier, {}).values())
        assert end + reserved <= request.budgets[tier]
        assert plan.resident_bytes(tier) == end + reserved
    for b, home in plan.homes.items():
        assert (home is Home.PINNED) == (b in top.pinned), b
        if b in request.always:
            assert home is Home.PINNED, b
        if home is Home.BY_ROW:
            assert b in request.by_row
        if home is Home.CACHED:
            assert plan.blocks[b].kind is BlockKind.EXPERT
            assert top.slot_bytes >= plan.blocks[b].nbytes
            enough = min(max(request.top_k.values()) + 1, sum(map(len, request.experts.values())))
            for a in plan.tiers.values():
                assert b in a.pinned or a.slots >= enough
    streamed = {b for b, h in plan.homes.items() if h is Home.STREAMED}
    for step in [set(s.blocks) for s in request.trace] + [{b} for b in streamed]:
        assert sum(pages_of(plan.blocks[b]) for b in step & streamed) <= top.ring_bytes
    if request.compute_tier == Tier.DEVICE:
        ram = plan.tiers[Tier.RAM]
        for b in (streamed | set(top.pinned)) - set(ram.pinned):
            assert pages_of(plan.blocks[b]) <= ram.ring_bytes


class Player:
    """An executor without I/O: fetches arrive in any order; compute waits as it would."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan = plan
        self.residency = Residency(plan)
        self.rng = rng
        self.flying: list[Fetch] = []
        self.absorb(self.residency.start())

    def absorb(self, out: Iterable[object]) -> None:
        self.flying += [x for x in out if isinstance(x, Fetch)]
        self.residency.validate()

    def arrive(self, waits_for: str) -> None:
        assert self.flying, f"stuck: nothing is on its way; {waits_for}"
        fetch = self.flying.pop(self.rng.randrange(len(self.flying)))
        self.absorb(self.residency.arrived(fetch.block, fetch.dst))

    def play(self, passes: int) -> None:
        residency, rng = self.residency, self.rng
        homes = self.plan.homes
        groups: dict[str, list[str]] = {}
        for b, spec in self.plan.blocks.items():
            if spec.group:
                groups.setdefault(spec.group, []).append(b)
        for _ in range(passes):
            for step in self.plan.trace:
                while self.flying and rng.random() < 0.3:
                    self.arrive("")
                blocks = [b for b in step.blocks if homes[b] is not Home.BY_ROW]
                ticket, out = residency.need(step.unit, blocks)
                self.absorb(out)
                while missing := residency.missing(ticket):
                    self.arrive(f"{step.unit} needs {missing}; {residency.story(missing[0])}")
                assert all(residency.where(b) is not None for b in blocks)
                if step.group:
                    chosen = rng.sample(groups[step.group], self.plan.top_k[step.group])
                    self.absorb(residency.route(step.group, chosen))
                    for expert in chosen:
                        while True:
                            there, out = residency.acquire(expert)
                            self.absorb(out)
                            if there:
                                break
                            self.arrive(f"{expert}: {residency.story(expert)}")
                        self.absorb(residency.release(expert))
                    self.absorb(residency.end_route())
                self.absorb(residency.done(ticket))
        while self.flying:
            self.arrive("")
        assert residency.held() == []
        assert residency.loading() == []
