"""Fixtures of the batch tests: quiet transformers, one thread, checkpoints made once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from batch_support import write_model
from measured_once import measured_once


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(family)``, or ``family/q4``: made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, _, quant = name.partition("/")
            target = tmp_path_factory.mktemp("batch") / name.replace("/", "-")
            if quant:
                from offload.models.pack_open import open_source
                from offload.models.pack_run import pack

                with closing(open_source(make(family))) as source:
                    pack(source, target, quant=quant)
            else:
                write_model(family, target)
            made[name] = target
        return made[name]

    return make
