"""The devices that compute: the same tests on each, on a real card where there is one."""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Iterator

import pytest
import strict_card
import torch
from fake_card import FakeCard

from offload.models import head_check
from offload.runtime import cuda_api
from offload.train import card_values

CARD = torch.cuda.is_available()
"""Whether torch sees a card here."""

DEVICES = [
    "sim",
    pytest.param(
        "paper",
        marks=[pytest.mark.sweep, pytest.mark.skipif(CARD, reason="there is a real card")],
    ),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not CARD, reason="torch sees no card here")],
    ),
]
"""``paper``: the device of a card on a fake of the card, whose memory is the CPU's. Some of it runs
with all other tests on a stricter one, see ``test_strict_card``."""

STRICT = os.environ.get("OFFLOAD_TEST_CARD") == "strict"
"""Instead of all of them a fake whose memory is of a device of its own (``strict_card``)."""
if STRICT:
    DEVICES = ["strict"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What ``offload.load(device=...)`` is given."""
    kind = str(request.param)
    if kind not in ("paper", "strict"):
        yield kind
        if kind == "cuda":
            torch.cuda.empty_cache()
        return
    card = strict_card.StrictCard(jitter_s=50e-6) if STRICT else FakeCard(jitter_s=50e-6)
    monkeypatch.setattr(cuda_api, "card_count", lambda: 1)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda index: card)
    if STRICT:
        monkeypatch.setattr(cuda_api, "card_name", lambda device: card.name)
        monkeypatch.setattr(card_values, "make_launcher", strict_card.launcher)
        found = f"import sys; sys.path[:0] = {sys.path[:]!r}; import strict_card; "
        probe = f"{found}strict_card.device()\n{head_check._PROBE}"
        monkeypatch.setattr(head_check, "_PROBE", probe)
    yield "cuda"
    card.end()


@pytest.fixture
def place(device: str) -> torch.device:
    """Where tensors of ``device`` are, as torch names it."""
    if STRICT:
        return strict_card.device()
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
