"""Streams of the simulated accelerator: the host computes, one real thread per copy stream.

Time is kept twice. The *line* of a stream is when its work would end on the simulated hardware;
the thread waits until the clock has caught up with it. A wake-up that comes late therefore delays
what waits for it, but does not add up over a thousand copies.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass

from offload.errors import ClosedError, WatchdogError
from offload.runtime.device import Event, Region
from offload.runtime.race import Stamp
from offload.runtime.regions import copy_bytes
from offload.runtime.sim_event import Shared, SimEvent, finished_event, sim_event
from offload.units import format_bytes

CHUNK = 4 << 20
"""Bytes copied between two looks at the clock."""


class HostStream:
    """Compute: the host thread itself, so waiting blocks and what was recorded is done."""

    def __init__(self, name: str, shared: Shared) -> None:
        self.name = name
        self.copied_bytes = 0
        """Of all copies that were queued."""
        self._shared = shared

    def record(self) -> Event:
        return finished_event(self._shared, self.name)

    def wait(self, event: Event) -> None:
        sim_event(event).wait()


class UpdateStream(HostStream):
    """Computing on another thread of the host, which learns by itself what it comes after."""

    def wait(self, event: Event) -> None:
        before = sim_event(event)
        before.block()
        if self._shared.races is not None:
            self._shared.races.acquire(self.name, before.stamp)
        self._shared.check()


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
        self.copied_bytes = 0
        """Of all copies that were queued."""
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
            self._check_open()
            # What is over, and without an error, ended before whatever is queued behind it begins.
            if not after.done() or after.error is not None:
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
            self.copied_bytes += src.nbytes
            self._submit(_Op(self._shared.clock.now(), copy=(dst, src), event=event))
        return event

    def _new_event(self) -> SimEvent:
        self._check_open()
        races = self._shared.races
        stamp: Stamp = races.release(self.name) if races is not None else {}
        return SimEvent(self._shared, self.name, stamp, self.whereabouts)

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
