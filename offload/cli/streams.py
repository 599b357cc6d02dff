"""stdin, stdout and stderr as a shell may leave them: closed, or on a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

from offload.errors import OffloadError

T = TypeVar("T")

_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
_CONTROLS[ord("\r")] = ""  # of a line's end
"""As errors write them. Not all that is unprintable: parts of emoji are, too."""

_FIRST_FREE = 3
"""The first descriptor that is none of the standard three."""


def write_words(text: str) -> None:
    """A model's words, at once. A terminal would obey control characters among them (and a text
    can have a model repeat any): it gets their numbers; a file or a pipe gets the text as it is."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class _Guarded:
    """A stream whose failures are a user's error, or none."""

    def __init__(self, inner: TextIO, *, vital: bool) -> None:
        """``vital``: what is written is the command's result. What is only said beside it may be
        lost: the work goes on."""
        self._inner, self._vital = inner, vital
        self._why = ""

    def write(self, text: str) -> int:
        return self._try(lambda: self._inner.write(text), len(text))

    def flush(self) -> None:
        self._try(self._inner.flush, None)

    def _try(self, work: Callable[[], T], instead: T) -> T:
        try:
            done = work()
        except BrokenPipeError:
            raise
        except UnicodeEncodeError as error:
            if not self._vital:
                return instead
            raise OffloadError(
                f"stdout cannot be written: its encoding, {error.encoding}, has no "
                f"{error.object[error.start]!a}; set PYTHONIOENCODING=utf-8, or a locale with "
                f"UTF-8"
            ) from error
        except OSError as error:
            self._why = error.strerror or str(error)
            drop_output(self._inner)
            done = instead
        if self._vital and self._why:  # again and again: who writes may try, and go on
            raise OffloadError(
                f"stdout cannot be written: {self._why}; free some space or send it elsewhere"
            )
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def drop_output(stream: TextIO) -> None:
    """Let what a stream still holds, and all that comes, go to nowhere: Python would try to write
    it again when it exits."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def standard_streams() -> Iterator[None]:
    """Inside, all three streams are there, and stdout that cannot be written is an OffloadError.

    A descriptor below three that a shell has closed would be given to the next file that is
    opened, and what a library prints would end up in it.
    """
    while (taken := os.open(os.devnull, os.O_RDWR)) < _FIRST_FREE:
        pass
    os.close(taken)
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    out = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    err = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = cast(TextIO, _Guarded(out, vital=True))
    sys.stderr = cast(TextIO, _Guarded(err, vital=False))
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


__all__ = ["drop_output", "standard_streams"]
