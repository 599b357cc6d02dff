"""A packed model directory that was not finished: killed, a full disk, a failed commit."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_support import SIZES, content, fill, job, read

from offload.errors import StoreError
from offload.io import pack_writer, private
from offload.io.engines import Engine
from offload.io.files import Syscalls
from offload.io.memory import Staging
from offload.io.pack_manifest import (
    JOURNAL,
    bundle_name,
    is_pack,
)
from offload.io.pack_writer import PackDirectory


@pytest.mark.parametrize("stop", range(len(SIZES) + 1))
def test_a_stopped_run_continues(tmp_path: Path, io: tuple[Engine, Staging], stop: int) -> None:
    with PackDirectory(tmp_path / "p", job()) as directory:
        fill(directory, stop)
        if stop < len(SIZES):
            directory.begin()
            directory.write(memoryview(b"half of a block"))
            with pytest.raises(StoreError, match=rf"{len(SIZES) - stop} of {len(SIZES)} blocks"):
                directory.commit({})
    assert not is_pack(tmp_path / "p")
    with (tmp_path / "p" / JOURNAL).open("ab") as journal:
        journal.write(b"[9,1")  # a line that was cut
    with PackDirectory(tmp_path / "p", job()) as directory:
        assert [f.note for f in directory.finished] == [[i] for i in range(stop)]
        fill(directory)
        directory.commit({})
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]


def test_the_journal_is_behind_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the journal names was synced before."""
    order: list[str] = []
    real_sync, real_write = pack_writer.DirectFile.sync, os.write

    def sync(self: pack_writer.DirectFile) -> None:
        order.append("data")
        real_sync(self)

    def write_fd(fd: int, data: bytes) -> int:
        if bytes(data).startswith(b"["):
            order.append(f"journal {bytes(data).count(10)}")
        return real_write(fd, data)

    monkeypatch.setattr(pack_writer.DirectFile, "sync", sync)
    monkeypatch.setattr(os, "write", write_fd)
    with PackDirectory(tmp_path / "p", job(), sync_bytes=20000) as directory:
        fill(directory)
    assert order == ["data", "journal 3", "data", "journal 3"]


@pytest.mark.parametrize(
    "damage",
    [
        "{", "[0,1,2]\n[2,1,2]\n", "[0]\n", '"x"\n', '[0,"x",2]\n', "[0,-1,2]\n", "[0,true,2]\n",
        "[false,1,2]\n", "[0,1,2]\n[true,1,2]\n", '[0,1,2,"AAAA"]\n', "[" * 100_000,
    ],
    ids=lambda damage: damage[:40],
)  # fmt: skip
def test_a_damaged_journal_is_not_trusted(tmp_path: Path, damage: str) -> None:
    with PackDirectory(tmp_path / "p", job()):
        pass
    with (tmp_path / "p" / JOURNAL).open("a") as journal:
        journal.write(damage.rstrip("\n") + "\n")
    with pytest.raises(StoreError, match=r"pack\.journal is damaged.*delete .* to start anew"):
        PackDirectory(tmp_path / "p", job())


@pytest.mark.parametrize("what", ["missing", "short", "long", "a directory"])
def test_a_bundle_that_finished_blocks_were_in(tmp_path: Path, what: str) -> None:
    """It would be made anew, and zeros be taken for the blocks that were in it."""
    with PackDirectory(tmp_path / "p", job()) as directory:
        fill(directory, 2)
    bundle = tmp_path / "p" / bundle_name(0)
    size = bundle.stat().st_size
    if what in ("short", "long"):
        os.truncate(bundle, size - 4096 if what == "short" else size + 4096)
    else:
        bundle.unlink()
    if what == "a directory":
        bundle.mkdir()
    before = sorted(os.listdir(tmp_path / "p"))
    with pytest.raises(
        StoreError, match=f"bundle {bundle} is .*; delete {tmp_path / 'p'} and pack"
    ):
        PackDirectory(tmp_path / "p", job())
    assert sorted(os.listdir(tmp_path / "p")) == before


