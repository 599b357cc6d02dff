"""The devices that compute: the same tests on each, on a real card where there is one."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Iterator

import pytest
import torch
from fake_card import FakeCard

from offload.runtime import cuda_api

CARD = torch.cuda.is_available()
"""Whether torch sees a card here."""

DEVICES = [
    "sim",
    pytest.param("paper", marks=pytest.mark.skipif(CARD, reason="there is a real card")),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not CARD, reason="torch sees no card here")],
    ),
]
"""``paper``: the device of a card on a fake of the card, whose memory is the CPU's."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What ``offload.load(device=...)`` is given."""
    kind = str(request.param)
    if kind != "paper":
        yield kind
        if kind == "cuda":
            torch.cuda.empty_cache()
        return
    card = FakeCard(jitter_s=50e-6)
    monkeypatch.setattr(cuda_api, "card_count", lambda: 1)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda index: card)
    yield "cuda"
    card.end()


@pytest.fixture
def place(device: str) -> torch.device:
    """Where tensors of ``device`` are, as torch names it."""
    on_card = CARD and device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny models as finely as large ones, and do not warm up a toy before each of them."""
    from offload.models import layouts, load, toy, units

    monkeypatch.setattr(units, "HEAD_SLICE_BYTES", 16384)
    monkeypatch.setattr(layouts, "IN_PAGES_FROM", 512)
    monkeypatch.setattr(load, "warm_up", lambda *_: toy.Warm(baseline_rss=0))
    monkeypatch.setattr(load, "warm_card", lambda *_: None)
