"""Reading stores on files when something goes wrong: errors, cancellation, order."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
from fault_support import BY_ID, CONTENTS, Valve, checkpoint
from io_support import (
    DEPTH,
    REQUEST_BYTES,
    payload,
    read_block,
)

from offload.blocks import BlockKind, BlockSpec, TensorSpec, layout
from offload.errors import ClosedError, StoreError
from offload.io.engines import Engine, make_engine
from offload.io.files import Syscalls, TransferError
from offload.io.memory import AlignedBuffer, Staging
from offload.io.ranges import Piece
from offload.io.store import DEMAND, PREFETCH
from offload.io.stores import RangeStore

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
