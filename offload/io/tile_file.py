"""The data file of a tile store: moves the parts of slots and checks them, on the engine's threads.

Neighbouring parts that are short travel in one request. A part's checksum is computed by the
worker that moves it, before it is written and after it was read, while other workers keep the disk
busy: so a job is whole parts, of which one longer than a request takes several.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence

from offload.blocks import ALIGN
from offload.errors import StoreError
from offload.io.files import DirectFile
from offload.io.memory import address, byte_view
from offload.io.meter import Meter
from offload.io.tile_manifest import Layout
from offload.io.transfer import Moved

Checksum = Callable[[memoryview], int]
"""Of contiguous bytes: 0 .. 2**64 - 1. Called on the engine's workers."""

__all__ = ["Checksum", "DamagedError", "TileFile", "UnsyncedError", "aligned", "check_request"]


class DamagedError(StoreError):
    """A part's checksum is wrong."""


class UnsyncedError(StoreError):
    """The data could not be synced. The system reports that once and then calls the pages clean,
    so another try would succeed without having written anything."""


def check_request(nbytes: int) -> int:
    """``nbytes`` if requests can be that long, else ValueError."""
    if nbytes < ALIGN or nbytes % ALIGN:
        raise ValueError(f"requests of {nbytes} bytes: not a multiple of {ALIGN}")
    return nbytes


class TileFile:
    """Reads and writes slots; blocks. Thread-safe.

    Attributes:
        reads, writes: what went through the file.
        both: the two together.
    """

    def __init__(
        self, file: DirectFile, layout: Layout, checksum: Checksum, request_bytes: int
    ) -> None:
        """``request_bytes``: the longest request, see ``check_request``. Takes over ``file``."""
        self.reads, self.writes, self.both = Meter(), Meter(), Meter()
        self._file = file
        self.layout = layout
        self._checksum = checksum
        self._request_bytes = request_bytes
        self.generations = file.size // layout.nbytes
        """How many the file has room for; ``TileDirectory.grow`` makes more."""

    @property
    def data(self) -> DirectFile:
        return self._file

    def groups(self, tile: int, parts: Sequence[int]) -> list[list[int]]:
        """The jobs for ``parts``: neighbours of at most a request, or single ones."""
        places, out = self.layout.places(tile), list[list[int]]()
        for p in parts:
            together = bool(out) and out[-1][-1] == p - 1
            if together and places[p + 1] - places[out[-1][0]] <= self._request_bytes:
                out[-1].append(p)
            else:
                out.append([p])
        return out

    def _requests(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(start, end, self._request_bytes):
            yield at, min(at + self._request_bytes, end)

    def fetch(
        self, tile: int, generation: int, group: list[int], dst: memoryview, start: int,
        sums: array[int],
    ) -> Moved:  # fmt: skip
        """Read a group of parts and check them; ``dst`` begins ``start`` bytes into the slot.

        Raises:
            DamagedError: a checksum is not the one of ``sums``.
            StoreError: a read error, or the file is too short.
        """
        places, offset = self.layout.places(tile), self.layout.offset(tile, generation)
        for at, end in self._requests(places[group[0]], places[group[-1] + 1]):
            with self.reads.moving(end - at), self.both.moving(end - at):
                came = self._file.read(offset + at, dst[at - start : end - start])
            if came < end - at:
                raise StoreError(
                    f"{self._file.path} ends at {self._file.size}: {came} of {end - at} bytes "
                    f"came from offset {offset + at}"
                )
        for p in group:
            at, nbytes = places[p] - start, self.layout.shapes[tile][p]
            if self._checksum(dst[at : at + nbytes]) != sums[p]:
                raise DamagedError(
                    f"part {p} is damaged: its checksum is wrong ({nbytes} bytes at offset "
                    f"{offset + places[p]} of {self._file.path})"
                )
        return Moved(places[group[-1] + 1] - places[group[0]], 0)

    def put(self, tile: int, generation: int, group: list[int], src: memoryview) -> Moved:
        """Write a group of parts; ``src`` is the whole slot. Raises StoreError."""
        places, offset = self.layout.places(tile), self.layout.offset(tile, generation)
        for at, end in self._requests(places[group[0]], places[group[-1] + 1]):
            with self.writes.moving(end - at), self.both.moving(end - at):
                self._file.write(offset + at, src[at:end])
        return Moved(places[group[-1] + 1] - places[group[0]], 0)

    def sums(self, tile: int, group: list[int], src: memoryview) -> list[int]:
        """Checksums of a group of parts in ``src``, a whole slot."""
        places, sizes = self.layout.places(tile), self.layout.shapes[tile]
        return [self._checksum(src[places[p] : places[p] + sizes[p]]) for p in group]

    def sync(self, fsync: Callable[[int], None] = os.fsync) -> None:
        """Have everything written reach the disk. Raises UnsyncedError."""
        try:
            fsync(self._file.fileno())
        except OSError as e:
            raise UnsyncedError(
                f"{self._file.path} could not be synced ({e.strerror}): what was written since "
                "the last commit may not be on the disk. See to the disk, then continue with "
                "--resume"
            ) from e

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def aligned(tile: int, buf: memoryview, nbytes: int) -> memoryview:
    """``buf`` as flat bytes. Raises ValueError if shorter than ``nbytes`` or not aligned."""
    view = byte_view(buf)
    if view.nbytes < nbytes:
        raise ValueError(f"tile {tile}: {nbytes} bytes, but the buffer has {view.nbytes}")
    at = address(view)
    if at % ALIGN:
        raise ValueError(f"tile {tile}: the buffer's address {at:#x} is not {ALIGN}-aligned")
    return view
