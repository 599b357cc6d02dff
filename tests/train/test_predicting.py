"""What a step will take: measured, planned, and said, for full fine-tuning and for adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import not_warmed, options_for, write_data, write_model

from offload.train import beside, preparing, stopwatch
from offload.train.pace import Beside
from offload.train.predicting import StepRates, predict
from offload.train.run import Run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as always, but for less long."""
    monkeypatch.setattr(preparing, "warm_training", not_warmed)
    monkeypatch.setattr(beside, "LEAST_S", 0.05)
    monkeypatch.setattr(stopwatch, "SAMPLE_S", 0.02)


def prepared(model: Path, data: Path, place: Path, **more: Any) -> Run:
    place.mkdir(exist_ok=True)
    run = preparing.prepare(options_for(model, data, place, **more))
    run.close()
    return run


@pytest.mark.parametrize(
    "more",
    [{}, {"max_grad_norm": 0.0, "states": "8bit"}, {"method": "lora"}, {"grad_accum": 2}],
    ids=["clipped", "unclipped 8bit", "lora", "accumulated"],
)
def test_every_method_has_a_step_time(
    model: Path, data: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    run = prepared(model, data, tmp_path, **more)
    found = run.prediction
    assert found is not None
    assert set(found.phases) == set(found.lanes) == {"forward", "backward"}
    for phase, seconds in found.phases.items():
        assert seconds >= found.lanes[phase]["compute"] * 0.999 > 0
    (line,) = [text for text in run.describe() if text.startswith("time")]
    assert f"{found.seconds:.2f} s a step" in line


def speeds(run: Run, **more: Any) -> StepRates:
    """A made-up machine; a second for each of a unit's halves."""
    units = {u.index: (1.0, 2.0) for u in run.layout.units if "layers" in u.name}
    given: dict[str, Any] = {"disk_read": 1e12, "disk_write": 1e12, "update": 1e12, **more}
    return StepRates(units=units, head=0.5, **given)


def test_a_dtype_without_fast_products_is_told(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    run = prepared(model, data, tmp_path)
    torch._C._set_mkldnn_enabled(False)
    try:
        (line,) = [text for text in run.describe() if text.startswith("slow")]
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert "no fast products of bfloat16" in line
    assert "--dtype float32" in line


@pytest.mark.parametrize("clipping", [True, False])
def test_what_is_slower_takes_longer(
    model: Path, data: Path, tmp_path: Path, clipping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a plan that keeps nothing in RAM, on machines that differ in one thing."""
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    run = prepared(model, data, tmp_path, max_grad_norm=float(clipping))
    from run_support import everything_on_disk

    from offload.train.plan import Needs, traffic
    from offload.train.updates import Updater

    everything_on_disk(run)
    needs = Needs(fixed={}, kinds=Updater.kinds(run.layout, "fp32"), grad_dtype=None)
    place = replace(run.plan.placement, inputs=None)
    phases = traffic(run.layout, needs, place, clipping=clipping, backwards=1)
    plan = replace(run.plan, placement=place, phases=phases, inputs_moved=0)

    def seconds(**more: Any) -> float:
        return predict(
            plan, run.layout, needs, speeds(run, **more), clipping=clipping
        ).seconds  # fmt: skip

    layers = sum("layers" in u.name for u in run.layout.units)
    fast = seconds()
    assert fast == pytest.approx(3.0 * layers + 0.5, rel=1e-3)
    read, written = plan.read_bytes, plan.written_bytes
    slow = seconds(disk_read=1e4, disk_write=1e4)
    assert slow > max(fast, 0.9 * (read + written) / 1e4)
    assert seconds(disk_read=1e6, disk_write=1e6, beside=Beside(compute=1.5)) > seconds(
        disk_read=1e6, disk_write=1e6
    )
    assert seconds(update=1e4) > fast


def test_units_that_keep_their_graph_are_not_run_again(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    run = prepared(model, data, tmp_path)
    from offload.train.plan import Needs
    from offload.train.updates import Updater

    needs = Needs(fixed={}, kinds=Updater.kinds(run.layout, "fp32"), grad_dtype=None)
    kept = frozenset(u.index for u in run.layout.units if "layers" in u.name)
    keeping = replace(run.plan, placement=replace(run.plan.placement, kept=kept))
    again, not_again = (
        predict(p, run.layout, needs, speeds(run), clipping=True) for p in (run.plan, keeping)
    )
    assert again.seconds - not_again.seconds == pytest.approx(len(kept))
    assert again.phases["forward"] == pytest.approx(not_again.phases["forward"])


def test_page_faults_count_where_freed_blocks_leave(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    run = prepared(model, data, tmp_path)
    from offload.train.plan import Needs
    from offload.train.updates import Updater

    needs = Needs(fixed={}, kinds=Updater.kinds(run.layout, "fp32"), grad_dtype=None)
    stay = replace(run.plan, placement=replace(run.plan.placement, freed_bytes=1))
    leave = replace(run.plan, placement=replace(run.plan.placement, freed_bytes=0))
    calm, kept, gone = (
        predict(plan, run.layout, needs, speeds(run, faults=faults), clipping=True).seconds
        for plan, faults in ((leave, 1.0), (stay, 1.5), (leave, 1.5))
    )
    assert kept == calm
    assert gone > 1.3 * calm
