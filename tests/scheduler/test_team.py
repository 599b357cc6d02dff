"""Whether one thread fewer is found where it is faster, and left where it is not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from offload.scheduler import team
from offload.scheduler.team import Team

TRIAL = team.TURN * team.TURNS


def played(of: Team, passes: int, seconds: Callable[[bool, int], float]) -> list[bool]:
    """Which of the passes had one thread fewer, each taking ``seconds(fewer, pass)``."""
    seen = []
    for i in range(passes):
        fewer = of.next_fewer
        seen.append(fewer)
        of.took(seconds(fewer, i))
    return seen


def test_the_first_passes_are_not_looked_at() -> None:
    slow_start = [100.0] * team.FIRST_UNPLANNED
    seen = played(Team(), len(slow_start), lambda _, i: slow_start[i])
    assert not any(seen)
    of = Team()
    seen = played(of, len(slow_start) + TRIAL, lambda fewer, i: 100.0 if i < 4 else 1 + fewer)
    assert of.trials == 1
    assert not of.fewer
    # Each number had as many passes of the trial, in turns.
    turns = seen[len(slow_start) :]
    assert turns == ([False] * team.TURN + [True] * team.TURN) * (team.TURNS // 2)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("better", [False, True])
def test_the_faster_one_wins(begins: bool, planned: bool, better: bool) -> None:
    noise = random.Random(3)
    of = Team(fewer=begins, planned=planned)
    seen = played(
        of, 4000, lambda fewer, _: (0.9 if fewer == better else 1.0) * noise.uniform(0.97, 1.03)
    )
    assert of.fewer == better
    assert seen.count(better) > 0.95 * len(seen)


def test_what_makes_no_difference_is_not_tried_for_ever() -> None:
    of = Team()
    seen = played(of, 10_000, lambda *_: 1.0)
    assert not of.fewer
    assert sum(seen) < 0.02 * len(seen)
    # Its end is still seen: the machine has changed.
    played(of, 3000, lambda fewer, _: 0.5 if fewer else 1.0)
    assert of.fewer


def test_one_pass_that_waited_for_something_else_decides_nothing() -> None:
    of = Team()
    stuck = team.FIRST_UNPLANNED + 1
    played(of, team.FIRST_UNPLANNED + TRIAL, lambda _, i: 50.0 if i == stuck else 1.0)
    assert of.trials == 1
    assert not of.fewer


def test_what_was_planned_is_trusted_for_longer() -> None:
    for planned, first in ((True, team.FIRST_PLANNED), (False, team.FIRST_UNPLANNED)):
        of = Team(fewer=True, planned=planned)
        seen = played(of, first + TRIAL, lambda *_: 1.0)
        assert all(seen[:first])
        assert of.trials == 1
