"""What the parts of a training engine share: a lock, the first error, waiting that cannot hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from offload.errors import ClosedError, WatchdogError

WATCHDOG_S = 300.0
"""Without any event for so long, a wait is given up."""


class Shared:
    """The lock of a training engine, its first error, and waiting that cannot hang."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        self.events = 0
        self.closed = False

    def notify(self) -> None:
        """Something happened. With the lock held."""
        self.events += 1
        self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Keep the first error: everybody who waits gets it."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.notify()

    def check(self) -> None:
        """Raise the error if there is one. With the lock held."""
        if self.error is not None:
            raise self.error
        if self.closed:
            raise ClosedError("the training engine is closed")

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held. Raises the engine's error; WatchdogError if nothing moves."""
        while not ready():
            self.check()
            before = self.events
            self.changed.wait(WATCHDOG_S)
            if self.events == before and not ready():
                raise WatchdogError(f"{what}: nothing has happened for {WATCHDOG_S:.0f} s")
        self.check()

    def wait_for_change(self, what: str) -> None:
        """Wait, with the lock held, until something has happened."""
        before = self.events
        self.wait_for(lambda: self.events != before, what)
