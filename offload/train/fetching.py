"""At which rate weights are read, and what that costs whoever computes meanwhile; measured.

A disk's rate for large requests says little of reads of single experts: a megabyte in three pieces
of a file, put together, checked and handed over by threads that compute, too, would have. So some
of the run's own blocks are read as a run reads them, from where it reads them; alone, and beside
the unit that takes most of a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from offload.blocks import align_up
from offload.io.engines import Engine, make_engine
from offload.io.memory import Staging
from offload.io.store import PREFETCH
from offload.runtime.memory import HostMemory
from offload.train.beside import together
from offload.train.layout import Block, TrainLayout
from offload.train.opening import CHUNK_BYTES, STAGING_CHUNKS, EngineOptions
from offload.train.pace import Beside
from offload.train.source import MadeBlocks
from offload.train.weights import LOADING_AHEAD

logger = logging.getLogger(__name__)

SAMPLED, MOST_BYTES = 64, 256 << 20
"""Blocks that are read in turns, and bytes of memory that they are read to at most: a table of more
is no measure of layers."""
ALONE_S = 0.25
"""Reading alone is timed for so long."""

OpenSource = Callable[[TrainLayout, Engine, Staging], MadeBlocks]
"""Opens what the blocks of a layout are read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """What was measured."""

    rate: float
    """Bytes per second, with nothing beside it."""
    beside: Beside


def measure_fetching(
    layout: TrainLayout, open_source: OpenSource, work: Callable[[], object] | None
) -> Fetching | None:
    """Read experts, or whole blocks where there are none, alone and then beside ``work``. None:
    there is nothing that is read as it is, or only more at once than a measurement may take, or it
    cannot be read (which the run itself will say).
    """
    blocks = [layout.blocks[b] for b in layout.expert_blocks()]
    if not blocks:
        blocks = [b for b in layout.blocks if b.index not in layout.rest]
        blocks = [b for b in blocks if not b.trained] or blocks  # adapters are in no checkpoint
    try:
        return _of_some(layout, blocks, open_source, work)
    except Exception as error:  # noqa: BLE001  a prediction must never stop a run
        logger.info("reads of weights cannot be measured: %s", error)
        return None


def _of_some(
    layout: TrainLayout, blocks: list[Block], open_source: OpenSource,
    work: Callable[[], object] | None,
) -> Fetching | None:  # fmt: skip
    blocks = [b for b in blocks if LOADING_AHEAD * b.nbytes <= MOST_BYTES]
    largest = max((b.nbytes for b in blocks), default=0)
    blocks = [b for b in blocks if 4 * b.nbytes >= largest]
    blocks = blocks[:: max(1, len(blocks) // SAMPLED)]
    if not blocks:
        return None
    engine = make_engine(queue_depth=EngineOptions().queue_depth)
    staging = Staging(STAGING_CHUNKS, CHUNK_BYTES)
    try:
        source = open_source(replace(layout, blocks=blocks), engine, staging)
        try:
            found = [b for b in blocks if b.index not in source.made]
            if not found:
                return None
            with _Reads(source, found) as reads:
                return _measure(reads, work)
        finally:
            source.close()
    finally:
        engine.close()
        staging.close()


def _measure(reads: _Reads, work: Callable[[], object] | None) -> Fetching:
    reads.run(lambda nbytes, seconds: nbytes > 0)  # what is opened and looked up once
    rate = reads.run(lambda nbytes, seconds: seconds >= ALONE_S)
    if work is None:
        return Fetching(rate=rate, beside=Beside())

    def until(stop: threading.Event) -> float:
        return reads.run(lambda nbytes, seconds: nbytes > 0 and stop.is_set())

    slower, found = together(work, until, "reads")
    if found is None:
        return Fetching(rate=rate, beside=Beside())
    beside = Beside(compute=slower, disk=max(1.0, rate / found))
    logger.debug("reads and computing beside each other: %s", beside)
    return Fetching(rate=rate, beside=beside)


class _Reads:
    """Blocks that are read one after the other, as many at a time as in a run."""

    def __init__(self, source: Any, blocks: Sequence[Block]) -> None:
        size = max(align_up(b.nbytes) for b in blocks)
        self._source = source
        self._blocks = blocks
        self._memories = [HostMemory(size, "probe") for _ in range(LOADING_AHEAD)]
        self._next = 0

    def __enter__(self) -> _Reads:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._memories:
            memory.close()

    def run(self, enough: Callable[[int, float], bool]) -> float:
        """Bytes per second until ``enough(bytes, seconds)``."""
        free = deque(self._memories)
        under_way: deque[tuple[HostMemory, int, list[Future[Any]]]] = deque()
        done, began = 0, time.perf_counter()
        try:
            while True:
                while free and not enough(done, time.perf_counter() - began):
                    block = self._blocks[self._next % len(self._blocks)]
                    self._next += 1
                    memory = free.popleft()
                    futures = self._source.read(block, memory.view(), PREFETCH)
                    under_way.append((memory, block.nbytes, futures))
                if not under_way:
                    return done / (time.perf_counter() - began)
                memory, nbytes, futures = under_way.popleft()
                for future in futures:
                    future.result()
                free.append(memory)
                done += nbytes
        finally:
            for _, _, futures in under_way:  # an error must not free what others read to
                for future in futures:
                    future.exception()


__all__ = ["Fetching", "OpenSource", "measure_fetching"]
