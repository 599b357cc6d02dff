"""Which dense blocks the CPU computes beside a device: against sums by hand; what moves then."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from plan_support import PAGE, dense, machine, rate
from residency_oracle import Harness
from residency_oracle import make_plan as plan_of

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.bounds import CPU, H2D, PRODUCT_S, host_product_s, lane_seconds
from offload.scheduler.costs import CostModel
from offload.scheduler.describe import homes
from offload.scheduler.hardware import FLOP_PER_S, Card
from offload.scheduler.plan import DenseSites, Plan
from offload.scheduler.planner import PlanRequest, make_plan
from offload.scheduler.simulate import simulate
from offload.scheduler.trace import Trace

LAYERS, PER_LAYER, PAGES = 12, 4, 2048
BLOCK = PAGES * PAGE


def costs(*, gemv: float = 20e9, h2d: float = 10e9, matmul: float = 1e12) -> CostModel:
    fast, cpu = ({"bfloat16": rate(of, unit=FLOP_PER_S)} for of in (1e14, matmul))
    card = Card(
        name="a card", memory_bytes=2**34, read=rate(1e12), matmul=fast,
        gemv={"bfloat16": rate(1e12)},
    )  # fmt: skip
    hardware = replace(machine(gemv=gemv, h2d=h2d), card=card, matmul=cpu)
    return CostModel(hardware=hardware, copy_latency_s=0.0, on_card=True)


def request(model: CostModel | None, *, ram: int = 2**40, apart: bool = True) -> PlanRequest:
    """Room for 8 of 48 blocks on the device."""
    blocks, steps = dense(LAYERS, PER_LAYER, PAGES)
    return PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        budgets={Tier.RAM: ram, Tier.DEVICE: 16 * BLOCK},
        compute_tier=Tier.DEVICE,
        costs=model,
        apart=frozenset(blocks) if apart else frozenset(),
        apart_rows=32,
    )


def sites(plan: Plan) -> DenseSites:
    assert plan.sites is not None
    return plan.sites


def test_what_a_product_costs_besides_itself_is_measured() -> None:
    """A copy up takes 0.84 ms here, the CPU's pass 0.42 ms: with 1 ms more for each it is not worth
    it, with next to nothing more it is worth more than with what is assumed of other machines."""
    counts = [
        len(sites(make_plan(request(replace(costs(), product_overhead_s=each_s)))).blocks)
        for each_s in (1e-6, None, 1e-3)
    ]
    assert counts[0] > counts[1] > counts[2]
    spec = next(iter(make_plan(request(None)).blocks.values()))
    told, assumed = (replace(costs(), product_overhead_s=s) for s in (2e-3, None))
    assert host_product_s(spec, told) == pytest.approx(BLOCK / 20e9 + 2e-3)
    assert host_product_s(spec, assumed) == pytest.approx(BLOCK / 20e9 + PRODUCT_S)


def test_link_and_cpu_share_so_that_both_are_busy() -> None:
    """10 GB/s up, 20 GB/s on the CPU: two thirds stay, and a token takes what 30 GB/s would."""
    model = costs()
    plan = make_plan(request(model))
    streamed = len(plan.blocks) - len(plan.tiers[Tier.DEVICE].pinned)
    chosen = sites(plan)
    product_s = BLOCK / 20e9 + PRODUCT_S
    best = streamed * BLOCK / 10e9 / (BLOCK / 10e9 + product_s)
    assert len(chosen.blocks) == pytest.approx(best, rel=0.15)
    assert plan.predicted_pass_s is not None
    assert plan.predicted_pass_s.mid < 1.15 * best * product_s
    alone = replace(plan, sites=DenseSites(blocks=frozenset(), rows=32))
    assert plan.predicted_pass_s.mid < 0.45 * simulate(alone, model).pass_s
    lanes = lane_seconds(plan, model)
    assert lanes[CPU] == pytest.approx(len(chosen.blocks) * product_s)
    assert lanes[H2D] == pytest.approx((streamed - len(chosen.blocks)) * BLOCK / 10e9)
    assert CPU not in lane_seconds(plan, model, tokens=33)
    assert any("are computed there by the CPU in passes of up to" in r for r in plan.reasons)
    labels = " ".join(row.label for row in homes(plan))
    assert "weights in RAM, for up to 32 tokens computed there by the CPU" in labels


@pytest.mark.parametrize("h2d", [5e9, 15e9, 30e9])
def test_no_choice_of_how_many_is_faster(h2d: float) -> None:
    """Against every number of blocks, evenly over the trace."""
    model = costs(h2d=h2d)
    plan = make_plan(request(model))
    may = [b for b in plan.blocks if b not in plan.tiers[Tier.DEVICE].pinned]
    times = []
    for n in range(len(may) + 1):
        chosen = frozenset(
            b for i, b in enumerate(may) if (i + 1) * n // len(may) > i * n // len(may)
        )
        tried = replace(plan, sites=DenseSites(blocks=chosen, rows=32))
        times.append(simulate(tried, model).pass_s)
    assert simulate(plan, model).pass_s <= 1.05 * min(times)


def test_a_turn_of_the_cpu_ends_before_the_device_goes_on() -> None:
    """All stay: nothing moves, and the products follow each other."""
    model = costs()
    plan = make_plan(request(model))
    may = frozenset(plan.blocks) - plan.tiers[Tier.DEVICE].pinned.keys()
    found = simulate(replace(plan, sites=DenseSites(blocks=may, rows=32)), model)
    assert found.h2d_bytes == 0
    assert found.lane_s[CPU] == pytest.approx(len(may) * (BLOCK / 20e9 + PRODUCT_S))
    assert found.pass_s == pytest.approx(found.lane_s[CPU] + found.lane_s["compute"])
    assert found.stall_s == pytest.approx(0.0)


def test_the_device_has_all_where_the_link_is_faster() -> None:
    plan = make_plan(request(costs(gemv=2e9, h2d=60e9)))
    assert sites(plan).blocks == frozenset()
    (why,) = [r for r in plan.reasons if "the device computes all of them" in r]
    assert "up takes 0.14 ms" in why
    assert "the CPU's own pass over it with its hidden states 4.34 ms" in why


def test_what_comes_from_disk_is_not_asked_about() -> None:
    plan = make_plan(request(costs(), ram=20 * BLOCK))
    assert sites(plan).blocks <= plan.tiers[Tier.RAM].pinned.keys()
    none = make_plan(request(costs(), apart=False))
    assert sites(none).blocks == frozenset()
    assert any("there is nothing for the CPU to compute" in r for r in none.reasons)


def test_passes_are_as_long_as_the_cpu_keeps_up() -> None:
    """Weights of 4 Mi elements: with 0.1 TFLOP/s a copy takes as long as 10 tokens."""
    assert sites(make_plan(request(costs(matmul=1e11)))).rows == 8
    assert sites(make_plan(request(costs()))).rows == 32


def test_without_rates_two_thirds_stay() -> None:
    plan = make_plan(request(None))
    streamed = len(plan.blocks) - len(plan.tiers[Tier.DEVICE].pinned)
    assert len(sites(plan).blocks) == pytest.approx(2 * streamed / 3, abs=1)
    assert any("without measured rates" in r for r in plan.reasons)


def test_nobody_is_asked_unless_the_caller_asks() -> None:
    assert make_plan(replace(request(costs()), apart_rows=0)).sites is None


# -- what moves ---------------------------------------------------------------------------------

UNITS = 6


def small(ring: int, apart: Collection[str]) -> Plan:
    """Six units of two blocks, all in RAM; a ring of some blocks on the device."""
    steps = [(f"u{u}", (f"u{u}/a", f"u{u}/b")) for u in range(UNITS)]
    names = [b for _, blocks in steps for b in blocks]
    plan = plan_of(
        steps, dict.fromkeys(names, 1), top=Tier.DEVICE,
        ring={Tier.DEVICE: ring, Tier.RAM: 1}, pinned={Tier.RAM: names},
    )  # fmt: skip
    return replace(plan, sites=DenseSites(blocks=frozenset(apart), rows=4))


def run_pass(h: Harness, apart: Collection[str], rng: random.Random, *, few: bool) -> None:
    for u in range(UNITS):
        blocks = [b for b in (f"u{u}/a", f"u{u}/b") if not (few and b in apart)]
        while h.oracle.flights and rng.random() < 0.5:
            h.arrive(*rng.choice(sorted(h.oracle.flights)))
        ticket = h.need(f"u{u}", blocks)
        if few:
            for block in {f"u{u}/a", f"u{u}/b"} & set(apart):
                assert h.hold_below(block)
                h.release_below(block)
        while ticket not in h.ready:
            h.arrive(*rng.choice(sorted(h.oracle.flights)))
        h.done(ticket)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ring", [2, 3, 5, 12])
def test_passes_of_few_and_of_many_tokens_in_any_order(ring: int, seed: int) -> None:
    """Under the oracle: nothing is used before it is there, and nothing waits for ever. In a
    second pass of few tokens what stays in RAM does not move."""
    rng = random.Random(seed)
    apart = [f"u{u}/{p}" for u in range(UNITS) for p in "ab" if rng.random() < 0.5]
    h = Harness(small(ring, apart))
    h.settle()
    for _ in range(4):
        run_pass(h, apart, rng, few=False)
        run_pass(h, apart, rng, few=True)
        h.settle()
        before = dict(h.oracle.fetches)
        run_pass(h, apart, rng, few=True)
        h.settle()
        moved = {b for (b, _), n in h.oracle.fetches.items() if n > before.get((b, Tier.DEVICE), 0)}
        assert moved.isdisjoint(apart)
        assert h.residency.held() == []


def test_a_prompt_finds_ahead_of_it_what_tokens_leave_below() -> None:
    """The pointer goes back for the blocks that it has passed over."""
    apart = [f"u{u}/b" for u in range(UNITS)]
    h = Harness(small(5, apart))
    h.settle()
    rng = random.Random(0)
    for _ in range(2):
        run_pass(h, apart, rng, few=True)
    h.settle()
    ticket = h.need("u0", ["u0/a", "u0/b"])
    h.settle()
    assert "u1/b" in h.oracle.spans[Tier.DEVICE]
    h.done(ticket)
    h.finish()


def test_only_blocks_of_the_plan_are_held_below() -> None:
    h = Harness(small(4, ["u0/a"]))
    h.settle()
    with pytest.raises(SchedulerError, match="u0/b is not computed in RAM under this plan"):
        h.residency.hold_below("u0/b")
