"""How long something takes that is measured before a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

SAMPLES, SAMPLE_S = 5, 0.6
"""What is timed runs so often at most, and no more than twice for longer than so many seconds."""


def timed(*works: Callable[[], object]) -> list[float]:
    """Seconds of each of ``works``: the median of several, after one that does not count (it makes
    what is made once), or of few where they take long. Not the best of them: a step has no second
    try. They take turns, so that none has a bad moment of the machine for itself."""
    times: list[list[float]] = [[] for _ in works]
    began = time.perf_counter()
    while len(times[0]) < 2 or (
        len(times[0]) <= SAMPLES and time.perf_counter() - began < len(works) * SAMPLE_S
    ):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in times]
