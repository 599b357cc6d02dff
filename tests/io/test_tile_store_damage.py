"""Damaged tiles and manifests: they show, and nothing is passed over in silence."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from io_support import failing
from tile_support import (
    SHAPES,
    Trouble,
    commit,
    create,
    flip,
    names,
    parts_of,
    read_tile,
    reopen,
    slot_offset,
    state_of,
    write_all,
)

from offload.errors import StoreError
from offload.io.engines import Engine, make_engine
from offload.io.tile_directory import TileSyscalls


@pytest.fixture
def engine() -> Any:
    made = make_engine("threads", 2)
    yield made
    made.close()


def test_a_flipped_byte_shows_and_says_what_can_be_done(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    with create(path, engine, keep=2) as store:
        write_all(store, 1)
        for tile, part in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 3), (3, 2)):
            at = slot_offset(store, tile, part)
            for byte in {0, SHAPES[tile][part] - 1}:
                flip(path / "tiles.bin", at + byte)
                with pytest.raises(
                    StoreError,
                    match=rf"tile {tile}: part {part} is damaged.* offset {at} of .*tiles.bin"
                    r"\)\. There is no commit yet: start again",
                ):
                    read_tile(store, tile)
                flip(path / "tiles.bin", at + byte)
                assert read_tile(store, tile) == parts_of(tile, 1)
        commit(store)
        offset = slot_offset(store, 1)
        write_all(store, 2)
        flip(path / "tiles.bin", slot_offset(store, 1))
        with pytest.raises(StoreError, match="Commit 1 is intact, --resume continues from it"):
            read_tile(store, 1)
    flip(path / "tiles.bin", offset)
    with reopen(path, engine, keep=2) as store:
        with pytest.raises(StoreError, match="belong to commit 1, and no other commit has a copy"):
            read_tile(store, 1)
        assert read_tile(store, 2) == parts_of(2, 1)
        write_all(store, 3)
        commit(store)
        flip(path / "tiles.bin", slot_offset(store, 1))
        with pytest.raises(StoreError, match="commit 2; commit 1 has others of this tile"):
            read_tile(store, 1)


def test_bytes_between_parts_are_nobodys(tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "s"
    with create(path, engine) as store:
        state = write_all(store, 1)
        flip(path / "tiles.bin", slot_offset(store, 0) + 100)
        assert state_of(store) == state


def test_a_torn_write_shows(tmp_path: Path, engine: Engine) -> None:
    """A disk that says it wrote everything, and did not."""

    def torn(fd: int, bufs: list[memoryview], offset: int) -> int:
        os.pwritev(fd, [bufs[0][:4096]], offset)
        return bufs[0].nbytes

    with create(tmp_path / "s", engine, syscalls=TileSyscalls(pwritev=torn)) as store:
        write_all(store, 1)
        with pytest.raises(StoreError, match="tile 1: part 0 is damaged"):
            read_tile(store, 1)
        # Its parts are a page each, but the first two went in one request.
        with pytest.raises(StoreError, match="tile 3: part 1 is damaged"):
            read_tile(store, 3)


def test_short_transfers_are_repeated(tmp_path: Path, engine: Engine) -> None:
    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        return os.preadv(fd, [bufs[0][:4096]], offset)

    def pwritev(fd: int, bufs: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, [bufs[0][:4096]], offset)

    def some(fd: int, data: memoryview) -> int:
        return os.write(fd, data[:100])

    calls = TileSyscalls(preadv=preadv, pwritev=pwritev, write=some)
    with create(tmp_path / "s", engine, syscalls=calls) as store:
        state = write_all(store, 1)
        commit(store)
        assert state_of(store) == state
    with reopen(tmp_path / "s", engine) as store:
        assert state_of(store) == state


def test_read_errors_are_errors(tmp_path: Path, engine: Engine) -> None:
    trouble, path = Trouble(), tmp_path / "s"
    with create(path, engine, syscalls=trouble.syscalls) as store:
        state = write_all(store, 1)
        commit(store)
        trouble.arm("preadv")
        with pytest.raises(StoreError, match=r"tile 1: cannot read .* of .*tiles.bin"):
            read_tile(store, 1)
        trouble.disarm()
        assert state_of(store) == state
        os.truncate(path / "tiles.bin", 4096)
        with pytest.raises(StoreError, match="shrank"):
            read_tile(store, 2)
    with pytest.raises(StoreError, match=r"has 4096 bytes, its commits need \d+: it was cut"):
        reopen(path, engine)
    (path / "tiles.bin").unlink()
    with pytest.raises(StoreError, match="holds no training states"):
        reopen(path, engine)


def test_a_manifest_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with create(path, engine, keep=2) as store:
        commit(store)
        commit(store)
    monkeypatch.setattr(Path, "read_bytes", failing(errno.EIO))
    with pytest.raises(StoreError, match=r"cannot read .*commit-2.json: Input/output error"):
        reopen(path, engine, keep=2)
    assert names(path) == ["commit-1.json", "commit-2.json", "tiles.bin"]


def test_damaged_manifests_are_passed_over_aloud(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with create(path, engine, keep=2) as store:
        state = write_all(store, 1)
        commit(store, n=1)
        write_all(store, 2)
        commit(store, n=2)
    flip(path / "commit-2.json", 300)
    with caplog.at_level(logging.WARNING), reopen(path, engine, keep=2) as store:
        assert "commit-2.json is damaged: " in caplog.text
        assert store.commits() == [1]
        assert state_of(store) == state
        assert "commit-2.json" in names(path)
        write_all(store, 3)
        commit(store, n=3)
        assert names(path) == ["commit-1.json", "commit-3.json", "tiles.bin"]
    flip(path / "commit-1.json", 300)
    with pytest.raises(StoreError, match=r"commit-1.json is damaged.*can be used: 3"):
        reopen(path, engine, keep=2, commit=1)
    flip(path / "commit-3.json", 300)
    with pytest.raises(StoreError, match=r"is damaged: .*there is no other commit"):
        reopen(path, engine, keep=2)
