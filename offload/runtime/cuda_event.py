"""Events of a card, and the threads that wait for them.

An event is *recorded* (the card knows it), then *done* or failed. The card's own events cannot call
back, and a wait for one cannot have a timeout; so each stream has a watcher, a thread that blocks
on the events somebody wants to hear of, in the order of the stream. Waits of streams for events
never pass through it: they are the card's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from offload.errors import SchedulerError, WatchdogError
from offload.runtime.cuda_api import CardApi, failed
from offload.runtime.device import Event

log = logging.getLogger(__name__)

Callback = Callable[[BaseException | None], None]


class Faults:
    """What went wrong on a card, for ``check()``: the first error, because all later ones follow
    from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first: BaseException | None = None

    def add(self, error: BaseException) -> None:
        with self._lock:
            if self.first is not None:
                return
            self.first = error
        log.error("%s", error, exc_info=error)

    def check(self) -> None:
        if self.first is not None:
            raise self.first


class CudaEvent:
    """A point in a stream's work; see the ``Event`` protocol. Thread-safe."""

    __slots__ = ("_callbacks", "_changed", "_done", "_error", "_raw", "_recorded", "_watcher")

    def __init__(self, watcher: Watcher, raw: Any = None, *, recorded: bool = True) -> None:
        """``raw``: the card's event; None and ``recorded``: of the host, done already. Without
        ``recorded`` the stream's thread calls ``record`` when it gets there."""
        self._watcher = watcher
        self._raw = raw
        self._recorded = recorded
        self._done = recorded and raw is None
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []
        self._changed = threading.Condition()

    def record(self, raw: Any) -> None:
        """The card knows the event now."""
        with self._changed:
            self._raw, self._recorded = raw, True
            self._changed.notify_all()

    def settle(self, error: BaseException | None) -> None:
        """The work before the event has ended. Once; later calls change nothing."""
        with self._changed:
            if self._done:
                return
            self._error, self._done, self._recorded = error, True, True
            self._raw = None  # the card's event may go
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            self._call(callback)

    @property
    def error(self) -> BaseException | None:
        """What made the work before the event fail, once that is known."""
        return self._error

    @property
    def settled(self) -> bool:
        """Whether it is known here, without asking the card, that the work before it has ended."""
        return self._done

    def done(self) -> bool:
        if self._done:
            return True
        with self._changed:
            raw = self._raw
        if raw is None:
            return self._done
        try:
            if not self._watcher.api.reached(raw):
                return False
        except RuntimeError as error:
            self.settle(self._watcher.fault("in work queued earlier", error))
            return True
        with self._changed:
            heard = bool(self._callbacks)
        # Callbacks are the watcher's to make: who only asks may hold locks that they take.
        if not heard:
            self.settle(None)
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See ``Event``; without ``timeout`` the device's watchdog applies."""
        limit_s = self._watcher.watchdog_s if timeout is None else timeout
        if not self.done():
            self._watcher.watch(self)
            with self._changed:
                if not self._changed.wait_for(lambda: self._done, limit_s):
                    raise WatchdogError(
                        f"waited {limit_s:.3g} s for the card's stream {self._watcher.name}"
                    )
        if self._error is not None:
            raise self._error

    def then(self, callback: Callback) -> None:
        """See ``Event``: at once if done, else on the watcher's thread."""
        with self._changed:
            if not self._done:
                first = not self._callbacks
                self._callbacks.append(callback)
                if first:
                    self._watcher.watch(self)
                return
        self._call(callback)

    def block(self) -> None:
        """For the watcher: wait until done, however long it takes."""
        with self._changed:
            self._changed.wait_for(lambda: self._recorded)
            raw = self._raw
        if raw is None:
            return
        try:
            self._watcher.api.block(raw)
        except RuntimeError as error:
            self.settle(self._watcher.fault("in work queued earlier", error))
        else:
            self.settle(None)

    def order(self, stream: Any) -> None:
        """What is queued on the card's ``stream`` from now on comes after the event. Blocks the
        host only while a thread of ours has not recorded it yet.

        Raises:
            DeviceError: the work before the event has failed, or the card has.
            WatchdogError: it was not recorded in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._recorded, self._watcher.watchdog_s):
                raise WatchdogError(
                    f"the card's stream {self._watcher.name} has not come to an event in "
                    f"{self._watcher.watchdog_s:.3g} s"
                )
            raw = self._raw
        if self._error is not None:
            raise self._error
        if raw is None:
            return
        try:
            self._watcher.api.wait(stream, raw)
        except RuntimeError as error:
            raise self._watcher.fault("when a stream was to wait", error) from error

    def _call(self, callback: Callback) -> None:
        try:
            callback(self._error)
        # Nobody is above us on the watcher's thread: keep it for the next check.
        except Exception as error:  # noqa: BLE001
            self._watcher.faults.add(error)


class Watcher:
    """The thread that waits for a stream's events; it starts with the first one."""

    def __init__(self, name: str, api: CardApi, faults: Faults, watchdog_s: float) -> None:
        self.name = name
        self.api = api
        self.faults = faults
        self.watchdog_s = watchdog_s
        self._queue: deque[CudaEvent] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def fault(self, when: str, error: BaseException) -> BaseException:
        """The card's error as ours, kept for ``check()``."""
        ours = failed(when, error)
        self.faults.add(ours)
        return ours

    def watch(self, event: CudaEvent) -> None:
        """Settle the event when it is done."""
        with self._changed:
            self._queue.append(event)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"offload-cuda-{self.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> bool:
        """Settle what is queued and end the thread; whether that was possible in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(self.watchdog_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    # A later event starts another thread: there is always one to settle it.
                    self._thread = None
                    return
                event = self._queue.popleft()
            event.block()


def cuda_event(event: Event) -> CudaEvent:
    """The event, checked to be one of a card."""
    if not isinstance(event, CudaEvent):
        raise SchedulerError(f"{type(event).__name__} is not an event of the card")
    return event


__all__ = ["CudaEvent", "Faults", "Watcher", "cuda_event"]
