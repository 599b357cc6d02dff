"""Who computes which expert: against all assignments there are, and against hand-made cases."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.scheduler.split import (
    COUNTS,
    INVEST,
    Job,
    Place,
    Schedule,
    SplitCosts,
    _play,
    _split,
    split,
)


def costs(
    *,
    cpu: float = 1.0,
    device: float = 0.1,
    move: float = 2.0,
    read: float = 8.0,
    hand: float = 0.0,
) -> SplitCosts:
    """Flat up to 8 tokens, then linear."""

    def table(s: float) -> tuple[float, ...]:
        return tuple(s * max(1.0, n / 8) for n in COUNTS)

    return SplitCosts(
        nbytes=1000, cpu=table(cpu), device=table(device), move_s=move, read_s=read,
        hand_over_s=hand, rows=64,
    )  # fmt: skip


def jobs(*of: tuple[Place, int]) -> list[Job]:
    return [Job(f"e{i:02}", n, place, 1000) for i, (place, n) in enumerate(of)]


def everywhere(found: Schedule, asked: Sequence[Job]) -> None:
    """Each job is computed once, what is in a slot on the device; reads follow both orders."""
    assert sorted((*found.device, *found.cpu)) == sorted(j.expert for j in asked)
    here = {j.expert for j in asked if j.place is Place.SLOT}
    assert here <= set(found.device)
    assert set(found.reads) == {j.expert for j in asked} - here
    for site in (found.device, found.cpu):
        order = [b for b in site if b not in here]
        assert order == [b for b in found.reads if b in set(site)]


def test_what_is_in_slots_stays_there() -> None:
    found = split(jobs((Place.SLOT, 1), (Place.SLOT, 1)), costs())
    assert found.cpu == ()
    assert found.span_s == pytest.approx(0.2)


def test_one_token_is_cheaper_where_its_weights_lie() -> None:
    """A copy takes two products' time: of six experts the CPU takes four."""
    found = split(jobs(*[(Place.RAM, 1)] * 6), costs())
    assert len(found.cpu) == 4
    assert found.span_s == pytest.approx(4.1)


def test_a_little_time_is_spent_on_moving() -> None:
    """Two on the CPU end at 2.0, one of each at 2.1: then the one that moved is in a slot."""
    found = split(jobs((Place.RAM, 1), (Place.RAM, 1)), costs())
    assert (len(found.device), len(found.cpu)) == (1, 1)


def test_many_tokens_pay_for_a_copy() -> None:
    found = split(jobs((Place.RAM, 512), (Place.RAM, 512), (Place.RAM, 1)), costs())
    assert found.device[:2] == ("e00", "e01")
    assert found.span_s < split(jobs((Place.RAM, 512)), costs()).span_s * 2


def test_equal_sites_share_equally() -> None:
    """As long to compute here as there, and copies that hide behind computing."""
    asked = jobs(*[(Place.SLOT, 1)] * 3, *[(Place.RAM, 1)] * 5)
    found = split(asked, costs(cpu=1.0, device=1.0, move=1.0))
    assert found.span_s == pytest.approx(4.0)  # 8 jobs on 2 sites


def test_the_device_alone_without_the_cpu() -> None:
    found = split(jobs(*[(Place.RAM, 1)] * 4, (Place.SLOT, 1)), costs(), cpu=False)
    assert found.cpu == ()
    assert found.device[0] == "e04"
    assert found.span_s == pytest.approx(8.1)


def test_what_is_on_disk_comes_last() -> None:
    found = split(jobs((Place.DISK, 9), (Place.RAM, 1), (Place.RAM, 1)), costs())
    assert found.reads[-1] == "e00"


places = st.sampled_from(list(Place))
some_jobs = st.lists(st.tuples(places, st.integers(1, 200)), min_size=1, max_size=7).map(
    lambda of: jobs(*of)
)
some_costs = st.builds(
    costs,
    cpu=st.floats(0.01, 10),
    device=st.floats(0.01, 10),
    move=st.floats(0.0, 10),
    read=st.floats(0.0, 10),
    hand=st.floats(0.0, 1),
)


@settings(max_examples=300, deadline=None)
@given(some_jobs, some_costs)
def test_never_worse_than_one_site_and_near_the_best(asked: list[Job], by: SplitCosts) -> None:
    found = split(asked, by)
    everywhere(found, asked)
    order = sorted(asked, key=lambda j: (-j.tokens, j.expert))
    here = [j for j in order if j.place is Place.SLOT]
    away = [j for p in (Place.RAM, Place.DISK) for j in order if j.place is p]
    spans = [
        _play(here, away, frozenset(chosen), by).span_s
        for n in range(len(away) + 1)
        for chosen in itertools.combinations([j.expert for j in away], n)
    ]
    assert found.span_s <= min(spans[0], spans[-1]) * (1 + INVEST) + 1e-9
    assert found.span_s <= 1.5 * min(spans) * (1 + INVEST) + 1e-9


@settings(max_examples=60, deadline=None)
@given(some_jobs, some_costs, st.randoms(use_true_random=False))
def test_the_order_of_asking_does_not_matter(
    asked: list[Job], by: SplitCosts, rng: random.Random
) -> None:
    again = list(asked)
    rng.shuffle(again)
    assert split(again, by) == split(asked, by)


@settings(max_examples=100, deadline=None)
@given(some_jobs, some_costs, st.booleans(), st.randoms(use_true_random=False))
def test_what_is_remembered_is_what_these_names_would_get(
    asked: list[Job], by: SplitCosts, cpu: bool, rng: random.Random
) -> None:
    """Also where another layer's experts, by other names, have been split before."""
    names = rng.sample(["a", "a1", "b", "g#10", "g#9", "x", "y.3"], len(asked))
    named = [dataclasses.replace(job, expert=name) for job, name in zip(asked, names, strict=True)]
    split([dataclasses.replace(job, expert=f"z{job.expert}") for job in asked], by, cpu=cpu)
    want = _split(sorted(named, key=lambda j: (-j.tokens, j.expert)), by, cpu)
    assert split(named, by, cpu=cpu) == want


def test_costs_between_counts_and_beyond() -> None:
    table = costs(cpu=1.0)
    (job,) = jobs((Place.RAM, 24))
    assert table.cpu_s(job) == pytest.approx(3.0)
    (job,) = jobs((Place.RAM, 4096))
    assert table.cpu_s(job) == pytest.approx(512.0)
    assert table.up_s(Job("half", 1, Place.RAM, 500)) == pytest.approx(1.0)


def test_costs_survive_json() -> None:
    found = costs(hand=0.25)
    assert SplitCosts.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="tables of"):
        SplitCosts.from_json({**found.to_json(), "cpu": [1.0]})
