"""Durable tiles of optimizer state: written again and again, committed without being copied.

A tile's slot that belongs to a commit is never written to; the next write of that tile goes to its
slot of another generation (copy-on-write), and later ones overwrite that slot in place. So a commit
costs a sync and a manifest, whatever the size of the state, and a kill at any moment leaves the
last commit as it was. See ``tile_manifest`` for how slots lie, ``tile_directory`` for the files.

Why not a journal, or a second copy per commit: both write the state twice, and writes to the disk
are what a training step with its states there waits for.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from offload.errors import ClosedError, OffloadError, StoreError
from offload.io.engines import DEFAULT_REQUEST_BYTES, Engine
from offload.io.meter import Listener
from offload.io.pack_format import normal_meta
from offload.io.store import DEMAND, PREFETCH, Receipt
from offload.io.tile_commit import Committing
from offload.io.tile_directory import (
    DoubtfulError,
    TileDirectory,
    TileSyscalls,
    check_directory,
    has_commits,
    is_tile_store,
    reserved,
    stored_identity,
)
from offload.io.tile_file import Checksum, DamagedError, TileFile, UnsyncedError, aligned
from offload.io.tile_manifest import (
    LOST,
    MOST_GENERATIONS,
    VIRGIN,
    manifest_space,
    space_needed,
)
from offload.io.tile_map import TileMap
from offload.io.tile_opening import Given, make_store, open_store
from offload.io.tile_waiting import WaitingWrites, Write
from offload.io.transfer import Moved, Transfer, failed

__all__ = [
    "Checksum", "TileStore", "check_directory", "has_commits", "is_tile_store", "manifest_space",
    "reserved", "space_needed", "stored_identity",
]  # fmt: skip


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
        file: TileFile,
        given: Given,
        engine: Engine,
    ) -> None:
        """Not to be called; see ``create`` and ``open``."""
        self.layout = given.layout
        self._directory = directory
        self._file = file
        self._engine = engine
        self._given = given
        self._idle = threading.Condition()  # guards all below
        slots = min(MOST_GENERATIONS, max(given.most, file.generations))
        self._map = TileMap(given.layout, given.keep, slots)
        self._growing = threading.Lock()
        """Held for as long as reserving takes; never together with the one above."""
        self._commits = Committing(directory, file, self._map, self._idle, given.calls)
        self._reading: Counter[int] = Counter()
        self._writing: set[int] = set()
        self._waiting = WaitingWrites(self._map, directory.path)
        self._in_flight = 0
        self._closed = False
        self._failed: StoreError | None = None

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
        hold: int = 0,
        checksum: Checksum,
        generations: int | None = None,
        syscalls: TileSyscalls | None = None,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
    ) -> TileStore:
        """A store of virgin tiles in a directory that is new or empty; it is made private.

        Args:
            shapes: bytes of each part of each tile.
            identity: what must be the same when it is opened again; JSON.
            keep: commits that are kept, from 1 to 127.
            hold: commits that may be held beyond those, see ``commit``; 127 with them at most.
            generations: how often there is room for each tile from the start; None:
                ``keep + hold + 1`` times, which is as often as it will ever be needed. Where fewer
                are reserved and a write needs one more, that is reserved then, or the write fails.
            request_bytes: the longest request, a multiple of 4096.

        Raises:
            StoreError: the directory holds something or is in use, or the disk has less than
                the bytes of these generations free, all of which are reserved here.
            ValueError: sizes or ``keep`` out of range, or an identity that is not JSON.
        """
        given = Given.of(
            shapes, identity, keep, hold, generations, checksum, request_bytes, syscalls
        )
        folder, file = make_store(Path(directory), given)
        return cls(folder, file, given, engine)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        engine: Engine,
        *,
        shapes: Sequence[Sequence[int]],
        identity: Mapping[str, Any],
        keep: int,
        hold: int = 0,
        checksum: Checksum,
        commit: int | None = None,
        generations: int | None = None,
        syscalls: TileSyscalls | None = None,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
    ) -> TileStore:
        """The store as its newest valid commit has it, or as commit number ``commit`` has it.

        A damaged manifest is passed over with a warning. Commits newer than ``commit`` are given
        up with the next commit, and not before. The data file grows to ``generations`` (see
        ``create``) where it is shorter. Without any commit all tiles are virgin.

        Raises:
            StoreError: there is no store or no such commit, all commits are damaged, they are of
                another run (the message names what differs), the directory is in use, or the disk
                is too full for more generations.
        """
        given = Given.of(
            shapes, identity, keep, hold, generations, checksum, request_bytes, syscalls
        )
        found = open_store(Path(directory), given, commit)
        store = cls(found.directory, found.file, given, engine)
        try:
            store._map.newest = found.newest
            if found.chosen is not None:
                found.directory.remove(store._map.stand_on(found.chosen, found.valid))
        except BaseException:
            store.close()
            raise
        return store

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
    def next_number(self) -> int:
        """What the next commit will be called."""
        return self._map.newest + 1

    @property
    def read_bytes(self) -> int:
        """Read from the data file so far."""
        return self._file.reads.nbytes

    @property
    def written_bytes(self) -> int:
        """Written to the data file so far."""
        return self._file.writes.nbytes

    @property
    def read_busy_s(self) -> float:
        """Seconds in which at least one read of the file was under way."""
        return self._file.reads.busy_s

    @property
    def busy_s(self) -> float:
        """Seconds in which the file was read or written."""
        return self._file.both.busy_s

    def listen(self, read: Listener, written: Listener) -> None:
        """Be told of each request of the data file: see ``Meter.listener``."""
        self._file.reads.listener = read
        self._file.writes.listener = written

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
        view = aligned(tile, dst, places[last + 1] - places[first])
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
            partial(self._fetch, tile, generation, group, view, places[first], sums)
            for group in self._file.groups(tile, range(first, last + 1))
        ]
        transfer.run(self._engine, jobs, priority)
        return transfer.future

    def _fetch(self, tile: int, generation: int, *what: Any) -> Moved:
        try:
            return self._file.fetch(tile, generation, *what)
        except DamagedError as e:
            with self._idle:
                raise self._map.damaged(tile, generation, str(e)) from None

    def _has_read(self, tile: int, _: BaseException | None) -> None:
        with self._idle:
            self._reading[tile] -= 1
            if not self._reading[tile]:
                del self._reading[tile]

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
        view = aligned(tile, src, self.layout.places(tile)[-1])
        write = Write(tile, view, present, [0] * len(sizes))
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
            self._waiting.add(write)
        transfer.future.add_done_callback(self._landed)
        self._run_waiting()
        return transfer.future

    def _run_waiting(self) -> None:
        """Start what has a slot by now. Never called with the lock held: it resolves futures."""
        with self._idle:
            ready = self._waiting.ready(self._failed)
        for write, error in ready:
            assert write.transfer is not None
            if error is not None:
                write.transfer.fail(error)
                continue
            parts = [p for p, there in enumerate(write.present) if there]
            jobs = [partial(self._put, write, g) for g in self._file.groups(write.tile, parts)]
            write.transfer.run(self._engine, jobs, PREFETCH)

    def reserve(self, generations: int) -> None:
        """Have room for that many of each tile now, rather than when a write needs it; blocks.

        Raises:
            StoreError: too little space. What is there is as it was.
        """
        with self._growing:
            if generations > self._file.generations:
                self._directory.grow(self._file, generations)

    def _put(self, write: Write, group: list[int]) -> Moved:
        if write.generation >= self._file.generations:
            self.reserve(write.generation + 1)  # before the tile is spoilt
        sums = self._file.sums(write.tile, group, write.view)
        write.sums[group[0] : group[-1] + 1] = sums
        with self._idle:
            self._map.spoil(write.tile, write.generation)
        return self._file.put(write.tile, write.generation, group, write.view)

    def _has_written(self, write: Write, error: BaseException | None) -> None:
        with self._idle:
            self._writing.discard(write.tile)
            self._waiting.discard(write)  # cancelled before it had a slot
            if error is None:
                self._map.place(write.tile, write.generation, write.present, write.sums)

    # Committing

    def commit(self, meta: Mapping[str, Any], hold: Collection[int] = ()) -> Future[None]:
        """Make the state of all tiles as of now durable, with ``meta`` (JSON).

        ``hold``: numbers of older commits that stay, however many newer ones there are; to be
        named again with each commit that shall hold them. The future is done when the commit would
        survive a power failure and the commits beyond ``keep`` and ``hold`` are gone. If it fails
        the earlier ones are as they were. Not cancellable. Through the future: StoreError, among
        others where a tile was lost, or where the disk refused to sync: from then on nothing is
        written any more, because a system that dropped what it could not write says so once.

        Raises:
            ValueError: a write or another commit is under way, ``meta`` is not JSON, or ``hold``
                names a commit that is not there or more than the store has room for.
        """
        meta = normal_meta(meta)
        held = frozenset(hold)
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
            if len(held) > self._given.hold or not held <= self._map.retained.keys():
                raise ValueError(
                    f"commits {sorted(held)} cannot be held: there are "
                    f"{sorted(self._map.retained)}, and room to hold {self._given.hold}"
                )
            try:
                if self._closed:
                    raise ClosedError("the tile store is closed")
                if self._failed is not None:
                    raise self._failed
                commit = self._map.begin_commit(self._given.identity, meta, held)
            except OffloadError as e:
                future.set_exception(e)
                return future
            self._in_flight += 1
        future.add_done_callback(self._landed)
        try:
            job = self._engine.submit(partial(self._commits.make_durable, commit), DEMAND)
        except OffloadError as e:
            self._committed(e, future)
        else:
            job.add_done_callback(partial(self._commit_ended, future))
        return future

    def _commit_ended(self, future: Future[None], job: Future[None]) -> None:
        self._committed(job.exception(), future)

    def _committed(self, error: BaseException | None, future: Future[None]) -> None:
        with self._idle:
            self._map.end_commit()
            if isinstance(error, (DoubtfulError, UnsyncedError)):
                self._failed = error
        self._run_waiting()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def go_back(self, number: int) -> None:
        """Make the state of all tiles that of commit ``number``, as ``open`` would; waits for what
        is in flight. Newer commits are given up with the next one, and not before.

        Raises:
            StoreError: there is no such commit, or its manifest cannot be read.
            ClosedError: the store is closed.
        """
        with self._idle:
            if self._closed:
                raise ClosedError("the tile store is closed")
            self._idle.wait_for(lambda: self._in_flight == 0)
            retained = self._map.retained
            if number not in retained:  # its manifest may be there, its slots be others'
                there = ", ".join(map(str, sorted(retained))) or "none"
                raise StoreError(
                    f"{self._directory.path} has no commit {number}; these can be used: {there}"
                )
            chosen, _ = self._directory.choose(self.layout, self._given.identity, number)
            assert chosen is not None
            self._commits.remove(self._map.stand_on(chosen, retained))

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
