"""What computing and the optimizer's lane cost each other on this machine, measured.

Updates are not free beside computing: they read tiles, check their sums, run Adam, and write, on
cores and through memory that products want. With a core to spare that is little; on two cores it
is a fifth of a step. So one unit's forward and backward is run while tiles of the run's own kind go
round a private file as the update lane moves them, and each is compared with itself alone.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offload.blocks import DTYPE_BYTES
from offload.cpu_ops.adam_step import AdamStep
from offload.errors import OffloadError
from offload.io.checksum import xxh3
from offload.io.engines import make_engine
from offload.io.files import DirectFile
from offload.io.private import nameless_file, reserve
from offload.io.store import PREFETCH
from offload.runtime.memory import HostMemory
from offload.train.pace import Beside
from offload.train.tiles import Slot, SlotKind, numbers

logger = logging.getLogger(__name__)

ELEMENTS = 1 << 19
"""Of a tile: half of the engine's, so that few suffice."""
TILES, UNDER_WAY = 128, 8
"""Of the file, at most: a gigabyte of them, for what is written over and over in a little place may
never reach the disk. And how many are under way at a time."""
TIMED = 72
"""Tiles that are timed alone."""
LEAST_S, MOST_RUNS = 0.5, 25
"""Computing beside tiles is timed for so long, or so often: what takes no time costs nobody any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """What was measured."""

    adam: float
    """Bytes per second of a slot's parts, both ways, through one thread's Adam."""
    lane: float
    """Bytes per second that are read and written by the whole lane, with nothing beside it: less
    than the disk's, for tiles are checked and updated in between."""
    beside: Beside


def measure_updating(
    directory: Path, kind: SlotKind, gradient_dtype: str, work: Callable[[], object] | None, *,
    largest: int = ELEMENTS, count: int = TILES, workers: int = 1,
) -> Updating:  # fmt: skip
    """Run tiles of ``kind`` alone, then beside ``work``, which computes with torch's threads.
    Without ``work`` nothing is said of what they cost each other.

    ``largest``: elements of the largest tile there is; ``count``: how many tiles there are;
    ``workers``: threads that update one.

    Raises:
        StoreError: the directory has no room for the tiles, or cannot be read or written.
    """
    tiles = max(UNDER_WAY, min(TILES, count))
    elements = min(ELEMENTS, largest)
    with _Lane(directory, kind, gradient_dtype, elements, tiles, workers) as lane:
        lane.run(tiles)  # the first write of a block is no disk's rate
        lane.adam_s = 0.0
        each = lane.run(TIMED) / TIMED
        adam = 2 * lane.slot_bytes * TIMED / lane.adam_s
        alone_bytes_s = lane.moved_bytes / each
        if work is None:
            return Updating(adam=adam, lane=alone_bytes_s, beside=Beside())
        slower, found = together(work, lane.until, "updates")
        if found is None:
            return Updating(adam=adam, lane=alone_bytes_s, beside=Beside())
    beside = Beside(compute=slower, disk=max(1.0, found / each))
    logger.debug("beside each other: %s", beside)
    return Updating(adam=adam, lane=alone_bytes_s, beside=beside)


def together(
    work: Callable[[], object], other: Callable[[threading.Event], float], name: str
) -> tuple[float, float | None]:
    """How many times as long ``work`` takes while ``other`` goes on until the event, and what that
    returns; None if it failed (its reason is logged)."""
    stop = threading.Event()
    found: list[float] = []

    def go_on() -> None:
        try:
            found.append(other(stop))
        except OffloadError as error:
            logger.info("%s beside computing: %s", name, error)

    thread = threading.Thread(target=go_on, name=f"offload-probe-{name}")
    alone = mean_seconds(work)
    thread.start()
    try:
        both = mean_seconds(work)
    finally:
        stop.set()
        thread.join()
    return max(1.0, both / alone), found[0] if found else None


def mean_seconds(work: Callable[[], object]) -> float:
    """The mean of one run of ``work``."""
    times: list[float] = []
    while len(times) < 2 or (sum(times) < LEAST_S and len(times) < MOST_RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.fmean(times)


class _Lane:
    """Tiles that are read, updated and written, as ``updates.Updater`` has them."""

    def __init__(
        self, directory: Path, kind: SlotKind, gradient_dtype: str, elements: int, tiles: int,
        workers: int,
    ) -> None:  # fmt: skip
        self._tiles = tiles
        self._workers = workers
        offsets = kind.offsets(elements)
        self._elements = elements
        self._kind = kind
        self._first = offsets[kind.first_state]
        self.slot_bytes = offsets[-1]
        self.moved_bytes = 2 * self.slot_bytes - self._first
        """Of a tile, read and written."""
        self.adam_s = 0.0
        self._gradient = numbers(
            np.zeros(elements * DTYPE_BYTES[gradient_dtype], np.uint8), gradient_dtype
        )
        fd, _ = nameless_file(directory)
        try:
            reserve(fd, tiles * self.slot_bytes, os.fspath(directory))
        except BaseException:
            os.close(fd)
            raise
        self._file = DirectFile(fd, f"{directory}/(probe)")
        self._engine = make_engine(queue_depth=4)
        self._memories = [HostMemory(self.slot_bytes, "probe") for _ in range(UNDER_WAY)]
        self._free = list(self._memories)
        self._writing: deque[tuple[HostMemory, Future[Any]]] = deque()
        self._number = 0

    def __enter__(self) -> _Lane:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._settle(0)
        finally:
            self._engine.close()
            self._file.close()
            for memory in self._memories:  # also what was under way when a transfer failed
                memory.close()

    def run(self, tiles: int) -> float:
        """Seconds until so many are through and written."""
        began = time.perf_counter()
        self._go(lambda done: done >= tiles)
        self._settle(0)
        return time.perf_counter() - began

    def until(self, stop: threading.Event) -> float:
        """Go on until then; returns the seconds of one tile."""
        began = time.perf_counter()
        tiles = self._go(lambda done: done > 0 and stop.is_set())
        return (time.perf_counter() - began) / tiles

    def _go(self, enough: Callable[[int], bool]) -> int:
        reading: deque[tuple[HostMemory, int, Future[Any]]] = deque()
        done = begun = 0
        while not enough(done):
            while len(reading) < UNDER_WAY // 2:
                self._settle(UNDER_WAY - len(reading) - 1)
                memory, at = self._free.pop(), (begun % self._tiles) * self.slot_bytes
                begun += 1
                read = self._engine.read(
                    self._file, at + self._first, memory.view()[self._first :], PREFETCH
                )
                reading.append((memory, at, read))
            self._update(*reading.popleft())
            done += 1
        for memory, _, read in reading:
            read.result()
            self._free.append(memory)
        return done

    def _settle(self, left: int) -> None:
        """Wait until at most ``left`` writes are under way."""
        while len(self._writing) > left:
            memory, write = self._writing.popleft()
            write.result()
            self._free.append(memory)

    def _update(self, memory: HostMemory, at: int, read: Future[Any]) -> None:
        read.result()
        view = memory.view()
        xxh3(view[self._first :])
        self._number += 1
        step = AdamStep(lr=1e-3, step=self._number)
        began = time.perf_counter()
        slot = Slot(self._kind, self._elements, memory.tensor().numpy())
        slot.update(step, self._gradient, 0, self._elements, seed=0, first=0, workers=self._workers)
        del slot
        self.adam_s += time.perf_counter() - began
        xxh3(view)
        self._writing.append((memory, self._engine.write(self._file, at, view)))


__all__ = ["Updating", "measure_updating", "together"]
