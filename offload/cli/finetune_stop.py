"""Ctrl-C in training: the step that runs is finished and committed, unless asked again.

Not ``signals_raise``: an exception in the middle of a step would throw the step away, and a step
can be minutes of work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ASKED = "after this step, which is committed; once more: at once, back to the last commit"
_SHOW_CURSOR = b"\x1b[?25h\n"


class StopRequest:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._event = threading.Event()

    def __call__(self) -> bool:
        """``should_stop`` of a run: true once a signal has come. Takes no lock."""
        return self.signum is not None

    def _ask(self, signum: int) -> None:
        self.signum = signum
        self._event.set()

    def _wait(self) -> bool:
        """Wait until a signal has come (true) or none can come any more."""
        self._event.wait()
        return self.signum is not None

    def _end(self) -> None:
        self._event.set()


@contextlib.contextmanager
def stop_after_step(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM is a request, and the second one ends the process.

    It ends it by the signal's own action, and not by an exception: raised between any two
    bytecodes, that left workers waiting for good now and then, and a kill loses no more than the
    steps since the last commit. Of the terminal only the cursor has to be brought back.

    A signal that the parent ignores stays ignored. In another thread than the main one, nothing
    is changed.

    Args:
        announce: says that the request is heard; from a thread of its own, as a handler runs
            inside whatever the main thread is doing, its printing and its locks included.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(signum: int, _frame: FrameType | None) -> None:
        if request.signum is None:
            request._ask(signum)
            return
        if sys.__stderr__ is not None and sys.__stderr__.isatty():
            os.write(sys.__stderr__.fileno(), _SHOW_CURSOR)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def wait() -> None:
        if request._wait():
            announce(ASKED)

    waiter = threading.Thread(target=wait, name="offload-stop", daemon=True)
    waiter.start()
    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        request._end()
        waiter.join()
