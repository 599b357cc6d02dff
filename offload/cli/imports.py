"""Importing torch and transformers, without Python's search for garbage in between.

They make half a million objects, of which next to none goes again, and the search visits all of
them several times: a seventh of the time until a command begins.
"""

from __future__ import annotations

import gc

_MANY = 10_000
"""New objects before the youngest are searched; by default some hundreds."""

_usual: list[tuple[int, int, int]] = []


def importing() -> None:
    """For a process that has one command to run: from now on it imports what that needs."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(_MANY, *_usual[0][1:])


def imported() -> None:
    """What was imported stays, and garbage is searched as usual: the command's own may be large.

    The searches before and after a model is opened would visit all that was imported, for a third
    of a second each time.
    """
    gc.freeze()
    if _usual:
        gc.set_threshold(*_usual.pop())


__all__ = ["imported", "importing"]
