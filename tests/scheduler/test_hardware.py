"""Measured rates survive being cached on disk, and refuse to be nonsense."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from plan_support import machine, rate

from offload.scheduler.hardware import FLOP_PER_S, Hardware, Rate


def test_hardware_survives_json() -> None:
    for hardware in (machine(), replace(machine(), h2d=None, d2h=None)):
        assert Hardware.from_json(json.loads(json.dumps(hardware.to_json()))) == hardware


def test_a_rate_is_the_median_and_the_spread_of_its_samples() -> None:
    assert Rate.of([3.0, 1.0, 2.0], FLOP_PER_S) == Rate(
        median=2.0, low=1.0, high=3.0, n=3, unit=FLOP_PER_S
    )


@pytest.mark.parametrize(("low", "median"), [(0.0, 1.0), (3.0, 1.0), (1.0, float("inf"))])
def test_impossible_rates_are_refused(low: float, median: float) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        Rate(median=median, low=low, high=5.0, n=1, unit="B/s")


@pytest.mark.parametrize("wrong", [{"read_beside": 0.0}, {"gemv_beside": 1.5}, {"product_s": -1.0}])
def test_impossible_shares_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]|besides"):
        replace(machine(), **wrong)


def test_an_entry_of_before_has_neither_shares_nor_product_costs() -> None:
    data = machine().to_json()
    for key in ("product_s", "read_beside", "gemv_beside"):
        del data[key]
    assert Hardware.from_json(data) == machine()


def test_units_must_match_the_field() -> None:
    with pytest.raises(ValueError, match="ssd_read must be in B/s"):
        replace(machine(), ssd_read=rate(1e9, unit=FLOP_PER_S))
