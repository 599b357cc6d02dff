"""Ctrl-C and SIGTERM as an exception that nothing on the way mistakes for an error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """A signal asks the process to stop.

    One for both signals, and not KeyboardInterrupt: the exit code needs the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


_received: list[int] = []


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise ``Interrupted`` in the main thread, once.

    A second signal ends the process at once: nothing that we write survives a kill, so cleaning
    up is a courtesy that the user can decline. A signal that the parent ignores (a job in the
    background of a shell script) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def stop(signum: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        _received.append(signum)
        raise Interrupted(signum)

    _received.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_received() -> None:
    """Raise what was received but got lost: an exception inside a destructor is only printed."""
    if _received:
        raise Interrupted(_received[-1])
