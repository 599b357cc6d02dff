"""Costs against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_support import machine, rate

from offload.blocks import BlockKind, layout
from offload.scheduler.costs import CostModel, Pick
from offload.scheduler.hardware import FLOP_PER_S, Hardware

HARDWARE = Hardware(
    ssd_read=rate(1e9, 0.5),
    ssd_write=rate(1e9),
    ssd_mixed=rate(1e9),
    ram_read=rate(40e9, 0.5),
    memcpy=rate(4e9, 0.5),
    matmul={
        "bfloat16": rate(1e12, 0.5, FLOP_PER_S),
        "float32": rate(2e11, 0.5, FLOP_PER_S),
    },
    gemv={"bfloat16": rate(20e9, 0.5)},
    cores=2,
    ram_bytes=2**34,
    name="by hand",
)
COSTS = CostModel(hardware=HARDWARE, read_latency_s=1e-3, copy_latency_s=1e-4)
MATRIX = layout("m", BlockKind.WEIGHT, [("w", "bfloat16", (1000, 1000))])  # 2e6 bytes


def test_a_read_is_a_latency_and_the_bytes_over_the_rate() -> None:
    assert COSTS.read_s(10**6) == pytest.approx(1e-3 + 1e-3)
    assert COSTS.read_busy_s(10**6) == pytest.approx(1e-3)


def test_staged_reads_run_at_the_slower_of_disk_and_memcpy() -> None:
    disk_bound = CostModel(hardware=HARDWARE, staged=True)
    assert disk_bound.read_busy_s(10**6) == pytest.approx(1e-3)
    copy_bound = CostModel(hardware=machine(ssd=40e9), staged=True)  # its memcpy: 10 GB/s
    assert copy_bound.read_busy_s(10**6) == pytest.approx(1e-4)


def test_copies_use_the_device_rates_and_memcpy_without_them() -> None:
    assert COSTS.copy_up_s(4 * 10**6) == pytest.approx(1e-4 + 1e-3)
    card = CostModel(hardware=machine(h2d=8e9), copy_latency_s=1e-4)
    assert card.copy_up_s(8 * 10**6) == pytest.approx(1e-4 + 1e-3)


def test_decode_reads_the_weights_once() -> None:
    assert COSTS.step_s([MATRIX, MATRIX], overhead_s=5e-4) == pytest.approx(2e-4 + 5e-4)


def test_each_product_costs_something_besides_its_bytes() -> None:
    costs = CostModel(hardware=replace(HARDWARE, product_s=5e-5))
    vector = layout("v", BlockKind.WEIGHT, [("w", "bfloat16", (1000,))])
    assert costs.weights_s([MATRIX, MATRIX]) - COSTS.weights_s([MATRIX, MATRIX]) == (
        pytest.approx(1e-4)
    )
    assert costs.weights_s([vector]) == COSTS.weights_s([vector])


def test_prefill_is_flops_but_never_less_than_decode() -> None:
    assert COSTS.weights_s([MATRIX], tokens=2) == pytest.approx(1e-4)  # 4e-6 s of flops
    assert COSTS.weights_s([MATRIX], tokens=1000) == pytest.approx(2e-3)


def test_vectors_are_read_and_cost_no_matmul() -> None:
    norm = layout("n", BlockKind.WEIGHT, [("w", "bfloat16", (10**6,))])
    assert COSTS.weights_s([norm], tokens=10**6) == pytest.approx(1e-4)


def test_a_dtype_that_was_not_probed_reads_like_a_stream_and_multiplies_like_the_slowest() -> None:
    packed = layout("q", BlockKind.EXPERT, [("w", "uint8", (1000, 1000))], "g")
    assert COSTS.weights_s([packed]) == pytest.approx(1e6 / 40e9)
    assert COSTS.weights_s([packed], tokens=1000) == pytest.approx(2e9 / 2e11)


def test_an_expert_call_has_an_overhead() -> None:
    costs = CostModel(hardware=HARDWARE, expert_overhead_s=1e-5)
    assert costs.expert_s(MATRIX) == pytest.approx(1e-4 + 1e-5)


def test_an_interval_spans_the_measured_rates() -> None:
    found = COSTS.interval(lambda c: c.read_busy_s(3 * 10**6))
    assert (found.low, found.mid, found.high) == pytest.approx((2e-3, 3e-3, 6e-3))
    assert COSTS.at(Pick.SLOW).weights_s([MATRIX]) == pytest.approx(2e-4)
