"""A frozen plan decides as it did, and obeys nobody else."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from plan_support import machine, moe

from offload.blocks import Tier
from offload.errors import PlanError
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import Plan
from offload.scheduler.plan_file import Identity, document, read_identity, restore
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.scheduler.simulate import simulate

WHO = Identity(model="m", config="c", machine="box", context=64, prompt_tokens=32)


def tight(extra: int = 30 * 4096, **more: Any) -> PlanRequest:
    """Three tiers, too small for the dense blocks and for the experts."""
    request = replace(
        moe(6, 8, 2),
        budgets={Tier.RAM: 2**30, Tier.DEVICE: 2**30},
        compute_tier=Tier.DEVICE,
        costs=CostModel(hardware=machine()),
        **more,
    )
    least = minimum_budgets(request)
    return replace(request, budgets={t: n + extra for t, n in least.items()})


def story(plan: Plan) -> list[tuple[str, str, float, float, int]]:
    """All that the real scheduler decides over some passes, and when."""
    told: list[tuple[str, str, float, float, int]] = []
    simulate(
        plan,
        CostModel(hardware=machine()),
        passes=5,
        record=lambda *span: told.append(span),
    )
    return told


def frozen(plan: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(document(plan, WHO)))


def test_a_frozen_plan_makes_the_same_decisions() -> None:
    request = tight()
    plan = make_plan(request)
    # What this machine would decide today is something else: no rates, so by rule.
    fresh = make_plan(replace(request, costs=None))
    again = restore(frozen(plan), fresh, WHO, "p.json")
    assert again.trace.steps == plan.trace.steps
    assert replace(again, trace=plan.trace) == plan
    assert story(again) == story(plan)


def test_the_run_needs_what_the_run_needs() -> None:
    request = tight(reserves={Tier.RAM: {"slack": 4096}, Tier.DEVICE: {}})
    plan = make_plan(request)
    free = plan.budgets[Tier.RAM] - plan.resident_bytes(Tier.RAM)
    more = replace(plan, reserves={Tier.RAM: {"slack": 4096 + free}, Tier.DEVICE: {}})
    assert restore(frozen(plan), more, WHO, "p").reserves == more.reserves
    more = replace(plan, reserves={Tier.RAM: {"slack": 4097 + free}, Tier.DEVICE: {}})
    with pytest.raises(PlanError, match="leaves 1 bytes too few of --ram"):
        restore(frozen(plan), more, WHO, "p")


def test_another_model_machine_or_budget_is_refused() -> None:
    request = tight()
    plan = make_plan(request)
    data = frozen(plan)
    with pytest.raises(PlanError, match="a plan for m, and this is other"):
        restore(data, plan, replace(WHO, model="other", config="d"), "p")
    with pytest.raises(PlanError, match=r"another machine \(box\) than this one \(laptop\)"):
        restore(data, plan, replace(WHO, machine="laptop"), "p")
    larger = replace(plan, budgets=plan.budgets | {Tier.DEVICE: 2**24})
    with pytest.raises(PlanError, match=r"with \d+ bytes .* of --gpu, and this run has 16777216 b"):
        restore(data, larger, WHO, "p")
    two_tiers = make_plan(
        replace(request, budgets={Tier.RAM: 2**24}, compute_tier=Tier.RAM, reserves={})
    )
    with pytest.raises(PlanError, match="this run has"):
        restore(data, two_tiers, WHO, "p")
    other = make_plan(replace(tight(), expert_policy="lru", budgets=plan.budgets))
    with pytest.raises(PlanError, match="--expert-policy laps, and this run says lru"):
        restore(data, other, WHO, "p")
    blocks = dict(plan.blocks)
    name = next(iter(blocks))
    blocks[name] = replace(blocks[name], nbytes=blocks[name].nbytes + 1)
    with pytest.raises(PlanError, match="other blocks"):
        restore(data, replace(plan, blocks=blocks), WHO, "p")


def test_a_file_that_is_none_or_was_changed_is_refused() -> None:
    data = frozen(make_plan(tight()))
    assert read_identity(data, "p") == WHO
    for wrong, said in (([], "is no plan"), ({}, "is no plan"), (data | {"version": 9}, "version")):
        with pytest.raises(PlanError, match=said):
            read_identity(wrong, "p")
    changed = copy.deepcopy(data)
    changed["tiers"]["RAM"]["slots"] += 1
    with pytest.raises(PlanError, match="damaged or changed"):
        read_identity(changed, "p")
