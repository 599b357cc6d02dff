"""The learning rate: transformers' numbers to the last bit, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from offload.errors import OffloadError
from offload.train.options import SCHEDULES
from offload.train.schedule import Schedule, warmup_steps

THEIRS = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def theirs(name: str, lr: float, warmup: int, total: int) -> list[float]:
    """The rate that each step of a run is taken with, from torch's own loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(THEIRS[name], optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (1, 2), (3, 100), (99, 100)])
@pytest.mark.parametrize("lr", [1e-5, 3e-4 / 7, 1.0])
def test_a_whole_run_has_transformers_numbers(
    name: str, warmup: int, total: int, lr: float
) -> None:
    ours = Schedule(name=name, lr=lr, warmup_steps=warmup, total_steps=total)
    assert [ours.rate(step) for step in range(1, total + 1)] == theirs(name, lr, warmup, total)


@given(
    name=st.sampled_from(SCHEDULES),
    total=st.integers(2, 10**6),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_rate_climbs_to_the_peak_and_never_leaves_its_range(
    name: str, total: int, share: float
) -> None:
    warmup = warmup_steps(share, total)
    schedule = Schedule(name=name, lr=2.0, warmup_steps=warmup, total_steps=total)
    assert schedule.rate(warmup + 1) == 2.0
    for step in {1, warmup or 1, warmup + 1, (warmup + total) // 2 or 1, total}:
        assert 0.0 <= schedule.rate(step) <= 2.0
    assert schedule.rate(total) > 0 or name == "cosine"


def test_a_warmup_is_steps_or_a_share() -> None:
    assert warmup_steps(0, 100) == 0
    assert warmup_steps(0.03, 100) == 3
    assert warmup_steps(0.03, 101) == 4  # as transformers: up
    assert warmup_steps(5.0, 100) == 5
    assert warmup_steps(0.03, 1) == 0  # else the only step would be at rate 0
    assert warmup_steps(0.999, 10) == 9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"warmup_steps": 10}, ["--warmup 10", "10 step", "at most 9"]),
        ({"warmup_steps": -1}, ["-1"]),
        ({"total_steps": 0, "warmup_steps": 0}, ["0 steps"]),
        ({"name": "wavy"}, ["--schedule wavy", "cosine"]),
    ],
)
def test_what_is_no_schedule(change: dict[str, object], said: list[str]) -> None:
    fields: dict[str, object] = {"name": "linear", "lr": 1.0, "warmup_steps": 1, "total_steps": 10}
    with pytest.raises(OffloadError) as raised:
        Schedule(**(fields | change))  # type: ignore[arg-type]
    assert all(word in str(raised.value) for word in said), str(raised.value)


@pytest.mark.parametrize("step", [0, 11])
def test_a_step_outside_the_run_is_a_bug(step: int) -> None:
    schedule = Schedule(name="linear", lr=1.0, warmup_steps=1, total_steps=10)
    with pytest.raises(ValueError, match=f"step {step}"):
        schedule.rate(step)
