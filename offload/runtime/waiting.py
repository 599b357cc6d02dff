"""How the thread that computes waits for transfers: with a watchdog, and for what has failed."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from offload.errors import ClosedError, DeviceError, StoreError, WatchdogError
from offload.runtime.interrupts import Shield

_SIGNAL_S = 0.25


class Waiting:
    """The lock of one executor, and what is known of progress under it.

    Attributes:
        changed: notified whenever something has finished.
        progress: completions of any kind.
        closed: nothing is waited for any more.
        left_behind: this is a fork's child, and whoever would move anything is in the parent.
    """

    def __init__(
        self, shield: Shield, watchdog_s: float, story: Callable[[str], str],
        in_flight: Callable[[], int],
    ) -> None:  # fmt: skip
        """
        Args:
            watchdog_s: a wait in which nothing finishes for so long is an error, never a hang.
            story: of a block, ``in_flight``: transfers under way, for messages.
        """
        self.changed = threading.Condition(threading.RLock())
        self.progress = 0
        self.closed = False
        self.left_behind = False
        _ALIVE.add(self)
        self._shield, self._watchdog_s = shield, watchdog_s
        self._story, self._in_flight = story, in_flight
        self._failures: dict[str, BaseException] = {}

    def moved(self) -> None:
        """Something has finished: whoever waits looks again."""
        self.progress += 1
        self.changed.notify_all()

    def check_open(self) -> None:
        """Raises ClosedError."""
        if self.left_behind:
            raise ClosedError(
                "this model was opened by the parent process, and its threads stayed there; load "
                "it in the process that runs it"
            )
        if self.closed:
            raise ClosedError("this model has been closed; load it again")

    def wait(self, who: str, blocks: Sequence[str], seen: int) -> None:
        """Wait until more has finished than the ``seen`` of before the caller's last look. A store
        may have called back in between, from inside the very call that asked it to read.

        Raises:
            WatchdogError: nothing has finished for too long.
            ClosedError: nothing will.
        """
        left = self._watchdog_s
        while left > 0:
            if self._shield.received:
                raise KeyboardInterrupt
            if self.progress != seen or self.closed:
                self.check_open()
                return
            # Whatever moves notifies; only a signal cannot, so it is looked for now and then.
            asked, began = min(left, _SIGNAL_S), time.monotonic()
            self.changed.wait(asked)
            # No longer than asked for: while a Ctrl-Z holds the process nothing can finish.
            left -= min(time.monotonic() - began, asked)
        raise WatchdogError(
            f"{who} has waited {self._watchdog_s:.0f} s for {', '.join(blocks[:4])} and no "
            f"transfer has finished ({self._in_flight()} in flight); {self._story(blocks[0])}"
        )

    # -- failures -------------------------------------------------------------------------

    def failed(self, block: str, error: BaseException) -> None:
        """A block could not be fetched: raised where it is waited for."""
        self._failures[block] = error

    def forgive(self, blocks: Iterable[str]) -> None:
        """Who asks anew gets a new attempt: an old failure was that of a prefetch (logged), or has
        been raised where it was waited for."""
        for block in blocks:
            self._failures.pop(block, None)

    def raise_failures(self, blocks: Iterable[str]) -> None:
        """Raise the first failure among these blocks, once, with the block's story."""
        for block in blocks:
            error = self._failures.pop(block, None)
            if error is not None:
                kind = next(
                    (k for k in (ClosedError, DeviceError) if isinstance(error, k)), StoreError
                )
                # Its story ends with the same words: say them once.
                story = self._story(block).replace(f"failed: {error}", "failed")
                raise kind(f"{error} (block {block}; {story})") from error


_ALIVE: weakref.WeakSet[Waiting] = weakref.WeakSet()


def _forked() -> None:
    """In a child: say so where somebody would wait, instead of after the watchdog's minutes."""
    for waiting in list(_ALIVE):
        # A thread that is not here may have held the lock in that very moment.
        waiting.changed._at_fork_reinit()  # type: ignore[attr-defined]
        waiting.left_behind = waiting.closed = True


os.register_at_fork(after_in_child=_forked)

__all__ = ["Waiting"]
