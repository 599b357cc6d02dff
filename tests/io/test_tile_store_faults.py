"""The tile store when something goes wrong: kills, full disks, failing calls."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from io_support import filled
from tile_crash import KEEP, WAYS, rounds
from tile_support import (
    SHAPES,
    Trouble,
    checksum,
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

from offload.errors import ClosedError, StoreError
from offload.io.engines import Engine, make_engine
from offload.io.memory import AlignedBuffer
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import TileStore


@pytest.fixture
def engine() -> Any:
    made = make_engine("threads", 2)
    yield made
    made.close()


@pytest.mark.slow
def test_a_kill_at_any_system_call_leaves_the_last_commit(tmp_path: Path, engine: Engine) -> None:
    script = Path(__file__).parent / "tile_crash.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    calls = int(done.stdout)
    assert calls > 3 * (5 + 5)  # of three rounds: writes, and the steps of a commit
    states, reached = rounds(), set()
    for k in range(1, calls + 1):
        for way in WAYS:
            path = tmp_path / f"{k}-{way}"
            told = path.parent / f"{path.name}.done"
            least = int(told.read_text()) if told.exists() else 1
            with reopen(path, engine, keep=KEEP) as store:
                assert store.commit_meta is not None
                n = store.commit_meta["n"]
                assert least <= n <= least + 1, path
                reached.add(n)
                assert state_of(store) == states[n], path
                assert "commit.tmp" not in names(path)
                # Whatever was left, the next rounds find their slots.
                for again in (1, 2, 3):
                    state = write_all(store, 100 + again)
                    commit(store, n=again)
                assert len(store.commits()) == KEEP
            with reopen(path, engine, keep=KEEP) as store:
                assert state_of(store) == state
    assert reached == {1, 2, 3, 4}


def test_the_order_of_a_commit(tmp_path: Path, engine: Engine) -> None:
    """Data before the manifest, the manifest before its name, the name before what it replaces
    goes, and that is gone for certain before a slot of it is used."""
    log: list[str] = []
    real = TileSyscalls()

    def note(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            name = what
            if what == "fsync":
                name += " " + Path(os.readlink(f"/proc/self/fd/{args[0]}")).name
            elif what in ("rename", "unlink"):
                name += " " + " ".join(map(str, args[:-1]))
            log.append(name)
            return call(*args)

        return noted

    calls = TileSyscalls(
        **{n: note(n, getattr(real, n)) for n in ("pwritev", "fsync", "write", "rename", "unlink")}
    )
    with create(tmp_path / "s", engine, syscalls=calls) as store:
        write(store, 1, parts_of(1, 1))
        commit(store)
        write(store, 1, parts_of(1, 2))
        log.clear()
        committing = store.commit({})
        with filled(b"x", 8192) as buf:
            store.write_from(1, buf).result(timeout=30)
        committing.result(timeout=30)
    assert log == [
        "fsync tiles.bin",
        "write",
        "fsync commit.tmp",
        "rename commit.tmp commit-2.json",
        "fsync s",
        "unlink commit-1.json",
        "fsync s",
        "pwritev",
    ]


# Failing writes


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_beside_a_commit_keeps_the_old_tile(
    tmp_path: Path, engine: Engine, code: int
) -> None:
    trouble = Trouble()
    with create(tmp_path / "s", engine, syscalls=trouble.syscalls) as store:
        state = write_all(store, 1)
        commit(store)
        trouble.arm("pwritev", 1, code)
        with pytest.raises(StoreError, match=r"tile 2: cannot write .* of .*tiles.bin"):
            write(store, 2, parts_of(2, 2))
        trouble.disarm()
        assert state_of(store) == state
        commit(store, n=2)
        write(store, 2, parts_of(2, 3))
        assert read_tile(store, 2) == parts_of(2, 3)


def test_a_failed_write_in_place_loses_the_tile_and_no_commit(
    tmp_path: Path, engine: Engine
) -> None:
    trouble, path = Trouble(), tmp_path / "s"
    with create(path, engine, syscalls=trouble.syscalls) as store, AlignedBuffer(65536) as buf:
        write_all(store, 0)
        trouble.arm("pwritev", 1)
        with pytest.raises(StoreError, match="cannot write"):
            write(store, 2, parts_of(2, 0))
        trouble.disarm()
        with pytest.raises(StoreError, match=r"tile 2 was lost .* no commit yet: start again"):
            store.read_into(2, 0, 0, buf).result(timeout=30)
        state = write_all(store, 1)
        commit(store)
        write_all(store, 2)
        trouble.arm("pwritev", 1)
        with pytest.raises(StoreError, match="cannot write"):
            write(store, 2, parts_of(2, 3))
        trouble.disarm()
        assert store.written(2)
        assert not store.has(2, 0)
        with pytest.raises(StoreError, match="commit 1 is intact, --resume continues from it"):
            store.read_into(2, 0, 0, buf).result(timeout=30)
        with pytest.raises(StoreError, match="tile 2 was lost"):
            commit(store)
        assert store.commits() == [1]
        write(store, 2, parts_of(2, 4))
        assert read_tile(store, 2) == parts_of(2, 4)
    with reopen(path, engine) as store:
        assert state_of(store) == state


def test_a_checksum_that_fails_spoils_nothing(tmp_path: Path, engine: Engine) -> None:
    broken: list[int] = []

    def sum_or_fail(view: memoryview) -> int:
        if broken:
            raise RuntimeError("no kernel")
        return checksum(view)

    with TileStore.create(
        tmp_path / "s", SHAPES, engine, identity={}, keep=1, checksum=sum_or_fail
    ) as store:
        state = write_all(store, 1)
        broken.append(1)
        with pytest.raises(StoreError, match="no kernel"):
            write(store, 2, parts_of(2, 2))
        broken.clear()
        assert state_of(store) == state


# Failing commits

STEPS = [("open", 0, errno.ENOSPC), ("open", 0, errno.EACCES), ("write", 0, errno.ENOSPC),
         ("write", 0, errno.EIO), ("fsync", 1, errno.EIO), ("rename", 0, errno.EIO),
         ("rename", 0, errno.ENOSPC)]  # fmt: skip


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize(("call", "index", "code"), STEPS)
def test_a_failed_commit_leaves_the_earlier_ones(
    tmp_path: Path, engine: Engine, call: str, index: int, code: int, keep: int
) -> None:
    trouble, path = Trouble(), tmp_path / "s"
    with create(path, engine, keep=keep, syscalls=trouble.syscalls) as store:
        old = write_all(store, 1)
        commit(store, n=1)
        now = write_all(store, 2)
        trouble.arm(call, index, code)
        committing = store.commit({"n": 2})
        trouble_ended = committing.exception(timeout=30)
        trouble.disarm()
        assert isinstance(trouble_ended, StoreError)
        assert os.strerror(code) in str(trouble_ended)
        assert ("free some space" in str(trouble_ended)) == (code == errno.ENOSPC)
        assert store.commits() == [1]
        assert store.commit_meta == {"n": 1}
        assert state_of(store) == now
        assert names(path) == ["commit-1.json", "tiles.bin"]
        places = [slot_offset(store, t) for t in range(len(SHAPES))]
        now = write_all(store, 3)  # the failed snapshot's slots are free: in place
        assert [slot_offset(store, t) for t in range(len(SHAPES))] == places
        with reopen_copy(path, tmp_path / "copy", engine, keep) as copy:
            assert state_of(copy) == old
        commit(store, n=3)
        assert store.commits() == [1, 2][-keep:]
    with reopen(path, engine, keep=keep) as store:
        assert store.commit_meta == {"n": 3}
        assert state_of(store) == now


def reopen_copy(path: Path, to: Path, engine: Engine, keep: int) -> TileStore:
    subprocess.run(["cp", "-a", str(path), str(to)], check=True)
    return reopen(to, engine, keep=keep)


def test_a_write_waiting_for_a_commit_that_fails(tmp_path: Path, engine: Engine) -> None:
    trouble = Trouble()
    with create(tmp_path / "s", engine, syscalls=trouble.syscalls) as store:
        write_all(store, 1)
        commit(store)
        write_all(store, 2)
        trouble.arm("rename")
        committing = store.commit({})
        write(store, 0, parts_of(0, 5))
        assert isinstance(committing.exception(timeout=30), StoreError)
        trouble.disarm()
        assert read_tile(store, 0) == parts_of(0, 5)
        assert store.commits() == [1]


def test_a_disk_that_refuses_to_sync_is_not_asked_again(tmp_path: Path, engine: Engine) -> None:
    """A system that dropped what it could not write says so once: the next sync would succeed."""
    trouble, path = Trouble(), tmp_path / "s"
    with create(path, engine, syscalls=trouble.syscalls) as store:
        old = write_all(store, 1)
        commit(store)
        now = write_all(store, 2)
        trouble.arm("fsync")
        with pytest.raises(StoreError, match=r"could not be synced .*--resume"):
            commit(store)
        trouble.disarm()
        for future in (store.commit({}), write_future(store, 1)):
            with pytest.raises(StoreError, match="could not be synced"):
                future.result(timeout=30)
        assert state_of(store) == now
    with reopen(path, engine) as store:
        assert state_of(store) == old


def write_future(store: TileStore, tile: int) -> Any:
    with AlignedBuffer(65536) as buf:
        future = store.write_from(tile, buf)
        future.exception(timeout=30)
        return future


def test_a_commit_whose_name_may_not_last(tmp_path: Path, engine: Engine) -> None:
    """The directory cannot be synced after the rename, nor can the name be removed: the commit
    may be found by the next start or not, so neither its slots nor the old ones are written to."""
    trouble, path = Trouble(), tmp_path / "s"
    with create(path, engine, syscalls=trouble.syscalls) as store:
        old = write_all(store, 1)
        commit(store, n=1)
        now = write_all(store, 2)
        trouble.arm("fsync", 2)
        trouble.arm("unlink")
        with pytest.raises(StoreError, match="nor could it be taken back"):
            commit(store, n="doubtful")
        trouble.disarm()
        assert store.commits() == [1]
        for future in (store.commit({}), write_future(store, 1)):
            with pytest.raises(StoreError, match="nor could it be taken back"):
                future.result(timeout=30)
        assert state_of(store) == now
    for meta, state in (("doubtful", now), (1, old)):
        with reopen(path, engine, keep=2) as store:
            assert store.commit_meta == {"n": meta}
            assert state_of(store) == state
        (path / "commit-2.json").unlink(missing_ok=True)


def test_a_commit_is_taken_back_if_its_name_may_not_last(tmp_path: Path, engine: Engine) -> None:
    path, synced = tmp_path / "s", []

    def fsync(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 6:  # data, manifest, name; then data, manifest, name
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(fd)

    with create(path, engine, syscalls=TileSyscalls(fsync=fsync)) as store:
        old = write_all(store, 1)
        commit(store)
        write_all(store, 2)
        with pytest.raises(StoreError, match=r"cannot write .*commit-2.json .*Input/output"):
            commit(store)
        assert len(synced) == 7
        assert names(path) == ["commit-1.json", "tiles.bin"]
        write_all(store, 3)
    with reopen(path, engine) as store:
        assert state_of(store) == old


def test_superseded_commits_that_cannot_be_removed(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    trouble, path = Trouble(), tmp_path / "s"
    with create(path, engine, syscalls=trouble.syscalls) as store:
        write_all(store, 1)
        commit(store)
        state = write_all(store, 2)
        trouble.arm("unlink", code=errno.EACCES)
        commit(store)
        assert "commit 2 is made, but: cannot remove ['commit-1.json']" in caplog.text
        assert store.commits() == [1, 2]
        with pytest.raises(StoreError, match=r"tile 1: no slot is free: commits 1, 2 are there"):
            write(store, 1, parts_of(1, 3))
        trouble.disarm()
        assert state_of(store) == state
        commit(store)
        assert store.commits() == [3]
        write(store, 1, parts_of(1, 3))


def test_an_engine_that_is_closed(tmp_path: Path) -> None:
    other = make_engine("threads", 1)
    with create(tmp_path / "s", other) as store:
        write_all(store, 1)
        other.close()
        with pytest.raises(ClosedError, match="closed"):
            commit(store)
        with pytest.raises(ClosedError, match="closed"):
            write(store, 1, parts_of(1, 2))
        with pytest.raises(ClosedError, match="closed"):
            read_tile(store, 1)
        assert store.has(1, 0)
