"""Packed model directories: written, killed, damaged, refused, read."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from offload.blocks import align_up
from offload.errors import StoreError
from offload.io import pack_writer, private
from offload.io.engines import Engine
from offload.io.files import Syscalls
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_bundle import BundleStore
from offload.io.pack_manifest import (
    JOURNAL,
    MANIFEST,
    Block,
    Kind,
    Layout,
    Manifest,
    Part,
    SourceId,
    bundle_name,
    digest,
    is_pack,
    read_manifest,
)
from offload.io.pack_sums import PageSums, page_sums
from offload.io.pack_writer import Job, PackDirectory
from offload.io.store import Span

SIZES = [5000, 4096, 70001, 12288, 300, 9000]


def block(i: int, nbytes: int, file: int, offset: int) -> Block:
    half = nbytes // 2 // 64 * 64
    parts = (
        Part(name="gate", format="q4_0", layout=Layout.PACKED, shape=(16, 32), offset=0,
             nbytes=half - 7),
        Part(name="down", format="uint8", layout=Layout.PLAIN, shape=(nbytes - half,),
             offset=half, nbytes=nbytes - half),
    )  # fmt: skip
    return Block(
        name=f"b{i}", kind=Kind.EXPERT, group="layer", file=file, offset=offset, nbytes=nbytes,
        parts=parts,
    )  # fmt: skip


def job(fingerprint: str = "f" * 64, quant: str = "q4", plan: str = "p", scale: int = 1) -> Job:
    files = [0, 0]
    blocks = []
    for i, size in enumerate(SIZES):
        file = i // 3
        blocks.append(block(i, size * scale, file, files[file]))
        files[file] += align_up(size * scale)
    manifest = Manifest(
        source=SourceId(kind="test", path=f"/models/{fingerprint[:2]}", fingerprint=fingerprint),
        quant=quant,
        offload="0",
        model={"model_type": "test"},
        blocks=tuple(blocks),
        files=tuple(files),
    )
    return Job(manifest=manifest, plan=plan)


def content(i: int) -> bytes:
    return random.Random(i).randbytes(SIZES[i])


def fill(directory: PackDirectory, stop: int = len(SIZES)) -> None:
    for i in range(len(directory.finished), stop):
        directory.begin()
        data = memoryview(content(i))
        for at in range(0, len(data), 3000):
            directory.write(data[at : at + 3000])
        directory.end([i])


def write(path: Path) -> Manifest:
    with PackDirectory(path, job()) as directory:
        fill(directory)
        return directory.commit({"config.json": b"{}"}, aliases={"a": "b"})


def read(path: Path, io: tuple[Engine, Staging], verify: bool = True) -> list[bytes]:
    store = BundleStore(path, read_manifest(path), *io, verify=verify)
    try:
        out = []
        for i in store.ids():
            spec = store.spec(i)
            with AlignedBuffer(spec.slot_nbytes) as buf:
                receipt = store.read_into(i, buf).result(timeout=30)
                assert (receipt.requests, receipt.copied_bytes) == (
                    -(-spec.slot_nbytes // 73728),
                    0,
                )
                assert receipt.physical_bytes == spec.slot_nbytes
                out.append(bytes(buf[: spec.nbytes]))
        return out
    finally:
        store.close()


# Checksums


def test_the_checksum_does_not_depend_on_the_pieces() -> None:
    data = random.Random(0).randbytes(5 * 4096 + 1234)
    whole = page_sums(data)
    for step in (4096, 8192, 3 * 4096):
        sums = PageSums()
        for at in range(0, len(data), step):
            sums.update(data[at : at + step])
        assert sums.value() == whole
    assert page_sums(data + bytes(4096 - 1234)) == whole  # as the slot is on disk
    with pytest.raises(ValueError, match="behind a part"):
        sums.update(data)


def test_the_checksum_finds_every_flip_swap_and_cut() -> None:
    data = bytearray(random.Random(1).randbytes(3 * 4096))
    whole = page_sums(data)
    for at in range(0, len(data), 97):
        for bit in (0, 7):
            data[at] ^= 1 << bit
            assert page_sums(data) != whole
            data[at] ^= 1 << bit
    assert page_sums(data[4096:8192] + data[:4096] + data[8192:]) != whole  # pages
    assert page_sums(data[8:16] + data[:8] + data[16:]) != whole  # words
    assert page_sums(data[:8192]) != whole
    assert page_sums(data[:8192] + bytes(4096)) != whole
    assert page_sums(data) == whole


# Writing and reading


def test_what_was_written_is_read_in_place(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    made = write(tmp_path / "p")
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]
    found = read_manifest(tmp_path / "p")
    assert found == made
    assert found.aliases == {"a": "b"}
    assert is_pack(tmp_path / "p")
    assert sorted(os.listdir(tmp_path / "p")) == [
        "bundle-00001.bin", "bundle-00002.bin", "config.json", MANIFEST,
    ]  # fmt: skip


def test_everything_is_private(tmp_path: Path) -> None:
    write(tmp_path / "p")
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o700
    for path in (tmp_path / "p").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_rows_are_read_without_the_rest(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    write(tmp_path / "p")
    store = BundleStore(tmp_path / "p", read_manifest(tmp_path / "p"), *io)
    with AlignedBuffer(4096) as buf:
        store.read_spans_into("b2", [Span(40000, 5, 100)], buf).result(timeout=30)
        assert bytes(buf[5:105]) == content(2)[40000:40100]
    with pytest.raises(StoreError, match="never written"), AlignedBuffer(8192) as buf:
        store.write_from("b0", buf).result(timeout=30)
    assert not store.writable
    store.close()


def test_a_flipped_byte_is_found_and_named(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    write(tmp_path / "p")
    bundle = tmp_path / "p" / bundle_name(1)
    raw = bytearray(bundle.read_bytes())
    raw[12288 + 17] ^= 0x20  # b4
    bundle.write_bytes(raw)
    with pytest.raises(StoreError, match=r"block b4: .*bundle-00002.bin is damaged.*offset 12288"):
        read(tmp_path / "p", io)
    assert bundle.read_bytes() == raw
    unchecked = read(tmp_path / "p", io, verify=False)
    assert unchecked[4] != content(4)
    assert unchecked[5] == content(5)


@pytest.mark.parametrize("cut", [0, 4096, -1])
def test_a_truncated_bundle_is_refused(tmp_path: Path, cut: int) -> None:
    write(tmp_path / "p")
    bundle = tmp_path / "p" / bundle_name(0)
    size = bundle.stat().st_size
    os.truncate(bundle, cut if cut >= 0 else size + cut)
    with pytest.raises(StoreError, match=rf"bundle-00001.bin is truncated: \d+ bytes.*{size}"):
        read_manifest(tmp_path / "p")
    bundle.unlink()
    with pytest.raises(StoreError, match=r"bundle-00001.bin is missing"):
        read_manifest(tmp_path / "p")


def test_a_bundle_cut_after_opening_is_an_error(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    manifest = write(tmp_path / "p")
    os.truncate(tmp_path / "p" / bundle_name(0), 4096)
    with pytest.raises(StoreError, match="truncated"):
        BundleStore(tmp_path / "p", manifest, *io)


def test_every_changed_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    write(tmp_path / "p")
    path = tmp_path / "p" / MANIFEST
    raw = path.read_bytes()
    for at in range(0, len(raw) - 1, 29):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(StoreError, match=r"pack\.json"):
            read_manifest(tmp_path / "p")


def test_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "p")
    path = tmp_path / "p" / MANIFEST
    whole = json.loads(path.read_text())
    whole["version"] = 2
    path.write_text(json.dumps(whole))
    with pytest.raises(StoreError, match="of pack format 2, this offload reads format 1"):
        read_manifest(tmp_path / "p")


@pytest.mark.parametrize(
    "change",
    [
        lambda pack: pack["blocks"][0].__setitem__(4, 17),  # unaligned
        lambda pack: pack["blocks"][1].__setitem__(4, 0),  # overlaps
        lambda pack: pack["blocks"][5].__setitem__(4, 1 << 40),  # past the end
        lambda pack: pack["blocks"][0].__setitem__(6, None),  # without a checksum
        lambda pack: pack["blocks"][0].__setitem__(3, 7),  # no such file
        lambda pack: pack["layouts"][0][0].__setitem__(4, 60000),  # parts overlap
        lambda pack: pack.__delitem__("quant"),
    ],
)
def test_an_impossible_manifest_is_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], None]
) -> None:
    """Also one that somebody has sealed again: its numbers say where to read."""
    write(tmp_path / "p")
    path = tmp_path / "p" / MANIFEST
    whole = json.loads(path.read_text())
    change(whole["pack"])
    whole["sha256"] = digest(whole["pack"])
    path.write_text(json.dumps(whole))
    with pytest.raises(StoreError, match="cannot be understood"):
        read_manifest(tmp_path / "p")


# What is there already


def listing(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("years")
    (tmp_path / "f").write_text("a file")
    before = listing(tmp_path)
    with pytest.raises(StoreError, match=r"is not a packed model \(it has thesis.txt\)"):
        PackDirectory(tmp_path / "d", job())
    with pytest.raises(StoreError, match="is no directory"):
        PackDirectory(tmp_path / "f", job())
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / MANIFEST).write_text("{}")
    with pytest.raises(StoreError, match="not the manifest of a packed model"):
        PackDirectory(tmp_path / "half", job())
    (tmp_path / "half" / MANIFEST).unlink()
    (tmp_path / "half").rmdir()
    assert listing(tmp_path) == before


def test_a_pack_of_another_source_names_both(tmp_path: Path) -> None:
    write(tmp_path / "p")
    before = listing(tmp_path)
    with pytest.raises(StoreError, match=r"pack of /models/ff .* as q4, wanted is /models/ee"):
        PackDirectory(tmp_path / "p", job(fingerprint="e" * 64))
    with pytest.raises(StoreError, match=r" as q4, wanted is .* as q8"):
        PackDirectory(tmp_path / "p", job(quant="q8"))
    with PackDirectory(tmp_path / "p", job()) as same:
        assert same.complete == read_manifest(tmp_path / "p")
    assert listing(tmp_path) == before


def test_an_unfinished_pack_of_another_source_names_both(tmp_path: Path) -> None:
    with PackDirectory(tmp_path / "p", job()) as directory:
        fill(directory, 2)
    before = listing(tmp_path)
    with pytest.raises(StoreError, match=r"unfinished pack of /models/ff .* wanted is /models/ee"):
        PackDirectory(tmp_path / "p", job(fingerprint="e" * 64))
    with pytest.raises(StoreError, match=r"unfinished pack by offload 0, .* another way"):
        PackDirectory(tmp_path / "p", job(plan="q"))
    with pytest.raises(StoreError, match="is an unfinished pack; run 'offload pack'"):
        read_manifest(tmp_path / "p")
    assert listing(tmp_path) == before


def test_one_process_at_a_time(tmp_path: Path, io: tuple[Engine, Staging]) -> None:
    first = PackDirectory(tmp_path / "p", job())
    with pytest.raises(StoreError, match="another process is packing into"):
        PackDirectory(tmp_path / "p", job())
    found: list[Manifest | None] = []

    def second() -> None:
        with PackDirectory(tmp_path / "p", job(), wait=True) as directory:
            found.append(directory.complete)

    thread = threading.Thread(target=second)
    thread.start()
    fill(first)
    made = first.commit({})
    first.close()
    thread.join(timeout=60)
    assert found == [made]
    assert read(tmp_path / "p", io) == [content(i) for i in range(len(SIZES))]


# Interruptions


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


@pytest.mark.parametrize("damage", ["{", "[0,1,2]\n[2,1,2]\n", "[0]\n", '"x"\n'])
def test_a_damaged_journal_is_not_trusted(tmp_path: Path, damage: str) -> None:
    with PackDirectory(tmp_path / "p", job()):
        pass
    with (tmp_path / "p" / JOURNAL).open("a") as journal:
        journal.write(damage + "\n")
    with pytest.raises(StoreError, match=r"pack\.journal is damaged.*delete .* to start anew"):
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

    def reserve(fd: int, nbytes: int, directory: str) -> None:
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


# Single rows


def table_job() -> Job:
    """As ``job``, and ``b2`` is a table, 17 whole pages and 369 bytes."""
    plan = job()
    blocks = list(plan.manifest.blocks)
    blocks[2] = replace(blocks[2], kind=Kind.ROWS, group="")
    return Job(manifest=replace(plan.manifest, blocks=tuple(blocks)), plan=plan.plan)


def rows_of(path: Path, io: tuple[Engine, Staging], *spans: Span, verify: bool = True) -> bytes:
    store = BundleStore(path, read_manifest(path), *io, verify=verify)
    try:
        buf = memoryview(bytearray(max(s.dst + s.nbytes for s in spans)))
        store.read_spans_into("b2", spans, buf).result(timeout=30)
        return bytes(buf)
    finally:
        store.close()


def test_a_flipped_byte_is_found_in_the_page_of_a_row(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    with PackDirectory(tmp_path / "p", table_job()) as directory:
        fill(directory)
        made = directory.commit({})
    assert [len(b.page_crcs) for b in made.blocks] == [0, 0, 4 * 18, 0, 0, 0]
    assert read_manifest(tmp_path / "p") == made
    start, bundle = made.blocks[2].offset, tmp_path / "p" / bundle_name(0)
    whole = bundle.read_bytes()
    row = Span(4000, 3, 500)  # across two pages
    for page in range(18):
        raw = bytearray(whole)
        raw[start + 4096 * page + 7 * page] ^= 0x20
        bundle.write_bytes(raw)
        far = Span(SIZES[2] - 9, 600, 9)  # in the last page
        hurt = page in (0, 1, 17)
        if hurt:
            at = start + 4096 * page
            with pytest.raises(
                StoreError, match=rf"block b2: .*00001.bin is damaged.*offset {at} "
            ):
                rows_of(tmp_path / "p", io, row, far)
        got = rows_of(tmp_path / "p", io, row, far, verify=not hurt)
        assert hurt or got[3:503] == content(2)[4000:4500]
        assert hurt or got[600:] == content(2)[-9:]


def test_a_resumed_pack_has_the_checksums_of_its_pages(tmp_path: Path) -> None:
    def make(path: Path, *stops: int) -> bytes:
        for stop in stops:
            with PackDirectory(path, table_job()) as directory:
                fill(directory, stop)
        with PackDirectory(path, table_job()) as directory:
            fill(directory)
            directory.commit({})
        return (path / MANIFEST).read_bytes()

    assert make(tmp_path / "a") == make(tmp_path / "b", 2, 3, 5)


def test_a_limit_of_the_file_size_is_not_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        private.ctypes.set_errno(errno.EFBIG)
        return -1

    monkeypatch.setattr(private._libc, "fallocate", refuse)
    with pytest.raises(
        StoreError, match=r"takes no file of .* \(\d+ bytes\): .*ulimit -f.*smaller"
    ):
        PackDirectory(tmp_path / "p", job())
    assert not (tmp_path / "p").exists()
