"""Durable tiles of optimizer state: written again and again, committed without being copied.

A tile's slot that belongs to a commit is never written to; the next write of that tile goes to its
slot of another generation (copy-on-write), and later ones overwrite that slot in place. So a commit
costs a sync and a manifest, whatever the size of the state, and a kill at any moment leaves the
last commit as it was. See ``tile_manifest`` for how slots lie, ``tile_directory`` for the files.

Why not a journal, or a second copy per commit: both write the state twice, and writes to the disk
are what a training step with its states there waits for.
"""

from __future__ import annotations

import logging
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload.blocks import ALIGN
from offload.errors import ClosedError, OffloadError, StoreError
from offload.io import tile_manifest
from offload.io.engines import DEFAULT_REQUEST_BYTES, Engine
from offload.io.files import DirectFile
from offload.io.memory import address, byte_view
from offload.io.meter import Meter
from offload.io.pack_format import normal_meta
from offload.io.store import DEMAND, PREFETCH, Receipt
from offload.io.tile_directory import DoubtfulError, TileDirectory, TileSyscalls, is_tile_store
from offload.io.tile_manifest import (
    LOST,
    MOST_GENERATIONS,
    VIRGIN,
    Commit,
    Layout,
    check_keep,
    space_needed,
)
from offload.io.tile_map import TileMap
from offload.io.transfer import Moved, Transfer, failed

__all__ = ["Checksum", "TileStore", "is_tile_store", "space_needed"]

log = logging.getLogger(__name__)

Checksum = Callable[[memoryview], int]
"""Of contiguous bytes: 0 .. 2**64 - 1. Called on the engine's workers."""


class _UnsyncedError(StoreError):
    """The data could not be synced. The system reports that once and then calls the pages clean,
    so another try would succeed without having written anything."""


@dataclass(slots=True, eq=False)
class _Write:
    """A write under way, or waiting for a slot."""

    tile: int
    view: memoryview
    present: list[bool]
    sums: list[int]
    transfer: Transfer | None = None
    generation: int = VIRGIN


