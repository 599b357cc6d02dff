"""A tile store's directory: private, reserved, one process's, and somebody else's untouched."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tile_support import (
    IDENTITY,
    SHAPES,
    checksum,
    commit,
    create,
    names,
    reopen,
    state_of,
    write_all,
)

from offload.errors import StoreError
from offload.io.engines import Engine
from offload.io.memory import AlignedBuffer
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import (
    TileStore,
    has_commits,
    is_tile_store,
    reserved,
    space_needed,
)

TILES = range(len(SHAPES))


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
