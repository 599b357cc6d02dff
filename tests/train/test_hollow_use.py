"""Weights that a model reads where they are not in memory: said as what it is, not as bad data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import engine_of
from families import tiny_config, write

from offload.errors import OffloadError, UnsupportedModelError
from offload.train.data.batches import Batch
from offload.train.loop import LanguageLoop
from offload.train.steps import Group, NotFinite


def batch() -> Batch:
    ids = torch.randint(5, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(
        input_ids=ids, labels=labels, position_ids=torch.arange(16).expand(2, -1),
        attention_mask=torch.ones_like(ids), lengths=(16, 16), rows=("some.jsonl:1",),
        tokens=ids.numel(), label_tokens=30,
    )  # fmt: skip


def step(engine: Any, one: Batch) -> Any:
    loop = LanguageLoop(engine, None)
    try:
        return loop.step(0, [one], lambda _: Group(lr=1e-3), 1.0)
    finally:
        loop.close()


def test_weights_that_are_read_past_their_layers(tmp_path: Path) -> None:
    """ProphetNet's table of distances, of which it looks rows up by itself."""
    directory = write("prophetnet", tmp_path / "m", torch.float32, config=tiny_config("prophetnet"))
    with (
        engine_of(directory, "disk") as (engine, _),
        pytest.raises(UnsupportedModelError, match="outside of the layer that has it"),
    ):
        step(engine, batch())


def test_a_loss_that_is_none_for_another_reason(tmp_path: Path) -> None:
    directory = write("llama", tmp_path / "m", torch.float32)
    with engine_of(directory, "disk") as (engine, _):
        assert step(engine, batch()).loss > 0
        engine.drain()
        loop = LanguageLoop(engine, None)
        loop._check = _not_finite  # type: ignore[method-assign]
        with pytest.raises(OffloadError, match=r"its rows begin with some\.jsonl:1"):
            loop.step(1, [batch()], lambda _: Group(lr=1e-3), 1.0)
        loop.close()


def _not_finite(_: Any) -> None:
    raise NotFinite("the loss is nan")
