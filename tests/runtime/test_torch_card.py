"""What is called of ``torch.cuda``, on stand-ins for its objects: no card is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offload.runtime.cuda_api import TorchCard


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """``torch.cuda``'s current device, which each thread begins with as 0."""
    found = threading.local()

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        before = getattr(found, "index", 0)
        found.index = where.index
        yield
        found.index = before

    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_a_thread_asks_the_card_itself_for_its_events(current: threading.local) -> None:
    """On card 0, where threads begin, the question would make a context."""
    card = TorchCard.__new__(TorchCard)
    card.device = torch.device("cuda", 1)
    asked: list[tuple[str, int]] = []

    class Event:
        def query(self) -> bool:
            asked.append(("query", getattr(current, "index", 0)))
            return True

        def synchronize(self) -> None:
            asked.append(("synchronize", getattr(current, "index", 0)))

    def work(event: Any) -> None:
        assert card.reached(event)
        card.block(event)
        assert getattr(current, "index", 0) == 0

    thread = threading.Thread(target=work, args=(Event(),))
    thread.start()
    thread.join(30)
    assert asked == [("query", 1), ("synchronize", 1)]
