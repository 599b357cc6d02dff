"""For all tests: each starts as from a terminal, whatever ran the suite or ran before it."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import engine

# Of five minutes by default, which is a test's time limit: that ends the process, and nobody learns
# what failed. An example that is not the smallest says more.
assert engine.MAX_SHRINKING_SECONDS > 60
engine.MAX_SHRINKING_SECONDS = 60

# By default an example that takes 200 ms is a failure: on a busy machine any does.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``sampled(n)`` one case in n is CI's, the others are the sweep's: on
    the diagonals of the grid of its parameters, where each value of each comes again and again."""
    seen: dict[object, dict[object, int]] = {}
    for item in items:
        mark, case = item.get_closest_marker("sampled"), getattr(item, "callspec", None)
        if mark is None or case is None:
            continue
        place = 0
        for axis, grid in enumerate(item.iter_markers("parametrize")):
            names = grid.args[0]
            names = names.split(",") if isinstance(names, str) else names
            values = repr([case.params[name.strip()] for name in names])
            known = seen.setdefault((item.nodeid.partition("[")[0], axis), {})
            place += known.setdefault(values, len(known))
        if place % mark.args[0]:
            item.add_marker(pytest.mark.sweep)


@pytest.fixture(scope="session")
def searched() -> list[int]:
    """How many objects there were after the last whole search for garbage."""
    return [0]


@pytest.fixture(autouse=True, scope="module")
def what_other_modules_left(searched: list[int]) -> None:
    """A module's fixtures (models, their threads and files) are frozen while they live. A whole
    search before another module finds what they left in cycles; it takes up to half a second, and
    is made once there is a fifth more to search."""
    if gc.get_freeze_count() > 1.2 * searched[0]:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        searched[0] = gc.get_freeze_count()


@pytest.fixture(autouse=True)
def a_young_process() -> None:
    """Only what a test makes is searched for garbage. The runtime does that search two to four
    times whenever it opens a model or begins a run; with torch, transformers and Numba imported it
    visits half a million objects and takes 0.3 s, more than the rest of most tests. What the last
    test left is found here, and what only a test makes is never frozen while that test runs."""
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
