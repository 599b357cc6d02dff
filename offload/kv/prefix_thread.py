"""The one thread that reads and writes a prompt cache, and what becomes of it when the disk hangs.

A disk that takes too long once is waited for once: until what was asked of it comes back, nothing
more is asked, so that a server does not have each of its clients wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from offload.errors import StoreError
from offload.io.workers import Workers

T = TypeVar("T")

WAIT_S = 120.0
"""So long a disk may take for one group before it is given up."""


class HungError(StoreError):
    """What was asked of the disk does not come back."""

    def __init__(self) -> None:
        super().__init__(f"the prompt cache's disk takes more than {WAIT_S:.0f} s; it is not used")


class PrefixThread:
    """Does one thing after the other. For one calling thread at a time."""

    def __init__(self) -> None:
        self._workers = Workers(1, "prompt-cache", finish=True)
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._late = False

    @property
    def hangs(self) -> bool:
        """Whether something took too long, and has not come back yet."""
        return self._late and not self._last.done()

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Raises as ``Workers.submit``."""
        self._last = future = self._workers.submit(work, *args)
        return future

    def too_late(self) -> HungError:
        """Something was waited for, ``WAIT_S`` seconds."""
        self._late = True
        return HungError()

    def wait(self, future: Future[T]) -> T:
        """What ``submit`` gave a promise of.

        Raises:
            HungError: it does not come.
        """
        try:
            return future.result(timeout=WAIT_S)
        except TimeoutError:
            raise self.too_late() from None

    def close(self) -> None:
        """Do what was submitted; a disk that hangs is waited for ``WAIT_S`` seconds, or, if it has
        been already, not at all. What is left then is given up."""
        if not self.hangs:
            futures.wait([self._last], timeout=WAIT_S)
        if self._last.done():
            self._workers.shutdown()
        else:
            self._workers.leave()
