"""Tiles of optimizer state: what is written comes back, what is committed stays."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from io_support import filled
from tile_support import (
    IDENTITY,
    SHAPES,
    State,
    Tile,
    checksum,
    commit,
    create,
    parts_of,
    read,
    read_tile,
    reopen,
    slot_offset,
    state_of,
    write,
    write_all,
)

from offload.errors import ClosedError, StoreError
from offload.io.checksum import xxh3
from offload.io.engines import Engine, make_engine
from offload.io.memory import AlignedBuffer
from offload.io.meter import Meter
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import (
    TileStore,
    has_commits,
    is_tile_store,
    reserved,
    space_needed,
)

TILES = range(len(SHAPES))


@pytest.fixture
def engine(engine_name: str) -> Any:
    made = make_engine(engine_name, 3)
    yield made
    made.close()


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


# Reading and writing


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
        assert 0 < store.busy_s <= store.read_busy_s + store.write_busy_s


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


# Commits


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_commits_come_back_bit_for_bit(tmp_path: Path, engine: Engine, keep: int) -> None:
    path = tmp_path / "s"
    states: dict[int, State] = {}
    with create(path, engine, keep=keep) as store:
        for number in range(1, 6):
            state = write_all(store, number, [t for t in TILES if t == 0 or (t + number) % 2])
            states[number] = {**states.get(number - 1, {}), **state}
            commit(store, step=10 * number, loss=0.1 * number)
            assert store.commit_meta == {"step": 10 * number, "loss": 0.1 * number}
            assert store.commits() == list(range(1, number + 1))[-keep:]
            assert state_of(store) == states[number]
        write_all(store, 99)  # after the last commit: forgotten
        kept = store.commits()
        assert names(path) == [*(f"commit-{n}.json" for n in kept), "tiles.bin"]
    for number in kept:
        with reopen(path, engine, keep=keep, commit=number) as store:
            assert store.commit_meta == {"step": 10 * number, "loss": 0.1 * number}
            assert state_of(store) == states[number]
            assert store.commits() == kept
    with reopen(path, engine, keep=keep) as store:
        assert state_of(store) == states[5]


def test_commits_cost_no_writes_of_data(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine, keep=2) as store:
        write_all(store, 0)
        per_state = store.written_bytes
        for n in range(1, 5):
            commit(store)
            commit(store)
            assert store.written_bytes == n * per_state
            write_all(store, n)
        assert store.read_bytes == 0
    assert (tmp_path / "s" / "tiles.bin").stat().st_size == space_needed(SHAPES, 2)
    assert space_needed(SHAPES, 2) == 3 * per_state


def test_rewrites_between_commits_stay_in_place(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine, keep=1) as store:
        write_all(store, 0)
        first = [slot_offset(store, t) for t in TILES]
        write_all(store, 1)
        assert [slot_offset(store, t) for t in TILES] == first
        commit(store)
        write_all(store, 2)
        second = [slot_offset(store, t) for t in TILES]
        assert not set(first) & set(second)
        write_all(store, 3)
        assert [slot_offset(store, t) for t in TILES] == second


def test_writes_during_a_commit_wait_for_a_slot(tmp_path: Path, engine: Engine) -> None:
    """There is room for the commits that are kept and one state more; nothing of the old commit
    is touched before the new one is made."""
    path, gate = tmp_path / "s", Gate()
    gate.opened.set()
    with create(path, engine, syscalls=TileSyscalls(fsync=gate.fsync)) as store:
        old = write_all(store, 1)
        commit(store, n=1)
        new = write_all(store, 2, [0, 1])
        gate.opened.clear()
        gate.entered.clear()
        committing = store.commit({"n": 2})
        assert gate.entered.wait(timeout=30)
        with pytest.raises(ValueError, match="a commit is under way"):
            store.commit({})
        write(store, 2, parts_of(2, 3))  # has a free slot
        with filled(b"waits", 65536) as buf:
            waits, cancelled = store.write_from(0, buf), store.write_from(1, buf)
            assert not waits.running()
            with pytest.raises(ValueError, match="is being written"):
                store.read_into(0, 0, 0, buf)
            assert cancelled.cancel()
            gate.opened.set()
            committing.result(timeout=30)
            waits.result(timeout=30)
        assert read_tile(store, 0) != new[0]
        assert read_tile(store, 1) == new[1]
    with reopen(path, engine) as store:
        assert store.commit_meta == {"n": 2}
        assert state_of(store) == {**old, **new}


def test_close_waits_for_a_commit_and_the_writes_behind_it(tmp_path: Path, engine: Engine) -> None:
    gate = Gate()
    gate.opened.set()
    store = create(tmp_path / "s", engine, syscalls=TileSyscalls(fsync=gate.fsync))
    write_all(store, 1)
    commit(store)
    write_all(store, 2)
    gate.opened.clear()
    committing = store.commit({})
    with filled(b"waits", 65536) as buf:
        waiting: Future[Any] = store.write_from(0, buf)
        opener = threading.Timer(0.01, gate.opened.set)
        opener.start()
        store.close()
        assert committing.done()
        assert waiting.done()
        waiting.result()
        opener.join()


def test_rolling_back(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    states: dict[int, State] = {}
    with create(path, engine, keep=3) as store:
        for number in (1, 2, 3):
            states[number] = write_all(store, number)
            commit(store, n=number)
    with reopen(path, engine, keep=3, commit=2) as store:
        assert state_of(store) == states[2]
        write_all(store, 9, [0])
    with reopen(path, engine, keep=3) as store:  # nothing was given up yet
        assert store.commit_meta == {"n": 3}
    with reopen(path, engine, keep=3, commit=1) as store:
        write(store, 3, parts_of(3, 7))
        commit(store, n="other")
        assert store.commits() == [1, 4]
    with reopen(path, engine, keep=3) as store:
        assert store.commit_meta == {"n": "other"}
        assert state_of(store) == {**states[1], 3: parts_of(3, 7)}
    with pytest.raises(StoreError, match=r"no commit 3; these can be used: 1, 4"):
        reopen(path, engine, commit=3)


def test_a_held_commit_stays(tmp_path: Path, engine: Engine) -> None:
    """However many come after it, until one does not name it; also where a kill has left more
    commits than there is room for."""
    path = tmp_path / "s"
    states: dict[int, State] = {}
    with create(path, engine, hold=1) as store:
        for number in (1, 2, 3, 4):
            states[number] = write_all(store, number)
            assert store.next_number == number
            store.commit({"n": number}, hold=[2] if number > 2 else []).result(timeout=30)
            if number == 3:
                superseded = (path / "commit-3.json").read_bytes()
        assert store.commits() == [2, 4]
        with pytest.raises(ValueError, match=r"\[3\] cannot be held"):
            store.commit({}, hold=[3])
        with pytest.raises(ValueError, match="room to hold 1"):
            store.commit({}, hold=[2, 4])
    assert (path / "tiles.bin").stat().st_size == space_needed(SHAPES, 1, 1)
    assert space_needed(SHAPES, 1, 1) == space_needed(SHAPES, 2)
    (path / "commit-3.json").write_bytes(superseded)
    with reopen(path, engine, hold=1) as store:
        assert store.commits() == [2, 4]
        assert state_of(store) == states[4]
        write_all(store, 5)
        store.go_back(2)
        assert store.commit_meta == {"n": 2}
        assert state_of(store) == states[2]
        with pytest.raises(StoreError, match="no commit 3"):
            store.go_back(3)
        assert state_of(store) == states[2]
    with reopen(path, engine, hold=1) as store:  # nothing was given up yet
        assert state_of(store) == states[4]
        states[5] = write_all(store, 5)
        store.commit({"n": 5}).result(timeout=30)
        assert store.commits() == [5]
    with pytest.raises(ValueError, match="not 127 and 1 held"):
        create(tmp_path / "t", engine, keep=127, hold=1)


def test_keeping_more_or_fewer(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    states: dict[int, State] = {}
    with create(path, engine, keep=1) as store:
        states[1] = write_all(store, 1)
        commit(store)
    with reopen(path, engine, keep=3) as store:
        for number in (2, 3):
            states[number] = write_all(store, number)
            commit(store)
        assert store.commits() == [1, 2, 3]
    with reopen(path, engine, keep=1) as store:
        assert store.commits() == [1, 2, 3]
        write_all(store, 4)
        assert store.commits() == [1, 2, 3]
    with reopen(path, engine, keep=1, commit=1) as store:
        assert state_of(store) == states[1]
    with reopen(path, engine, keep=1) as store:
        states[4] = write_all(store, 4)
        commit(store)
        assert store.commits() == [4]
        assert state_of(store) == states[4]


def test_threads_write_and_read_while_commits_are_made(tmp_path: Path, engine: Engine) -> None:
    """Each thread has a tile of its own; what it writes during a commit is not in that commit."""
    path = tmp_path / "s"
    with create(path, engine) as store, ThreadPoolExecutor(len(SHAPES)) as threads:
        state = write_all(store, 0)

        def work(tile: int, round_: int) -> Tile:
            parts: Tile = ()
            for n in range(3):
                parts = parts_of(tile, 100 * round_ + n)
                write(store, tile, parts)
                assert read_tile(store, tile) == parts
            return parts

        for round_ in range(8):
            committed = state
            committing = store.commit({"round": round_})
            written = list(threads.map(work, TILES, [round_] * len(SHAPES)))
            committing.result(timeout=30)
            state = dict(zip(TILES, written, strict=True))
            assert state_of(store) == state
    with reopen(path, engine) as store:
        assert store.commit_meta == {"round": 7}
        assert state_of(store) == committed


def test_busy_time_is_a_union(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    meter = Meter()
    with meter.moving(10):
        clock[0] = 1.0
        with meter.moving(5):
            clock[0] = 3.0
            assert meter.busy_s == 3.0
    clock[0] = 10.0
    with contextlib.suppress(KeyError), meter.moving(7):
        clock[0] = 11.0
        raise KeyError
    assert meter.busy_s == 4.0
    assert meter.nbytes == 15


# The directory


def test_files_are_private(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        with create(path, engine) as store:
            write_all(store, 1)
            commit(store)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o600}


def test_space_is_reserved(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine, keep=2):
        info = (tmp_path / "s" / "tiles.bin").stat()
        assert info.st_size == space_needed(SHAPES, 2)
        assert info.st_blocks * 512 >= info.st_size


def test_too_little_space(tmp_path: Path, engine: Engine) -> None:
    shapes = [[1 << 50], [4096]]
    need = space_needed(shapes, 3)
    assert need == 4 * ((1 << 50) + 4096)
    with pytest.raises(StoreError, match=rf"\({need} bytes\) are needed.*are free; free some"):
        TileStore.create(tmp_path / "s", shapes, engine, identity={}, keep=3, checksum=checksum)
    assert names(tmp_path / "s") == []
    with create(tmp_path / "s", engine, keep=1):
        pass
    with pytest.raises(StoreError, match=r"too little space"):
        TileStore.open(
            tmp_path / "s", engine, shapes=shapes, identity={}, keep=3, checksum=checksum
        )
    assert names(tmp_path / "s") == ["tiles.bin"]


def test_room_is_made_when_it_is_needed(tmp_path: Path, engine: Engine) -> None:
    """A store of one version: nothing more until a commit's tile is written again."""
    path, shapes = tmp_path / "s", [[100], [5000]]
    one = space_needed(shapes, 1) // 2
    given: dict[str, Any] = {"identity": {}, "keep": 1, "checksum": checksum, "generations": 1}
    with AlignedBuffer(8192) as buffer:
        with TileStore.create(path, shapes, engine, **given) as store:
            assert reserved(path) == one
            buffer[:] = b"a" * 8192
            for tile in (0, 1, 0):
                store.write_from(tile, buffer).result()
            assert not has_commits(path)
            store.commit({}).result()
            assert reserved(path) == one
            assert has_commits(path)
        with TileStore.open(path, engine, shapes=shapes, **given) as store:
            assert reserved(path) == one
            buffer[:] = b"b" * 8192
            store.write_from(1, buffer).result()
            assert reserved(path) == 2 * one
            store.read_into(0, 0, 0, buffer).result()
            assert bytes(buffer[:100]) == b"a" * 100
        with TileStore.open(path, engine, shapes=shapes, **given) as store:
            store.read_into(1, 0, 0, buffer).result()
            assert bytes(buffer[:5000]) == b"a" * 5000
    with pytest.raises(ValueError, match="generations must be from 1 to keep"):
        TileStore.create(tmp_path / "t", shapes, engine, **{**given, "generations": 3})


