"""Inputs kept for backward on the disk: who goes, in what order they come back, in how much RAM."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import (
    Log,
    not_warmed,
    options_for,
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.errors import PlanError
from offload.io.engines import make_engine
from offload.io.files import DirectFile, TransferError
from offload.train import preparing
from offload.train.inputs import AHEAD, SpilledInputs, buffer_bytes
from offload.train.opening import Placement
from offload.train.placing import DRIFT
from offload.train.plan import Needs, TrainPlan
from offload.train.predicting import Prediction
from offload.train.preparing import prepare
from offload.train.spilling import KEPT, MOVING, KeptInputs, best, plans
from offload.train.weights import Shared

LARGEST = 5 << 20
"""Two requests."""


class LateEngine:
    """Does what it is asked when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, int, Any, Future[int]]] = []

    def write(self, file: Any, offset: int, view: Any) -> Future[int]:
        return self._job("write", offset, view)

    def read(self, file: Any, offset: int, view: Any, priority: int = 0) -> Future[int]:
        return self._job("read", offset, view)

    def _job(self, what: str, offset: int, view: Any) -> Future[int]:
        future: Future[int] = Future()
        self.jobs.append((what, offset, view, future))
        return future

    def finish(self) -> list[tuple[str, int]]:
        """End what there is now, and say what it was."""
        jobs, self.jobs = self.jobs, []
        for _, _, view, future in jobs:
            future.set_result(len(view))
        return [(what, offset) for what, offset, _, _ in jobs]


class NoFile:
    def close(self) -> None: ...


@pytest.fixture
def late() -> tuple[SpilledInputs, LateEngine]:
    engine: Any = LateEngine()
    file: Any = NoFile()
    return SpilledInputs(Shared(), engine, file, range(8), 4096), engine


@pytest.fixture
def real() -> Iterator[SpilledInputs]:
    engine = make_engine(queue_depth=2)
    with tempfile.TemporaryFile() as file:
        inputs = SpilledInputs(
            Shared(), engine, DirectFile(os.dup(file.fileno()), "inputs"), range(8), LARGEST
        )
        yield inputs
        inputs.close()
        engine.close()


