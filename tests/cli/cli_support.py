"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
