"""The streamed engine against the resident oracle, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import (
    assert_equal_weights,
    batch,
    engine_of,
    every_pair,
    group_at,
    oracle_of,
    placements,
)
from families import write

from offload.runtime import heap
from offload.train.layout import TrainLayout
from offload.train.opening import Placement
from offload.train.vertical import Rounds
from offload.train.weights import Entry, Weights

STEPS = 4
PLACES = ["disk", "least", "half", "ram"]


def paired(values: list[Any]) -> list[Any]:
    """(place, value): every place and every value in turn; their product is for the sweep. The
    dense model has it in CI."""
    every = [(i, place, value) for i, place in enumerate(PLACES) for value in values]
    return [
        pytest.param(place, value, marks=[pytest.mark.sweep] * (value != values[i % len(values)]))
        for i, place, value in every
    ]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Path] = {}

    def make(family: str, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
        key = (family, dtype, *sorted(how.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / family
            write(family, made[key], dtype, **how)
        return made[key]

    return make


def train(engine: Any, oracle: Any, accumulate: int, clip: float, steps: int = STEPS) -> None:
    for step in range(steps):
        engine.begin_forward()
        if not clip:
            engine.in_backward = group_at(step)
        for micro in range(accumulate):
            engine.last_micro_batch = micro + 1 == accumulate
            ids = batch(step, micro)
            torch.manual_seed(step)  # of dropout
            ours = engine.model(input_ids=ids, labels=ids).loss
            torch.manual_seed(step)
            wanted = oracle.model(input_ids=ids, labels=ids).loss
            assert torch.equal(ours, wanted), (step, micro)
            (ours / accumulate).backward()
            (wanted / accumulate).backward()
        engine.end_backward()
        result = engine.step(group_at(step), clip)
        norm = oracle.step(group_at(step), clip)
        assert result.norm == norm
    assert_equal_weights(engine, oracle)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_a_dense_model(tiny: Any, place: str, clip: float) -> None:
    directory = tiny("qwen3")
    with engine_of(directory, place) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 1, clip)


def test_nothing_is_read_ahead_before_what_stays(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the room of blocks that are pinned, however soon their reads end."""
    begun: list[bool] = []
    read = Weights._read

    def at_once(self: Weights, entry: Entry, priority: int) -> None:
        begun.append(entry.block.index in self.pinned)
        read(self, entry, priority)
        if begun[-1]:
            self._until_ready(entry)  # its callback has run

    monkeypatch.setattr(Weights, "_read", at_once)
    with engine_of(tiny("qwen3_moe"), "half") as (engine, _):
        pinned = len(engine.weights.pinned)
        assert pinned > 1
        assert begun[:pinned] == [True] * pinned
        assert False in begun[pinned:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "accumulate"), paired([3, 8]))
@pytest.mark.parametrize("grad_dtype", [None, "float32"])
def test_accumulation(tiny: Any, place: str, accumulate: int, grad_dtype: str | None) -> None:
    directory = tiny("llama")
    with engine_of(directory, place, grad_dtype=grad_dtype) as (engine, _):
        oracle = oracle_of(directory, engine.layout, grad_dtype=grad_dtype)
        train(engine, oracle, accumulate, 0.5, steps=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "clip"), paired([0.5, 0.0]))
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts(tiny: Any, family: str, place: str, clip: float) -> None:
    directory = tiny(family)
    with engine_of(directory, place) as (engine, _):
        assert list(engine.layout.expert_blocks())
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 2, clip)


@pytest.mark.parametrize(
    ("family", "kept"), [("doge", False), ("doge", True), ("inkling_text", False)]
)
def test_attention_whose_mask_wants_a_gradient(tiny: Any, family: str, kept: bool) -> None:
    """torch computes it in another way than fused: in forward, too, whether graphs are kept or not,
    and in the layers of experts, of which no graph is."""

    def place(layout: TrainLayout) -> Placement:
        units = frozenset(u.index for u in layout.units if not u.groups)
        where = placements(layout)["disk"]
        return replace(where, inputs=None, kept=frozenset(sorted(units)[::2])) if kept else where

    directory = tiny(family)
    with engine_of(directory, place) as (engine, _):
        assert bool(engine.kept_units) == kept
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 2, 0.5, steps=2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_states(tiny: Any, place: str, states: str) -> None:
    directory = tiny("llama")
    with engine_of(directory, place, states=states, seed=7) as (engine, _):
        oracle = oracle_of(directory, engine.layout, states=states, seed=7)
        train(engine, oracle, 1, 0.5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "clip"), paired([0.5, 0.0]))
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_tied_embeddings(tiny: Any, family: str, place: str, clip: float) -> None:
    directory = tiny(family, tie_word_embeddings=True)
    with engine_of(directory, place) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 2, clip)


