"""Fixtures of the model tests: no network, quiet transformers, tiny checkpoints made once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import Golden, golden
from families import write
from measured_once import measured_once


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and other tests run beside these."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    with measured_once():
        yield


@pytest.fixture
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny models as finely as large ones: a vocabulary of 256 has two head slices, and all
    but vectors lie in their pages as in the file. And do not warm up a toy before each of
    hundreds of them."""
    from offload.models import layouts, load, toy, units

    monkeypatch.setattr(units, "HEAD_SLICE_BYTES", 16384)
    monkeypatch.setattr(layouts, "IN_PAGES_FROM", 512)
    monkeypatch.setattr(load, "warm_up", lambda *_: toy.Warm(baseline_rss=0))


@pytest.fixture
def split_layers(cut_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split layers into their projections as well, where that is possible."""
    from offload.models import split

    monkeypatch.setattr(split, "STEP_BYTES", 4096)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Golden]:
    """``checkpoint(family, dtype, **how)``: written and asked once, then shared."""
    made: dict[Any, Golden] = {}

    def make(
        family: str,
        dtype: torch.dtype = torch.bfloat16,
        *,
        generates: bool = True,
        load_dtype: torch.dtype | None = None,
        overrides: dict[str, Any] | None = None,
        **save: Any,
    ) -> Golden:
        key = (family, dtype, generates, load_dtype, repr(overrides), repr(save))
        if key not in made:
            from families import tiny_config

            directory: Path = tmp_path_factory.mktemp(family)
            config = tiny_config(family, **overrides) if overrides else None
            write(family, directory, dtype, config=config, **save)
            made[key] = golden(directory, load_dtype or dtype, generates)
        return made[key]

    return make
