"""Result files: whole or not at all, and nothing takes the place of what is no file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.cli import output, trace_plot
from offload.errors import OffloadError
from offload.io.routing_file import RoutingHeader, RoutingReader, RoutingWriter
from offload.io.whole_file import PRIVATE, takes_bytes, whole_file
from offload.runtime import trace_file
from offload.scheduler.timeline import Timeline


def write_routing(path: Path) -> None:
    RoutingWriter(path, RoutingHeader(layers=("a",), experts=(4,), model="m")).close()


class Figure:
    def savefig(self, file: object, **_: object) -> None:
        file.write(b"picture")  # type: ignore[attr-defined]


WRITERS: dict[str, Callable[[Path], None]] = {
    "json": lambda path: output.write_json(path, {"a": 1}),
    "trace": lambda path: trace_file.write(path, Timeline({}), "title", {}),
    "picture": lambda path: trace_plot._save(path, Figure()),
    "routing": write_routing,
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_is_no_file_is_written_to_and_stays(what: str, tmp_path: Path) -> None:
    """A named pipe, and a pipe that has no name but in /dev/fd, as of a shell's ``>(command)``."""
    write = WRITERS[what]
    write(tmp_path / "file")
    expected = (tmp_path / "file").read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.check_target(pipe, "--flag")
    write(pipe)
    assert os.read(reader, 65536) == expected
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader, writer = os.pipe()
    path = Path(f"/dev/fd/{writer}")
    output.check_target(path, "--flag")
    write(path)
    assert os.read(reader, 65536) == expected
    os.close(reader)
    os.close(writer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    target, link = tmp_path / "file", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with whole_file(link, PRIVATE) as file:
        file.write(b"new")
        file.flush()
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == PRIVATE
    with pytest.raises(TypeError), whole_file(target) as file:
        file.writelines([b"newer", "no bytes"])  # type: ignore[list-item]
    assert target.read_bytes() == b"new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    assert not takes_bytes(target)
    assert not takes_bytes(tmp_path)
    assert not takes_bytes(tmp_path / "missing")


def test_a_device_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(output.os, "access", lambda *_: False)
    with pytest.raises(OffloadError, match="pipe is not writable"):
        output.check_target(tmp_path / "pipe", "--trace")


def test_a_routing_in_a_pipe_can_be_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    write_routing(Path(f"/dev/fd/{writer}"))
    os.close(writer)
    (tmp_path / "copy").write_bytes(os.read(reader, 65536))
    os.close(reader)
    assert RoutingReader(tmp_path / "copy").header.experts == (4,)
