"""Ctrl-C and SIGTERM as an exception, raised where it can do no harm."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_TICK_S = 0.2
_IMPORT_S = 0.02
"""A signal within an import looks so often whether that has ended."""


class Interrupted(BaseException):
    """A signal asks the process to stop.

    One for both signals, and not KeyboardInterrupt: the exit code needs the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _State:
    """The process has one: signals are global."""

    received: int | None = None
    waits: bool = False
    due: bool = False  # it came within an import, and raises behind it
    listen: Callable[[], None] | None = None


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise ``Interrupted`` in the main thread, once; within an import
    as soon as that has ended.

    A second signal ends the process at once: nothing that we write survives a kill, so cleaning
    up is a courtesy that the user can decline. A signal that the parent ignores (a job in the
    background of a shell script) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}
    alarm: list[Any] = []  # the handler before ours, once that is there
    around = _imports(sys._getframe())

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        _State.received = signum
        if _State.waits:
            return
        if _imports(frame) > around:
            # A library goes on without what it could not import, or with half of it: torch's C code
            # forgets what numpy raises, and a numpy that is there by half asks itself for ever.
            later()
            return
        raise Interrupted(signum)

    def later() -> None:
        _State.due = True
        handler = signal.signal(signal.SIGALRM, again)
        if not alarm:
            alarm.append(handler)
        signal.setitimer(signal.ITIMER_REAL, _IMPORT_S, _IMPORT_S)

    def again(_signum: int, frame: FrameType | None) -> None:
        if _State.due and not _State.waits and _imports(frame) > around:
            return
        if _State.due and not _State.waits and not _under_way() and _State.received is not None:
            # And once more with the next alarm, unless it is on its way by then: C code that drops
            # an exception says so to nobody.
            raise Interrupted(_State.received)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _State.due = False

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        # Raised within a __del__ or a callback of a weak reference, out of which nothing comes (a
        # command that was interrupted while libraries were imported ran to its end, one in eight).
        here = threading.current_thread() is threading.main_thread()
        if not (here and isinstance(lost.exc_value, Interrupted)):
            others(lost)
        elif _State.received is not None and not _State.waits:
            later()

    def listen() -> None:
        _State.received, _State.due = None, False
        for number in before:
            signal.signal(number, stop)

    others, sys.unraisablehook = sys.unraisablehook, unraisable
    _State.received, _State.due = None, False
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    _State.listen = listen
    try:
        yield
    finally:
        _State.listen, _State.received, _State.due = None, None, False
        sys.unraisablehook = others
        for number, handler in before.items():
            signal.signal(number, handler)
        if alarm:
            _end_alarms(alarm[0])


def _imports(frame: FrameType | None) -> int:
    """How many imports are under way."""
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return found


def _under_way() -> bool:
    """Whether the program is being left already: an ``Interrupted`` is handled right now."""
    error = sys.exception()
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


def _end_alarms(handler: Any) -> None:
    """Back to ``handler``. An alarm may still be on its way to a thread that sleeps, and kills by
    default: to ignore a signal discards what is pending of it."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Inside, a signal waits for the next ``raise_received()``, or for the end.

    For as long as this thread keeps books with others: an exception between "a read is on its
    way" and its submission would leave everyone who waits for that read waiting for good (it did:
    closing the model hung in one of some ten interruptions).
    """
    outer, _State.waits = _State.waits, True
    try:
        yield
    finally:
        _State.waits = outer
    if not outer:
        raise_received()


@contextlib.contextmanager
def signals_at_once() -> Iterator[None]:
    """Inside ``signals_wait()``, for as long as this thread only waits for the user: a signal
    raises at once, as one does that came just before."""
    outer, _State.waits = _State.waits, True
    try:
        with _ticks():  # begun and ended while signals wait: an exception would leave them running
            _State.waits = False
            try:
                raise_received()
                yield
            finally:
                _State.waits = True
    finally:
        _State.waits = outer
    if not outer:
        raise_received()


@contextlib.contextmanager
def _ticks() -> Iterator[None]:
    """Interrupt the system call that waits for the user now and then.

    Python looks for signals between bytecodes and when a call is interrupted. One that comes after
    the last bytecode and before readline's select() would be seen with the next key only (a
    SIGTERM that came while the prompt was printed was not seen for minutes).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
        yield
    finally:
        _end_alarms(before)


def listen_again() -> None:
    """Forget the signal that came, and catch the next one: what it asked for is done.

    For a program that outlives an interruption: without it the next signal would kill.
    """
    if _State.listen is not None:
        _State.listen()


def heard() -> None:
    """The exception has come to where it was to go: it is not raised again."""
    _State.due = False


def raise_received(*_: object) -> None:
    """Raise ``Interrupted`` if a signal has come. Takes any arguments: it serves as a hook."""
    if _State.received is not None:
        _State.due = False
        raise Interrupted(_State.received)
