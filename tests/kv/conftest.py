"""Fixtures of the KV tests: quiet transformers, one thread, tiny models made once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from measured_once import measured_once


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    with measured_once():
        yield


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """``tiny(family, seed=0, **config)``: a tiny random model in bfloat16, made once."""
    from families import randomise, tiny_config
    from transformers import AutoModelForCausalLM

    made: dict[Any, Any] = {}

    def make(family: str, seed: int = 0, **overrides: Any) -> Any:
        key = (family, seed, repr(overrides))
        if key not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
            randomise(model, seed)
            made[key] = model.to(torch.bfloat16).eval()
            made[key].generation_config.pad_token_id = 0
            made[key].generation_config.eos_token_id = None
        return made[key]

    return make
