"""The residency under every eviction policy: an executor's history, guesses, and the plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_support import Player, check_placement, moe
from residency_oracle import Harness, make_plan

from offload.blocks import Tier
from offload.scheduler.plan import Plan
from offload.scheduler.planner import make_plan as plan_for
from offload.scheduler.policy import CYCLIC, DEFAULT, NAMES

RAM, DEVICE = Tier.RAM, Tier.DEVICE
A = [f"a{i}" for i in range(8)]
B = [f"b{i}" for i in range(8)]
LAYERS, EXPERTS, TOP_K = 4, 8, 2


def planned(name: str, slots: int, *, top: Tier = RAM, guesses: bool = False) -> Plan:
    """All dense weights resident, ``slots`` of the 32 experts beside them."""
    request = moe(LAYERS, EXPERTS, TOP_K)
    size = max(s.slot_nbytes for s in request.blocks.values())
    dense = sum(s.slot_nbytes for s in request.blocks.values() if not s.group)
    experts = [b for bs in request.experts.values() for b in bs]
    ram = dense + slots * size if top is RAM else dense + 2 * slots * size
    return plan_for(
        replace(
            request,
            budgets={RAM: ram, DEVICE: dense + slots * size},
            compute_tier=top,
            expert_policy=name,
            hot=tuple(experts[::-1]) if name == "pinned" else (),
            guesses=guesses,
        )
    )


@pytest.mark.parametrize("top", [RAM, DEVICE])
@pytest.mark.parametrize("slots", [3, 5, 16])
@pytest.mark.parametrize("name", NAMES)
def test_an_executor_runs_under_every_policy(name: str, slots: int, top: Tier) -> None:
    plan = planned(name, slots, top=top)
    assert plan.tiers[top].slots == slots
    assert plan.expert_policy == name
    player = Player(plan, random.Random(1))
    player.play(12)
    routed = 12 * LAYERS * TOP_K
    assert player.residency.hits + player.residency.misses == routed


@pytest.mark.parametrize("name", NAMES)
def test_no_guess_takes_the_slot_of_what_is_used(name: str) -> None:
    plan = make_plan(
        [],
        dict.fromkeys([*A, *B], 1),
        ring={},
        experts={"a": A, "b": B},
        slots={RAM: 5},
        guess_top_k=3,
    )
    h = Harness(replace(plan, expert_policy=name, kept={RAM: frozenset(B)}))
    h.route("a", A[:5])
    h.settle()
    assert all(h.acquire(e) for e in A[:5])
    h.guess("b", B[:2])
    assert not h.oracle.flights
    h.release(A[4])
    h.guess("b", B[:2])
    used = {e: h.residency.where(e) for e in A[:4]}
    assert None not in used.values()
    h.settle()
    assert {e: h.residency.where(e) for e in A[:4]} == used
    h.release_all()
    h.note(h.residency.end_route())


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_says_what_to_expect_below_one_tokens_experts(name: str) -> None:
    below, above = planned(name, 5), planned(name, 16)
    check_rate = 0.0 if name in CYCLIC else 5 / 32
    assert below.expected_hit_rate == pytest.approx(check_rate)
    assert above.expected_hit_rate == pytest.approx(0.5)
    [warning] = [r for r in below.reasons if r.startswith("warning:")]
    assert "5 slots" in warning
    assert "8 experts" in warning
    assert ("drop --expert-policy" in warning) == (name in CYCLIC)
    assert not [r for r in above.reasons if r.startswith("warning:")]
    said = [r for r in above.reasons if f"policy {name}" in r]
    assert len(said) == (name != DEFAULT)
    assert below.streamed_bytes_per_pass >= above.streamed_bytes_per_pass


def test_pinned_keeps_the_hottest_and_leaves_room_to_run() -> None:
    plan = planned("pinned", 16)
    [kept] = plan.kept.values()
    experts = [b for b, s in plan.blocks.items() if s.group]
    assert kept == set(experts[-8:])
    assert {t: len(k) for t, k in planned("pinned", 5, guesses=True).kept.items()} == {RAM: 1}
    assert planned("lru", 5).kept == {}


def test_a_request_with_hot_experts_for_another_policy() -> None:
    request = moe(LAYERS, EXPERTS, TOP_K)
    for wrong in (
        {"hot": ("l0.experts.0",)},
        {"expert_policy": "fifo"},
        {"expert_policy": "pinned", "hot": ("nobody",)},
    ):
        with pytest.raises(ValueError):
            replace(request, **wrong)


def test_plans_of_every_policy_obey_the_budget() -> None:
    for name in NAMES:
        request = replace(moe(LAYERS, EXPERTS, TOP_K), expert_policy=name)
        total = sum(s.slot_nbytes for s in request.blocks.values())
        request = replace(request, budgets={RAM: total // 2})
        check_placement(plan_for(request), request)
