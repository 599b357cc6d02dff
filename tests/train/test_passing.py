"""Layers that use an earlier one's keys and values, through a mapping that all are called with."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin_support import streamed
from engine_support import (
    assert_equal_weights,
    batch,
    engine_of,
    group_at,
    oracle_of,
    placements,
)
from families import tiny_config, write

from offload.errors import OffloadError
from offload.models.meta import build
from offload.train.footprint import measure_training
from offload.train.layout import TrainLayout, lay_out
from offload.train.opening import Placement
from offload.train.passing import Watch, hand_over, without_caches

FAMILIES = ["gemma3n_text", "gemma4_text"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            config = tiny_config(family, num_hidden_layers=6, num_kv_shared_layers=4)
            place = tmp_path_factory.mktemp("tiny") / family
            made[family] = write(family, place, config=config)
        return made[family]

    return make


def kept(layout: TrainLayout) -> Placement:
    units = frozenset(u.index for u in layout.units)
    return replace(placements(layout)["half"], inputs=None, kept=units)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["disk", "half", kept])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_come_back_to_whose_keys_were_used(tiny: Any, family: str, place: Any) -> None:
    directory = tiny(family)
    with engine_of(directory, place) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        for step in range(3):
            engine.begin_forward()
            ids = batch(step, 0)
            for model in (engine.model, oracle.model):
                model(input_ids=ids, labels=ids).loss.backward()
            engine.end_backward()
            assert engine.step(group_at(step), 0.5).norm == oracle.step(group_at(step), 0.5)
            with torch.no_grad():
                engine.begin_forward()
                logits = engine.model(input_ids=ids).logits
                assert torch.equal(logits, oracle.model(input_ids=ids).logits)
        assert_equal_weights(engine, oracle)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_weighed(tiny: Any, family: str) -> None:
    model = build(tiny(family)).model
    model.train()
    units = [unit.module for unit in lay_out(model).units]
    found = measure_training(model, units, 2, 64)
    assert found.measured
    layers = [
        nbytes
        for unit, nbytes in zip(units, found.arguments, strict=True)
        if type(unit).__name__.endswith("DecoderLayer")
    ]
    assert len(layers) == 6
    assert min(layers[2:]) > layers[0]


def test_a_cache_that_holds_something_is_no_cache_to_train_with(tiny: Any) -> None:
    """Prefix tuning brings one: without autograd it would be used, and with it not."""
    from transformers import DynamicCache

    with engine_of(tiny("gemma4_text"), "disk") as (engine, _):
        cache = DynamicCache(config=engine.model.config)
        keys = torch.zeros((2, 2, 3, 16), dtype=torch.bfloat16)
        cache.update(keys, keys, 0)
        engine.begin_forward()
        with pytest.raises(OffloadError, match=r"use_cache=False.* instead of prefix tuning"):
            engine.model(input_ids=batch(0, 0), past_key_values=cache)


@pytest.mark.parametrize("after", [torch.enable_grad, torch.no_grad])
def test_a_cache_that_was_left_empty_is_not_gone_on_with(tiny: Any, after: Any) -> None:
    """Its tokens were missing to the next forward, without a word."""
    with engine_of(tiny("gemma4_text"), "disk") as (engine, _):
        engine.begin_forward()
        out = engine.model(input_ids=batch(0, 0), use_cache=True)
        with after(), pytest.raises(OffloadError, match=r"earlier forward.*no_grad"):
            engine.model(input_ids=batch(0, 0), past_key_values=out.past_key_values)
        engine.model(input_ids=batch(0, 0), use_cache=True)  # with one of its own
        with torch.no_grad():
            out = engine.model(input_ids=batch(0, 0), use_cache=True)
            engine.model(input_ids=batch(0, 0), past_key_values=out.past_key_values)


def test_an_input_that_is_changed_in_place(tiny: Any) -> None:
    """torch's error named a shape and two versions. xLSTM changes its states in this way."""
    with streamed(tiny("gemma4_text"), "ram") as model:
        ids = batch(0, 0)
        change = model.model.layers[1].register_forward_hook(lambda _, given, __: given[0].mul_(2))
        loss = model(input_ids=ids, labels=ids).loss
        change.remove()
        with pytest.raises(OffloadError, match=r"DecoderLayer.*in place.*use_cache=False.*x \+ y"):
            loss.backward()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()


def test_only_what_a_unit_puts_there_is_a_result() -> None:
    one, two = torch.zeros(2), torch.ones(2)
    given: Any = UserDict({"full": (one, two), "n": 3})
    (own,), _ = without_caches((given,), {})
    assert own == {"full": (one, two), "n": 3}
    watch = Watch((own,), {})
    own["full"] = (own["full"][0], own["full"][1])
    own["window"] = (two, one)
    (stored,) = watch.stored()
    assert set(stored) == {"window"}
    assert "window" not in given
    hand_over([stored], (given,), {})
    assert given["window"][0] is two
