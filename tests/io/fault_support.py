"""Stores, and a gate for their system calls, for the tests of what goes wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from io_support import (
    SPECS,
    content_of,
    scatter,
    write_block,
)

from offload.io.engines import Engine
from offload.io.files import DirectFile, Syscalls
from offload.io.memory import Staging
from offload.io.stores import PackStore, RangeStore

BY_ID = {s.id: s for s in SPECS}
CONTENTS = {s.id: content_of(s) for s in SPECS}


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