class TileStore:
    """Tiles in one data file, and commits of them all. Thread-safe.

    A caller's mistake raises ValueError at once; what goes wrong later arrives through the future
    as ``StoreError``, after ``close`` as ``ClosedError``. Buffers start at multiples of 4096 and
    are let go of before their future is done. One write of a tile at a time, and no read of it
    meanwhile; reads of a tile may run together.

    Attributes:
        layout: where the parts of tiles lie in their slots.
    """

    def __init__(
        self,
        directory: TileDirectory,
        file: DirectFile,
        layout: Layout,
        engine: Engine,
        calls: TileSyscalls,
        *,
        identity: Mapping[str, Any],
        keep: int,
        checksum: Checksum,
        request_bytes: int,
    ) -> None:
        """Not to be called; see ``create`` and ``open``."""
        self.layout = layout
        self._directory = directory
        self._file = file
        self._engine = engine
        self._sys = calls
        self._identity = normal_meta(identity)
        self._checksum = checksum
        self._request_bytes = request_bytes
        slots = min(MOST_GENERATIONS, max(keep + 1, file.size // layout.nbytes))
        self._idle = threading.Condition()  # guards all below
        self._map = TileMap(layout, keep, slots)
        self._reading: Counter[int] = Counter()
        self._writing: set[int] = set()
        self._waiting: list[_Write] = []
        self._in_flight = 0
        self._closed = False
        self._failed: StoreError | None = None
        self._reads, self._writes, self._both = Meter(), Meter(), Meter()

    # Making and opening

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        shapes: Sequence[Sequence[int]],
        engine: Engine,
        *,
        identity: Mapping[str, Any],
        keep: int,
        checksum: Checksum,
        syscalls: TileSyscalls | None = None,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
    ) -> TileStore:
        """A store of virgin tiles in a directory that is new or empty; it is made private.

        Args:
            shapes: bytes of each part of each tile.
            identity: what must be the same when it is opened again; JSON.
            keep: commits that are kept, from 1 to 127.
            request_bytes: the longest request, a multiple of 4096.

        Raises:
            StoreError: the directory holds something or is in use, or the disk has less than
                ``space_needed`` bytes free, all of which are reserved here.
            ValueError: sizes or ``keep`` out of range, or an identity that is not JSON.
        """
        layout, calls = Layout(shapes), syscalls or TileSyscalls()
        check_keep(keep)
        folder = TileDirectory.make(Path(directory), calls)
        try:
            file = folder.make_data((keep + 1) * layout.nbytes)
        except BaseException:
            folder.close()
            raise
        return cls._around(
            folder, file, layout, engine, calls,
            identity=identity, keep=keep, checksum=checksum, request_bytes=request_bytes,
        )  # fmt: skip

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        engine: Engine,
        *,
        shapes: Sequence[Sequence[int]],
        identity: Mapping[str, Any],
        keep: int,
        checksum: Checksum,
        commit: int | None = None,
        syscalls: TileSyscalls | None = None,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
    ) -> TileStore:
        """The store as its newest valid commit has it, or as commit number ``commit`` has it.

        A damaged manifest is passed over with a warning. Commits newer than ``commit`` are given
        up with the next commit, and not before. A larger ``keep`` than before makes the data file
        grow. Without any commit all tiles are virgin.

        Raises:
            StoreError: there is no store or no such commit, all commits are damaged, they are of
                another run (the message names what differs), the directory is in use, or the disk
                is too full for a larger ``keep``.
        """
        layout, calls = Layout(shapes), syscalls or TileSyscalls()
        check_keep(keep)
        path = Path(directory)
        if path.is_dir() and not is_tile_store(path):
            raise StoreError(f"{path} holds no training states; start without --resume")
        folder = TileDirectory.lock(path, calls)
        try:
            folder.clean()
            chosen, others = folder.choose(layout, identity, commit)
            used = {g for gs in others.values() for g in gs} - {VIRGIN}
            needed = (max(used) + 1) * layout.nbytes if used else 0
            file = folder.open_data(needed, (keep + 1) * layout.nbytes)
        except BaseException:
            folder.close()
            raise
        store = cls._around(
            folder, file, layout, engine, calls,
            identity=identity, keep=keep, checksum=checksum, request_bytes=request_bytes,
        )  # fmt: skip
        try:
            store._map.newest = max(folder.numbers(), default=0)
            if chosen is not None:
                folder.remove(store._map.stand_on(chosen, others))
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def _around(
        cls, folder: TileDirectory, file: DirectFile, *args: Any, request_bytes: int, **kwargs: Any
    ) -> TileStore:
        try:
            if request_bytes < ALIGN or request_bytes % ALIGN:
                raise ValueError(f"requests of {request_bytes} bytes: not a multiple of {ALIGN}")
            return cls(folder, file, *args, request_bytes=request_bytes, **kwargs)
        except BaseException:
            file.close()
            folder.close()
            raise

    # What is there

    def __len__(self) -> int:
        """Tiles."""
        return len(self.layout)

    def written(self, tile: int) -> bool:
        """Whether ``tile`` was ever written; else it is virgin and cannot be read."""
        self._check_tile(tile)
        return self._map.generation(tile) != VIRGIN

    def has(self, tile: int, part: int) -> bool:
        """Whether ``part`` of ``tile`` can be read: written, and not absent."""
        self._check_parts(tile, part, part)
        with self._idle:
            return self._map.has(tile, part)

    def commits(self) -> list[int]:
        """Numbers of the commits that can be opened, in order."""
        with self._idle:
            return sorted(self._map.retained)

    @property
    def commit_meta(self) -> Mapping[str, Any] | None:
        """Of the commit that the state goes back to; None if there is none."""
        return self._map.meta

    @property
    def read_bytes(self) -> int:
        """Read from the data file so far."""
        return self._reads.nbytes

    @property
    def written_bytes(self) -> int:
        """Written to the data file so far."""
        return self._writes.nbytes

    @property
    def read_busy_s(self) -> float:
        """Seconds in which at least one read of the file was under way."""
        return self._reads.busy_s

    @property
    def write_busy_s(self) -> float:
        """Seconds in which at least one write of the file was under way."""
        return self._writes.busy_s

    @property
    def busy_s(self) -> float:
        """Seconds in which the file was read or written."""
        return self._both.busy_s

    def _check_tile(self, tile: int) -> None:
        if not 0 <= tile < len(self.layout):
            raise ValueError(f"there is no tile {tile}, only 0 to {len(self.layout) - 1}")

    def _check_parts(self, tile: int, first: int, last: int) -> None:
        self._check_tile(tile)
        parts = len(self.layout.shapes[tile])
        if not 0 <= first <= last < parts:
            raise ValueError(f"tile {tile} has parts 0 to {parts - 1}, not {first} to {last}")

    # Reading

    def read_into(
        self, tile: int, first: int, last: int, dst: memoryview, priority: int = DEMAND
    ) -> Future[Receipt]:
        """Read parts ``first`` to ``last`` (inclusive) and check them.

        Part p comes to ``places[p] - places[first]`` of ``dst``, where ``places`` is
        ``layout.places(tile)``; ``dst`` has at least ``places[last + 1] - places[first]`` bytes,
        of which those between parts are overwritten with anything. Several parts that are short
        travel in one request, and each is checked by the worker that read it.

        Raises:
            ValueError: the tile is virgin or being written, a part is absent, or ``dst`` is too
                short, read-only or not aligned.
        """
        self._check_parts(tile, first, last)
        places = self.layout.places(tile)
        if dst.readonly:
            raise ValueError(f"tile {tile}: the buffer is read-only")
        view = _aligned(tile, dst, places[last + 1] - places[first])
        with self._idle:
            if self._closed:
                return failed(ClosedError(f"tile {tile}: the store is closed"))
            generation = self._map.generation(tile)
            if tile in self._writing:
                raise ValueError(f"tile {tile} is being written; wait for that first")
            if generation == VIRGIN:
                raise ValueError(f"tile {tile} was never written")
            if generation == LOST:
                return failed(self._map.lost(tile))
            absent = [p for p in range(first, last + 1) if not self._map.has(tile, p)]
            if absent:
                raise ValueError(f"tile {tile}: part {absent[0]} is absent")
            sums = self._map.sums(tile)
            self._reading[tile] += 1
            self._in_flight += 1
        payload = sum(self.layout.shapes[tile][first : last + 1])
        transfer = Transfer(f"tile {tile}", view, payload, partial(self._has_read, tile))
        transfer.future.add_done_callback(self._landed)
        jobs = [
            partial(self._fetch, tile, generation, group, places[first], view, sums)
            for group in self._groups(tile, range(first, last + 1))
        ]
        transfer.run(self._engine, jobs, priority)
        return transfer.future

    def _groups(self, tile: int, parts: Sequence[int]) -> list[list[int]]:
        """Runs of neighbouring parts of at most a request, or single ones that are longer."""
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

    def _fetch(
        self, tile: int, generation: int, group: list[int], start: int, view: memoryview,
        sums: array[int],
    ) -> Moved:  # fmt: skip
        places, offset = self.layout.places(tile), self.layout.offset(tile, generation)
        for at, end in self._requests(places[group[0]], places[group[-1] + 1]):
            with self._reads.moving(end - at), self._both.moving(end - at):
                came = self._file.read(offset + at, view[at - start : end - start])
            if came < end - at:
                raise StoreError(
                    f"{self._file.path} ends at {self._file.size}: {came} of {end - at} bytes came "
                    f"from offset {offset + at}"
                )
        for p in group:
            at, nbytes = places[p] - start, self.layout.shapes[tile][p]
            if self._checksum(view[at : at + nbytes]) != sums[p]:
                raise self._damaged(tile, p, generation, offset + places[p])
        return Moved(places[group[-1] + 1] - places[group[0]], 0)

    def _has_read(self, tile: int, _: BaseException | None) -> None:
        with self._idle:
            self._reading[tile] -= 1
            if not self._reading[tile]:
                del self._reading[tile]

    def _damaged(self, tile: int, part: int, generation: int, offset: int) -> StoreError:
        nbytes = self.layout.shapes[tile][part]
        what = (
            f"part {part} of tile {tile} is damaged: its checksum is wrong ({nbytes} bytes at "
            f"offset {offset} of {self._file.path})"
        )
        with self._idle:
            return self._map.damaged(tile, generation, what)

    # Writing

    def write_from(
        self, tile: int, src: memoryview, parts: Sequence[bool] | None = None
    ) -> Future[Receipt]:
        """Replace ``tile`` by ``src``, laid out as ``layout.places(tile)`` says, whole slots.

        ``parts``: which parts are written; the others are absent afterwards, and their bytes of
        ``src`` are not looked at. The tile is the new one when the future is done. If that failed
        it is still the old one where the old one belongs to a commit, and else lost. While a
        commit is under way, a write may wait for its end: there is room for ``keep`` commits and
        one state beyond.

        Raises:
            ValueError: the tile is being written or read, ``parts`` has another length than the
                tile has parts, or ``src`` is too short or not aligned.
        """
        self._check_tile(tile)
        sizes = self.layout.shapes[tile]
        present = [True] * len(sizes) if parts is None else [bool(p) for p in parts]
        if len(present) != len(sizes):
            raise ValueError(f"tile {tile} has {len(sizes)} parts, not {len(present)}")
        view = _aligned(tile, src, self.layout.places(tile)[-1])
        write = _Write(tile, view, present, [0] * len(sizes))
        with self._idle:
            if self._closed:
                return failed(ClosedError(f"tile {tile}: the store is closed"))
            if tile in self._writing or self._reading[tile]:
                doing = "written" if tile in self._writing else "read"
                raise ValueError(f"tile {tile} is being {doing}; wait for that first")
            if self._failed is not None:
                return failed(self._failed)
            payload = sum(n for n, there in zip(sizes, present, strict=True) if there)
            transfer = Transfer(f"tile {tile}", view, payload, partial(self._has_written, write))
            write.transfer = transfer
            self._writing.add(tile)
            self._in_flight += 1
            self._waiting.append(write)
        transfer.future.add_done_callback(self._landed)
        self._run_waiting()
        return transfer.future

    def _run_waiting(self) -> None:
        """Start what has a slot by now. Never called with the lock held: it resolves futures."""
        ready: list[tuple[_Write, StoreError | None]] = []
        with self._idle:
            still = []
            for write in self._waiting:
                slot = self._map.slot_for(write.tile)
                if self._failed is not None:
                    ready.append((write, self._failed))
                elif slot is not None:
                    write.generation = slot
                    ready.append((write, None))
                elif self._map.committing is not None:
                    still.append(write)
                else:
                    error = self._map.no_slot(write.tile, self._directory.path)
                    ready.append((write, error))
            self._waiting = still
        for write, error in ready:
            assert write.transfer is not None
            if error is not None:
                write.transfer.fail(error)
                continue
            parts = [p for p, there in enumerate(write.present) if there]
            jobs = [partial(self._put, write, g) for g in self._groups(write.tile, parts)]
            write.transfer.run(self._engine, jobs, PREFETCH)

    def _put(self, write: _Write, group: list[int]) -> Moved:
        tile, view, generation = write.tile, write.view, write.generation
        places, sizes = self.layout.places(tile), self.layout.shapes[tile]
        for p in group:
            write.sums[p] = self._checksum(view[places[p] : places[p] + sizes[p]])
        with self._idle:
            self._map.spoil(tile, generation)
        offset = self.layout.offset(tile, generation)
        for at, end in self._requests(places[group[0]], places[group[-1] + 1]):
            with self._writes.moving(end - at), self._both.moving(end - at):
                self._file.write(offset + at, view[at:end])
        return Moved(places[group[-1] + 1] - places[group[0]], 0)

    def _has_written(self, write: _Write, error: BaseException | None) -> None:
        with self._idle:
            self._writing.discard(write.tile)
            if write in self._waiting:  # cancelled before it had a slot
                self._waiting.remove(write)
            if error is None:
                self._map.place(write.tile, write.generation, write.present, write.sums)

    # Committing

    def commit(self, meta: Mapping[str, Any]) -> Future[None]:
        """Make the state of all tiles as of now durable, with ``meta`` (JSON).

        The future is done when the commit would survive a power failure and the commits beyond
        ``keep`` are gone. If it fails the earlier ones are as they were. Not cancellable.
        Through the future: StoreError, among others where a tile was lost, or where the disk
        refused to sync: from then on nothing is written any more, because a system that dropped
        what it could not write says so once.

        Raises:
            ValueError: a write or another commit is under way, or ``meta`` is not JSON.
        """
        meta = normal_meta(meta)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._idle:
            if self._map.committing is not None:
                raise ValueError("a commit is under way; wait for it first")
            if self._writing:
                raise ValueError(
                    f"{len(self._writing)} tiles are being written (tile {min(self._writing)}); "
                    "wait for them before the commit"
                )
            try:
                if self._closed:
                    raise ClosedError("the tile store is closed")
                if self._failed is not None:
                    raise self._failed
                commit = self._map.begin_commit(self._identity, meta)
            except OffloadError as e:
                future.set_exception(e)
                return future
            self._in_flight += 1
        future.add_done_callback(self._landed)
        try:
            job = self._engine.submit(partial(self._make_durable, commit), DEMAND)
        except OffloadError as e:
            self._committed(commit, e, [], future)
        else:
            job.add_done_callback(partial(self._commit_ended, commit, future))
        return future

    def _make_durable(self, commit: Commit) -> list[int]:
        """On a worker. Returns the commits that are gone for certain."""
        with self._idle:
            abandoned, kept = self._map.abandoned(), self._map.kept_with(commit.number)
            old = set(self._map.retained)
        # First: a kill after the commit must not leave them in the place of older ones.
        self._directory.remove(abandoned)
        try:
            self._sys.fsync(self._file.fileno())
        except OSError as e:
            raise _UnsyncedError(
                f"{self._file.path} could not be synced ({e.strerror}): what was written since "
                "the last commit may not be on the disk. See to the disk, then continue with "
                "--resume"
            ) from e
        self._directory.publish(commit.number, tile_manifest.dump(commit))
        # What is damaged goes, too: a newer one is whole.
        gone = sorted({*old, *self._directory.numbers()} - kept)
        try:
            self._directory.remove(gone)
        except StoreError as e:
            log.warning("commit %d is made, but: %s", commit.number, e)
            return abandoned
        return gone

    def _commit_ended(self, commit: Commit, future: Future[None], job: Future[list[int]]) -> None:
        error = job.exception()
        self._committed(commit, error, [] if error else job.result(), future)

    def _committed(
        self, commit: Commit, error: BaseException | None, gone: list[int], future: Future[None]
    ) -> None:
        with self._idle:
            self._map.end_commit(None if error else commit, gone)
            if isinstance(error, (DoubtfulError, _UnsyncedError)):
                self._failed = error
        self._run_waiting()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    # Closing

    def _landed(self, _: Future[Any]) -> None:
        with self._idle:
            self._in_flight -= 1
            self._idle.notify_all()

    def close(self) -> None:
        """Wait for what is in flight, then close the file and give up the lock. Idempotent.

        Commits nothing. The engine stays the caller's. Not to be called from a callback.
        """
        with self._idle:
            first, self._closed = not self._closed, True
            self._idle.wait_for(lambda: self._in_flight == 0)
        if first:
            self._file.close()
            self._directory.close()

    def __enter__(self) -> TileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _aligned(tile: int, buf: memoryview, nbytes: int) -> memoryview:
    """The first ``nbytes`` of ``buf`` as flat bytes."""
    view = byte_view(buf)
    if view.nbytes < nbytes:
        raise ValueError(f"tile {tile}: {nbytes} bytes, but the buffer has {view.nbytes}")
    at = address(view)
    if at % ALIGN:
        raise ValueError(f"tile {tile}: the buffer's address {at:#x} is not {ALIGN}-aligned")
    return view
