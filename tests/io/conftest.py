"""Every test of ``offload.io`` must give back the descriptors and threads it took."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from io_support import rig

from offload.io.engines import Engine, make_engine
from offload.io.memory import Staging


def _descriptors() -> dict[str, str]:
    out = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            out[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return out


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    threads, files = set(threading.enumerate()), _descriptors()
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and t.is_alive()]
    assert not left, f"threads left: {left}"
    opened = {fd: name for fd, name in _descriptors().items() if files.get(fd) != name}
    assert not opened, f"descriptors left: {opened}"


@pytest.fixture(params=["aiofiles", "threads"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(engine_name: str) -> Iterator[Engine]:
    made = make_engine(engine_name, 3)
    yield made
    made.close()


@pytest.fixture
def io(engine_name: str) -> Iterator[tuple[Engine, Staging]]:
    """An engine and its staging."""
    with rig(engine_name) as both:
        yield both


@pytest.fixture
def big_file(tmp_path: Path) -> Path:
    """5 pages and 100 bytes, each page filled with its number + 1."""
    path = tmp_path / "big"
    path.write_bytes(b"".join(bytes([i + 1]) * 4096 for i in range(5)) + b"\x77" * 100)
    return path
