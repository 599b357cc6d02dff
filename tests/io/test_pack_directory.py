"""Packed model directories: written, damaged, refused, read."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import stat
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_support import SIZES, content, fill, job, read, write

from offload.blocks import align_up
from offload.errors import StoreError
from offload.io import private
from offload.io.engines import Engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_bundle import BundleStore
from offload.io.pack_manifest import (
    MANIFEST,
    Kind,
    Manifest,
    bundle_name,
    digest,
    is_pack,
    read_manifest,
)
from offload.io.pack_sums import PageSums, page_sums
from offload.io.pack_writer import Job, PackDirectory
from offload.io.store import Span

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


def test_a_read_leaves_nothing_to_the_garbage_search(
    tmp_path: Path, io: tuple[Engine, Staging]
) -> None:
    """Thousands of reads a second would have it run all the time."""
    manifest = write(tmp_path / "pack")
    with AlignedBuffer(align_up(max(SIZES))) as buf:
        store = BundleStore(tmp_path / "pack", manifest, *io)
        gone = threading.Event()
        gc.disable()
        try:
            future = store.read_into("b2", buf[:])
            future.result(timeout=30)
            weakref.finalize(future, gone.set)
            del future
            assert gone.wait(timeout=30)
        finally:
            gc.enable()
        store.close()


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
    thread.join(timeout=240)
    assert found == [made]
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
        StoreError, match=r"takes no file of .* \(\d+ bytes\): .*ulimit -f.*smaller.*--bundle-size"
    ):
        PackDirectory(tmp_path / "p", job())
    assert not (tmp_path / "p").exists()
    fd = private.nameless_file(tmp_path)[0]
    try:  # what is no pack has no bundles
        with pytest.raises(StoreError, match=r"ulimit -f.*or choose another directory$"):
            private.reserve(fd, 4096, str(tmp_path))
    finally:
        os.close(fd)