@pytest.mark.parametrize("place", PLACES)
def test_float32(tiny: Any, place: str) -> None:
    directory = tiny("llama", torch.float32)
    with engine_of(directory, place) as (engine, _):
        oracle = oracle_of(directory, engine.layout, dtype=torch.float32)
        train(engine, oracle, 1, 0.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_frozen_parameters(tiny: Any, place: str, clip: float) -> None:
    def freeze(name: str) -> bool:
        return "embed" in name or "layers.0" in name or name.endswith("k_proj.weight")

    directory = tiny("qwen3_moe")
    with engine_of(directory, place, freeze=freeze) as (engine, _):
        oracle = oracle_of(directory, engine.layout, freeze=freeze)
        train(engine, oracle, 1, clip)


@pytest.mark.parametrize("place", PLACES)
def test_masters_keep_every_bit_of_a_float32_checkpoint(tiny: Any, place: str) -> None:
    from safetensors.torch import load_file

    directory = tiny("llama", torch.float32)
    exact = load_file(directory / "model.safetensors")
    with engine_of(directory, place, dtype="bfloat16") as (engine, _):
        oracle = oracle_of(
            directory, engine.layout, masters=lambda p: exact[p.param].reshape(-1).numpy()
        )
        train(engine, oracle, 1, 0.5)


@pytest.mark.parametrize("place", PLACES)
def test_evaluation_between_steps_waits_for_updates_and_changes_nothing(
    tiny: Any, place: str
) -> None:
    directory = tiny("qwen3_moe")
    with engine_of(directory, place) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        for step in range(3):
            train(engine, oracle, 1, 0.5, steps=step + 1)
            engine.begin_forward()
            with torch.no_grad():
                for micro in range(2):
                    ids = batch(99, micro)
                    wanted = oracle.model(input_ids=ids).logits
                    assert torch.equal(engine.model(input_ids=ids).logits, wanted)


@pytest.fixture(scope="module")
def one_after_the_other() -> dict[Any, Any]:
    """What the usual order came to, by family and clipping."""
    return {}


@pytest.mark.parametrize(
    ("family", "place", "clip"), every_pair(["qwen3_moe", "gpt2"], PLACES, [0.5, 0.0])
)
def test_vertical_accumulation_is_the_usual_one(
    tiny: Any, one_after_the_other: dict[Any, Any], family: str, place: str, clip: float
) -> None:
    """Micro-batches of different lengths, layer by layer, against one after the other."""
    directory = tiny(family)
    width = 3

    def train(vertical: bool, place: str) -> Any:
        with engine_of(directory, place, grad_dtype="float32") as (engine, _):
            rounds = Rounds(width) if vertical else None
            losses = []
            for step in range(3):
                engine.begin_forward()
                if not clip:
                    engine.in_backward = group_at(step)

                engine.random_key = lambda m, unit, step=step: 1000 * step + 100 * m + unit

                def micro(i: int, step: int = step) -> float:
                    engine.micro = i
                    torch.manual_seed(1000 * step + 100 * i + 99)
                    ids = batch(step, i, length=8 + 3 * i)
                    loss = engine.model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    return loss.item()

                if rounds is not None:
                    engine.rounds = rounds
                    losses += rounds.run([partial(micro, i) for i in range(width)])
                else:
                    for i in range(width):
                        engine.last_micro_batch = i == width - 1
                        losses.append(micro(i))
                engine.end_backward()
                losses.append(engine.step(group_at(step), clip).norm)
            if rounds is not None:
                rounds.close()
            return losses, [engine.block_values(b) for b in engine.layout.blocks]

    ours, values = train(True, place)
    if (family, clip) not in one_after_the_other:
        one_after_the_other[family, clip] = train(False, "ram")
    wanted, usual = one_after_the_other[family, clip]
    assert ours == wanted
    assert all(torch.equal(a, b) for a, b in zip(values, usual, strict=True))


def test_freed_blocks_stay_within_a_limit_and_until_the_end(tiny: Any) -> None:
    """Looked at before each unit; where the limit is near they are given back. The same bits."""
    directory = tiny("qwen3")
    kept_before = heap._keeping
    with engine_of(directory, "half") as (engine, _):
        assert engine.give_back is None
        engine.keep_freed(0, 1)
        assert engine.give_back is None
        assert heap._keeping == kept_before
        engine.keep_freed(1 << 20, 1)  # exceeded at any rate
        assert heap._keeping == kept_before + 1
        train(engine, oracle_of(directory, engine.layout), 1, 0.5, steps=2)
        units = len(engine.layout.units)
        assert engine.give_back is not None
        assert engine.give_back.times >= 2 * 2 * units  # forward and backward of two steps
        engine.bound_freed(1 << 20, 2)
        assert engine.give_back.limit == 1
    assert heap._keeping == kept_before


def test_small_free_blocks_have_a_limit_where_none_are_kept(tiny: Any) -> None:
    """They stay between those in use: a budget of 290 MiB was exceeded by an eighth."""
    directory = tiny("qwen3")
    kept_before = heap._keeping
    with engine_of(directory, "half") as (engine, _):
        engine.bound_freed(0, 1)
        assert engine.give_back is None
        engine.bound_freed(1 << 20, 1)  # exceeded at any rate
        assert heap._keeping == kept_before
        train(engine, oracle_of(directory, engine.layout), 1, 0.5, steps=1)
        assert engine.give_back is not None
        assert engine.give_back.times >= 2 * len(engine.layout.units)
