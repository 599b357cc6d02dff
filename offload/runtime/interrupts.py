"""Ctrl-C where it can do no harm.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Between "this block
is on its way" in the books and the request that brings it, that would leave everyone who waits
for the block waiting for good. Inside a shield the signal is noted, and raised at its end.
"""

from __future__ import annotations

# What `signal` wraps: its enums cost ten times the calls.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGINT = int(signal.SIGINT)

_main: int | None = None


def _note_main() -> None:
    """After a fork the thread that forked is the main one."""
    global _main
    _main = threading.main_thread().ident


_note_main()
os.register_at_fork(after_in_child=_note_main)


class Shield:
    """A re-entrant context that delays SIGINT in the main thread; costs a microsecond.

    Only Python's own handler is replaced: a program with a handler of its own has decided where
    its signals are raised.
    """

    __slots__ = ("_before", "_depth", "_received")

    def __init__(self) -> None:
        self._depth = 0
        self._before: Any = None
        self._received = False

    @property
    def received(self) -> bool:
        """A signal has come: whoever waits should stop waiting."""
        return self._received

    def __enter__(self) -> Shield:
        if threading.get_ident() != _main:
            return self
        self._depth += 1
        if self._depth == 1:
            before = _signal.getsignal(_SIGINT)
            if before is signal.default_int_handler:
                self._received = False
                self._before = before
                _signal.signal(_SIGINT, self._note)
        return self

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._received = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if threading.get_ident() != _main:
            return
        self._depth -= 1
        if self._depth == 0 and self._before is not None:
            before, self._before = self._before, None
            _signal.signal(_SIGINT, before)
            received, self._received = self._received, False
            if received and not (kind and issubclass(kind, KeyboardInterrupt)):
                raise KeyboardInterrupt
