"""Training tests: quiet transformers, no network, one thread."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import (
    everything_else_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a whole run; its log and the bytes of its weights."""
    planned_once(monkeypatch)
    data = write_data(tmp_path / "data.jsonl")

    def run(model: Path, name: str, **more: Any) -> Any:
        options = options_for(model, data, tmp_path / name, **more)
        log = train(options, change=everything_else_on_disk)
        return log.losses, log.norms, weights_of(tmp_path / name / "out")

    return run
