"""Routing files: round trips, and every way in which a file can be wrong."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import StoreError
from offload.io.routing_file import (
    NO_EXPERT,
    Record,
    RoutingFileError,
    RoutingHeader,
    RoutingReader,
    RoutingWriter,
)

HEADER = RoutingHeader(("layers.0", "layers.1 ünïcode"), (4, 300), "some model")


def add(writer: RoutingWriter, layer: int, chosen: int, width: int, ids: list[int]) -> None:
    scores = [i % 8 / 8 for i in ids]
    n = len(ids)
    writer.add(layer, chosen, width, struct.pack(f"<{n}H", *ids), struct.pack(f"<{n}e", *scores))


def write(path: Path) -> bytes:
    writer = RoutingWriter(path, HEADER)
    add(writer, 0, 1, 2, [3, 1, 0, 2])
    add(writer, 1, 2, 3, [299, NO_EXPERT, 7])
    writer.close()
    return path.read_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    write(path)
    reader = RoutingReader(path)
    assert reader.header == HEADER
    first, second = reader
    assert first == Record(0, 2, 1, 2, (3, 1, 0, 2), (0.375, 0.125, 0.0, 0.25))
    assert (second.layer, second.tokens, second.experts) == (1, 1, (299, NO_EXPERT, 7))
    assert list(reader) == [first, second], "it can be read again"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    chosen, more, tokens = draw(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 5)))
    n = tokens * (chosen + more)
    ids = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return draw(st.integers(0, 1)), chosen, chosen + more, ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(runs(), max_size=12))
def test_any_routing(tmp_path: Path, records: list[tuple[int, int, int, list[int]]]) -> None:
    path = tmp_path / "any"
    writer = RoutingWriter(path, HEADER)
    for layer, chosen, width, ids in records:
        add(writer, layer, chosen, width, ids)
    writer.close()
    found = [(r.layer, r.chosen, r.width, list(r.experts)) for r in RoutingReader(path)]
    assert found == records


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    whole = write(path)
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(RoutingFileError, match=r"empty|not a routing|truncated") as caught:
            list(RoutingReader(path))
        assert str(path) in str(caught.value)


def test_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    whole = write(path)
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 0x10
        path.write_bytes(broken)
        with pytest.raises(RoutingFileError):
            list(RoutingReader(path))


def test_a_length_beyond_all_memory(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    broken = bytearray(write(path))
    start = broken.index(b"\n", broken.index(b"\n") + 1) + 1
    struct.pack_into("<IHBB", broken, start, 2**32 - 1, 0, 1, 255)  # a record of 4 TB
    path.write_bytes(broken)
    with pytest.raises(RoutingFileError, match="truncated"):
        list(RoutingReader(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x00" * 100, "not a routing"),
        (b"hello\nworld\n", "not a routing"),
        (b"offload-routing 2\n{}\n", "version 2"),
        (b"offload-routing 1\n[1, 2]\n", "header"),
        (b'offload-routing 1\n{"layers": [], "experts": [], "model": ""}\n', "header"),
        (b'offload-routing 1\n{"layers": ["a"], "experts": [0], "model": ""}\n', "header"),
        (b'offload-routing 1\n{"layers": ["a"], "experts": ["x"], "model": ""}\n', "header"),
        (b'offload-routing 1\n{"layers": ["a"], "experts": [1e999], "model": ""}\n', "header"),
        (b'offload-routing 1\n{"layers": ["a"], "experts": [65535], "model": ""}\n', "header"),
        (b"offload-routing 1\n" + b"[" * 100_000 + b"\n", "header"),
    ],
)
def test_not_a_routing(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(content)
    with pytest.raises(RoutingFileError, match=words) as caught:
        list(RoutingReader(path))
    assert "\n" not in str(caught.value)


def test_something_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    path.write_bytes(write(path) + b"x")
    with pytest.raises(RoutingFileError, match="follows its end"):
        list(RoutingReader(path))


def test_an_expert_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    writer = RoutingWriter(path, HEADER)
    add(writer, 0, 1, 1, [4])
    writer.close()
    with pytest.raises(RoutingFileError, match="beyond 4"):
        list(RoutingReader(path))


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RoutingFileError, match="No such file"):
        RoutingReader(tmp_path / "nothing")
    with pytest.raises(RoutingFileError, match="directory"):
        RoutingReader(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # the second to open it would wait for ever
    with pytest.raises(RoutingFileError, match="pipe is no file"):
        RoutingReader(tmp_path / "pipe")
    with pytest.raises(StoreError, match="directory"):
        RoutingWriter(tmp_path, HEADER)
    with pytest.raises(StoreError, match="No such file"):
        RoutingWriter(tmp_path / "no" / "folder", HEADER)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    path.write_text("old")
    writer = RoutingWriter(path, HEADER)
    add(writer, 0, 1, 1, [2])
    assert path.read_text() == "old"
    writer.abandon()
    writer.close()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"
    write(path)
    assert len(list(RoutingReader(path))) == 2


def test_a_full_disk_gives_the_file_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "routing"
    writer = RoutingWriter(path, HEADER)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
    writer.close()
    add(writer, 0, 1, 1, [2])  # nobody reads it any more


def test_a_callers_mistakes(tmp_path: Path) -> None:
    writer = RoutingWriter(tmp_path / "routing", HEADER)
    for layer, chosen, width, experts, scores in [
        (2, 1, 1, b"12", b"12"),
        (0, 2, 1, b"12", b"12"),
        (0, 1, 2, b"12", b"12"),
        (0, 1, 1, b"12", b""),
    ]:
        with pytest.raises(ValueError):
            writer.add(layer, chosen, width, experts, scores)
    writer.abandon()
    with pytest.raises(ValueError, match="layers"):
        RoutingWriter(tmp_path / "none", RoutingHeader((), ()))
    with pytest.raises(StoreError, match="65534"):
        RoutingWriter(tmp_path / "many", RoutingHeader(("a",), (70_000,)))
