"""Ctrl-C in training: the step that runs is finished and committed, unless asked again.

Not ``signals_raise``: an exception in the middle of a step would throw the step away, and a step
can be minutes of work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ASKED = "after this step, which is committed; once more: at once, back to the last commit"
_END = 0
"""Written to the pipe when no signal counts any more; no signal has this number."""
_SHOW_CURSOR = "\x1b[?25h\r\x1b[2K"


class StopRequest:
    """Whether a signal has come: the ``should_stop`` of a run. Asking takes no lock."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self) -> bool:
        return self.signum is not None


@contextlib.contextmanager
def stop_after_step(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM is a request, and the second one ends the process.

    It ends it as a kill would, and not by an exception: raised between any two bytecodes, that
    left workers waiting for good now and then, and no more is lost than the steps since the last
    commit. The exit code is that of an interruption, and a hidden cursor is brought back.

    A signal that the parent ignores stays ignored. In another thread than the main one, nothing
    is changed.

    Args:
        announce: says that the request is heard; called from a thread of its own.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(signum: int, _frame: FrameType | None) -> None:
        request.signum = request.signum or signum

    # Python runs handlers in the main thread, once that comes out of its kernel or its lock, and
    # forgets one that arrives while it goes into a lock (a second Ctrl-C was lost in that way). A
    # byte comes through the pipe at once, whatever the main thread does.
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def listen() -> None:
        while (number := os.read(reads, 1)[0]) != _END:
            if number not in before:
                continue  # every signal with a handler is written here
            if heard:
                _exit(number)
            heard.append(number)
            request.signum = request.signum or number
            announce(ASKED)

    heard: list[int] = []
    before = {
        int(number): signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    outer = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, name="offload-stop", daemon=True)
    listener.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(outer)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writes, bytes([_END]))
        listener.join()
        os.close(reads)
        os.close(writes)


def _exit(signum: int) -> None:
    """End the process now; says so past every buffer and lock."""
    word = "interrupted" if signum == signal.SIGINT else "terminated"
    with contextlib.suppress(OSError):  # whoever read our stderr has gone
        cursor = _SHOW_CURSOR if os.isatty(2) else ""
        os.write(2, f"{cursor}{word}\n".encode())
    os._exit(128 + signum)
