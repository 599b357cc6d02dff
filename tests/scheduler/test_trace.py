"""``Trace`` against a walk over the endless sequence it stands for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.trace import Step, Trace

steps = st.lists(
    st.builds(
        lambda unit, n: Step(unit=unit, blocks=tuple(f"{unit}{i}" for i in range(n))),
        st.sampled_from("abc"),
        st.integers(0, 3),
    ),
    max_size=6,
)


@given(steps, st.integers(0, 20), st.sampled_from("abcd"))
def test_positions_and_uses(steps: list[Step], at: int, unit: str) -> None:
    trace = Trace(steps)
    endless = steps * 30
    want = next((i for i in range(at, len(endless)) if endless[i].unit == unit), None)
    assert trace.next_position(unit, at) == want
    assert trace.first_use(at) == sum(len(s.blocks) for s in endless[:at])
    assert [b for b, _ in trace.uses] == [b for s in steps for b in s.blocks]
    assert all(b in steps[i].blocks for b, i in trace.uses)
    assert list(trace) == steps
    assert len(trace) == len(steps)


def test_shows_its_steps() -> None:
    assert repr(Trace([Step(unit="u", blocks=("a", "b"))])) == "Trace(u: a b)"
