"""Packs when something goes wrong: full disks, kills, damaged files."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fault_support import BY_ID, CONTENTS, full_pack
from io_support import (
    REQUEST_BYTES,
    SPECS,
    content_of,
    failing,
    filled,
    payload,
    read_block,
    write_block,
)

from offload.blocks import BlockKind, layout
from offload.errors import ClosedError, StoreError
from offload.io import private
from offload.io.engines import Engine, make_engine
from offload.io.files import Syscalls
from offload.io.memory import Staging
from offload.io.stores import PackStore


def test_a_write_in_place_may_be_longer_than_a_chunk(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    spec = layout("b", BlockKind.WEIGHT, [("w", "uint8", (100_001,))])
    content = content_of(spec)
    store = PackStore.create(tmp_path, [spec], *io, request_bytes=1 << 20)
    with filled(content, spec.slot_nbytes + 8) as buf:
        # A whole slot goes at once, one byte less or an unaligned buffer through the chunks.
        for end, chunks in ((spec.slot_nbytes, 1), (spec.slot_nbytes - 1, 7)):
            assert store.write_from("b", buf[:end]).result(timeout=30).requests == chunks
            assert read_block(store, "b") == [content]
        buf[8 : 8 + len(content)] = content
        assert store.write_from("b", buf[8:]).result(timeout=30).requests == 7
        assert read_block(store, "b") == [content]
    store.close()


# Writing a pack


def test_a_pack_is_private_and_has_no_name(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    store = full_pack(tmp_path, *io)
    assert list(tmp_path.iterdir()) == []
    info = os.fstat(store._files[0].fileno())
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_nlink == 0
    store.close()


def no_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, mode: int = 0o777, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)


def test_without_o_tmpfile(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_tmpfile(monkeypatch)
    store = full_pack(tmp_path, *io)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(store._files[0].fileno()).st_nlink == 0
    store.commit(tmp_path / "p", {"a": 1})
    store.close()
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o600
    again = PackStore.open(tmp_path / "p", *io, expect_meta={"a": 1})
    for i in BY_ID:
        assert read_block(again, i) == payload(BY_ID[i], CONTENTS[i])
    again.close()


def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from offload.blocks import BlockKind, layout
from offload.io.engines import make_engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.stores import PackStore
spec = layout("b", BlockKind.STATE, [("w", "uint8", (100000,))])
store = PackStore.create(sys.argv[1], [spec], make_engine("threads", 2), Staging(2, 16384))
store.write_from("b", AlignedBuffer(spec.slot_nbytes).view).result()
print(os.readlink(f"/proc/self/fd/{store._files[0].fileno()}"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert str(tmp_path) in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_space_for_the_pack(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = layout("b", BlockKind.STATE, [("w", "uint8", (1 << 60,))])
    with pytest.raises(StoreError, match=rf"need 1048576.0 TiB \({1 << 60} bytes\).*are free"):
        PackStore.create(tmp_path, [huge], *io)
    # Also where the count of free blocks was too good to be true.
    monkeypatch.setattr(private, "_libc", type("L", (), {"fallocate": _full_disk}))
    with pytest.raises(StoreError, match=r"need .*are free"):
        PackStore.create(tmp_path, SPECS, *io)
    assert list(tmp_path.iterdir()) == []


def _full_disk(*_: object) -> int:
    ctypes.set_errno(errno.ENOSPC)
    return -1


def test_without_fallocate(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(private, "_libc", type("L", (), {"fallocate": unsupported}))
    store = full_pack(tmp_path, *io)
    assert read_block(store, "long") == payload(BY_ID["long"], CONTENTS["long"])
    store.close()


@pytest.mark.parametrize("where", ["missing", "a file"])
def test_no_directory_for_the_pack(tmp_path: Path, io: tuple[Engine, Staging], where: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(StoreError, match="choose another directory"):
        PackStore.create(tmp_path / where, SPECS, *io)


def test_a_full_disk_in_the_middle_of_a_write(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    full = threading.Event()

    def pwritev(fd: int, bufs: list[memoryview], offset: int) -> int:
        # "odd" lies at 8192: its first request may replace a part of the old block.
        if full.is_set() and offset > 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(fd, bufs, offset)

    store = PackStore.create(tmp_path, SPECS, *io, syscalls=Syscalls(pwritev=pwritev))
    for i, content in CONTENTS.items():
        write_block(store, i, content)
    full.set()
    with pytest.raises(StoreError, match=r"block odd: cannot write \d+ bytes.*are free there"):
        write_block(store, "odd", content_of(BY_ID["odd"], 1))
    with pytest.raises(StoreError, match="last write failed"):
        read_block(store, "odd")
    for i in ("small", "page", "long"):
        assert read_block(store, i) == payload(BY_ID[i], CONTENTS[i])
    with pytest.raises(StoreError, match=r"1 of 5 blocks are not written yet, odd first"):
        store.commit(tmp_path / "p", {})
    full.clear()
    write_block(store, "odd", CONTENTS["odd"])
    assert read_block(store, "odd") == payload(BY_ID["odd"], CONTENTS["odd"])
    store.close()


def test_a_block_that_is_being_written_cannot_be_read(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pwritev(fd: int, bufs: list[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(timeout=30)
        return os.pwritev(fd, bufs, offset)

    store = PackStore.create(tmp_path, SPECS, *io, syscalls=Syscalls(pwritev=pwritev))
    with filled(CONTENTS["page"]) as buf:
        writing = store.write_from("page", buf)
        assert inside.wait(timeout=30)
        with pytest.raises(StoreError, match="is being written"):
            read_block(store, "page")
        with pytest.raises(StoreError, match="being written already"):
            store.write_from("page", buf).result(timeout=30)
        go_on.set()
        writing.result(timeout=30)
    assert read_block(store, "page") == payload(BY_ID["page"], CONTENTS["page"])
    store.close()


def test_a_cancelled_write_leaves_the_old_block(tmp_path: Path, engine_name: str) -> None:
    staging, engine = Staging(1, REQUEST_BYTES), make_engine(engine_name, 1)
    store = full_pack(tmp_path, engine, staging)
    inside, go_on = threading.Event(), threading.Event()
    engine.submit(lambda: (inside.set(), go_on.wait(timeout=30)))
    assert inside.wait(timeout=30)
    with filled(content_of(BY_ID["page"], 1)) as buf:
        future = store.write_from("page", buf)
        assert future.cancel()
    go_on.set()
    assert read_block(store, "page") == payload(BY_ID["page"], CONTENTS["page"])
    store.close()
    engine.close()
    staging.close()


def test_padding_holds_nothing_of_what_passed_before(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    _, staging = io
    chunks = [staging._take(0) for _ in range(staging.chunks)]
    for chunk in chunks:
        chunk.view[:] = b"\x66" * len(chunk.view)  # another user's secret
    staging._free.extend(chunks)
    store = PackStore.create(tmp_path, SPECS, *io)
    for i, content in CONTENTS.items():
        with filled(content) as buf:  # shorter than the slot: the end goes through the staging
            store.write_from(i, buf).result(timeout=30)
    store.commit(tmp_path / "p", {})
    store.close()
    pack, at = (tmp_path / "p").read_bytes(), 0
    for spec in SPECS:
        assert pack[at : at + spec.nbytes] == CONTENTS[spec.id]
        assert not any(pack[at + spec.nbytes : at + spec.slot_nbytes])
        at += spec.slot_nbytes


# Publishing a pack, and what is refused afterwards


def test_commit_replaces_in_one_step(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    (tmp_path / "p").write_text("something else")
    store = full_pack(tmp_path, *io)
    store.commit(tmp_path / "p", {"n": [1, 2]})
    assert not store.writable
    assert read_block(store, "long") == payload(BY_ID["long"], CONTENTS["long"])
    store.close()
    again = PackStore.open(tmp_path / "p", *io, expect_meta={"n": (1, 2)})
    assert list(again.ids()) == list(BY_ID)
    assert all(again.spec(i) == BY_ID[i] for i in BY_ID)
    assert not again.writable
    again.close()


@pytest.mark.parametrize("step", ["link", "replace", "fsync"])
def test_a_commit_that_fails_leaves_the_name_alone(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "p").write_text("the old one")
    store = full_pack(tmp_path, *io)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing(errno.EIO))
        with pytest.raises(StoreError, match="Input/output error"):
            store.commit(tmp_path / "p", {"longer than the next one": "x" * 10_000})
    assert (tmp_path / "p").read_text() == "the old one"
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    assert store.writable
    write_block(store, "page", content_of(BY_ID["page"], 1))
    store.commit(tmp_path / "p", {})
    store.close()
    again = PackStore.open(tmp_path / "p", *io)
    assert read_block(again, "page") == payload(BY_ID["page"], content_of(BY_ID["page"], 1))
    again.close()


def test_commit_to_another_filesystem_copies(
    tmp_path: Path, io: tuple[Engine, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = full_pack(tmp_path, *io)
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    store.commit(tmp_path / "p", {})
    store.close()
    again = PackStore.open(tmp_path / "p", *io)
    assert read_block(again, "odd") == payload(BY_ID["odd"], CONTENTS["odd"])
    again.close()


def test_commit_into_a_missing_folder(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    store = full_pack(tmp_path, *io)
    with pytest.raises(StoreError, match=r"cannot publish .*No such file"):
        store.commit(tmp_path / "nowhere" / "p", {})
    store.close()
    with pytest.raises(ClosedError):
        store.commit(tmp_path / "p", {})


def test_two_blocks_of_one_name(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    with pytest.raises(ValueError, match="small"):
        PackStore.create(tmp_path, [SPECS[0], SPECS[0]], *io)


@pytest.fixture
def published(tmp_path: Path, io: tuple[Engine, Staging]) -> Path:
    store = full_pack(tmp_path, *io, checksums=True)
    store.commit(tmp_path / "p", {"model": "a", "n": 1})
    store.close()
    return tmp_path / "p"


def test_every_flipped_byte_of_index_and_footer_is_found(
    published: Path, io: tuple[Engine, Staging]
) -> None:
    whole = published.read_bytes()
    data = sum(s.slot_nbytes for s in SPECS)
    used = [i for i in range(data, len(whole)) if whole[i]]
    for at in [*used[::37], *used[-64:]]:
        published.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(StoreError, match="not a complete pack"):
            PackStore.open(published, *io)


@pytest.mark.parametrize("keep", [0, 1, 4095, 4096, 8192, -1, -4096, -8192])
def test_a_cut_pack_is_refused(published: Path, io: tuple[Engine, Staging], keep: int) -> None:
    published.write_bytes(published.read_bytes()[:keep])
    with pytest.raises(StoreError, match=r"not a complete pack.*delete it"):
        PackStore.open(published, *io)


def test_what_is_no_pack_is_refused(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    (tmp_path / "zeros").write_bytes(bytes(65536))
    (tmp_path / "noise").write_bytes(os.urandom(65536))
    for name in ("zeros", "noise"):
        with pytest.raises(StoreError, match="no footer"):
            PackStore.open(tmp_path / name, *io)
    with pytest.raises(StoreError, match="cannot open"):
        PackStore.open(tmp_path / "nothing", *io)


@pytest.mark.parametrize(
    ("meta", "key"),
    [
        ({"model": "b", "n": 1}, "model"),
        ({"model": "a"}, "n"),
        ({"model": "a", "n": 1, "x": None}, "x"),
        ({}, "model"),
    ],
)
def test_a_pack_of_something_else_is_refused(
    published: Path, io: tuple[Engine, Staging], meta: dict[str, object], key: str
) -> None:
    with pytest.raises(StoreError, match=f"made from something else: its {key} is"):
        PackStore.open(published, *io, expect_meta=meta)


def test_a_flipped_bit_is_found_when_asked(published: Path, io: tuple[Engine, Staging]) -> None:
    whole = bytearray(published.read_bytes())
    whole[4096 + 100] ^= 1  # in the second block
    published.write_bytes(whole)
    store = PackStore.open(published, *io, verify=True)
    with pytest.raises(StoreError, match=r"block page: .*damaged.*offset 4096.*CRC-32"):
        read_block(store, "page")
    assert read_block(store, "long") == payload(BY_ID["long"], CONTENTS["long"])
    store.close()


def test_nothing_to_verify(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    store = full_pack(tmp_path, *io)
    store.commit(tmp_path / "p", {})
    store.close()
    with pytest.raises(StoreError, match="without checksums"):
        PackStore.open(tmp_path / "p", *io, verify=True)
