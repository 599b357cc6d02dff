"""The planner's choices on models whose best placement is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_support import PAGE, block, check_placement, dense, machine, moe

from offload.blocks import BlockKind, BlockSpec, Tier
from offload.errors import PlanError
from offload.scheduler.costs import CostModel
from offload.scheduler.describe import budget, describe, homes, prediction
from offload.scheduler.plan import Home, Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.scheduler.simulate import simulate
from offload.scheduler.trace import Step, Trace
from offload.units import format_bytes


def transformer(ram: int, *, ssd: float = 1.5e9, gemv: float = 2e10, **kw: object) -> PlanRequest:
    """24 layers of 6 blocks of 64 KiB to 512 KiB, an embedding and a norm that cannot stream."""
    blocks, steps = dense(24, 0, 0)
    for i, step in enumerate(steps):
        ids = tuple(f"l{i}.{j}" for j in range(6))
        blocks |= {
            b: block(b, pages) for b, pages in zip(ids, (16, 17, 32, 64, 128, 128), strict=True)
        }
        steps[i] = replace(step, blocks=ids)
    blocks |= {"embed": block("embed", 2000), "norm": block("norm", 1)}
    steps = [Step(unit="e", blocks=("embed",)), *steps, Step(unit="n", blocks=("norm",))]
    return PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        always=frozenset({"norm"}),
        by_row=frozenset({"embed"}),
        budgets={Tier.RAM: ram},
        costs=CostModel(hardware=machine(ssd=ssd, gemv=gemv)),
        **kw,  # type: ignore[arg-type]
    )


LAYERS = 24 * (16 + 17 + 32 + 64 + 128 + 128) * PAGE


def pinned_bytes(plan: Plan, tier: Tier = Tier.RAM) -> int:
    return sum(plan.blocks[b].nbytes for b in plan.tiers[tier].pinned)


def test_what_fits_is_pinned_and_nothing_streams() -> None:
    plan = make_plan(transformer(LAYERS + 2001 * PAGE))
    assert set(plan.homes.values()) == {Home.PINNED}
    assert plan.streamed_bytes_per_pass == 0
    assert plan.bottleneck == "compute"
    assert plan.tiers[Tier.RAM].ring_bytes == 0
    assert "everything fits" in plan.reasons[0]


def test_a_table_stays_only_if_there_is_room_after_everything_else() -> None:
    plan = make_plan(transformer(LAYERS + 2000 * PAGE))
    assert plan.homes["embed"] is Home.BY_ROW
    assert {h for b, h in plan.homes.items() if b != "embed"} == {Home.PINNED}


def test_experts_that_all_fit_are_pinned() -> None:
    plan = make_plan(moe(4, 8, 2))
    assert set(plan.homes.values()) == {Home.PINNED}
    assert plan.expected_hit_rate == 1.0
    assert plan.tiers[Tier.RAM].slots == 0


def test_dense_weights_come_before_experts() -> None:
    request = moe(4, 8, 2)  # dense 2 pages a layer, experts 4 pages each
    plan = make_plan(replace(request, budgets={Tier.RAM: (4 * 2 + 10 * 4) * PAGE + 5000}))
    assert {h for b, h in plan.homes.items() if plan.blocks[b].kind is BlockKind.WEIGHT} == {
        Home.PINNED
    }
    assert plan.tiers[Tier.RAM].slots == 10
    assert plan.expected_hit_rate == 10 / 32
    assert not any("warning" in r for r in plan.reasons)


def test_the_cliff_is_said() -> None:
    request = moe(4, 8, 2)  # one token uses 8 experts
    plan = make_plan(replace(request, budgets={Tier.RAM: (4 * 2 + 7 * 4) * PAGE}))
    warning = next(r for r in plan.reasons if r.startswith("warning"))
    assert "7 slots hold less than the 8 experts of one token" in warning
    assert "16.0 KiB more" in warning


def test_pins_are_spread_over_the_layers() -> None:
    plan = make_plan(transformer(LAYERS // 2))
    streamed = [
        sum(plan.blocks[b].nbytes for b in s.blocks if plan.homes[b] is Home.STREAMED)
        for s in plan.trace
        if s.unit.startswith("l")
    ]
    mean = sum(streamed) / len(streamed)
    assert mean > 0
    assert max(streamed) <= mean + 2 * 128 * PAGE


def test_a_block_that_is_used_often_is_pinned_first() -> None:
    blocks, steps = dense(8, 2, 32)
    blocks["shared"] = block("shared", 32)
    steps = [replace(s, blocks=(*s.blocks, "shared")) for s in steps]
    plan = make_plan(
        PlanRequest(blocks=blocks, trace=Trace(steps), budgets={Tier.RAM: 6 * 32 * PAGE})
    )
    assert plan.homes["shared"] is Home.PINNED


def test_small_blocks_are_pinned_first() -> None:
    request = transformer(LAYERS // 3)
    small = [b for b, s in request.blocks.items() if s.nbytes <= 64 * 1024]
    plan = make_plan(request)
    assert {plan.homes[b] for b in small} == {Home.PINNED}


@pytest.mark.parametrize(("ssd", "gemv"), [(1.5e9, 2e10), (1.5e9, 1.5e9), (1.5e9, 1e9)])
def test_more_ram_never_predicts_slower(ssd: float, gemv: float) -> None:
    least = minimum_budgets(transformer(2**40))[Tier.RAM]
    step = (LAYERS + PAGE - least) // 15
    before = float("inf")
    for i in range(17):
        request = transformer(least + i * step, ssd=ssd, gemv=gemv)
        plan = make_plan(request)
        check_placement(plan, request)
        assert plan.predicted_pass_s is not None
        assert plan.predicted_pass_s.mid <= before * 1.02
        before = min(before, plan.predicted_pass_s.mid)


def test_a_plan_does_most_of_what_is_possible() -> None:
    """Pins and ring are the whole budget, and the ring takes no more than overlap needs."""
    plan = make_plan(transformer(LAYERS // 2))
    layout = plan.tiers[Tier.RAM]
    assert layout.nbytes > LAYERS // 2 - 2 * PAGE
    assert plan.bottleneck == "read"
    assert plan.predicted_pass_s is not None
    assert plan.predicted_pass_s.mid <= 1.02 * (LAYERS - pinned_bytes(plan)) / 1.5e9
    step = max(
        sum(plan.blocks[b].nbytes for b in s.blocks if plan.homes[b] is Home.STREAMED)
        for s in plan.trace
    )
    assert layout.ring_bytes <= 3 * step


@pytest.mark.parametrize("rates", [True, False])
def test_one_large_step_does_not_set_the_rings_length(rates: bool) -> None:
    """A head of two layers and a half is pinned, not let through a ring that is empty meanwhile."""
    request = transformer(LAYERS // 2)
    head = block("head", 1000)
    request = replace(
        request,
        blocks={**request.blocks, "head": head},
        trace=Trace([*request.trace.steps, Step(unit="h", blocks=("head",))]),
        costs=request.costs if rates else None,
    )
    plan = make_plan(request)
    check_placement(plan, request)
    assert plan.homes["head"] is Home.PINNED
    if rates:
        assert plan.tiers[Tier.RAM].ring_bytes < head.nbytes
    # With less than it takes to pin it, it streams as ever.
    least = minimum_budgets(request)[Tier.RAM]
    tight = replace(request, budgets={Tier.RAM: least})
    plan = make_plan(tight)
    check_placement(plan, tight)
    assert plan.homes["head"] is Home.STREAMED


def test_without_rates_a_plan_predicts_nothing() -> None:
    request = replace(transformer(LAYERS // 2), costs=None)
    plan = make_plan(request)
    check_placement(plan, request)
    assert plan.predicted_pass_s is None
    assert plan.bound_pass_s is None
    assert plan.bottleneck is None
    assert plan.tiers[Tier.RAM].ring_bytes > 0
    assert not prediction(plan)[0].label.startswith("predicted")


def test_ram_keeps_what_the_device_does_not() -> None:
    request = transformer(LAYERS // 2)
    request = replace(
        request,
        compute_tier=Tier.DEVICE,
        budgets={Tier.RAM: LAYERS // 3, Tier.DEVICE: LAYERS // 3},
    )
    plan = make_plan(request)
    check_placement(plan, request)
    ram, device = set(plan.tiers[Tier.RAM].pinned), set(plan.tiers[Tier.DEVICE].pinned)
    assert ram
    assert device
    assert not ram & device
    assert {plan.homes[b] for b in ram} == {Home.STREAMED}
    assert {plan.homes[b] for b in device} == {Home.PINNED}
    dense = LAYERS + PAGE  # with the norm
    row = plan.blocks["embed"].nbytes // 16
    read = dense - pinned_bytes(plan) - pinned_bytes(plan, Tier.DEVICE) + row
    assert plan.streamed_bytes_per_pass == read


def test_a_large_table_is_not_pinned_where_ram_could_not_let_it_pass() -> None:
    request = replace(
        transformer(0),
        compute_tier=Tier.DEVICE,
        budgets={Tier.RAM: 300 * PAGE, Tier.DEVICE: LAYERS + 2500 * PAGE},
    )
    plan = make_plan(request)
    check_placement(plan, request)
    assert plan.homes["embed"] is Home.BY_ROW
    wide = make_plan(replace(request, budgets={**request.budgets, Tier.RAM: 3000 * PAGE}))
    assert wide.homes["embed"] is Home.PINNED


def test_experts_in_ram_feed_slots_on_the_device() -> None:
    request = moe(4, 8, 2)
    everything = sum(b.nbytes for b in request.blocks.values())
    plan = make_plan(
        replace(
            request,
            compute_tier=Tier.DEVICE,
            budgets={Tier.RAM: everything, Tier.DEVICE: everything // 2},
        )
    )
    expert = request.experts["l0.experts"][0]
    assert plan.homes[expert] is Home.CACHED
    assert expert in plan.tiers[Tier.RAM].pinned
    assert plan.expected_hit_rate == 1.0
    assert plan.streamed_bytes_per_pass == 0
    assert plan.lane_s["h2d"] > 0


def test_a_refusal_says_what_takes_the_room_and_what_to_change() -> None:
    request = replace(
        transformer(5 * 2**20, reserves={Tier.RAM: {"KV cache": 4 * 2**20, "logits": 12345}})
    )
    need = minimum_budgets(request)[Tier.RAM]
    with pytest.raises(PlanError) as e:
        make_plan(request)
    text = str(e.value)
    assert f"{need - 5 * 2**20} bytes too small: at least {need} bytes" in text
    assert "KV cache 4.0 MiB" in text
    assert f"the largest step {format_bytes(385 * PAGE)}" in text
    assert "--ram" in text
    assert "--context" in text
    assert "prompt" in text
    assert make_plan(replace(request, budgets={Tier.RAM: -(-need // 2**20) * 2**20}))


def test_a_refusal_names_the_device_flag() -> None:
    request = replace(
        transformer(2**30),
        compute_tier=Tier.DEVICE,
        budgets={Tier.RAM: 2**30, Tier.DEVICE: PAGE},
    )
    with pytest.raises(PlanError, match=r"DEVICE budget of 4096 bytes.* raise --gpu"):
        make_plan(request)


def test_a_very_long_trace_is_planned_by_rule_and_arithmetic() -> None:
    blocks, steps = dense(300, 80, 1)
    total = sum(b.nbytes for b in blocks.values())
    request = PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        budgets={Tier.RAM: total // 4},
        costs=CostModel(hardware=machine()),
    )
    plan = make_plan(request)
    check_placement(plan, request)
    reads = sum(h is Home.STREAMED for h in plan.homes.values())
    assert plan.predicted_pass_s is not None
    assert plan.predicted_pass_s.mid == pytest.approx(reads * 1e-4 / 4)


def test_plans_are_deterministic() -> None:
    a, b = (make_plan(transformer(LAYERS // 2)) for _ in range(2))
    assert replace(a, trace=b.trace) == b  # traces compare by identity


def test_a_description_adds_up() -> None:
    request = transformer(LAYERS // 2, reserves={Tier.RAM: {"KV": 3 * 2**20}})
    plan = make_plan(request)
    lines = "\n".join(describe(plan))
    assert f"budget   {format_bytes(LAYERS // 2)}".replace(" ", "") in lines.replace(" ", "")
    assert "3.0 MiB" in lines
    rows = {r.label: r.value for r in budget(plan)}
    assert rows["RAM: total"] == format_bytes(plan.resident_bytes(Tier.RAM))
    assert {r.label for r in homes(plan)} == {
        "weights pinned in RAM",
        "weights streamed from disk",
        "weights read by row from disk",
    }
    assert plan.predicted_pass_s is not None
    speed = {r.label: r.value for r in prediction(plan)}
    assert speed["predicted"] == f"{1 / plan.predicted_pass_s.mid:.3g} tok/s"
    assert speed["bottleneck"] == "read"
    for reason in plan.reasons:
        assert reason in lines


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"budgets": {}}, "no budget for RAM"),
        ({"always": frozenset({"nobody"})}, "unknown blocks, first 'nobody'"),
        ({"compute_tier": Tier.DISK}, "nothing computes on disk"),
        ({"top_k": {"l0.experts": 9}}, "top_k between 1 and 8"),
        ({"always": frozenset({"l0.experts.0"})}, "cannot be in `always`"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(moe(1, 8, 2), **change)  # type: ignore[arg-type]


def wide_layers(ram: int) -> PlanRequest:
    """8 layers of attention and three large matrices, each a step of its own."""
    blocks: dict[str, BlockSpec] = {}
    steps = []
    for i in range(8):
        parts = {f"l{i}.attention": (800, 160, 160, 800), **{f"l{i}.m{j}": (2720,) for j in "abc"}}
        for unit, sizes in parts.items():
            ids = [f"{unit}.{j}" for j in range(len(sizes))]
            blocks |= {b: block(b, pages) for b, pages in zip(ids, sizes, strict=True)}
            steps.append(Step(unit=unit, blocks=tuple(ids)))
    costs = CostModel(hardware=machine(ssd=0.8e9))
    return PlanRequest(
        blocks=blocks, trace=Trace(steps), budgets={Tier.RAM: ram}, costs=costs, overhead_s=2e-4
    )


def test_many_rows_choose_what_is_fastest_for_all_of_them() -> None:
    """What one token waits for is the disk; many compute nearly as long, and a ring that is soon
    full has the disk stand still meanwhile."""
    few = wide_layers(90 * 2**20)
    many = replace(few, rows=128, row_share=0.2)
    costs = few.costs
    assert costs is not None
    one, all_of_them = make_plan(few), make_plan(many)
    # Predictions are those of one token.
    assert all_of_them.overhead_s == one.overhead_s == 2e-4

    def pass_s(plan: Plan, rows: int) -> float:
        busy = replace(plan, overhead_s=2e-4 * (1 + 0.2 * (rows - 1)))
        return simulate(busy, costs, tokens=rows).pass_s

    assert pass_s(all_of_them, 128) < 0.95 * pass_s(one, 128)
    assert pass_s(one, 1) <= pass_s(all_of_them, 1)
