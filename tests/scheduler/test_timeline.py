"""Timelines keep what happened: lanes are busy when they were, and I/O is hidden where it was."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.timeline import COMPUTE, EXPERTS, H2D, READ, Span, Timeline, arrange

SPANS = st.lists(
    st.tuples(st.sampled_from([READ, H2D, COMPUTE]), st.integers(0, 50), st.integers(1, 9)).map(
        lambda x: Span(x[0], "b", float(x[1]), float(x[1] + x[2]), 10)
    ),
    max_size=30,
)


def busy(spans: list[Span], *lanes: str) -> set[int]:
    """An oracle: whole seconds in which one of the lanes works."""
    found = (range(int(s.start_s), int(s.end_s)) for s in spans if s.lane in lanes)
    return {t for seconds in found for t in seconds}


@given(SPANS)
def test_arranging_changes_neither_when_lanes_are_busy_nor_what_they_move(
    spans: list[Span],
) -> None:
    found = arrange(spans)
    for lane in (READ, H2D, COMPUTE):
        assert found.busy_s(lane) == len(busy(spans, lane))
        assert found.nbytes(lane) == sum(s.nbytes for s in spans if s.lane == lane)
        laid = found.lanes.get(lane, [])
        assert all(a.end_s <= b.start_s for a, b in pairwise(laid))
    moving, working = busy(spans, READ, H2D), busy(spans, COMPUTE)
    share = found.hidden()
    assert share == (pytest.approx(len(moving & working) / len(moving)) if moving else None)


@given(SPANS, st.integers(0, 60), st.integers(1, 20))
def test_a_part_of_the_time_has_what_happened_in_it(
    spans: list[Span], start: int, length: int
) -> None:
    part = arrange(spans).between(start, start + length)
    window = set(range(start, start + length))
    for lane in (READ, COMPUTE):
        assert part.busy_s(lane) == len(busy(spans, lane) & window)
    assert part.shifted(5.0).busy_s(READ) == part.busy_s(READ)


def test_lanes_as_text_show_how_busy_each_is() -> None:
    lines = arrange(
        [Span(READ, "a", 0.0, 5.0), Span(EXPERTS, "a", 5.0, 10.0), Span(COMPUTE, "u", 0.0, 0.5)]
    ).text(10)
    assert [line.split("|")[1] for line in lines] == ["@@@@@     ", "+         ", "     @@@@@"]
    assert [line.split()[-1] for line in lines] == ["50%", "5%", "50%"]
    assert Timeline({}).text() == []
