"""A store that is killed at one of its system calls. Run as a program: DIRECTORY.

For each call k and each way to die (before it, after it, in the middle of a write) a child works
in ``DIRECTORY/k-way`` on a copy of the store in ``DIRECTORY/start``, says in ``done`` which
commits were reported to it, and kills itself with SIGKILL. Prints the number of calls. This process
has no threads, so it can fork.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tile_support import State, commit, create, reopen, write, write_all

from offload.io.engines import make_engine
from offload.io.tile_directory import TileSyscalls

WAYS = ("before", "half", "after")
KEEP = 2


class Killer:
    """Counts system calls that change something, and dies at number ``at``."""

    def __init__(self, at: int | None, way: str) -> None:
        self.calls = 0
        self._at, self._way = at, way
        self._lock = threading.Lock()

    def around(self, call: Callable[..., Any], half: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with self._lock:  # held while dying, so that nobody else gets on
                self.calls += 1
                if self.calls != self._at:
                    return call(*args)
                if self._way != "before":
                    (call if self._way == "after" else half)(*args)
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    def syscalls(self) -> TileSyscalls:
        real = TileSyscalls()

        def half_of_pages(fd: int, bufs: list[memoryview], offset: int) -> None:
            os.pwritev(fd, [bufs[0][: bufs[0].nbytes // 8192 * 4096]], offset)

        def half_of_bytes(fd: int, data: memoryview) -> None:
            os.write(fd, data[: len(data) // 2])

        def nothing(*_: Any) -> None: ...

        return TileSyscalls(
            pwritev=self.around(real.pwritev, half_of_pages),
            write=self.around(real.write, half_of_bytes),
            fsync=self.around(real.fsync, nothing),
            rename=self.around(real.rename, nothing),
            unlink=self.around(real.unlink, nothing),
        )


def start(path: Path) -> None:
    """What every child begins with: one commit."""
    engine = make_engine("threads", 2)
    with create(path, engine, keep=KEEP) as store:
        write_all(store, 1)
        commit(store, n=1)
    engine.close()


def rounds() -> dict[int, State]:
    """The state of each commit, by its number."""
    from tile_support import SHAPES, parts_of

    states = {1: {t: parts_of(t, 1) for t in range(len(SHAPES))}}
    for n in (2, 3, 4):
        states[n] = {**states[n - 1], **{t: parts_of(t, n) for t in (0, n - 1)}}
    return states


def work(path: Path, killer: Killer) -> None:
    """Three more commits, with rewrites in between."""
    engine = make_engine("threads", 2)
    states = rounds()
    with reopen(path, engine, keep=KEEP, syscalls=killer.syscalls()) as store:
        for n in (2, 3, 4):
            for tile in (0, n - 1):
                write(store, tile, states[n][tile])
            write(store, 0, states[n][0])  # in place
            commit(store, n=n)
            with open(path.parent / f"{path.name}.done", "w") as done:
                done.write(str(n))
    engine.close()


def main(folder: Path) -> None:
    first = folder / "start"
    if os.fork() == 0:
        start(first)
        os._exit(0)
    assert os.wait()[1] == 0
    shutil.copytree(first, folder / "whole")
    if os.fork() == 0:
        killer = Killer(None, "")
        work(folder / "whole", killer)
        (folder / "calls").write_text(str(killer.calls))
        os._exit(0)
    assert os.wait()[1] == 0
    calls = int((folder / "calls").read_text())
    for k in range(1, calls + 1):
        for way in WAYS:
            path = folder / f"{k}-{way}"
            shutil.copytree(first, path)
            if os.fork() == 0:
                work(path, Killer(k, way))
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL, path
    print(calls)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
