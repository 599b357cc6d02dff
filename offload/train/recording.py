"""What a run's lanes do, told to a recorder: ``offload finetune --trace``.

Units and waits are told by the engine, updates by the updating thread, steps by the phases. Here is
what the disk does: tiles by the meters of their store; gradients, inputs and the checkpoint by an
I/O engine that stands around the run's. So does a device around the run's, for the link to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from offload.io.engines import Engine, Job
from offload.io.files import DirectFile
from offload.io.store import DEMAND
from offload.runtime.device import Device, Event, Region, Stream
from offload.scheduler.timeline import D2H, H2D, READ, WRITE, Record

T = TypeVar("T")

TILES = "tiles"
"""The name of spans of tiles; other files have names of their own."""


class _Timed:
    """A file whose transfers are told to ``record``."""

    def __init__(self, file: DirectFile, record: Record) -> None:
        self._file = file
        self._record = record
        self.path = file.path
        self._name = os.path.basename(file.path)

    def read(self, offset: int, buf: memoryview) -> int:
        began = time.perf_counter()
        moved = self._file.read(offset, buf)
        self._record(READ, self._name, began, time.perf_counter(), moved)
        return moved

    def write(self, offset: int, buf: memoryview) -> int:
        began = time.perf_counter()
        moved = self._file.write(offset, buf)
        self._record(WRITE, self._name, began, time.perf_counter(), moved)
        return moved


class RecordedEngine:
    """An I/O engine whose reads and writes of files are told to ``record``, each as it runs."""

    def __init__(self, engine: Engine, record: Record) -> None:
        self._engine = engine
        self._record = record
        self.name = engine.name
        self.queue_depth = engine.queue_depth

    def submit(self, work: Callable[[], T], priority: int = DEMAND) -> Future[T]:
        return self._engine.submit(work, priority)

    def put(self, job: Job, priority: int = DEMAND) -> None:
        self._engine.put(job, priority)

    def read(
        self, file: DirectFile, offset: int, buf: memoryview, priority: int = DEMAND
    ) -> Future[int]:
        timed: Any = _Timed(file, self._record)
        return self._engine.read(timed, offset, buf, priority)

    def write(self, file: DirectFile, offset: int, buf: memoryview) -> Future[int]:
        timed: Any = _Timed(file, self._record)
        return self._engine.write(timed, offset, buf)

    def close(self) -> None:
        self._engine.close()


def record_tiles(store: Any, record: Record) -> None:
    """Tell of a tile store's requests."""
    if hasattr(store, "listen"):  # tests have tiles in memory
        store.listen(
            lambda began, ended, nbytes: record(READ, TILES, began, ended, nbytes),
            lambda began, ended, nbytes: record(WRITE, TILES, began, ended, nbytes),
        )


class RecordedDevice:
    """A device whose copies between RAM and its memory are told to ``record``, by the name of the
    device's memory; all else is the device's."""

    def __init__(self, device: Device, record: Record) -> None:
        self._device = device
        self._record = record
        self._free = {H2D: 0.0, D2H: 0.0}
        """When the last copy of each direction ended: the next one begins then at the earliest."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def copy(self, dst: Region, src: Region, stream: Stream) -> Event:
        """See ``Device``."""
        asked = time.perf_counter()
        end = self._device.copy(dst, src, stream)
        lane, there = (D2H, src) if stream is self._device.d2h else (H2D, dst)

        def over(error: BaseException | None) -> None:
            ended = time.perf_counter()
            began = max(asked, self._free[lane])
            self._free[lane] = ended
            if error is None:
                self._record(lane, there.memory.name, began, ended, src.nbytes)

        end.then(over)
        return end


__all__ = ["TILES", "RecordedDevice", "RecordedEngine", "record_tiles"]
