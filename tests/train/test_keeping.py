"""Units that keep their graph: same bits as run again, weights elsewhere in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import assert_equal_weights, batch, engine_of, group_at, oracle_of, placements
from families import write
from run_support import Log, not_warmed, options_for, train, write_data, write_model

from offload.errors import PlanError
from offload.train import plan as training_plan
from offload.train import preparing
from offload.train.engine import Engine
from offload.train.keeping import GRAPHS, KeptGraphs, plans_keeping
from offload.train.layout import TrainLayout
from offload.train.opening import Placement
from offload.train.plan import LEAVING, Needs, TrainPlan
from offload.train.predicting import StepRates
from offload.train.preparing import prepare
from offload.train.run import Run
from offload.train.vertical import Rounds


def keeping(place: str, every: int) -> Any:
    """A placement, with every n-th unit's graph kept."""

    def of(layout: TrainLayout) -> Placement:
        units = frozenset(u.index for u in layout.units if not u.groups)
        where = placements(layout)[place]
        return replace(where, inputs=None, kept=frozenset(sorted(units)[::every]))

    return of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["disk", "half", "ram"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_bits(tmp_path: Path, family: str, place: str, every: int) -> None:
    """Dropout where the family has it; two micro-batches; tied embeddings where it ties them."""
    write(family, tmp_path / "model", torch.bfloat16)
    with engine_of(tmp_path / "model", keeping(place, every)) as (engine, _):
        assert engine.kept_units
        oracle = oracle_of(tmp_path / "model", engine.layout)
        for step in range(3):
            engine.begin_forward()
            for micro in range(2):
                engine.last_micro_batch = micro == 1
                ids = batch(step, micro)
                for model in (engine.model, oracle.model):
                    torch.manual_seed(step)  # of dropout
                    (model(input_ids=ids, labels=ids).loss / 2).backward()
            engine.end_backward()
            norm = engine.step(group_at(step), 0.5).norm
            assert norm == oracle.step(group_at(step), 0.5)
        assert_equal_weights(engine, oracle)


def test_updates_inside_backward(tmp_path: Path) -> None:
    write("llama", tmp_path / "model", torch.bfloat16)
    with engine_of(tmp_path / "model", keeping("least", 1)) as (engine, _):
        oracle = oracle_of(tmp_path / "model", engine.layout)
        for step in range(3):
            engine.begin_forward()
            engine.in_backward = group_at(step)
            ids = batch(step, 0)
            for model in (engine.model, oracle.model):
                model(input_ids=ids, labels=ids).loss.backward()
            engine.end_backward()
            assert engine.step(group_at(step), 0.0).norm == oracle.step(group_at(step), 0.0)
        assert_equal_weights(engine, oracle)


def test_weights_are_not_held(tmp_path: Path) -> None:
    """What a graph saves of a unit whose weights are gone is no more than its activations."""
    write("llama", tmp_path / "model", torch.bfloat16)
    with engine_of(tmp_path / "model", keeping("disk", 1)) as (engine, _):
        ids = batch(0, 0)
        loss = engine.model(input_ids=ids, labels=ids).loss
        gone = [u for u in engine.layout.units if not engine._running[u.index].entries]
        assert len(gone) == len(engine.layout.units)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_rounds(tmp_path: Path) -> None:
    """Micro-batches in turns: graphs of all of them at once."""
    write("llama", tmp_path / "model", torch.bfloat16)
    with engine_of(tmp_path / "model", keeping("disk", 1)) as (engine, _):
        oracle = oracle_of(tmp_path / "model", engine.layout)
        rounds = Rounds(3)
        try:
            for step in range(2):
                engine.begin_forward()

                def run(micro: int, step: int = step) -> float:
                    ids = batch(step, micro)
                    loss = engine.model(input_ids=ids, labels=ids).loss / 3
                    loss.backward()
                    return float(loss.detach())

                engine.rounds = rounds
                rounds.run([lambda m=m: run(m) for m in range(3)])
                engine.rounds = None
                for micro in range(3):
                    ids = batch(step, micro)
                    (oracle.model(input_ids=ids, labels=ids).loss / 3).backward()
                engine.end_backward()
                assert engine.step(group_at(step), 0.5).norm == oracle.step(group_at(step), 0.5)
            assert_equal_weights(engine, oracle)
        finally:
            rounds.close()


def test_shares() -> None:
    """The last units, as many as fit."""
    asked: list[int] = []

    def make(needs: Needs) -> TrainPlan:
        asked.append(needs.fixed[GRAPHS])
        if needs.fixed[GRAPHS] > 700:
            raise PlanError("too much")
        return TrainPlan(
            budget=1000,
            placement=Placement(
                weights_bytes=1, pinned=frozenset(), buffers=6 if needs.fixed[GRAPHS] < 600 else 5
            ),
            ram=needs.fixed, disk_bytes=0, spill_bytes=0, phases={},
        )  # fmt: skip

    needs = Needs(fixed={"else": 1}, kinds={}, grad_dtype=None)
    graphs = KeptGraphs(sizes={u: 50 for u in range(1, 9)}, at_once=2)
    found = plans_keeping(make, needs, graphs, buffers=5)
    assert [p.placement.kept for p in found] == [frozenset(range(9 - n, 9)) for n in range(1, 8)]
    assert asked == [100 * n for n in range(1, 9)]
    fewer = plans_keeping(make, needs, graphs, buffers=6)
    assert len(fewer) == 5  # the next one would have fewer tiles under way
    assert "7 of 8 units keep" in found[-1].inputs_text


def test_a_run_keeps_what_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing that costs much is not done twice, and the result is the same."""
    monkeypatch.setattr(preparing, "warm_training", not_warmed)
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data.jsonl")

    def rates(seconds: float) -> Any:
        def of(meta: Any, layout: TrainLayout, *_: Any) -> StepRates:
            return StepRates(
                units={u.index: (seconds / 4, 3 * seconds / 4) for u in layout.units},
                disk_read=1e9, disk_write=1e9, update=1e9,
            )  # fmt: skip

        return of

    seen: dict[str, Any] = {}
    for name, seconds in (("dear", 100.0), ("free", 0.0)):
        monkeypatch.setattr(preparing, "step_rates", rates(seconds))
        (tmp_path / name).mkdir()
        log = Log()

        def look(run: Run, name: str = name) -> None:
            seen[name] = run.plan.placement.kept

        train(options_for(model, data, tmp_path / name), log, change=look)
        seen[name, "losses"] = log.losses
    layers = {u.index for u in prepare_layout(model, data, tmp_path).units if "layers" in u.name}
    assert seen["dear"] == layers
    assert not seen["free"]
    assert seen["dear", "losses"] == seen["free", "losses"]


def test_a_run_keeps_freed_blocks_where_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of the plan; what comes out is the same."""
    monkeypatch.setattr(preparing, "warm_training", not_warmed)
    monkeypatch.setattr(training_plan, "LARGE_BYTES", 1)  # these models' blocks are small
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data.jsonl")
    seen: dict[str, Any] = {}
    for name, faults in (("dear", 1.5), ("free", 1.0)):

        def rates(meta: Any, layout: TrainLayout, *_: Any, faults: float = faults) -> StepRates:
            return StepRates(
                units={u.index: (1.0, 3.0) for u in layout.units},
                disk_read=1e9, disk_write=1e9, update=1e9, faults=faults,
            )  # fmt: skip

        monkeypatch.setattr(preparing, "step_rates", rates)
        (tmp_path / name).mkdir()
        log = Log()

        def look(run: Run, name: str = name) -> None:
            seen[name] = run.plan

        train(options_for(model, data, tmp_path / name), log, change=look)
        seen[name, "losses"] = log.losses
    dear, free = seen["dear"], seen["free"]
    assert dear.placement.freed_bytes == dear.ram[training_plan.FREED] > 0
    assert training_plan.FREED not in free.ram or dear.placement.kept == free.placement.kept
    assert dear.ram_bytes <= dear.budget
    assert dear.limit == dear.budget - dear.ram["slack"]
    assert seen["dear", "losses"] == seen["free", "losses"]


def test_how_many_freed_blocks_are_worth_keeping() -> None:
    large = training_plan.LARGE_BYTES
    assert training_plan.freed_bytes(large, large) == 0  # they stay at any rate
    assert training_plan.freed_bytes(3 * large, large) == 3 * large
    assert training_plan.freed_bytes(large, 5 * large) == 5 * large
    assert training_plan.affordable(100, 800)
    assert not training_plan.affordable(101, 800)


def prepare_layout(model: Path, data: Path, place: Path) -> TrainLayout:
    (place / "third").mkdir()
    run = prepare(options_for(model, data, place / "third"))
    try:
        return run.layout
    finally:
        run.close()


def test_a_run_that_keeps_nothing_gives_free_blocks_back_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a unit that could exceed it, by what the plan says that one takes at most."""
    model = write_model(tmp_path / "model")
    options = options_for(
        model, write_data(tmp_path / "train.jsonl"), tmp_path, max_steps=1, warmup=0
    )
    given: list[tuple[int, int]] = []

    def bound(engine: Engine, ahead: int, limit: int) -> None:
        given.append((ahead, limit))

    monkeypatch.setattr(Engine, "bound_freed", bound)
    runs: list[Run] = []
    train(options, change=runs.append)
    (run,) = runs
    ram = run.plan.ram
    assert not run.plan.placement.freed_bytes
    ahead = ram["activations of a unit"] + ram["loss"]
    assert given == [(ahead + ram.get(LEAVING, 0), run.baseline + run.plan.budget)]


def test_what_planning_frees_is_not_there_when_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing a step left 40 MiB of small blocks, of a budget that counts 20 for the process."""
    model = write_model(tmp_path / "model")
    options = options_for(model, write_data(tmp_path / "train.jsonl"), tmp_path)
    order: list[str] = []
    for name in ("step_rates", "give_back", "reset_peak_rss"):
        monkeypatch.setattr(preparing, name, lambda *_, name=name: order.append(name))
    prepare(options).close()
    assert "step_rates" in order
    assert order[-2:] == ["give_back", "reset_peak_rss"]
