"""Stores on files when something goes wrong: errors, cancellation, order, damaged packs."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from io_support import (
    DEPTH,
    REQUEST_BYTES,
    SPECS,
    content_of,
    failing,
    filled,
    payload,
    read_block,
    rig,
    scatter,
    write_block,
)

from offload.blocks import BlockKind, BlockSpec, TensorSpec, layout
from offload.errors import ClosedError, StoreError
from offload.io import private
from offload.io.engines import Engine, make_engine
from offload.io.files import DirectFile, Syscalls, TransferError
from offload.io.memory import AlignedBuffer, Staging
from offload.io.ranges import Piece
from offload.io.store import DEMAND, PREFETCH
from offload.io.stores import PackStore, RangeStore

BY_ID = {s.id: s for s in SPECS}
CONTENTS = {s.id: content_of(s) for s in SPECS}


@pytest.fixture
def io(engine_name: str) -> Iterator[tuple[Engine, Staging]]:
    with rig(engine_name) as both:
        yield both


def checkpoint(
    folder: Path, engine: Engine, staging: Staging, syscalls: Syscalls | None = None
) -> RangeStore:
    paths, pieces = scatter(folder, CONTENTS)
    return RangeStore(
        paths,
        {s.id: (s, tuple(pieces[s.id])) for s in SPECS},
        engine,
        staging,
        open_file=lambda path: DirectFile.open(path, syscalls=syscalls),
    )


def full_pack(
    folder: Path, engine: Engine, staging: Staging, *, checksums: bool = False
) -> PackStore:
    store = PackStore.create(folder, SPECS, engine, staging, checksums=checksums)
    for block_id, content in CONTENTS.items():
        write_block(store, block_id, content)
    return store


class Valve:
    """``preadv`` that lets reads through only when opened, and notes their order."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.offsets: list[int] = []

    def preadv(self, fd: int, bufs: list[memoryview], offset: int) -> int:
        with self.lock:
            self.offsets.append(offset)
        self.entered.release()
        assert self.opened.wait(timeout=30)
        return os.preadv(fd, bufs, offset)


# Reading a checkpoint's own files


