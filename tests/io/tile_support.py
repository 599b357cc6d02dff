"""Small tiles, states to compare, system calls that fail or wait: for the tests of the store."""

from __future__ import annotations

import errno
import os
import random
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.io.engines import Engine
from offload.io.memory import AlignedBuffer
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import TileStore

SHAPES: list[list[int]] = [[100, 4096, 0], [5000], [20001, 8192, 8192, 1], [1, 1, 1]]
IDENTITY = {"model": "toy", "shape": (2, 3), "rate": 0.1}
REQUEST_BYTES = 8192  # so that a part takes several requests, and several parts take one

Tile = tuple[bytes | None, ...]
"""The parts of a written tile; None for one that is absent."""
State = dict[int, Tile]


def checksum(view: memoryview) -> int:
    return zlib.crc32(view) << 32 | view.nbytes


def parts_of(tile: int, seed: int, present: Sequence[bool] | None = None) -> Tile:
    generator = random.Random(f"{tile}/{seed}")
    made = [generator.randbytes(n) for n in SHAPES[tile]]
    there = present or [True] * len(made)
    return tuple(part if p else None for part, p in zip(made, there, strict=True))


def create(
    path: Path, engine: Engine, *, keep: int = 1, hold: int = 0,
    syscalls: TileSyscalls | None = None,
) -> TileStore:  # fmt: skip
    return TileStore.create(
        path, SHAPES, engine, identity=IDENTITY, keep=keep, hold=hold, checksum=checksum,
        syscalls=syscalls, request_bytes=REQUEST_BYTES,
    )  # fmt: skip


def reopen(
    path: Path,
    engine: Engine,
    *,
    keep: int = 1,
    hold: int = 0,
    commit: int | None = None,
    syscalls: TileSyscalls | None = None,
    shapes: Sequence[Sequence[int]] = SHAPES,
    identity: Mapping[str, Any] = IDENTITY,
) -> TileStore:
    return TileStore.open(
        path, engine, shapes=shapes, identity=identity, keep=keep, hold=hold, checksum=checksum,
        commit=commit, syscalls=syscalls, request_bytes=REQUEST_BYTES,
    )  # fmt: skip


def write(store: TileStore, tile: int, parts: Tile) -> None:
    places = store.layout.places(tile)
    with AlignedBuffer(max(1, places[-1])) as buf:
        for place, part in zip(places, parts, strict=False):
            buf[place : place + len(part or b"")] = part or b""
        there = [p is not None for p in parts]
        store.write_from(tile, buf, there).result(timeout=30)


def write_all(store: TileStore, seed: int, tiles: Sequence[int] = range(len(SHAPES))) -> State:
    state = {tile: parts_of(tile, seed) for tile in tiles}
    for tile, parts in state.items():
        write(store, tile, parts)
    return state


def read(store: TileStore, tile: int, first: int = 0, last: int | None = None) -> Tile:
    """Parts ``first`` to ``last``, which must all be there."""
    end = len(SHAPES[tile]) - 1 if last is None else last
    places = store.layout.places(tile)
    with AlignedBuffer(max(1, places[end + 1] - places[first])) as buf:
        store.read_into(tile, first, end, buf).result(timeout=30)
        at = [places[p] - places[first] for p in range(first, end + 1)]
        return tuple(bytes(buf[a : a + n]) for a, n in zip(at, SHAPES[tile][first:], strict=False))


def read_tile(store: TileStore, tile: int) -> Tile:
    """Each part by itself, or None."""
    return tuple(
        read(store, tile, p, p)[0] if store.has(tile, p) else None for p in range(len(SHAPES[tile]))
    )


def state_of(store: TileStore) -> State:
    return {i: read_tile(store, i) for i in range(len(SHAPES)) if store.written(i)}


def commit(store: TileStore, **meta: Any) -> None:
    store.commit(meta).result(timeout=30)


def slot_offset(store: TileStore, tile: int, part: int = 0) -> int:
    """Where a part lies in the data file."""
    start = store.layout.offset(tile, store._map.generation(tile))
    return start + store.layout.places(tile)[part]


def flip(path: Path, offset: int) -> None:
    """Change a bit of a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 4]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


class Gate:
    """Holds back data transfers until it is opened."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(timeout=30)

    def preadv(self, fd: int, bufs: list[memoryview], offset: int) -> int:
        self.wait()
        return os.preadv(fd, bufs, offset)

    def pwritev(self, fd: int, bufs: list[memoryview], offset: int) -> int:
        self.wait()
        return os.pwritev(fd, bufs, offset)

    def fsync(self, fd: int) -> None:
        self.wait()
        os.fsync(fd)


class Trouble:
    """System calls that fail when told to: ``arm(name, index, code)``, index counted from then."""

    def __init__(self) -> None:
        self._armed: dict[str, tuple[int, int]] = {}
        real = TileSyscalls()
        wrapped = ("pwritev", "preadv", "write", "fsync", "rename", "unlink", "open")
        self.syscalls = TileSyscalls(**{n: self._around(n, getattr(real, n)) for n in wrapped})

    def arm(self, name: str, index: int = 0, code: int = errno.EIO) -> None:
        self._armed[name] = (index, code)

    def disarm(self) -> None:
        self._armed.clear()

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if name in self._armed:
                index, code = self._armed[name]
                self._armed[name] = (index - 1, code)
                if index <= 0:
                    raise OSError(code, os.strerror(code))
            return call(*args)

        return wrapped
