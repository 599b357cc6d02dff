"""Adapters on a base that stays packed, against the same adapters on a resident model with the
values that the pack holds: bit for bit, at every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_support import EXPERTS, Made, adapted_oracle
from qlora_support import pack_checkpoint, packed_engine, unpacked_model
from test_lora import train

from offload.models.pack_reader import PackedModel

CASES = {
    "qwen3": {"tie_word_embeddings": True, "vocab_size": 520},
    "llama": {"tie_word_embeddings": False, "vocab_size": 521},
    "qwen3_moe": {"vocab_size": 520},
    "gpt_oss": {"vocab_size": 520},
}
"""Vocabularies whose tables are units of their own; no multiples of 16."""


class Packs:
    """By (family, quant): checkpoint, pack, and the checkpoint that its values make."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._tiny = Made(factory)
        self._factory = factory
        self._made: dict[Any, tuple[Path, Path, Path]] = {}

    def __call__(self, family: str, quant: str) -> tuple[Path, Path, Path]:
        if (family, quant) not in self._made:
            directory = self._tiny(family, **CASES[family])
            room = self._factory.mktemp("packs")
            packed = pack_checkpoint(directory, room / "pack", quant)
            values = unpacked_model(directory, PackedModel.open(packed), room / "values")
            self._made[family, quant] = directory, packed, values
        return self._made[family, quant]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return Packs(tmp_path_factory)


@pytest.mark.parametrize("place", ["disk", "ram"])
@pytest.mark.parametrize(
    ("family", "quant"),
    [("qwen3", "q4"), ("llama", "q8"), ("qwen3_moe", "q4"), ("gpt_oss", "q4"), ("gpt_oss", "none")],
)
def test_equals_resident_lora_on_the_unpacked_values(
    packs: Packs, family: str, quant: str, place: str
) -> None:
    _, packed, values = packs(family, quant)
    how: dict[str, Any] = {"targets": EXPERTS} if "moe" in family or "oss" in family else {}
    with packed_engine(packed, None, place, **how) as (engine, adapters, base, _):
        kept = {engine.layout.blocks[b].id for b in base.recipes}
        assert any("~packed" in k for k in kept)
        assert any(recipe.table for recipe in base.recipes.values())
        assert bool(how) == any("experts#" in k for k in kept)
        train(engine, adapted_oracle(values, engine.layout, **how), 2, 0.05)
        assert adapters.unused() == []
