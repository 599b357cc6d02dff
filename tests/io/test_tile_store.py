"""Tiles of optimizer state: what is written comes back."""

from __future__ import annotations

import os
from concurrent.futures import wait
from pathlib import Path

import pytest
from io_support import filled
from tile_support import (
    SHAPES,
    Gate,
    checksum,
    commit,
    create,
    names,
    parts_of,
    read,
    read_tile,
    reopen,
    state_of,
    write,
    write_all,
)

from offload.errors import ClosedError
from offload.io.checksum import xxh3
from offload.io.engines import Engine
from offload.io.memory import AlignedBuffer
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import (
    TileStore,
)

TILES = range(len(SHAPES))


def test_virgin_tiles_cannot_be_read(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine) as store, AlignedBuffer(65536) as buf:
        assert len(store) == len(SHAPES)
        assert store.commit_meta is None
        for tile in TILES:
            assert not store.written(tile)
            assert not store.has(tile, 0)
            with pytest.raises(ValueError, match="never written"):
                store.read_into(tile, 0, 0, buf)


def test_what_is_written_comes_back(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine) as store:
        for seed in (1, 2):
            state = write_all(store, seed)
            assert state_of(store) == state
        for tile in TILES:
            assert read(store, tile) == state[tile]
        assert read(store, 2, 1, 2) == state[2][1:3]
        assert read(store, 0, 2, 2) == (b"",)


def test_receipts_and_counters(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine) as store, AlignedBuffer(65536) as buf:
        receipt = store.write_from(2, buf).result(timeout=30)
        assert receipt.payload_bytes == sum(SHAPES[2])
        assert receipt.physical_bytes == store.written_bytes == 20480 + 8192 + 8192 + 4096
        assert store.read_bytes == 0
        assert store.read_busy_s == 0.0
        receipt = store.read_into(2, 1, 3, buf).result(timeout=30)
        assert receipt.payload_bytes == sum(SHAPES[2][1:])
        assert receipt.physical_bytes == store.read_bytes == 8192 + 8192 + 4096
        assert store.read_busy_s > 0
        assert store.busy_s > 0


def test_short_parts_travel_together(tmp_path: Path, engine: Engine) -> None:
    calls: list[int] = []

    def pwritev(fd: int, bufs: list[memoryview], offset: int) -> int:
        calls.append(sum(b.nbytes for b in bufs))
        return os.pwritev(fd, bufs, offset)

    with create(tmp_path / "s", engine, syscalls=TileSyscalls(pwritev=pwritev)) as store:
        write(store, 3, parts_of(3, 1))
        assert sorted(calls) == [4096, 8192]
        calls.clear()
        write(store, 3, parts_of(3, 1, [True, False, True]))
        assert calls == [4096, 4096]
        calls.clear()
        write(store, 2, parts_of(2, 1))
        assert sorted(calls) == [4096, 4096, 8192, 8192, 8192, 8192]


