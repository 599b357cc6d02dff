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
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.runtime.timeline import Recorder
from offload.scheduler.timeline import COMPUTE, PASSES, READ, UPDATE, WAITS, WRITE
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
