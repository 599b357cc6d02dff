"""Commits of a tile store: what is committed stays, and costs no writes of data."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from io_support import filled
from tile_support import (
    SHAPES,
    Gate,
    State,
    Tile,
    commit,
    create,
    names,
    parts_of,
    read_tile,
    reopen,
    slot_offset,
    state_of,
    write,
    write_all,
)

from offload.errors import StoreError
from offload.io.engines import Engine
from offload.io.meter import Meter
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import (
    space_needed,
)

TILES = range(len(SHAPES))


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
