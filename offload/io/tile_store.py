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
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
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
    require_same,
    space_needed,
)
from offload.io.transfer import Moved, Transfer, failed

__all__ = ["Checksum", "TileStore", "is_tile_store", "space_needed"]

log = logging.getLogger(__name__)

Checksum = Callable[[memoryview], int]
"""Of contiguous bytes: 0 .. 2**64 - 1. Called on the engine's workers."""


class _UnsyncedError(StoreError):
    """The data could not be synced. The system reports that once and then calls the pages clean,
    so another try would succeed without having written anything."""


class _Meter:
    """Bytes, and the time in which at least one request was under way. Thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()
        self._under_way = 0
        self._since_s = self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._under_way else 0.0
            return self._busy_s + running_s

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if not self._under_way:
                self._since_s = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.nbytes += nbytes
                self._under_way -= 1
                if not self._under_way:
                    self._busy_s += time.perf_counter() - self._since_s


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
        commit_meta: of the commit that the store stands on; None if there is none.
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
        self.commit_meta: Mapping[str, Any] | None = None
        self._directory = directory
        self._file = file
        self._engine = engine
        self._sys = calls
        self._identity = normal_meta(identity)
        self._keep = keep
        self._checksum = checksum
        self._request_bytes = request_bytes
        self._slots = min(MOST_GENERATIONS, max(keep + 1, file.size // layout.nbytes))

        self._idle = threading.Condition()  # guards all below
        self._generations = bytearray([VIRGIN]) * len(layout)
        self._present = bytearray(layout.parts)
        self._sums = array("Q", bytes(8 * layout.parts))
        self._retained: dict[int, bytes] = {}
        self._abandoned: list[int] = []
        self._committing: bytes | None = None
        self._newest = 0
        self._reading: Counter[int] = Counter()
        self._writing: set[int] = set()
        self._waiting: list[_Write] = []
        self._in_flight = 0
        self._closed = False
        self._failed: StoreError | None = None
        self._reads, self._writes, self._both = _Meter(), _Meter(), _Meter()

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
            chosen, others = _choose_commit(folder, layout, identity, commit)
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
            store._stand_on(chosen, others)
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

    def _stand_on(self, chosen: Commit | None, retained: dict[int, bytes]) -> None:
        self._newest = max(self._directory.numbers(), default=0)
        if chosen is None:
            return
        # A kill between a commit and the removal of what it supersedes leaves one too many.
        excess = [n for n in sorted(retained) if n != chosen.number]
        excess = excess[: max(0, len(retained) - (self._slots - 1))]
        self._directory.remove(excess)
        self._retained = {n: g for n, g in retained.items() if n not in excess}
        self._abandoned = [n for n in self._retained if n > chosen.number]
        self._generations[:] = chosen.generations
        self._present[:] = chosen.present
        self._sums = chosen.sums[:]
        self.commit_meta = chosen.meta

    # What is there

    def __len__(self) -> int:
        """Tiles."""
        return len(self.layout)

    def written(self, tile: int) -> bool:
        """Whether ``tile`` was ever written; else it is virgin and cannot be read."""
        self._check_tile(tile)
        return self._generations[tile] != VIRGIN

    def has(self, tile: int, part: int) -> bool:
        """Whether ``part`` of ``tile`` can be read: written, and not absent."""
        self._check_parts(tile, part, part)
        with self._idle:
            there = self._generations[tile] not in (VIRGIN, LOST)
            return there and bool(self._present[self.layout.first[tile] + part])

    def commits(self) -> list[int]:
        """Numbers of the commits that can be opened, in order."""
        with self._idle:
            return sorted(self._retained)

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
            generation = self._generations[tile]
            if tile in self._writing:
                raise ValueError(f"tile {tile} is being written; wait for that first")
            if generation == VIRGIN:
                raise ValueError(f"tile {tile} was never written")
            if generation == LOST:
                return failed(self._lost(tile))
            base = self.layout.first[tile]
            absent = [p for p in range(first, last + 1) if not self._present[base + p]]
            if absent:
                raise ValueError(f"tile {tile}: part {absent[0]} is absent")
            sums = self._sums[base : base + last + 1]
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
        """What a wrong checksum means depends on whose bytes they are."""
        what = (
            f"part {part} of tile {tile} is damaged: its checksum is wrong "
            f"({self.layout.shapes[tile][part]} bytes at offset {offset} of {self._file.path})"
        )
        with self._idle:
            owners = sorted(n for n, g in self._retained.items() if g[tile] == generation)
            others = sorted(n for n in self._retained if n not in owners)
        if not owners and others:
            return StoreError(f"{what}. Commit {others[-1]} is intact, --resume continues from it")
        if not owners:
            return StoreError(f"{what}. There is no commit yet: start again")
        owned = f"commit {', '.join(map(str, owners))}"
        if others:
            return StoreError(
                f"{what}. The bytes belong to {owned}; commit {others[-1]} has others of this "
                "tile and can be used"
            )
        return StoreError(
            f"{what}. The bytes belong to {owned} and no other commit has a copy of this tile: "
            "start again from the checkpoint, on another disk"
        )

    def _lost(self, tile: int) -> StoreError:
        where = max(self._retained, default=None)
        way = "there is no commit yet: start again"
        if where is not None:
            way = f"commit {where} is intact, --resume continues from it"
        return StoreError(f"tile {tile} was lost when a write of it failed; {way}")

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

    def _free_slot(self, tile: int) -> int | None:
        """The generation to write ``tile`` to: its own if no commit has it. Under the lock."""
        taken = {g[tile] for g in self._retained.values()}
        if self._committing is not None:
            taken.add(self._committing[tile])
        now = self._generations[tile]
        if now not in (VIRGIN, LOST) and now not in taken:
            return now
        return next((g for g in range(self._slots) if g not in taken), None)

    def _run_waiting(self) -> None:
        """Start what has a slot by now. Never called with the lock held: it resolves futures."""
        ready: list[tuple[_Write, StoreError | None]] = []
        with self._idle:
            still = []
            for write in self._waiting:
                slot = self._free_slot(write.tile)
                if self._failed is not None:
                    ready.append((write, self._failed))
                elif slot is not None:
                    write.generation = slot
                    ready.append((write, None))
                elif self._committing is not None:
                    still.append(write)
                else:
                    ready.append((write, self._no_slot()))
            self._waiting = still
        for write, error in ready:
            assert write.transfer is not None
            if error is not None:
                write.transfer.fail(error)
                continue
            parts = [p for p, there in enumerate(write.present) if there]
            jobs = [partial(self._put, write, g) for g in self._groups(write.tile, parts)]
            write.transfer.run(self._engine, jobs, PREFETCH)

    def _no_slot(self) -> StoreError:
        kept = ", ".join(map(str, sorted(self._retained)))
        return StoreError(
            f"no slot is free: commits {kept} are there, {self._keep} should be: superseded ones "
            f"could not be removed from {self._directory.path}; see to its permissions and disk"
        )

    def _put(self, write: _Write, group: list[int]) -> Moved:
        tile, view, generation = write.tile, write.view, write.generation
        places, sizes = self.layout.places(tile), self.layout.shapes[tile]
        for p in group:
            write.sums[p] = self._checksum(view[places[p] : places[p] + sizes[p]])
        with self._idle:
            if self._generations[tile] == generation:
                self._generations[tile] = LOST  # until all of it is written
        offset = self.layout.offset(tile, generation)
        for at, end in self._requests(places[group[0]], places[group[-1] + 1]):
            with self._writes.moving(end - at), self._both.moving(end - at):
                self._file.write(offset + at, view[at:end])
        return Moved(places[group[-1] + 1] - places[group[0]], 0)

    def _has_written(self, write: _Write, error: BaseException | None) -> None:
        first, n = self.layout.first[write.tile], len(write.present)
        with self._idle:
            self._writing.discard(write.tile)
            if write in self._waiting:  # cancelled before it had a slot
                self._waiting.remove(write)
            if error is None:
                self._generations[write.tile] = write.generation
                self._present[first : first + n] = bytes(write.present)
                self._sums[first : first + n] = array("Q", write.sums)

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
            if self._committing is not None:
                raise ValueError("a commit is under way; wait for it first")
            if self._writing:
                raise ValueError(
                    f"{len(self._writing)} tiles are being written (tile {min(self._writing)}); "
                    "wait for them before the commit"
                )
            error: OffloadError | None = self._failed
            lost = self._generations.find(LOST)
            if self._closed:
                error = ClosedError("the tile store is closed")
            elif error is None and lost >= 0:
                error = self._lost(lost)
            if error is not None:
                future.set_exception(error)
                return future
            commit = Commit(
                number=self._newest + 1,
                identity=self._identity,
                meta=meta,
                layout=self.layout,
                generations=bytes(self._generations),
                present=bytes(self._present),
                sums=self._sums[:],
            )
            self._committing = commit.generations
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
            abandoned = list(self._abandoned)
            old = [n for n in sorted(self._retained) if n not in abandoned]
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
        kept = {*[*old, commit.number][-self._keep :]}
        # Damaged ones go, too: a newer one is whole.
        stale = [n for n in self._directory.numbers() if n not in kept]
        gone = {*old, *abandoned, *stale} - kept
        try:
            self._directory.remove(sorted(gone))
        except StoreError as e:
            log.warning("commit %d is made, but: %s", commit.number, e)
            return abandoned
        return sorted(gone)

    def _commit_ended(self, commit: Commit, future: Future[None], job: Future[list[int]]) -> None:
        error = job.exception()
        self._committed(commit, error, [] if error else job.result(), future)

    def _committed(
        self, commit: Commit, error: BaseException | None, gone: list[int], future: Future[None]
    ) -> None:
        with self._idle:
            self._committing = None
            if error is None:
                self._newest = commit.number
                self._retained[commit.number] = commit.generations
                self._retained = {n: g for n, g in self._retained.items() if n not in gone}
                self._abandoned = []
                self.commit_meta = commit.meta
            elif isinstance(error, (DoubtfulError, _UnsyncedError)):
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


def _choose_commit(
    folder: TileDirectory, layout: Layout, identity: Mapping[str, Any], wanted: int | None
) -> tuple[Commit | None, dict[int, bytes]]:
    """The commit to stand on, and the generations of every one that can be used."""
    chosen: Commit | None = None
    valid: dict[int, bytes] = {}
    why: dict[int, str] = {}
    for number in reversed(folder.numbers()):
        where = folder.path / folder.name(number)
        try:
            found = tile_manifest.load(folder.read(number))
            if found.number != number:
                raise ValueError(f"it is commit {found.number}")
        except ValueError as e:
            why[number] = f"{where} is damaged: {e}"
            continue
        except StoreError as e:
            raise StoreError(f"{where} cannot be used: {e}") from e
        require_same(os.fspath(where), found, layout, identity)
        valid[number] = found.generations
        if number == wanted or (wanted is None and chosen is None):
            chosen = found
    there = ", ".join(map(str, sorted(valid))) or "none"
    if wanted is not None and chosen is None:
        reason = why.get(wanted, f"{folder.path} has no commit {wanted}")
        raise StoreError(f"{reason}; these can be used: {there}")
    if why and chosen is None:
        raise StoreError(
            f"{next(iter(why.values()))}, and there is no other commit in {folder.path}; bring a "
            "copy back, or start again in another directory"
        )
    for reason in why.values():
        log.warning("%s; these can be used: %s", reason, there)
    return chosen, valid
