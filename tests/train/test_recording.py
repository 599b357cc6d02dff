"""What a trace of a run says: every lane, and every byte that the run says it has moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_support import (
    STEPS,
    Log,
    everything_on_disk,
    not_warmed,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.runtime.timeline import Recorder
from offload.scheduler.timeline import (
    COMPUTE,
    D2H,
    H2D,
    PASSES,
    READ,
    UPDATE,
    UPDATE_AWAY,
    WAITS,
    WRITE,
)
from offload.train import preparing
from offload.train.run import Run


def test_a_trace_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "warm_training", not_warmed)
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data.jsonl")
    recorder, log, units = Recorder(1 << 14), Log(), set[str]()

    def change(run: Run) -> None:
        everything_on_disk(run)
        run.record = recorder.add
        units.update(u.name for u in run.layout.units)

    (tmp_path / "traced").mkdir()
    train(options_for(model, data, tmp_path / "traced", save_every=None), log, change=change)
    line = recorder.timeline()
    steps = [span.name for span in line.lanes[PASSES]]
    assert steps == [f"step {k + 1} {what}" for k in range(STEPS) for what in
                     ("forward", "backward")]  # fmt: skip
    computed = {span.name for span in line.lanes[COMPUTE]}
    assert {name for name in computed if not name.endswith(" backward")} <= units
    assert {name.removesuffix(" backward") for name in computed} == units
    assert {span.name.removesuffix(" backward") for span in line.lanes[WAITS]} <= units
    assert len(line.lanes[UPDATE]) >= STEPS * len(units)
    assert log.end is not None
    assert line.nbytes(WRITE) == log.end.written_bytes
    names = {span.name for span in line.lanes[READ]}
    assert {"tiles", "(gradients)", "(inputs)"} <= names
    (tmp_path / "plain").mkdir()
    train(options_for(model, data, tmp_path / "plain", save_every=None))
    assert weights_of(tmp_path / "traced" / "out") == weights_of(tmp_path / "plain" / "out")


def test_a_trace_of_a_run_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions of the link, with the bytes that the plan says, and tiles updated there."""
    planned_once(monkeypatch)
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data.jsonl")
    recorder, moved = Recorder(1 << 14), []

    def change(run: Run) -> None:
        run.record = recorder.add
        moved.append((run.plan.up_bytes, run.plan.down_bytes))

    options = options_for(
        model, data, tmp_path, save_every=None, device="sim", gpu=1 << 30, gpu_updates="1"
    )
    train(options, Log(), change=change)
    line = recorder.timeline()
    assert len(line.lanes[UPDATE_AWAY]) == (STEPS - 1) * len(line.lanes[UPDATE]) / STEPS > 0
    # The first step brings what stays, and makes the states in RAM.
    for lane, each in zip((H2D, D2H), moved[0], strict=True):
        assert (STEPS - 1) * each <= line.nbytes(lane) <= (STEPS + 1) * each
    assert {"weights", "arguments", "tiles to update"} <= {s.name for s in line.lanes[H2D]}
    assert {"results", "gradients on their way"} <= {s.name for s in line.lanes[D2H]}