def test_parts_can_be_absent(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    with create(path, engine) as store, AlignedBuffer(65536) as buf:
        parts = parts_of(2, 1, [False, True, False, True])
        write(store, 2, parts_of(2, 0))
        write(store, 2, parts)
        assert [store.has(2, p) for p in range(4)] == [False, True, False, True]
        assert read_tile(store, 2) == parts
        with pytest.raises(ValueError, match="part 2 is absent"):
            store.read_into(2, 1, 3, buf)
        write(store, 1, (None,))
        assert store.written(1)
        commit(store)
    with reopen(path, engine) as store:
        assert state_of(store) == {1: (None,), 2: parts}


def test_any_checksum_of_64_bits(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    with TileStore.create(
        path, SHAPES, engine, identity={}, keep=1, checksum=lambda v: 2**64 - 1 - v.nbytes
    ) as store:
        state = write_all(store, 1)
        commit(store)
        assert state_of(store) == state
    with TileStore.create(
        tmp_path / "x", SHAPES, engine, identity={}, keep=1, checksum=xxh3
    ) as store:
        assert write_all(store, 1) == state_of(store)


def test_callers_mistakes_raise_at_once(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine) as store, AlignedBuffer(65536) as buf:
        write_all(store, 1)
        for tile in (-1, len(SHAPES)):
            with pytest.raises(ValueError, match="no tile"):
                store.read_into(tile, 0, 0, buf)
            with pytest.raises(ValueError, match="no tile"):
                store.write_from(tile, buf)
            with pytest.raises(ValueError, match="no tile"):
                store.written(tile)
        for first, last in ((1, 0), (-1, 0), (0, 3)):
            with pytest.raises(ValueError, match="parts 0 to 2"):
                store.read_into(0, first, last, buf)
        with pytest.raises(ValueError, match="parts 0 to 2"):
            store.has(0, 3)
        with pytest.raises(ValueError, match="8192 bytes, but"):
            store.read_into(1, 0, 0, buf[:8191])
        with pytest.raises(ValueError, match="8192 bytes, but"):
            store.write_from(1, buf[:8191])
        with pytest.raises(ValueError, match="aligned"):
            store.read_into(1, 0, 0, buf[512:])
        with pytest.raises(ValueError, match="read-only"):
            store.read_into(1, 0, 0, buf.toreadonly())
        with pytest.raises(ValueError, match="has 1 parts, not 2"):
            store.write_from(1, buf, [True, True])
        with pytest.raises((ValueError, TypeError)):
            store.commit({"bad": float("nan")})
        assert store.commits() == []


def test_impossible_stores_are_refused(tmp_path: Path, engine: Engine) -> None:
    for shapes, keep, request_bytes in (
        ([], 1, 4096), ([[]], 1, 4096), ([[-1]], 1, 4096), ([[0]], 1, 4096),
        ([[1]], 0, 4096), ([[1]], 128, 4096), ([[1]], 1, 100),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            TileStore.create(
                tmp_path / "s", shapes, engine, identity={}, keep=keep, checksum=checksum,
                request_bytes=request_bytes,
            )  # fmt: skip
    assert names(tmp_path) == []


def test_one_write_of_a_tile_and_no_read_of_it_meanwhile(tmp_path: Path, engine: Engine) -> None:
    gate = Gate()
    calls = TileSyscalls(preadv=gate.preadv, pwritev=gate.pwritev)
    with create(tmp_path / "s", engine, syscalls=calls) as store, filled(b"x", 65536) as buf:
        writing = store.write_from(1, buf)
        with pytest.raises(ValueError, match="tile 1 is being written"):
            store.write_from(1, buf)
        with pytest.raises(ValueError, match="tile 1 is being written"):
            store.read_into(1, 0, 0, buf)
        with pytest.raises(ValueError, match="1 tiles are being written"):
            store.commit({})
        gate.opened.set()
        writing.result(timeout=30)
        gate.opened.clear()
        gate.entered.clear()
        reading = [store.read_into(1, 0, 0, buf), store.read_into(1, 0, 0, buf[8192:])]
        assert gate.entered.wait(timeout=30)
        with pytest.raises(ValueError, match="tile 1 is being read"):
            store.write_from(1, buf)
        gate.opened.set()
        wait(reading, timeout=30)
        store.write_from(1, buf).result(timeout=30)
        commit(store)


def test_cancelled_in_time(tmp_path: Path, engine: Engine) -> None:
    gate = Gate()
    calls = TileSyscalls(preadv=gate.preadv, pwritev=gate.pwritev)
    with create(tmp_path / "s", engine, syscalls=calls) as store, filled(b"x", 65536) as buf:
        gate.opened.set()
        write(store, 1, parts_of(1, 1))
        gate.opened.clear()
        busy = [store.write_from(2, buf), store.write_from(0, buf)]
        waiting = store.write_from(1, buf)
        while not waiting.cancel():
            assert not waiting.done()
        reading = store.read_into(1, 0, 0, buf)
        assert reading.cancel()
        gate.opened.set()
        wait(busy, timeout=30)
        assert read_tile(store, 1) == parts_of(1, 1)
        write(store, 1, parts_of(1, 2))
        assert read_tile(store, 1) == parts_of(1, 2)


def test_a_done_future_has_let_go_of_the_buffer(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine) as store:
        for tile in TILES:
            buf = AlignedBuffer(65536)
            store.write_from(tile, buf.view).result(timeout=30)
            store.read_into(tile, 0, 0, buf.view).result(timeout=30)
            buf.close()  # BufferError while anybody holds a view


def test_after_close(tmp_path: Path, engine: Engine) -> None:
    store = create(tmp_path / "s", engine)
    with AlignedBuffer(65536) as buf:
        last = store.write_from(2, buf)
        store.close()
        assert last.done()
        last.result()
        store.close()
        for future in (store.read_into(2, 0, 0, buf), store.write_from(2, buf), store.commit({})):
            with pytest.raises(ClosedError, match="closed"):
                future.result(timeout=30)
