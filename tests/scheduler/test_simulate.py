"""The virtual clock against pipelines that can be solved by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from plan_support import PAGE, dense, machine, moe, rate

from offload.blocks import BlockKind, Tier
from offload.errors import SchedulerError
from offload.scheduler.bounds import distinct, lane_seconds
from offload.scheduler.costs import CostModel
from offload.scheduler.hardware import Card, Hardware
from offload.scheduler.plan import Home, Plan, TierLayout
from offload.scheduler.planner import PlanRequest, make_plan
from offload.scheduler.simulate import simulate
from offload.scheduler.trace import Step, Trace


def costs_on(hardware: Hardware, latency_s: float = 0.0) -> CostModel:
    return CostModel(hardware=hardware, read_latency_s=latency_s, copy_latency_s=latency_s)


def streaming(layers: int, pages: int, ring_blocks: int) -> Plan:
    """A plan by hand: equal layers of one block, nothing pinned."""
    blocks, steps = dense(layers, 1, pages)
    return Plan(
        blocks=blocks,
        trace=Trace(steps),
        groups=(),
        compute_tier=Tier.RAM,
        tiers={Tier.RAM: TierLayout(ring_bytes=ring_blocks * pages * PAGE)},
        homes=dict.fromkeys(blocks, Home.STREAMED),
        budgets={Tier.RAM: 2**40},
        reserves={},
        weight_bytes=sum(b.nbytes for b in blocks.values()),
        streamed_bytes_per_pass=sum(b.nbytes for b in blocks.values()),
        expected_hit_rate=None,
    )


LAYER = 256 * PAGE


def test_a_ring_of_one_block_cannot_overlap() -> None:
    costs = costs_on(machine(ssd=LAYER / 2e-3, gemv=LAYER / 1e-3), latency_s=1e-4)
    found = simulate(streaming(10, 256, 1), costs)
    assert found.pass_s == pytest.approx(10 * (2e-3 + 1e-3 + 1e-4))
    assert found.stall_s == pytest.approx(10 * (2e-3 + 1e-4))
    assert found.lane_s["read"] == pytest.approx(20e-3)
    assert found.lane_s["compute"] == pytest.approx(10e-3)
    assert found.read_bytes == 10 * LAYER


@pytest.mark.parametrize(("read_s", "compute_s"), [(2e-3, 1e-3), (1e-3, 2e-3)])
def test_a_ring_of_two_blocks_hides_the_shorter_lane(read_s: float, compute_s: float) -> None:
    costs = costs_on(machine(ssd=LAYER / read_s, gemv=LAYER / compute_s))
    found = simulate(streaming(10, 256, 3), costs)
    assert found.pass_s == pytest.approx(10 * max(read_s, compute_s))
    assert found.stall_s == pytest.approx(10 * max(0.0, read_s - compute_s))


def test_compute_beside_a_read_is_slower_by_the_measured_share() -> None:
    hardware = replace(machine(ssd=LAYER / 1e-3, gemv=LAYER / 2e-3), gemv_beside=0.5)
    found = simulate(streaming(10, 256, 3), costs_on(hardware))
    # 1 ms of each layer's 2 ms is computed beside the next read: half of it gets done meanwhile.
    assert found.pass_s == pytest.approx(10 * 2.5e-3)
    assert found.lane_s["compute"] == pytest.approx(10 * 2e-3)


def test_each_block_from_disk_takes_some_of_computes_time() -> None:
    costs = costs_on(machine(ssd=LAYER / 1e-3, gemv=LAYER / 2e-3))
    found = simulate(streaming(10, 256, 3), replace(costs, fetch_s=5e-4))
    assert found.pass_s == pytest.approx(10 * 2.5e-3)
    assert found.lane_s["compute"] == pytest.approx(10 * 2.5e-3)
    both = simulate(streaming(10, 256, 3), replace(costs, fetch_s=3e-4, crowd_s=2e-4))
    assert both.pass_s == pytest.approx(10 * 2.5e-3)
    # Where the disk is the slower one, it is paid for while nobody has anything to compute.
    slow = costs_on(machine(ssd=LAYER / 4e-3, gemv=LAYER / 2e-3))
    assert simulate(streaming(10, 256, 3), replace(slow, fetch_s=5e-4)).pass_s == pytest.approx(
        10 * 4e-3
    )
    # A kept model reads nothing.
    blocks, steps = dense(10, 1, 256)
    kept = make_plan(
        PlanRequest(blocks=blocks, trace=Trace(steps), budgets={Tier.RAM: 2**40}, costs=costs)
    )
    assert simulate(kept, replace(costs, fetch_s=5e-4)).pass_s == pytest.approx(10 * 2e-3)


def test_reads_beside_compute_are_slower_by_the_share_of_time_that_computes() -> None:
    hardware = replace(machine(ssd=LAYER / 2e-3, gemv=LAYER / 1e-3), read_beside=0.8)
    found = simulate(streaming(10, 256, 3), costs_on(hardware), passes=40)
    # A read takes t = 2 ms / (1 - 0.2 u), of which u = 1 ms / t is beside compute: t = 2.2 ms.
    assert found.pass_s == pytest.approx(10 * 2.2e-3, rel=0.01)


def test_a_device_computes_from_its_own_memory() -> None:
    blocks, steps = dense(10, 1, 256)
    hardware = machine(ssd=LAYER / 2e-3, gemv=LAYER / 1e-3)
    slow = replace(hardware, read_beside=0.5, gemv_beside=0.5)
    times = []
    for machine_ in (hardware, slow):
        request = PlanRequest(
            blocks=blocks,
            trace=Trace(steps),
            budgets={Tier.RAM: 4 * LAYER, Tier.DEVICE: 4 * LAYER},
            compute_tier=Tier.DEVICE,
            costs=costs_on(machine_),
        )
        times.append(simulate(make_plan(request), costs_on(machine_)).pass_s)
    assert times[0] == times[1]


def test_requests_in_flight_share_their_latency() -> None:
    plan = streaming(20, 1, 16)
    hardware = machine(ssd=PAGE / 1e-5, gemv=1e15)
    alone = simulate(plan, replace(costs_on(hardware, 1e-3), queue_depth=1))
    assert alone.pass_s == pytest.approx(20 * (1e-3 + 1e-5), rel=1e-3)
    together = simulate(plan, replace(costs_on(hardware, 1e-3), queue_depth=4))
    assert together.pass_s == pytest.approx(alone.pass_s / 4, rel=0.05)


@pytest.mark.parametrize("per_layer", [1, 4])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_equal_reading_and_computing_overlap_to_95_percent(per_layer: int, share: float) -> None:
    blocks, steps = dense(24, per_layer, 512)
    total = sum(b.nbytes for b in blocks.values())
    request = PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        budgets={Tier.RAM: int(total * share)},
        costs=CostModel(hardware=machine(gemv=2e9)),
    )
    for _ in range(3):  # the disk rate at which what this very plan streams takes as long
        streamed = make_plan(request).streamed_bytes_per_pass
        disk = machine(gemv=2e9, ssd=streamed / (total / 2e9))
        request = replace(request, costs=CostModel(hardware=disk))
    plan = make_plan(request)
    assert plan.predicted_pass_s is not None
    assert plan.lane_s["read"] == pytest.approx(plan.lane_s["compute"], rel=0.1)
    assert max(plan.lane_s.values()) / plan.predicted_pass_s.mid >= 0.95


def test_three_equal_lanes_overlap_to_95_percent() -> None:
    blocks, steps = dense(24, 4, 512)
    total = sum(b.nbytes for b in blocks.values())
    request = PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        budgets={Tier.RAM: total // 10, Tier.DEVICE: total // 10},
        compute_tier=Tier.DEVICE,
        costs=CostModel(hardware=machine(gemv=2e9, ssd=2e9, h2d=2e9)),
    )
    plan = make_plan(request)
    assert plan.predicted_pass_s is not None
    assert max(plan.lane_s.values()) / plan.predicted_pass_s.mid >= 0.95


def test_default_routing_hits_the_share_of_the_cache() -> None:
    request = moe(8, 16, 2)
    experts = sum(b.nbytes for b in request.blocks.values() if b.kind is BlockKind.EXPERT)
    weights = sum(b.nbytes for b in request.blocks.values()) - experts
    plan = make_plan(replace(request, budgets={Tier.RAM: weights + experts // 2}))
    assert plan.expected_hit_rate == 0.5
    assert request.costs is not None
    found = simulate(plan, request.costs, passes=9)
    assert found.hits + found.misses == 16
    assert found.hits / 16 == pytest.approx(0.5, abs=0.01)
    assert found.read_bytes == pytest.approx(found.misses * 4 * PAGE)


def test_given_routing_is_obeyed() -> None:
    request = moe(4, 8, 2)
    experts = request.experts

    def same(_: int, group: str) -> Sequence[str]:
        return experts[group][:2]

    turn = itertools.count()

    def fresh(_: int, group: str) -> Sequence[str]:
        first = 2 * (next(turn) // len(experts) % 4)
        return experts[group][first : first + 2]

    weights = sum(b.nbytes for b in request.blocks.values())
    plan = make_plan(replace(request, budgets={Tier.RAM: weights // 2}))
    assert request.costs is not None
    assert simulate(plan, request.costs, routing=same, passes=3).misses == 0
    assert simulate(plan, request.costs, routing=fresh, passes=9).misses > 2


def test_a_prompt_uses_each_distinct_expert_once() -> None:
    request = moe(4, 16, 2)
    plan = make_plan(request)
    assert request.costs is not None
    assert simulate(plan, request.costs).hits == 4 * 2
    assert simulate(plan, request.costs, tokens=8).hits == 4 * round(distinct(16, 2, 8))
    assert simulate(plan, request.costs, tokens=10_000).hits == 4 * 16
    long, short = (simulate(plan, request.costs, tokens=t).pass_s for t in (10_000, 100))
    assert long > short


def test_distinct_experts() -> None:
    assert distinct(16, 2, 1) == 2
    assert distinct(2, 1, 2) == pytest.approx(1.5)
    assert distinct(8, 8, 5) == 8


def test_very_many_experts_are_simulated_by_share() -> None:
    request = moe(16, 512, 4, pages=1)
    experts = sum(b.nbytes for b in request.blocks.values() if b.kind is BlockKind.EXPERT)
    plan = make_plan(replace(request, budgets={Tier.RAM: experts // 4 + 64 * PAGE}))
    assert request.costs is not None
    found = simulate(plan, request.costs, passes=6)
    assert plan.expected_hit_rate is not None
    assert found.hits / (found.hits + found.misses) == pytest.approx(
        plan.expected_hit_rate, abs=0.02
    )


def test_rows_are_waited_for() -> None:
    blocks, steps = dense(2, 1, 8)
    embed = replace(blocks["l0.0"], id="embed")
    steps.insert(0, Step(unit="embed", blocks=("embed",)))
    size = sum(b.nbytes for b in blocks.values())
    request = PlanRequest(
        blocks={**blocks, "embed": embed},
        trace=Trace(steps),
        by_row=frozenset({"embed"}),
        budgets={Tier.RAM: size},
        costs=CostModel(hardware=machine(), read_latency_s=1.0),
    )
    plan = make_plan(request)
    assert plan.homes["embed"] is Home.BY_ROW
    assert request.costs is not None
    found = simulate(plan, request.costs)
    assert found.stall_s == pytest.approx(1.0, rel=1e-3)
    assert found.read_bytes == embed.nbytes // 16
    roomy = make_plan(replace(request, budgets={Tier.RAM: 2 * size}))
    assert roomy.homes["embed"] is Home.PINNED
    # Pinned or not, a table that is looked up is not multiplied with.
    assert lane_seconds(plan, request.costs)["compute"] == pytest.approx(
        lane_seconds(roomy, request.costs)["compute"]
    )


def test_a_ring_that_is_too_small_is_found_out() -> None:
    with pytest.raises(SchedulerError, match="ring"):
        simulate(
            replace(streaming(3, 2, 1), tiers={Tier.RAM: TierLayout(ring_bytes=PAGE)}),
            CostModel(hardware=machine()),
        )


def test_one_pass_measures_nothing() -> None:
    with pytest.raises(ValueError, match="got 1"):
        simulate(streaming(3, 2, 2), CostModel(hardware=machine()), passes=1)


# -- experts on two sites -------------------------------------------------------------------------


def _shared(
    cpu_s: float, move_s: float, *, layers: int = 4, hybrid: bool = True
) -> tuple[Plan, CostModel]:
    """Experts that all lie in RAM, hardly any on the device, which computes in no time."""
    pages = 64
    request = moe(layers, 16, 4, pages=pages, dense_pages=1)
    nbytes = pages * PAGE
    slow = machine(gemv=nbytes / cpu_s, h2d=nbytes / move_s, ssd=1e12)
    fast = rate(1e15)
    card = Card(
        name="card", memory_bytes=2**40, read=fast, gemv={"bfloat16": fast},
        matmul={"bfloat16": rate(1e18, unit="FLOP/s")},
    )  # fmt: skip
    costs = CostModel(
        hardware=replace(slow, card=card), read_latency_s=0.0, copy_latency_s=0.0, on_card=True
    )
    return make_plan(
        replace(
            request,
            costs=costs,
            budgets={Tier.RAM: 2**40, Tier.DEVICE: (layers + 6 * pages) * PAGE},
            compute_tier=Tier.DEVICE,
            split_rows=8 if hybrid else 0,
        )
    ), costs


@pytest.mark.parametrize(("cpu_s", "move_s"), [(1e-3, 1e-3), (1e-3, 3e-3), (3e-3, 1e-3)])
def test_two_sites_share_the_experts_of_a_layer(cpu_s: float, move_s: float) -> None:
    """Four experts of a layer, the CPU and the link at known rates: the pass takes what the best
    split of four takes, but for the few that are in slots."""
    plan, costs = _shared(cpu_s, move_s)
    found = simulate(plan, costs, passes=20, skip=4)
    alone_plan, _ = _shared(cpu_s, move_s, hybrid=False)
    alone = simulate(alone_plan, costs, passes=20, skip=4)
    best = min(max(n * cpu_s, (4 - n) * move_s) for n in range(5)) * 4
    assert found.pass_s <= best * 1.01
    assert found.pass_s < 0.8 * alone.pass_s
    # With as many slots as there are, one expert in ten is on the device already.
    assert found.pass_s > 0.6 * best
    assert found.lane_s["cpu"] > 0
    bound = lane_seconds(plan, costs)
    assert set(bound) == set(found.lane_s) == {"read", "h2d", "compute", "cpu"}


def test_equal_times_on_two_sites_overlap() -> None:
    """Two experts of a layer in slots, two in RAM, each a millisecond wherever it is computed."""
    pages, layers = 64, 8
    request = moe(layers, 4, 4, pages=pages, dense_pages=1)
    nbytes = pages * PAGE
    costs = costs_on(machine(gemv=nbytes / 1e-3, h2d=nbytes / 8e-3, ssd=1e12))
    plan = make_plan(
        replace(
            request,
            costs=costs,
            budgets={Tier.RAM: 2**40, Tier.DEVICE: (layers + 2 * layers * pages) * PAGE},
            compute_tier=Tier.DEVICE,
            split_rows=8,
        )
    )
    assert plan.tiers[Tier.DEVICE].slots == 2 * layers
    hot = [b for blocks in request.experts.values() for b in blocks[:2]]
    found = simulate(
        plan, costs, passes=6, skip=2, hot=hot, routing=lambda _, g: request.experts[g]
    )
    assert found.h2d_bytes == 0
    assert layers * 2e-3 / found.pass_s >= 0.95


def test_a_prompt_is_computed_by_the_device() -> None:
    plan, costs = _shared(1e-3, 1e-3)
    found = simulate(plan, costs, passes=2, skip=1, tokens=64)
    assert found.lane_s["cpu"] == 0.0
    assert "cpu" not in lane_seconds(plan, costs, 64)