def values(seed: int, count: int = LARGEST // 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_what_comes_back_is_what_was_kept(real: SpilledInputs) -> None:
    """Of any length, and in whatever order, twice if asked for."""
    tensors = [values(i, 2500 * (i + 1)).view(2, -1, 50) for i in range(6)]
    tensors[3] = values(3)
    kept = [real.keep(i, t, in_turns=False) for i, t in enumerate(tensors)]
    wanted = [t.clone() for t in tensors]
    for t in tensors:
        t.zero_()  # forward's own memory is somebody else's by now
    real.ahead()
    for i in (5, 0, 4, 4, 1, 2, 3, 0):
        one = kept[i]
        assert one is not None
        assert torch.equal(one.take(), wanted[i]), i
    assert real.written_bytes == sum(-(-t.nbytes // 4096) * 4096 for t in wanted)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, 4).t(), torch.zeros(0),
        torch.zeros(LARGEST),
    ],
)  # fmt: skip
def test_what_stays_in_ram(real: SpilledInputs, tensor: torch.Tensor) -> None:
    """Integers, what is not contiguous, nothing, more than was planned for; another unit's."""
    assert real.keep(1, tensor, in_turns=False) is None
    assert real.keep(9, torch.zeros(8), in_turns=False) is None
    assert real.written_bytes == 0


def offsets(jobs: list[tuple[str, int]]) -> list[int]:
    return [offset // 4096 for _, offset in jobs]


def test_the_last_unit_is_read_first(late: tuple[SpilledInputs, LateEngine]) -> None:
    inputs, engine = late
    kept = []
    for unit in range(4):
        kept.append(inputs.keep(unit, torch.zeros(8), in_turns=False))
        assert engine.finish() == [("write", 4096 * unit)]
    inputs.ahead()
    for unit in (3, 2, 1, 0):
        engine.finish()
        one = kept[unit]
        assert one is not None
        one.take()
    assert inputs.read_bytes == 4 * 4096


def test_micro_batches_in_turns(late: tuple[SpilledInputs, LateEngine]) -> None:
    """Unit by unit backward, the first micro-batch of each first."""
    inputs, engine = late
    kept: dict[tuple[int, int], Any] = {}
    for unit in range(3):
        for micro in range(3):
            kept[unit, micro] = inputs.keep(unit, torch.zeros(8), in_turns=True)
            engine.finish()
    inputs.ahead()
    read: list[int] = []
    for unit in (2, 1, 0):
        for micro in range(3):
            read += offsets(engine.finish())
            kept[unit, micro].take()
    assert read == [6, 7, 8, 3, 4, 5, 0, 1, 2]


def test_never_more_than_is_planned_in_ram(late: tuple[SpilledInputs, LateEngine]) -> None:
    inputs, engine = late
    kept = []
    for unit in range(6):
        kept.append(inputs.keep(unit, torch.zeros(1024), in_turns=False))
        engine.finish()
    inputs.ahead()
    assert len(engine.jobs) == AHEAD
    for unit in reversed(range(6)):
        engine.finish()
        one = kept[unit]
        assert one is not None
        held = one.take()
        assert len(engine.jobs) <= AHEAD
        del held
    assert buffer_bytes(4096) == (AHEAD + 1) * 4096


def test_a_forward_that_no_backward_follows(late: tuple[SpilledInputs, LateEngine]) -> None:
    """Its room in the file, and what was read of it, is there for the next one."""
    inputs, engine = late
    for _ in range(3):
        kept = [inputs.keep(unit, torch.zeros(8), in_turns=False) for unit in range(2)]
        assert sorted(engine.finish()) == [("write", 0), ("write", 4096)]
        inputs.ahead()
        assert {what for what, _ in engine.finish()} == {"read"}
        del kept
        gc.collect()


def test_a_forward_between_another_and_its_backward(
    late: tuple[SpilledInputs, LateEngine],
) -> None:
    """What was read ahead makes room, and is read again."""
    inputs, engine = late
    first = [inputs.keep(unit, torch.zeros(8), in_turns=False) for unit in range(2)]
    engine.finish()
    inputs.ahead()
    assert len(engine.finish()) == 2
    second = [inputs.keep(unit, torch.zeros(8), in_turns=False) for unit in range(2)]
    engine.finish()
    inputs.ahead()
    for kept in (*reversed(second), *reversed(first)):
        engine.finish()
        assert kept is not None
        kept.take()
    assert inputs.read_bytes == 6 * 4096


@pytest.mark.parametrize("what", ["write", "read"])
def test_an_error_reaches_backward(late: tuple[SpilledInputs, LateEngine], what: str) -> None:
    inputs, engine = late
    kept = inputs.keep(0, torch.zeros(8), in_turns=False)
    assert kept is not None
    if what == "read":
        engine.finish()
        inputs.ahead()
    ((_, _, _, future),) = engine.jobs
    future.set_exception(TransferError("no space", path="inputs", offset=0))
    with pytest.raises(TransferError, match="no space"):
        kept.take()


# -- the plan -------------------------------------------------------------------------------------


def made(budget: int) -> Any:
    """A maker of plans that fit if what is fixed does."""

    def make(needs: Needs) -> TrainPlan:
        need = sum(needs.fixed.values())
        if need > budget:
            raise PlanError(f"{need - budget} too little")
        return TrainPlan(
            budget=budget, placement=Placement(weights_bytes=0, pinned=frozenset()),
            ram=needs.fixed, disk_bytes=0, spill_bytes=0,
            phases={"forward": (5, 6), "backward": (7, 8)},
        )  # fmt: skip

    return make


INPUTS = KeptInputs(sizes={u: 10 << 20 for u in range(1, 9)}, at_once=4, micro_batches=4)
NEEDS = Needs(fixed={KEPT: (320 << 20) + 7, "else": 100}, kinds={}, grad_dtype=None)


def test_what_fits_stays() -> None:
    found = plans(made(1 << 30), NEEDS, INPUTS)
    assert len(found) == 5
    assert found[0].placement.inputs is None
    assert "320.0 MiB" in found[0].inputs_text
    assert "stay in RAM" in found[0].inputs_text


def test_what_does_not_fit_goes_and_is_counted() -> None:
    found = plans(made(200 << 20), NEEDS, INPUTS)
    plan, spill = found[0], found[0].placement.inputs
    assert spill is not None
    assert spill.units == frozenset({1, 3, 5, 7})
    assert plan.ram[KEPT] == (160 << 20) + 7
    assert plan.ram[MOVING] == 30 << 20
    assert plan.phases == {"forward": (5, 6 + (160 << 20)), "backward": (7 + (160 << 20), 8)}
    assert spill.file_bytes == plan.inputs_bytes == 160 << 20
    assert re.search(r"160.0 MiB of the 320.0 MiB .*4 of 8 units.*does not fit", plan.inputs_text)


def test_too_little_even_so() -> None:
    with pytest.raises(PlanError, match=f"^{(30 << 20) + 107 - 4096} too little"):
        plans(made(4096), NEEDS, INPUTS)


def test_nothing_goes_for_less_than_its_buffers() -> None:
    few = KeptInputs(sizes={0: 4096, 1: 4096, 2: 4096})
    assert (
        len(plans(made(1 << 30), Needs(fixed={KEPT: 12288}, kinds={}, grad_dtype=None), few)) == 1
    )


@pytest.mark.parametrize(
    ("seconds", "wanted"), [([1.0, 0.99, 0.99], 0), ([1.0, 0.9, 0.89], 1), ([1.0, 0.9, 0.5], 2)]
)
def test_spilling_must_be_worth_it(seconds: list[float], wanted: int) -> None:
    found = plans(made(1 << 30), NEEDS, INPUTS)[:3]
    predictions = [Prediction(phases={"forward": s}, lanes={}) for s in seconds]
    assert best(found, predictions) == wanted


# -- a whole run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose step is all inputs: many layers, narrow, of many tokens."""
    place = tmp_path_factory.mktemp("long")
    model = write_model(
        place / "m", dtype=torch.float32, num_hidden_layers=10, hidden_size=128,
        intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    return model, write_data(place / "train.jsonl", rows=500)


def test_a_run_that_fits_only_so(
    long: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights as with RAM for everything."""
    monkeypatch.setattr(preparing, "warm_training", not_warmed)
    monkeypatch.setattr(preparing, "step_rates", lambda *_: None)
    more: dict[str, Any] = {
        "seq_len": 256, "batch_size": 2, "grad_accum": 6, "order": "vertical", "max_steps": 2,
        "save_every": None,
    }  # fmt: skip
    roomy = train(options_for(*long, tmp_path / "roomy", **more))
    with pytest.raises(PlanError) as raised:
        prepare(options_for(*long, tmp_path / "tight", ram=1 << 20, **more))
    least = re.search(r"raise it to (\d+)MiB", str(raised.value))
    assert least is not None
    seen: list[Any] = []

    def look(planned: Any) -> None:
        spill = planned.plan.placement.inputs
        assert spill is not None
        assert any("does not fit otherwise" in line for line in planned.describe())
        seen.append((planned.plan, spill))

    # What is told has room for what processes differ by, and that would do without a spill.
    ram = (int(least[1]) << 20) - DRIFT + (6 << 20)
    log = train(options_for(*long, tmp_path / "tight", ram=ram, **more), Log(), change=look)
    ((plan, spill),) = seen
    one = 2 * 256 * 128 * 4
    assert spill.largest == one
    assert plan.phases["forward"][1] >= 6 * len(spill.units) * one
    end = log.end
    assert end is not None
    assert end.written_bytes >= 2 * 6 * len(spill.units) * one
    assert end.phase_written_bytes["forward"] >= end.written_bytes // 2
    assert end.phase_read_bytes["backward"] >= 2 * 6 * len(spill.units) * one
    assert set(end.busy) == {"compute", "ssd", "update"}
    assert all(0 <= share <= 1.01 for share in end.busy.values())
    assert 0 <= end.exposed_update_s <= end.step_seconds <= end.seconds
    assert log.losses == roomy.losses
    assert log.norms == roomy.norms
    out = [tmp_path / name / "out" for name in ("roomy", "tight")]
    assert weights_of(out[0]) == weights_of(out[1])