def test_a_bundle_that_nothing_was_written_to_is_made_anew(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    with PackDirectory(tmp_path / "p", job()) as directory:
        fill(directory, 2)
    (tmp_path / "p" / bundle_name(1)).unlink()
    with PackDirectory(tmp_path / "p", job()) as directory:
        fill(directory)
        directory.commit({})
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]


def test_a_pipe_in_the_place_of_the_journal_is_not_waited_for(tmp_path: Path) -> None:
    with PackDirectory(tmp_path / "p", job()):
        pass
    (tmp_path / "p" / JOURNAL).unlink()
    os.mkfifo(tmp_path / "p" / JOURNAL)
    with pytest.raises(StoreError, match=r"pack\.journal is no file; delete .* to start anew"):
        PackDirectory(tmp_path / "p", job())


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_a_failed_commit_can_be_repeated(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with PackDirectory(tmp_path / "p", job()) as directory:
        fill(directory)
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(
                StoreError, match=r"cannot finish .*Input/output error.*run it again"
            ):
                directory.commit({})
    # Before the manifest has its name it is no pack; after, it is one.
    assert is_pack(tmp_path / "p") == (step == "unlink")
    with PackDirectory(tmp_path / "p", job()) as directory:
        assert len(directory.finished) == (0 if step == "unlink" else len(SIZES))
        if directory.complete is None:
            directory.commit({})
    assert not (tmp_path / "p" / JOURNAL).exists()
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]


# Full disks


def test_too_little_space_is_said_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"needs .*TiB \(\d+ bytes\) more, .* are free; free .*"):
        PackDirectory(tmp_path / "p", job(scale=1 << 40))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_while_space_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def reserve(fd: int, nbytes: int, directory: str, **_: object) -> None:
        calls.append(nbytes)
        if len(calls) == 2:
            raise private._too_small(nbytes, 0, directory)
        os.ftruncate(fd, nbytes)

    monkeypatch.setattr(pack_writer, "reserve", reserve)
    with pytest.raises(StoreError, match="too little space"):
        PackDirectory(tmp_path / "p", job())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_while_writing(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    full = True

    def pwritev(fd: int, bufs: list[memoryview], offset: int) -> int:
        if full and offset >= 12288:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(fd, bufs, offset)

    calls = Syscalls(pwritev=pwritev)
    with (
        pytest.raises(StoreError, match=r"cannot write .*bundle-00001.bin.*are free there"),
        PackDirectory(tmp_path / "p", job(), syscalls=calls) as directory,
    ):
        fill(directory)
    assert not is_pack(tmp_path / "p")
    full = False
    with PackDirectory(tmp_path / "p", job(), syscalls=calls) as directory:
        assert len(directory.finished) == 2
        fill(directory)
        directory.commit({})
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]


def test_a_block_of_the_wrong_length_is_a_bug(tmp_path: Path) -> None:
    with PackDirectory(tmp_path / "p", job()) as directory:
        directory.begin()
        directory.write(memoryview(bytes(4999)))
        with pytest.raises(ValueError, match="b0: 4999 bytes were written, not 5000"):
            directory.end()


def test_blocks_must_follow_each_other(tmp_path: Path) -> None:
    good = job()
    moved = replace(good.manifest.blocks[1], offset=12288)
    blocks = (good.manifest.blocks[0], moved, *good.manifest.blocks[2:])
    bad = replace(good, manifest=replace(good.manifest, blocks=blocks))
    with PackDirectory(tmp_path / "p", bad) as directory:
        fill(directory, 1)
        with pytest.raises(ValueError, match="b1 is at 12288, not 8192"):
            directory.begin()


def test_a_signal_between_journal_and_sync_is_no_damage(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", stop)
        with (
            pytest.raises(KeyboardInterrupt),
            PackDirectory(tmp_path / "p", job(), sync_bytes=1) as directory,
        ):
            fill(directory)
    with PackDirectory(tmp_path / "p", job()) as directory:
        assert len(directory.finished) == 1
        fill(directory)
        directory.commit({})
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]
