"""How lanes that wait for one another add up: by hand, and against what no schedule can beat."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.train.pace import Beside, UnitSeconds, pace


def step(units: list[UnitSeconds], **more: Any) -> tuple[float, float]:
    given: dict[str, Any] = {"deferred": True, "ahead": 1, "beside": Beside(), **more}
    return pace(units, **given)


def test_computing_alone() -> None:
    units = [UnitSeconds(forward=1.0, backward=3.0)] * 4 + [UnitSeconds(backward=2.0)]
    assert step(units) == pytest.approx((4.0, 14.0))


def test_a_step_begins_with_the_first_units_update() -> None:
    """Fill: 0.5 s before the first forward; all later updates run behind computing."""
    units = [UnitSeconds(forward=1.0, backward=3.0, update=0.5)] * 4
    assert step(units) == pytest.approx((4.5, 12.0))


def test_the_disk_is_the_bottleneck() -> None:
    """The last unit computes when all updates are through."""
    units = [UnitSeconds(forward=1.0, backward=3.0, update=2.0)] * 4
    assert step(units) == pytest.approx((9.0, 12.0))


def test_the_heads_update_is_backwards_business() -> None:
    units = [UnitSeconds(forward=1.0, backward=3.0, update=2.0)] * 2
    units += [UnitSeconds(backward=1.0, update=4.0)]
    assert step(units) == pytest.approx((5.0, 3.0 + 7.0))


def test_updates_inside_backward_end_in_the_next_forward() -> None:
    """The first unit's comes last, and its forward waits for it."""
    units = [UnitSeconds(forward=1.0, backward=3.0, update=2.0)] * 4
    assert step(units, deferred=False) == pytest.approx((6.0, 12.0))


def test_gradients_that_wait_for_updates_hold_backward() -> None:
    units = [UnitSeconds(forward=1.0, backward=1.0, update=4.0, gradient_bytes=10)] * 4
    free = step(units, deferred=False)
    held = step(units, deferred=False, gradient_limit=10)
    assert sum(held) == pytest.approx(sum(free))  # the disk is busy all the time in both
    assert held[1] > free[1]


def test_weights_that_are_read_again() -> None:
    """Two units are in the ring at the turn of the step; backward then waits for the disk."""
    units = [UnitSeconds(forward=1.0, backward=1.0, fetch_backward=2.0)] * 6
    forward, backward = step(units)
    assert forward == pytest.approx(6.0)
    assert 11.0 <= backward <= 13.0


def test_both_are_slower_beside_each_other() -> None:
    """Two seconds of updates cost computing half of that, as long as it is there to be cost."""
    units = [UnitSeconds(forward=10.0, backward=1.0, update=0.0)]
    units += [UnitSeconds(forward=10.0, backward=1.0, update=2.0)]
    assert step(units, beside=Beside(compute=1.5, disk=1.0)) == pytest.approx(
        (20.0 + 2.0 - 2.0 / 1.5, 2.0)
    )


def test_inputs_come_back_in_time_or_not() -> None:
    units = [UnitSeconds(forward=1.0, backward=2.0, input_away=0.5, input_back=0.5)] * 4
    assert step(units) == pytest.approx((4.0, 9.0))  # the last unit's has to go and to come


def on_link(n: int = 4, **more: float) -> list[UnitSeconds]:
    return [UnitSeconds(forward=1.0, backward=3.0, **more) for _ in range(n)]


def test_weights_go_up_behind_computing_if_there_is_a_slot_to_take_them() -> None:
    """With one slot a copy begins when the unit before is through, with two while it runs."""
    units = on_link(up_forward=1.0, up_backward=1.0)
    assert step(units, slots=1) == pytest.approx((8.0, 16.0))
    forward, backward = step(units, slots=2)
    assert forward == pytest.approx(
        4.0 + 1.0
    )  # the first one's waits for the last backward: its update
    assert backward == pytest.approx(12.0)


def test_a_link_slower_than_computing_is_the_bottleneck() -> None:
    units = on_link(up_forward=5.0, up_backward=5.0)
    assert sum(step(units, slots=2)) == pytest.approx(40.0, rel=0.1)


