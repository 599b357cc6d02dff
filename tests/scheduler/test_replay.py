"""Replays: what they count, and that the optimum is one."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.scheduler.policies import make_policy
from offload.scheduler.policy import CYCLIC, NAMES
from offload.scheduler.recency import Lru
from offload.scheduler.replay import Future, Pass, Replay, Tally, hottest, replay

GROUPS = ["a", "b", "c"]


def passes(*runs: str) -> list[Pass]:
    """``"a01"``: layer a uses its experts 0 and 1."""
    return [Pass(run[0], [f"{run[0]}{e}" for e in run[1:]]) for run in runs]


routings = st.lists(
    st.builds(
        lambda g, es: Pass(g, [f"{g}{e}" for e in sorted(es)]),
        st.sampled_from(GROUPS),
        st.sets(st.integers(0, 3), min_size=1, max_size=3),
    ),
    max_size=14,
)


def fewest_misses(runs: list[Pass], slots: int) -> int:
    """Every choice of what to keep, tried: a pass needs its experts together, and what was there
    before it stays only if there is room."""

    @cache
    def least(at: int, held: frozenset[str]) -> int:
        if at == len(runs):
            return 0
        wanted = frozenset(runs[at].experts)
        others = sorted(held - wanted)
        room = slots - len(wanted)
        best = min(
            least(at + 1, wanted | frozenset(b for i, b in enumerate(others) if keep >> i & 1))
            for keep in range(1 << len(others))
            if keep.bit_count() <= room
        )
        return len(wanted - held) + best

    return least(0, frozenset())


@settings(max_examples=60)
@given(runs=routings, slots=st.integers(3, 6))
def test_the_optimum_has_the_fewest_misses(runs: list[Pass], slots: int) -> None:
    found = Future(runs).optimum(slots)
    assert found.misses == fewest_misses(runs, slots)
    assert found.hits + found.misses == sum(len(r.experts) for r in runs)


@given(runs=routings, slots=st.integers(3, 12), name=st.sampled_from(NAMES))
def test_no_policy_beats_the_optimum_or_its_capacity(
    runs: list[Pass], slots: int, name: str
) -> None:
    policy = make_policy(name, GROUPS, ["a0", "b1"])
    run = Replay(policy, slots)
    total = 0
    for one in runs:
        run.feed(one)
        total += len(one.experts)
        assert len(policy) <= slots
        assert all(b in policy for b in one.experts)
        assert run.tally.hits + run.tally.misses == total
    assert run.tally.hits <= Future(runs).optimum(slots).hits
    assert replay(runs, make_policy(name, GROUPS, ["a0", "b1"]), slots) == run.tally


@given(runs=routings, name=st.sampled_from(NAMES))
def test_only_the_first_use_misses_with_room_for_all(runs: list[Pass], name: str) -> None:
    distinct = {b for r in runs for b in r.experts}
    tally = replay(runs, make_policy(name, GROUPS), 12)
    assert tally.misses == len(distinct) == Future(runs).optimum(12).misses


def test_lru_never_hits_below_one_tokens_cycle_and_the_default_does() -> None:
    token = ["a01", "b01", "c01"]
    runs = passes(*token * 20)
    for name in CYCLIC:
        assert replay(runs, make_policy(name, GROUPS), 4).hits == 0
    assert replay(runs, Lru(), 6).hits == 6 * 19
    best = Future(runs).optimum(4).hits
    assert 0 < replay(runs, make_policy("pinned", GROUPS, ["a0"]), 4).hits <= best
    assert 0.5 * best < replay(runs, make_policy("laps", GROUPS), 4).hits <= best


def test_a_pass_wider_than_the_cache_runs_in_waves() -> None:
    for name in NAMES:
        policy = make_policy(name, GROUPS, ["a0", "a1"])
        assert replay(passes("a0123", "a0123"), policy, 2).misses >= 6
        assert len(policy) == 2
    assert Future(passes("a0123", "a0123")).optimum(2).misses >= 6


def test_hottest() -> None:
    assert hottest(passes("a01", "a1", "b3", "a12", "b3"), 3) == ["a1", "b3", "a0"]
    assert hottest([], 3) == []


def test_a_cache_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slot"):
        Replay(Lru(), 0)
    with pytest.raises(ValueError, match="slot"):
        Future([]).optimum(0)
    assert Tally(0, 0).hit_rate == 0.0
    assert Tally(1, 3).hit_rate == 0.25