def test_o_direct_refused_changes_nothing_but_the_mode(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        if fd not in seen:
            seen.add(fd)
            raise OSError(errno.EINVAL, "refused")
        return os.preadv(fd, bufs, offset)

    seen: set[int] = set()
    store = checkpoint(tmp_path, *io, syscalls=Syscalls(preadv=preadv))
    for block_id in BY_ID:
        assert read_block(store, block_id) == payload(BY_ID[block_id], CONTENTS[block_id])
    assert set(store.modes.values()) == {"buffered"}
    store.close()


def test_a_read_error_names_the_block_and_harms_no_other(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    broken = threading.Event()
    broken.set()

    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        if broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, bufs, offset)

    store = checkpoint(tmp_path, *io, syscalls=Syscalls(preadv=preadv))
    with pytest.raises(StoreError, match=r"block odd: cannot read .*Input/output") as caught:
        read_block(store, "odd")
    assert isinstance(caught.value.__cause__, TransferError)
    assert caught.value.__cause__.errno == errno.EIO
    broken.clear()
    assert read_block(store, "odd") == payload(BY_ID["odd"], CONTENTS["odd"])
    store.close()


def test_a_failed_block_resolves_after_its_last_request(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    """One request fails while another is in the system call with the buffer in its hands."""
    go_on, stuck = threading.Event(), threading.Event()
    first = threading.Lock()

    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        if first.acquire(blocking=False):
            stuck.set()
            assert go_on.wait(timeout=30)
            return os.preadv(fd, bufs, offset)
        assert stuck.wait(timeout=30)
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failed = threading.Event()
    store = checkpoint(tmp_path, *io, syscalls=Syscalls(preadv=preadv))
    with AlignedBuffer(BY_ID["long"].slot_nbytes) as buf:
        future = store.read_into("long", buf)
        assert failed.wait(timeout=30)
        assert not future.done()
        assert not future.cancel()
        go_on.set()
        assert isinstance(future.exception(timeout=30), StoreError)
    store.close()


def test_the_checkpoint_shrinks_while_it_is_read(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    store = checkpoint(tmp_path, *io)
    assert read_block(store, "odd") == payload(BY_ID["odd"], CONTENTS["odd"])
    os.truncate(tmp_path / "part0", 5000)
    with pytest.raises(StoreError, match=r"block odd: .*part0 shrank.*5000"):
        read_block(store, "odd")
    store.close()


def test_a_checkpoint_that_is_too_short_is_refused_at_once(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    spec = layout("b", BlockKind.WEIGHT, [("w", "uint8", (64,))])
    with pytest.raises(StoreError, match=r"needs bytes 50 to 114 of .*f, which has 100"):
        RangeStore([tmp_path / "f"], {"b": (spec, (Piece(0, 50, 0, 64),))}, *io)
    with pytest.raises(StoreError, match="cannot open"):
        RangeStore([tmp_path / "f", tmp_path / "g"], {}, *io)


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (Piece(0, 0, 0, 63),),
        (Piece(0, 0, 0, 65),),
        (Piece(0, 0, 0, 64), Piece(0, 0, 0, 64)),
        (Piece(0, 0, 0, 64), Piece(0, 0, 64, 8)),
        (Piece(1, 0, 0, 64),),
    ],
)
def test_a_recipe_must_bring_exactly_the_block(
    tmp_path: Path, io: tuple[Engine, Staging], pieces: tuple[Piece, ...]
) -> None:
    (tmp_path / "f").write_bytes(bytes(200))
    spec = layout("b", BlockKind.WEIGHT, [("w", "uint8", (64,))])
    with pytest.raises(ValueError, match="block b"):
        RangeStore([tmp_path / "f"], {"b": (spec, pieces)}, *io)


def test_congruent_pieces_are_read_without_a_copy(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(100_000))
    spec = layout("b", BlockKind.WEIGHT, [("w", "uint8", (40_000,))])
    store = RangeStore([tmp_path / "f"], {"b": (spec, (Piece(0, 8192, 0, 40_000),))}, *io)
    with AlignedBuffer(spec.slot_nbytes) as buf:
        receipt = store.read_into("b", buf).result(timeout=30)
        assert (receipt.copied_bytes, receipt.physical_bytes) == (0, 40_960)
        assert bytes(buf[:40_000]) == (tmp_path / "f").read_bytes()[8192:48_192]
    store.close()


def test_only_the_pages_that_tensors_share_are_copied(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    content = os.urandom(200_000)
    (tmp_path / "f").write_bytes(content)
    n = 10 * 4096
    spec = BlockSpec(
        id="b",
        kind=BlockKind.EXPERT,
        tensors=(TensorSpec(name="gate_up", dtype="uint8", shape=(2 * n,), offset=1000),),
        nbytes=1000 + 2 * n,
    )
    gate, up = Piece(0, 9192, 1000, n), Piece(0, 20 * 4096 + 1000, 1000 + n, n)
    store = RangeStore([tmp_path / "f"], {"b": (spec, (gate, up))}, *io)
    with AlignedBuffer(spec.slot_nbytes) as buf:
        receipt = store.read_into("b", buf).result(timeout=30)
        assert receipt.copied_bytes == 4096  # one page, half of it from each
        assert receipt.physical_bytes == 2 * n + 2 * 4096
        assert bytes(buf[1000 : 1000 + n]) == content[9192 : 9192 + n]
        assert bytes(buf[1000 + n : 1000 + 2 * n]) == content[82_920 : 82_920 + n]
    store.close()


def test_a_request_in_place_may_be_longer_than_a_chunk(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    """The first tensor lies as in the file but for its ends, the second is copied throughout."""
    content = os.urandom(300_000)
    (tmp_path / "f").write_bytes(content)
    n, at = 100_000, 102_464
    spec = BlockSpec(
        id="b",
        kind=BlockKind.WEIGHT,
        tensors=(
            TensorSpec(name="v", dtype="uint8", shape=(n,), offset=8),
            TensorSpec(name="w", dtype="uint8", shape=(n,), offset=at),
        ),
        nbytes=at + n,
    )
    recipes = {"b": (spec, (Piece(0, 4104, 8, n), Piece(0, 150_000, at, n)))}
    assert io[1].chunk_bytes == REQUEST_BYTES
    store = RangeStore([tmp_path / "f"], recipes, *io, request_bytes=1 << 20)
    with AlignedBuffer(spec.slot_nbytes) as buf:
        receipt = store.read_into("b", buf).result(timeout=30)
        assert receipt.requests == 1 + -(-n // REQUEST_BYTES)
        assert n <= receipt.copied_bytes < n + 2 * 4096
        assert bytes(buf[8 : 8 + n]) == content[4104 : 4104 + n]
        assert bytes(buf[at : at + n]) == content[150_000 : 150_000 + n]
    store.close()
    with pytest.raises(ValueError, match="4096"):
        RangeStore([tmp_path / "f"], recipes, *io, request_bytes=5000)


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


def test_ids_are_in_the_order_of_the_disk(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    (tmp_path / "f").write_bytes(bytes(20_000))
    spec = {i: layout(str(i), BlockKind.WEIGHT, [("w", "uint8", (64,))]) for i in (5, 2, 9, 0)}
    recipes = {str(i): (s, (Piece(0, i * 100, 0, 64),)) for i, s in spec.items()}
    store = RangeStore([tmp_path / "f"], recipes, *io)
    assert list(store.ids()) == ["0", "2", "5", "9"]
    store.close()


def test_staging_must_match_the_queue_depth(io: tuple[Engine, Staging]) -> None:
    engine, _ = io
    small = Staging(DEPTH - 1, REQUEST_BYTES)
    with pytest.raises(ValueError, match="as many chunks"):
        RangeStore([], {}, engine, small)
    small.close()


# Cancellation and order


def test_a_cancelled_block_never_touches_its_buffer(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    valve = Valve()
    store = checkpoint(tmp_path, *io, syscalls=Syscalls(preadv=valve.preadv))
    bufs = [AlignedBuffer(BY_ID["long"].slot_nbytes) for _ in range(3)]
    running, queued, after = (store.read_into("long", b.view) for b in bufs)
    for _ in range(DEPTH):
        assert valve.entered.acquire(timeout=30)
    bufs[1].view[:] = b"\x33" * len(bufs[1].view)
    assert not running.cancel(), "its requests are in the system call"
    assert queued.cancel()
    assert queued.done()
    kept = bytes(bufs[1].view)
    bufs[1].close()  # a done future has let go, though its requests are still queued
    valve.opened.set()
    wait([running, after], timeout=30)
    assert kept == b"\x33" * len(kept)
    for i in (0, 2):
        assert payload(BY_ID["long"], bufs[i].view) == payload(BY_ID["long"], CONTENTS["long"])
        bufs[i].close()
    store.close()


def test_a_demanded_block_overtakes_queued_prefetches(tmp_path: Path, engine_name: str) -> None:
    valve = Valve()
    staging, engine = Staging(1, REQUEST_BYTES), make_engine(engine_name, 1)
    store = checkpoint(tmp_path, engine, staging, syscalls=Syscalls(preadv=valve.preadv))
    ids = ["page", "odd", "long", "small"]
    bufs = [AlignedBuffer(BY_ID[i].slot_nbytes) for i in ids]
    done: list[str] = []
    futures = []
    for i, buf in zip(ids, bufs, strict=True):
        priority = DEMAND if i == "small" else PREFETCH
        futures.append(store.read_into(i, buf.view, priority=priority))
        futures[-1].add_done_callback(lambda _, i=i: done.append(i))
        if i == "page":
            assert valve.entered.acquire(timeout=30)  # it is on the disk's lane already
    valve.opened.set()
    wait(futures, timeout=30)
    assert done == ["page", "small", "odd", "long"]
    store.close()
    engine.close()
    for buf in bufs:
        buf.close()
    staging.close()


def test_a_closed_engine_fails_the_future(tmp_path: Path) -> None:
    staging, engine = Staging(1, REQUEST_BYTES), make_engine("threads", 1)
    store = checkpoint(tmp_path, engine, staging)
    engine.close()
    with pytest.raises(ClosedError):
        read_block(store, "odd")
    store.close()
    staging.close()


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
