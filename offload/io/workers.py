"""A few threads that work until the process ends.

``concurrent.futures.ThreadPoolExecutor`` refuses work, and waits for its threads, as soon as the
main thread has ended. Other threads of the program go on then: a generation in one of them would
fail for want of its weights, and the interpreter would wait for workers that are fed for good.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from offload.errors import StoreError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

NO_THREAD = (
    "no thread can be started: the limit of processes (ulimit -u, or a container's) or of memory "
    "(ulimit -v) is reached; raise it, or end other programs"
)


def is_no_thread(error: BaseException) -> bool:
    """Whether the system has refused a thread, as Python says it."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


class Workers(Executor):
    """Up to ``count`` daemon threads, begun as work comes. What is submitted runs in order.

    All methods may be called from any thread.
    """

    def __init__(self, count: int, name: str, *, finish: bool = False) -> None:
        """``finish``: at the interpreter's end, when all other threads of the program have ended,
        what was submitted is waited for."""
        self._count, self._name = count, name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._open = True
        if finish:
            _FINISHED_LAST.add(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Give work to a thread.

        Raises:
            RuntimeError: it has been shut down.
            StoreError: the system has no thread for it, and there is none yet.
        """
        future: Future[T] = Future()
        with self._changed:
            if not self._open:
                raise RuntimeError(f"{self._name} takes no work after its shutdown")
            self._waiting.append((future, lambda: fn(*args, **kwargs)))
            if len(self._waiting) > self._idle and len(self._threads) < self._count:
                self._begin_one()
            self._changed.notify()
        return future

    def _begin_one(self) -> None:
        """Have one more thread, or go on with those that there are. Under the lock."""
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            if not self._threads:
                self._waiting.pop()
                raise StoreError(NO_THREAD) from e
            log.info("%s goes on with %d threads: %s", self._name, len(self._threads), e)
        else:
            self._threads.append(thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; threads end when all is done. Idempotent."""
        with self._changed:
            self._open = False
            if cancel_futures:
                while self._waiting:
                    self._waiting.popleft()[0].cancel()
            self._changed.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()

    def leave(self) -> None:
        """Take nothing more, and wait for nothing, at the interpreter's end either: what runs may
        never come back."""
        _FINISHED_LAST.discard(self)
        self.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or not self._open)
                self._idle -= 1
                if not self._waiting:
                    return
                future, work = self._waiting.popleft()
            _run(future, work)
            del future, work  # they may hold what their owner wants to see gone


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  whoever waits gets it
        future.set_exception(error)
    else:
        future.set_result(result)


_FINISHED_LAST: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    for workers in list(_FINISHED_LAST):
        workers.shutdown()


__all__ = ["NO_THREAD", "Workers", "is_no_thread"]