def test_room_for_a_held_commit_is_made_when_it_is_needed(tmp_path: Path, engine: Engine) -> None:
    path, shapes = tmp_path / "s", [[100], [5000]]
    one = space_needed(shapes, 1) // 2
    given: dict[str, Any] = {"identity": {}, "keep": 1, "hold": 1, "checksum": checksum}
    sizes = []
    with AlignedBuffer(8192) as buffer:
        with TileStore.create(path, shapes, engine, **given, generations=1) as store:
            for letter, held in ((b"a", []), (b"b", [1]), (b"c", [1])):
                buffer[:] = letter * 8192
                store.write_from(0, buffer).result(timeout=30)
                store.commit({}, hold=held).result(timeout=30)
                sizes.append(reserved(path) // one)
            assert store.commits() == [1, 3]
        assert sizes == [1, 2, 3]
        # Whoever holds nothing any more begins with the room there is, without the held one.
        alone = {**given, "hold": 0}
        with TileStore.open(path, engine, shapes=shapes, **alone, generations=1) as store:
            store.write_from(0, buffer).result(timeout=30)
            store.commit({}).result(timeout=30)
            assert store.commits() == [4]
            assert reserved(path) == 3 * one
    with pytest.raises(ValueError, match=r"from 1 to keep \+ hold \+ 1 = 3, not 4"):
        TileStore.create(tmp_path / "t", shapes, engine, **given, generations=4)


def test_directories_that_are_not_ours(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    assert not is_tile_store(path)
    with pytest.raises(StoreError, match="No such file"):
        reopen(path, engine)
    path.mkdir()
    with pytest.raises(StoreError, match="holds no training states"):
        reopen(path, engine)
    (path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match=r"not empty \(it has thesis.tex\)"):
        create(path, engine)
    assert names(path) == ["thesis.tex"]
    with pytest.raises(StoreError, match="cannot make"):
        create(path / "thesis.tex" / "s", engine)
    with pytest.raises(StoreError, match=r"cannot (make|open)"):
        create(path / "thesis.tex", engine)
    create(tmp_path / "t", engine).close()
    assert is_tile_store(tmp_path / "t")
    with pytest.raises(StoreError, match="--resume, or choose another directory"):
        create(tmp_path / "t", engine)


def test_a_store_without_a_commit_opens_as_virgin(tmp_path: Path, engine: Engine) -> None:
    with create(tmp_path / "s", engine) as store:
        write_all(store, 1)
    with reopen(tmp_path / "s", engine) as store:
        assert store.commit_meta is None
        assert state_of(store) == {}
    # Killed in ``create`` before anything was reserved.
    os.truncate(tmp_path / "s" / "tiles.bin", 0)
    with reopen(tmp_path / "s", engine) as store:
        assert write_all(store, 1) == state_of(store)
    assert (tmp_path / "s" / "tiles.bin").stat().st_size == space_needed(SHAPES, 1)


def test_two_processes(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    script = """
import sys
from pathlib import Path
from tile_support import create, reopen
from offload.errors import StoreError
from offload.io.engines import make_engine
engine = make_engine("threads", 1)
for what in (create, reopen):
    try:
        what(Path(sys.argv[1]), engine)
    except StoreError as e:
        print(e)
"""

    def other() -> list[str]:
        paths = [str(Path(__file__).parent), *sys.path]
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        return done.stdout.splitlines()

    with create(path, engine):
        with pytest.raises(StoreError, match="in use by another process, or is open already"):
            reopen(path, engine)
        assert ["in use" in line for line in other()] == [True, True]
    said = other()
    assert len(said) == 1
    assert "already holds" in said[0]


def test_of_another_run(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    with create(path, engine) as store:
        commit(store)
    for identity, says in (
        ({**IDENTITY, "rate": 0.2}, "its rate is 0.1, this run's is 0.2"),
        ({**IDENTITY, "new": 1}, "its new is 'missing', this run's is 1"),
        ({"model": "toy"}, "its rate is 0.1, this run's is 'missing'"),
    ):
        with pytest.raises(StoreError, match=says):
            reopen(path, engine, identity=identity)
    with pytest.raises(StoreError, match="it has 4 tiles, this run 3"):
        reopen(path, engine, shapes=SHAPES[:3])
    with pytest.raises(StoreError, match=r"tile 1 has parts of \[5000\] bytes.*\[5001\]"):
        reopen(path, engine, shapes=[SHAPES[0], [5001], *SHAPES[2:]])
    with reopen(path, engine, identity={**IDENTITY, "shape": [2, 3]}) as store:
        assert store.commit_meta == {}


def test_without_o_direct(tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(fd: int, flags: int) -> None:
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))

    calls = replace(TileSyscalls(), set_flags=refuse)
    with create(tmp_path / "s", engine, syscalls=calls) as store:
        state = write_all(store, 1)
        commit(store)
    with reopen(tmp_path / "s", engine, syscalls=calls) as store:
        assert state_of(store) == state
    assert "refuses O_DIRECT" in caplog.text
