"""For all tests: each starts as from a terminal, whatever ran the suite or ran before it."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new_is_searched_for_garbage() -> None:
    """The runtime collects garbage when it opens a model or begins a run. In a process that has
    imported everything and ran a thousand tests one such search takes longer than most tests: a
    user's process is a young one, and so is this when a module begins."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_from_a_terminal() -> Iterator[None]:
    """A background job of a script has SIGINT ignored; the command line sets our log's level."""
    handler, log = signal.getsignal(signal.SIGINT), logging.getLogger("offload")
    level, handlers = log.level, list(log.handlers)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
    log.setLevel(level)
    log.handlers[:] = handlers
