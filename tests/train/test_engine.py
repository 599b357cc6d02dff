"""The streamed engine against the resident oracle, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import assert_equal_weights, batch, engine_of, group_at, oracle_of
from families import write

STEPS = 4
PLACES = ["disk", "least", "half", "ram"]


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
            ours = engine.model(input_ids=ids, labels=ids).loss
            wanted = oracle.model(input_ids=ids, labels=ids).loss
            assert torch.equal(ours, wanted), (step, micro)
            (ours / accumulate).backward()
            (wanted / accumulate).backward()
        engine.end_backward()
        result = engine.step(group_at(step), clip)
        norm = oracle.step(group_at(step), clip)
        assert result.norm == norm
    assert_equal_weights(engine, oracle)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_a_dense_model(tiny: Any, place: str, clip: float) -> None:
    directory = tiny("qwen3")
    with engine_of(directory, place) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 1, clip)
