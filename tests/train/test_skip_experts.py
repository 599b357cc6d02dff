"""Experts that no token reached keep weights and states, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import assert_equal_weights, batch, engine_of, group_at, oracle_of
from families import tiny_config, write
from run_support import (
    again,
    everything_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.errors import OffloadError
from offload.models.expert_groups import expert_groups
from offload.train.layout import Piece
from offload.train.needs import touched_shares
from offload.train.plan import Needs, grad_bytes, slot_bytes, traffic
from offload.train.preparing import prepare
from offload.train.updates import Updater

STEPS = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More experts than a few tokens reach."""
    path = tmp_path_factory.mktemp("moe") / "m"
    write("qwen3_moe", path, torch.bfloat16, config=tiny_config("qwen3_moe", num_local_experts=12))
    return path


class Reached:
    """The experts that a resident model's routers choose, heard at the door of their modules."""

    def __init__(self, model: Any) -> None:
        self.experts: dict[str, set[int]] = defaultdict(set)
        self.total = 0
        for group in expert_groups(model):
            group.module.register_forward_pre_hook(self._hear(group.name), with_kwargs=True)
            self.total += group.n_experts

    def _hear(self, name: str) -> Any:
        def hear(_: Any, args: Any, kwargs: Any) -> None:
            chosen = [
                a for a in (*args, *kwargs.values())
                if isinstance(a, torch.Tensor) and a.dtype == torch.int64
            ]  # fmt: skip
            assert len(chosen) == 1
            self.experts[name].update(chosen[0].flatten().tolist())

        return hear

    def missed(self, piece: Piece) -> bool:
        module = piece.param.rpartition(".")[0]
        return piece.expert is not None and piece.expert not in self.experts[module]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize(
    ("place", "states"), [("disk", "fp32"), ("half", "bf16"), ("ram", "fp32"), ("least", "8bit")]
)
def test_equals_a_resident_loop_that_skips_them(
    directory: Path, place: str, states: str, clip: float
) -> None:
    with engine_of(directory, place, states=states, skip_untouched=True) as (engine, tiles):
        oracle = oracle_of(directory, engine.layout, states=states)
        reached = Reached(oracle.model)
        ever: set[tuple[str, int]] = set()
        for step in range(STEPS):
            reached.experts.clear()
            engine.begin_forward()
            if not clip:
                engine.in_backward = group_at(step)
            for micro in range(2):
                engine.last_micro_batch = micro == 1
                ids = batch(step, micro, length=2, rows=1)
                ours = engine.model(input_ids=ids, labels=ids).loss
                wanted = oracle.model(input_ids=ids, labels=ids).loss
                assert torch.equal(ours, wanted), (step, micro)
                (ours / 2).backward()
                (wanted / 2).backward()
            engine.end_backward()
            result = engine.step(group_at(step), clip)
            assert result.norm == oracle.step(group_at(step), clip, reached.missed)
            assert result.experts == sum(map(len, reached.experts.values()))
            assert result.experts + result.skipped == reached.total
            assert result.skipped > 0
            ever |= {(name, e) for name, found in reached.experts.items() for e in found}
        assert_equal_weights(engine, oracle)
        engine.drain()
        for block in engine.layout.blocks:
            piece = block.pieces[0]
            if piece.expert is not None and place == "disk":
                # What was never reached was never written.
                written = (piece.param.rpartition(".")[0], piece.expert) in ever
                assert {tiles.written(t) for t in block.tiles} == {written}
        assert len(ever) < reached.total


def test_without_the_flag_nothing_is_counted(directory: Path) -> None:
    with engine_of(directory, "least") as (engine, _):
        ids = batch(0, 0, length=2, rows=1)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        engine.end_backward()
        result = engine.step(group_at(0), 0.5)
        assert (result.experts, result.skipped) == (0, 0)


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Options of a run whose steps have few tokens."""
    planned_once(monkeypatch)
    model = write_model(tmp_path / "m", "qwen3_moe", num_local_experts=12)
    data = write_data(tmp_path / "d.jsonl")
    return lambda place, **more: options_for(
        model, data, tmp_path / place, seq_len=3, batch_size=1, skip_untouched_experts=True, **more
    )


def test_a_run(short: Any, tmp_path: Path) -> None:
    """The plan says that it is not exact; a stopped run goes on to the same bits; less is written;
    and it is another run than the one that updates every expert."""
    planned = prepare(short("plan"))
    assert any(line.startswith("not exact: ") for line in planned.describe())
    planned.close()
    options = short("whole")
    whole = train(options, change=everything_on_disk)
    assert whole.end is not None
    assert whole.end.skipped_updates > 0
    assert whole.end.expert_updates > 0
    exact = dataclasses.replace(options, skip_untouched_experts=False)
    with pytest.raises(OffloadError, match="its skip_untouched_experts is True"):
        train(again(exact))
    every = train(
        dataclasses.replace(short("every"), skip_untouched_experts=False),
        change=everything_on_disk,
    )
    assert every.end is not None
    assert (every.end.skipped_updates, every.end.expert_updates) == (0, 0)
    assert every.losses[1] == whole.losses[1]
    assert whole.end.written_bytes < every.end.written_bytes
    assert weights_of(tmp_path / "every" / "out") != weights_of(tmp_path / "whole" / "out")
    parts = short("parts", save_every=None)
    first = train(parts, stop_after=2)
    second = train(again(parts, order="usual"), change=everything_on_disk)
    assert first.losses | second.losses == whole.losses
    assert weights_of(tmp_path / "parts" / "out") == weights_of(tmp_path / "whole" / "out")


def test_nothing_to_skip(tmp_path: Path, short: Any) -> None:
    dense = write_model(tmp_path / "dense")
    with pytest.raises(
        OffloadError, match="--skip-untouched-experts cannot take effect: the model"
    ):
        prepare(dataclasses.replace(short("a"), model=str(dense)))
    with pytest.raises(OffloadError, match="--skip-untouched-experts cannot take effect with --me"):
        prepare(short("b", method="lora"))


def test_the_plan_counts_the_experts_that_even_routing_reaches(
    directory: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m", "qwen3_moe", num_local_experts=12)
    data = write_data(tmp_path / "train.jsonl")
    options = options_for(
        model, data, tmp_path, seq_len=3, batch_size=1, skip_untouched_experts=True
    )
    run = prepare(options)
    run.close()
    everything_on_disk(run)
    top = run.meta.model.config.num_experts_per_tok
    share = 1 - (1 - top / 12) ** 3  # three tokens
    shares = touched_shares(run.meta, run.layout, options)
    assert 0 < share < 1
    assert set(shares) == set(run.layout.expert_blocks())
    assert list(shares.values()) == pytest.approx([share] * len(shares))

    def moved(updated: dict[int, float]) -> dict[str, tuple[int, int]]:
        needs = Needs(
            fixed={}, kinds=Updater.kinds(run.layout, "fp32"), grad_dtype=None, updated=updated
        )
        where = run.plan.placement
        return traffic(run.layout, needs, where, clipping=True, backwards=1)

    every, some = moved({}), moved(shares)
    needs = Needs(fixed={}, kinds=Updater.kinds(run.layout, "fp32"), grad_dtype=None)
    slots = sum(slot_bytes(run.layout, needs, b) for b in shares)
    spilled = sum(grad_bytes(run.layout, needs, b) for b in shares)
    assert every["forward"][1] - some["forward"][1] == pytest.approx((1 - share) * slots, abs=2)
    assert every["backward"][1] - some["backward"][1] == pytest.approx((1 - share) * spilled, abs=2)
    assert run.plan.phases.keys() == some.keys()
