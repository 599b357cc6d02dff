"""Blocks on disk: a private file without a name, read and written past the page cache.

The file grows by extents that are reserved before anything is written into them, so a full disk is
met before a block is on its way, and writes do not have to extend the file one after the other.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future

from offload.errors import ClosedError, StoreError
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.io.private import nameless_file, reserve
from offload.io.store import DEMAND, PREFETCH
from offload.units import format_bytes

log = logging.getLogger(__name__)

EXTENT_BYTES = 64 * 2**20
"""By so much the file grows at once."""


class Spill:
    """Places of ``slot_bytes`` bytes in one file, which is made when the first block comes.

    Not for several threads at a time; transfers run on the engine, which the caller closes first.
    """

    def __init__(self, directory: str | os.PathLike[str], slot_bytes: int, engine: Engine) -> None:
        self.directory = os.fspath(directory)
        self.slot_bytes = slot_bytes
        self._engine = engine
        self._file: DirectFile | None = None
        self._reserved = 0
        self._free: list[int] = []
        self._closed = False
        self.written_bytes = 0
        self.read_bytes = 0

    def write(self, source: memoryview) -> tuple[int, Future[int]]:
        """Start to write a block; ``source`` must stay as it is until the future is done.
        Returns its place, which is taken until ``release``.

        Raises:
            StoreError: the disk is full, or the file cannot be made.
        """
        if not self._free:
            self._grow()
        place = self._free.pop()
        try:
            future = self._engine.write(self._open(), place * self.slot_bytes, source)
        except BaseException:
            self._free.append(place)
            raise
        self.written_bytes += self.slot_bytes
        return place, future

    def read(self, place: int, into: memoryview, *, ahead: bool) -> Future[int]:
        """Start to read a block. ``ahead``: nobody waits for it yet."""
        self.read_bytes += self.slot_bytes
        offset = place * self.slot_bytes
        return self._engine.read(self._open(), offset, into, PREFETCH if ahead else DEMAND)

    def release(self, place: int) -> None:
        """Nobody needs what is there any more; no transfer of it may be under way."""
        self._free.append(place)

    @property
    def places(self) -> int:
        """Places that are taken."""
        return self._reserved - len(self._free)

    def _open(self) -> DirectFile:
        if self._closed:
            raise ClosedError("the KV cache is closed")
        if self._file is None:
            fd, _ = nameless_file(self.directory)
            self._file = DirectFile(fd, f"the KV file in {self.directory}")
            log.info("KV blocks are spilled into %s", self.directory)
        return self._file

    def _grow(self) -> None:
        """Reserve an extent, or what is left of the disk if that is at least one block."""
        file = self._open()
        for wanted in (max(1, EXTENT_BYTES // self.slot_bytes), 1):
            nbytes = (self._reserved + wanted) * self.slot_bytes
            try:
                reserve(
                    file.fileno(), nbytes, self.directory, start=self._reserved * self.slot_bytes
                )
            except StoreError as error:
                refused = error
                continue
            file.size = nbytes
            self._free += range(self._reserved + wanted - 1, self._reserved - 1, -1)
            self._reserved += wanted
            return
        raise StoreError(
            f"{self.directory} has no room for another {format_bytes(self.slot_bytes)} of the KV "
            f"cache, which has {format_bytes(self._reserved * self.slot_bytes)} there; free some "
            f"space, choose another directory (--disk) or raise kv_ram (--kv-ram)"
        ) from refused

    def close(self) -> None:
        """Give the space back. Idempotent."""
        self._closed = True
        if self._file is not None:
            self._file.close()
            self._file = None
