"""The real order of use is found within two rounds, whatever was run before."""

from __future__ import annotations

import pytest

from offload.runtime.order import OrderWatcher
from offload.scheduler.trace import Step, Trace

PLANNED = ["0", "1", "2", "3", "4", "5", "head"]


def trace_of(units: list[str]) -> Trace:
    return Trace([Step(unit=u, blocks=(u,)) for u in units])


class Walk:
    """A cursor on a trace, moved as the scheduler moves it."""

    def __init__(self) -> None:
        self.trace, self.cursor = trace_of(PLANNED), 0
        self.watcher = OrderWatcher(len(PLANNED))

    def run(self, units: list[str]) -> int:
        """How many of them were not expected."""
        lost = 0
        for unit in units:
            expected = self.trace.next_position(unit, self.cursor) == self.cursor
            lost += not expected
            cycle = self.watcher.note(unit, (unit,), expected=expected)
            if cycle is not None:
                self.trace, self.cursor = cycle, 0
            position = self.trace.next_position(unit, self.cursor)
            self.cursor = self.cursor if position is None else position + 1
        return lost


@pytest.mark.parametrize("before", [[], ["head", "head"], ["3"] * 3, ["2", "3"] * 2, PLANNED * 3])
@pytest.mark.parametrize(
    "cycle",
    [
        PLANNED,
        PLANNED[1:4],
        PLANNED[::-1],
        ["0", "shared", "1", "shared", "2", "shared", "3", "head"],
        ["shared", "0", "shared", "1", "2", "3", "shared", "head"],
        ["another"],
    ],
)
def test_an_order_is_followed_from_its_third_round_on(before: list[str], cycle: list[str]) -> None:
    walk = Walk()
    walk.run(before)
    walk.run(cycle * 2)
    assert walk.run(cycle * 4) == 0


def test_the_planned_order_is_never_lost() -> None:
    walk = Walk()
    assert walk.run(PLANNED * 5) == 0
    assert walk.trace.uses == trace_of(PLANNED).uses
