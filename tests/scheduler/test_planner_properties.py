"""Any model, any budget, any machine: the plan fits, runs, and predicts no miracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import PAGE, Player, check_placement, pages_of, requests

from offload.blocks import Tier
from offload.errors import PlanError
from offload.scheduler.describe import describe
from offload.scheduler.plan import Home, Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.scheduler.simulate import simulate


def with_budget(request: PlanRequest, data: st.DataObject) -> PlanRequest:
    """Between the minimum and everything, odd bytes included."""
    weights = sum(pages_of(s) for s in request.blocks.values())
    return replace(
        request,
        budgets={
            t: n + data.draw(st.integers(0, weights + PAGE), label=f"{t.name} over the minimum")
            for t, n in minimum_budgets(request).items()
        },
    )


@settings(max_examples=300, deadline=None)
@given(requests(), st.data())
def test_a_plan_fits_its_budgets_and_runs(request_: PlanRequest, data: st.DataObject) -> None:
    request = with_budget(request_, data)
    plan = make_plan(request)
    check_placement(plan, request)
    Player(plan, random.Random(data.draw(st.integers(0, 2**32)))).play(3)
    assert describe(plan)


@settings(max_examples=300, deadline=None)
@given(requests(), st.integers(0, 2**32))
def test_the_minimum_works_and_a_byte_less_is_refused_with_numbers(
    request: PlanRequest, seed: int
) -> None:
    least = dict(minimum_budgets(request))
    plan = make_plan(replace(request, budgets=least))
    check_placement(plan, replace(request, budgets=least))
    Player(plan, random.Random(seed)).play(3)
    for tier, need in least.items():
        if need == sum(request.reserves.get(tier, {}).values()):
            continue  # the tier holds nothing
        for given_ in (need - PAGE, need - 1):
            with pytest.raises(PlanError) as e:
                make_plan(replace(request, budgets={**least, tier: given_}))
            assert f"{tier.name} budget of {given_} bytes" in str(e.value)
            assert f"{need - given_} bytes too small: at least {need} bytes" in str(e.value)


def bytes_per_pass(plan: Plan) -> dict[Tier, int]:
    """Bytes of weights that must move up in a pass: once per block, however often it is used."""
    used = {b for s in plan.trace for b in s.blocks if plan.homes[b] is Home.STREAMED}
    found = {Tier.RAM: 0}
    if plan.compute_tier == Tier.DEVICE:
        found[Tier.DEVICE] = sum(plan.blocks[b].nbytes for b in used)
    for b in used - set(plan.tiers[Tier.RAM].pinned):
        found[Tier.RAM] += plan.blocks[b].nbytes
    return found


@settings(max_examples=150, deadline=None)
@given(requests(costs=True), st.data())
def test_no_pass_is_faster_than_its_busiest_lane(
    request_: PlanRequest, data: st.DataObject
) -> None:
    request = with_budget(request_, data)
    plan = make_plan(request)
    assert request.costs is not None
    found = simulate(plan, request.costs, passes=4)
    hardware = request.costs.hardware
    moved = bytes_per_pass(plan)
    streamed = {b for s in plan.trace for b in s.blocks if plan.homes[b] is Home.STREAMED}
    lanes = []
    for tier, rate in ((Tier.RAM, hardware.ssd_read), (Tier.DEVICE, hardware.h2d)):
        # A ring with room for all that is streamed drops nothing: no bytes move, to it or below.
        room = sum(plan.blocks[b].slot_nbytes for b in streamed)
        largest = max((x.ring_bytes for t, x in plan.tiers.items() if t >= tier), default=0)
        if tier in moved and largest < room:
            assert rate is not None
            lanes.append(moved[tier] / rate.median)
    multiplied = 0
    for step in plan.trace:
        multiplied += sum(plan.blocks[b].nbytes for b in step.blocks if b not in request.by_row)
        if step.group:
            smallest = min(plan.blocks[b].nbytes for b in request.experts[step.group])
            multiplied += smallest * request.top_k[step.group]
    lanes.append(multiplied / hardware.gemv["bfloat16"].median)
    assert found.pass_s >= max(lanes) * (1 - 1e-9)
    assert plan.predicted_pass_s is not None
    p = plan.predicted_pass_s
    assert p.low <= p.mid <= p.high


@settings(max_examples=150, deadline=None)
@given(requests(costs=True), st.data())
def test_more_budget_is_never_much_slower(request_: PlanRequest, data: st.DataObject) -> None:
    small = with_budget(request_, data)
    tier = data.draw(st.sampled_from(sorted(small.budgets)))
    more = data.draw(st.integers(0, 400)) * PAGE
    large = replace(small, budgets={**small.budgets, tier: small.budgets[tier] + more})
    a, b = make_plan(small).predicted_pass_s, make_plan(large).predicted_pass_s
    assert a is not None
    assert b is not None
    # A few blocks of very different sizes do not divide smoothly: the worst of 6,000 random models
    # was 26 % slower with one page more. Models have many alike: see the sweep in test_planner.
    assert b.mid <= a.mid * 1.5