def test_weights_go_up_when_their_update_is_through() -> None:
    units = on_link(1, up_forward=2.0, update=4.0)
    assert step(units, slots=2) == pytest.approx((4.0 + 2.0 + 1.0, 3.0))


def test_computing_waits_for_arguments_and_results() -> None:
    units = on_link(enter_forward=0.5, leave_forward=0.25, enter_backward=1.0, leave_backward=0.5)
    assert step(units) == pytest.approx((4 * 1.75, 4 * 4.5))


def test_arguments_go_behind_the_weights_that_are_on_their_way() -> None:
    """And before those that are not."""
    units = [
        UnitSeconds(forward=1.0, backward=1.0, enter_forward=0.5),
        UnitSeconds(forward=1.0, backward=1.0, enter_forward=0.5, up_forward=2.5),
    ]
    assert step(units, slots=2)[0] == pytest.approx(2.5 + 0.5 + 1.0 + 0.5 + 1.0 - 1.0)


def test_gradients_come_down_beside_their_backward() -> None:
    assert step(on_link(gradients_down=2.0)) == pytest.approx((4.0, 12.0))
    assert step(on_link(gradients_down=5.0)) == pytest.approx((4.0, 20.0))


def test_experts_go_up_beside_the_unit_that_asks_for_them() -> None:
    """The next unit begins when all of them have come and been used."""
    assert step(on_link(slices_forward=0.9, slices_up=2.9)) == pytest.approx((4.0, 12.0))
    assert step(on_link(slices_forward=2.0, slices_up=5.0)) == pytest.approx((8.0, 20.0))


def test_what_backward_needs_comes_down_beside_the_next_unit() -> None:
    assert step(on_link(kept_down=0.75)) == pytest.approx(step(on_link()))


SECONDS = st.floats(0, 4).map(lambda s: round(s, 2))
UNITS = st.lists(
    st.builds(
        UnitSeconds, forward=SECONDS, backward=SECONDS, update=SECONDS, fetch_forward=SECONDS,
        fetch_backward=SECONDS, spill=SECONDS, input_away=SECONDS, input_back=SECONDS,
        gradient_bytes=st.integers(0, 9), up_forward=SECONDS, up_backward=SECONDS,
        enter_forward=SECONDS, enter_backward=SECONDS, leave_forward=SECONDS,
        leave_backward=SECONDS, gradients_down=SECONDS, kept_down=SECONDS,
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(UNITS, st.booleans(), st.integers(1, 3), st.none() | st.integers(0, 20), st.integers(1, 4))
def test_no_lane_is_faster_than_its_work(
    units: list[UnitSeconds], deferred: bool, ahead: int, limit: int | None, slots: int
) -> None:
    """A step is at least its computing, and at most everything one after the other."""
    found = pace(
        units, deferred=deferred, ahead=ahead, beside=Beside(), gradient_limit=limit, slots=slots
    )
    computing = sum(u.forward for u in units), sum(u.backward for u in units)
    assert all(a >= b - 1e-6 for a, b in zip(found, computing, strict=True))
    everything = sum(
        u.update + u.fetch_forward + u.fetch_backward + u.spill + u.input_away + u.input_back
        + u.up_forward + u.up_backward + u.enter_forward + u.enter_backward + u.leave_forward
        + u.leave_backward + u.gradients_down + u.kept_down
        for u in units
    )  # fmt: skip
    assert sum(found) <= sum(computing) + 2 * everything + 1e-6


def test_reads_of_weights_cost_computing_what_they_were_measured_to() -> None:
    """Updates cost something else, and where there are none they do not count."""
    reads = [UnitSeconds(forward=1.0, backward=1.0, fetch_backward=0.9)] * 6
    slow = Beside(compute=2.0)
    alone = sum(step(reads))
    assert sum(step(reads, beside=slow, reading=Beside())) == pytest.approx(alone)
    assert sum(step(reads, reading=slow)) > alone + 2.0
    assert sum(step(reads, reading=slow)) == pytest.approx(sum(step(reads, beside=slow)))
