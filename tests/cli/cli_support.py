"""What the tests of the command line share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload.runtime.probe import Effort

TINY_EFFORT = Effort(
    file_bytes=4 << 20,
    request_bytes=64 << 10,
    depth=2,
    ram_bytes=8 << 20,
    matmul_side=128,
    samples=2,
    sample_s=0.001,
)
"""A probe that takes a moment."""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


Cli = Callable[..., Result]
"""``cli("plan", "-m", path, stdin="text")``"""


def refused(result: Result, *words: str) -> str:
    """Check that the user got one clear line and nothing on stdout; returns it."""
    assert result.code == 2, result.err
    assert len(result.errors) == 1, result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    for word in words:
        assert word in result.errors[0], result.errors[0]
    return result.errors[0]


# A parent that ignores SIGINT (a shell's background job) would hand that on.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from offload.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def process(*words: object, first: str = "") -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which runs ``first`` before; killed if it still runs
    afterwards."""
    started = subprocess.Popen(
        [sys.executable, "-c", first + START, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()
