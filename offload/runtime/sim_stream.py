"""Streams and events of the simulated accelerator: one real thread per copy stream.

Time is kept twice. The *line* of a stream is when its work would end on the simulated hardware;
the thread waits until the clock has caught up with it. A wake-up that comes late therefore delays
what waits for it, but does not add up over a thousand copies.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from offload.errors import ClosedError, WatchdogError
from offload.runtime.device import Event, Region
from offload.runtime.memory import copy_bytes
from offload.runtime.race import RaceDetector, Stamp
from offload.units import format_bytes

log = logging.getLogger(__name__)

CHUNK = 4 << 20
"""Bytes copied between two looks at the clock."""


class Clock(Protocol):
    """Time in seconds, and waiting for it."""

    def now(self) -> float: ...

    def wait_until(self, deadline: float) -> None: ...


class WallClock:
    """Real time. Waits on a condition nobody notifies: idle, and right to about 0.1 ms."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, deadline: float) -> None:
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

    def __init__(self, shared: Shared, owner: SimStream | str, stamp: Stamp) -> None:
        self.stamp = stamp
        self.error: BaseException | None = None
        self.done_at = 0.0
        """When the work ended on its stream's line; valid once done."""
        self._shared = shared
        self._owner = owner
        self._number = next(shared.numbers)
        self._changed = threading.Condition()
        self._done = False
        self._before: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def __str__(self) -> str:
        owner = self._owner if isinstance(self._owner, str) else self._owner.name
        return f"event {self._number} of {owner}"

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
        limit_s = self._shared.watchdog_s if timeout is None else timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, limit_s):
                raise WatchdogError(f"waited {limit_s:.3g} s for {self}; {self._whereabouts()}")
        if self.error is not None:
            raise self.error

    def _whereabouts(self) -> str:
        return "" if isinstance(self._owner, str) else self._owner.whereabouts()

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


class HostStream:
    """Compute: the host thread itself, so waiting blocks and what was recorded is done."""

    def __init__(self, name: str, shared: Shared) -> None:
        self.name = name
        self._shared = shared

    def record(self) -> Event:
        return finished_event(self._shared, self.name)

    def wait(self, event: Event) -> None:
        sim_event(event).wait()


def finished_event(shared: Shared, actor: str) -> SimEvent:
    """An event that is done and stands for everything ``actor`` has done."""
    stamp: Stamp = shared.races.release(actor) if shared.races is not None else {}
    event = SimEvent(shared, actor, stamp)
    event.complete(None, shared.clock.now())
    return event


@dataclass(frozen=True, slots=True)
class _Op:
    """One operation: wait for ``after``, copy, complete ``event``; each part may be absent."""

    submitted_at: float
    after: SimEvent | None = None
    copy: tuple[Region, Region] | None = None  # dst, src
    event: SimEvent | None = None

    def __str__(self) -> str:
        if self.after is not None:
            return f"waiting for {self.after}"
        if self.copy is not None:
            dst, src = self.copy
            return (
                f"copying {format_bytes(src.nbytes)} from '{src.memory.name}'+{src.offset} "
                f"to '{dst.memory.name}'+{dst.offset}"
            )
        return f"recording {self.event}"


class SimStream:
    """Operations in order on a thread of their own.

    Args:
        bytes_per_s: rate of copies; None copies as fast as memory does.
        latency_s: added to every copy.
        rng: draws a delay up to ``jitter_s`` before every operation; None draws none.
    """

    def __init__(
        self,
        name: str,
        shared: Shared,
        *,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        rng: random.Random | None = None,
        jitter_s: float = 0.0,
    ) -> None:
        self.name = name
        self._shared = shared
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._rng = rng
        self._jitter_s = jitter_s
        self._line_s = 0.0
        """When the work so far ends on the simulated hardware."""
        self._queue: deque[_Op] = deque()
        self._changed = threading.Condition()
        self._doing: _Op | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"offload-sim-{name}", daemon=True)
        self._thread.start()

    def record(self) -> Event:
        """See ``Stream``. Raises ClosedError."""
        with self._changed:
            event = self._new_event()
            self._submit(_Op(self._shared.clock.now(), event=event))
        return event

    def wait(self, event: Event) -> None:
        """See ``Stream``. Raises ClosedError."""
        after = sim_event(event)
        with self._changed:
            self._submit(_Op(self._shared.clock.now(), after=after))
            if self._shared.races is not None:
                self._shared.races.acquire(self.name, after.stamp)

    def copy(self, dst: Region, src: Region) -> SimEvent:
        """Queue a copy (sizes checked by the caller). Raises ClosedError."""
        # One lock over judging and queueing: the judge must see the queue's order.
        with self._changed:
            self._check_open()
            if self._shared.races is not None:
                to, of = (
                    f"'{r.memory.name}' bytes [{r.offset}, {r.offset + src.nbytes})"
                    for r in (dst, src)
                )
                self._shared.races.touch(self.name, src, "r", f"copy to {to}")
                into = Region(dst.memory, dst.offset, src.nbytes)
                self._shared.races.touch(self.name, into, "w", f"copy from {of}")
            event = self._new_event()
            self._submit(_Op(self._shared.clock.now(), copy=(dst, src), event=event))
        return event

    def _new_event(self) -> SimEvent:
        self._check_open()
        races = self._shared.races
        return SimEvent(self._shared, self, races.release(self.name) if races is not None else {})

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError(f"stream {self.name} is closed")

    def _submit(self, op: _Op) -> None:
        self._check_open()
        self._queue.append(op)
        self._changed.notify_all()

    def whereabouts(self) -> str:
        """What the stream does now and how much is queued, for the watchdog."""
        with self._changed:
            doing = str(self._doing) if self._doing is not None else "idle"
            return f"stream {self.name} is {doing}, {len(self._queue)} operations queued behind"

    def close(self) -> None:
        """Finish what is queued and end the thread. Idempotent.

        Raises:
            WatchdogError: the thread did not end in time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            raise RuntimeError(f"stream {self.name} cannot be closed by its own callback")
        self._thread.join(self._shared.watchdog_s)
        if self._thread.is_alive():
            raise WatchdogError(
                f"waited {self._shared.watchdog_s:.3g} s for the end; {self.whereabouts()}"
            )

    # -- on the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        failed: BaseException | None = None
        while True:
            with self._changed:
                self._doing = None
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                op = self._doing = self._queue.popleft()
            if failed is None:
                try:
                    self._perform(op)
                # The stream is broken from here on: later work would use what is not there.
                except BaseException as e:  # noqa: BLE001
                    failed = e
                    self._shared.faults.add(e)
            if op.event is not None:
                op.event.complete(failed, max(self._line_s, op.submitted_at))

    def _perform(self, op: _Op) -> None:
        clock = self._shared.clock
        if self._rng is not None:
            clock.wait_until(clock.now() + self._rng.random() * self._jitter_s)
        if op.after is not None:
            op.after.block()
            self._line_s = max(self._line_s, op.after.done_at)
        if op.copy is not None:
            dst, src = op.copy
            start_s = max(self._line_s, op.submitted_at)
            rate_s = 1 / self._bytes_per_s if self._bytes_per_s else 0.0
            for begin in range(0, src.nbytes, CHUNK):
                end = min(begin + CHUNK, src.nbytes)
                copy_bytes(dst, src, begin, end)
                self._line_s = start_s + self._latency_s + end * rate_s
                clock.wait_until(self._line_s)
