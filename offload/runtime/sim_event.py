"""Events of the simulated accelerator, and what all its parts share: time, errors, races."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from offload.errors import WatchdogError
from offload.runtime.device import Event
from offload.runtime.race import RaceDetector, Stamp

log = logging.getLogger(__name__)


class Clock(Protocol):
    """Time in seconds, and waiting for it."""

    def now(self) -> float: ...

    def wait_until(self, deadline: float) -> None: ...


class WallClock:
    """Real time. Waits on a condition nobody notifies: idle, and right to about 0.1 ms."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, deadline: float) -> None:
        if self.now() >= deadline:
            return
        until = threading.Condition()
        with until:
            while (left := deadline - self.now()) > 0:
                until.wait(left)


class Faults:
    """Errors nobody was there to catch, for the device's check()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def add(self, error: BaseException) -> None:
        with self._lock:
            if error in self._errors:  # one failure, seen by several streams
                return
            self._errors.append(error)
        log.error("%s: %s", type(error).__name__, error, exc_info=error)

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]


@dataclass(frozen=True, slots=True)
class Shared:
    """What the streams and events of one device have in common."""

    clock: Clock
    faults: Faults
    races: RaceDetector | None
    watchdog_s: float
    numbers: itertools.count[int]

    def check(self) -> None:
        self.faults.check()
        if self.races is not None:
            self.races.check()


class SimEvent:
    """A point in a stream's or an actor's work. See the ``Event`` protocol.

    A blocking ``wait`` teaches the *host* actor; the thread of an I/O lane waits with ``then`` and
    tells the device with ``acquire``. ``done()`` orders nothing.
    """

    def __init__(
        self,
        shared: Shared,
        actor: str,
        stamp: Stamp,
        whereabouts: Callable[[], str] = lambda: "",
    ) -> None:
        self.stamp = stamp
        self.error: BaseException | None = None
        self.done_at = 0.0
        """When the work ended on its stream's line; valid once done."""
        self._shared = shared
        self._actor = actor
        self._whereabouts = whereabouts
        self._number = next(shared.numbers)
        self._changed = threading.Condition()
        self._done = False
        self._before: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def __str__(self) -> str:
        return f"event {self._number} of {self._actor}"

    def done(self) -> bool:
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        """Block the host. Without a timeout the device's watchdog applies.

        Raises:
            WatchdogError: not done in time; says what the stream was doing.
            RaceError: a race was found anywhere on the device.
        """
        self.block(timeout)
        if self._shared.races is not None:
            self._shared.races.acquire("host", self.stamp)
        self._shared.check()

    def block(self, timeout: float | None = None) -> None:
        """Wait without learning anything: for stream threads, and for ``wait``."""
        if not self._done:
            limit_s = self._shared.watchdog_s if timeout is None else timeout
            with self._changed:
                if not self._changed.wait_for(lambda: self._done, limit_s):
                    raise WatchdogError(f"waited {limit_s:.3g} s for {self}; {self._whereabouts()}")
        if self.error is not None:
            raise self.error

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call back with the error or None: at once if done, else on the stream's thread.

        What the callback raises is kept for ``check()``.
        """
        with self._changed:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def before_done(self, hook: Callable[[], None]) -> None:
        """Run ``hook`` before anyone can see the event done; now, if it is done already."""
        with self._changed:
            if not self._done:
                self._before.append(hook)
                return
        hook()

    def complete(self, error: BaseException | None, at: float) -> None:
        """Mark done, once. Hooks first, then waiters, then callbacks."""
        while True:
            with self._changed:
                hooks, self._before = self._before, []
                if not hooks:
                    self.error, self.done_at, self._done = error, at, True
                    callbacks, self._callbacks = self._callbacks, []
                    self._changed.notify_all()
                    break
            for hook in hooks:
                hook()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[BaseException | None], None]) -> None:
        try:
            callback(self.error)
        # Nobody is above us on a stream's thread: keep it for the next check.
        except Exception as e:  # noqa: BLE001
            self._shared.faults.add(e)


def sim_event(event: Event) -> SimEvent:
    """The event, checked to be one of a simulated device."""
    if not isinstance(event, SimEvent):
        raise TypeError(f"{type(event).__name__} is not an event of the simulated device")
    return event


def finished_event(shared: Shared, actor: str) -> SimEvent:
    """An event that is done and stands for everything ``actor`` has done."""
    stamp: Stamp = shared.races.release(actor) if shared.races is not None else {}
    event = SimEvent(shared, actor, stamp)
    event.done_at, event._done = shared.clock.now(), True  # nobody can be waiting for it
    return event
