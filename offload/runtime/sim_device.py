"""A simulated accelerator: bounded memory and copy streams of its own, on a machine without one.

Everything a card makes possible to get wrong can go wrong here: copies run on other threads, take
time, come in another order at every seed; memory nobody has written is poisoned; and each use is
checked against vector clocks (``race.py``), so that a missing wait is reported at every timing.

The compute stream is the host thread: ``compute`` and ``host`` are one actor.

The lanes of I/O are actors, too, and say so themselves::

    device.acquire("read", freed)           # freed: a done event, the region's last use before
    device.touch("read", region, "w")       # at submission
    ... the disk fills the region ...
    arrived = device.signal("read")         # on completion
    device.h2d.wait(arrived)                # before the copy that reads it
    device.copy(slot, region, device.h2d)

Any string is an actor. A lane with several requests in flight is several actors: name each slot
(``read/0``, ``read/1``), because a signal stands for *everything* its actor touched, and with one
name for all the signal of the request that came first would vouch for the ones still running.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Sequence

import torch

from offload.errors import ClosedError, PlanError, SchedulerError
from offload.runtime.device import Access, Event, Memory, Region, Stream
from offload.runtime.memory import POISON, HostMemory
from offload.runtime.race import RaceDetector
from offload.runtime.regions import check_copy, check_region
from offload.runtime.sim_event import Clock, Faults, Shared, WallClock, finished_event, sim_event
from offload.runtime.sim_stream import HostStream, SimStream, UpdateStream
from offload.units import format_bytes


class _SimMemory(HostMemory):
    def __init__(self, nbytes: int, name: str, on_close: Callable[[_SimMemory], None]) -> None:
        super().__init__(nbytes, name)
        self._on_close = on_close

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._on_close(self)


class _SimDeviceMemory(_SimMemory):
    def view(self) -> memoryview:
        raise SchedulerError(f"device memory '{self.name}' cannot be addressed by the host or I/O")


class SimDevice:
    """An accelerator simulated on CPU memory. Thread-safe. See the module for its rules.

    Args:
        capacity_bytes: device memory there is.
        h2d_bytes_per_s, d2h_bytes_per_s: rates of the copy streams; None: as fast as RAM.
        latency_s: added to every copy.
        seed: of the delays that the streams draw before every operation; None draws none (for
            measurements).
        jitter_s: the longest such delay.
        poison: fill memory with NaN patterns at creation and after release. Touches all pages.
        check_races: keep vector clocks.
        watchdog_s: the longest any wait takes before it raises WatchdogError.
        clock: time; tests pass a virtual one.

    Raises:
        ValueError: a rate that is not positive, or a negative size or time.
    """

    kind = "sim"
    runs_ahead = False

    def __init__(
        self,
        capacity_bytes: int,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        *,
        latency_s: float = 0.0,
        seed: int | None = 0,
        jitter_s: float = 100e-6,
        poison: bool = True,
        check_races: bool = True,
        watchdog_s: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        if capacity_bytes < 0 or latency_s < 0 or jitter_s < 0:
            raise ValueError("capacity_bytes, latency_s and jitter_s cannot be negative")
        for rate in (h2d_bytes_per_s, d2h_bytes_per_s):
            if rate is not None and not rate > 0:
                raise ValueError(f"a copy rate must be positive or None, got {rate} bytes/s")
        self.torch_device = torch.device("cpu")
        self.notes: list[str] = []
        self.capacity_bytes = capacity_bytes
        self.poison = poison
        self._races = RaceDetector() if check_races else None
        self._shared = Shared(
            clock=clock or WallClock(),
            faults=Faults(),
            races=self._races,
            watchdog_s=watchdog_s,
            numbers=itertools.count(),
        )
        self._lock = threading.RLock()
        self._memories: dict[int, _SimMemory] = {}

        def stream(name: str, bytes_per_s: float | None) -> SimStream:
            return SimStream(
                name,
                self._shared,
                bytes_per_s=bytes_per_s,
                latency_s=latency_s,
                rng=None if seed is None else random.Random(f"{seed}/{name}"),
                jitter_s=jitter_s,
            )

        self.compute: Stream = HostStream("compute", self._shared)
        self.update: Stream = UpdateStream("update", self._shared)
        self.h2d: Stream = stream("h2d", h2d_bytes_per_s)
        self.d2h: Stream = stream("d2h", d2h_bytes_per_s)
        self.up: Stream = stream("up", h2d_bytes_per_s)
        streams = (self.h2d, self.d2h, self.up)
        self._copy_streams = [s for s in streams if isinstance(s, SimStream)]

    def __enter__(self) -> SimDevice:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if kind is None:
            self.check()

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """See ``Device``: the thread that updates computes itself."""
        return contextlib.nullcontext()

    # -- memory --------------------------------------------------------------------------------

    def host_memory(self, nbytes: int, name: str) -> Memory:
        """See ``Device``. Poisoned, so its pages are touched, unless ``poison`` is off."""
        return self._adopt(_SimMemory(nbytes, name, self._forget))

    def buffer_memory(self, nbytes: int, name: str) -> HostMemory:
        """See ``Device``."""
        return HostMemory(nbytes, name)

    def device_memory(self, nbytes: int, name: str) -> Memory:
        """See ``Device``. Its ``view()`` raises: the host cannot address a card's memory.

        Raises:
            PlanError: more than is left of the capacity.
        """
        with self._lock:  # two callers must not both get the last bytes
            return self._device_memory(nbytes, name)

    def _device_memory(self, nbytes: int, name: str) -> Memory:
        used = self.acquired_memory()
        if used + nbytes > self.capacity_bytes:
            short = used + nbytes - self.capacity_bytes
            raise PlanError(
                f"device memory '{name}' needs {format_bytes(nbytes)}, but "
                f"{format_bytes(used)} of {format_bytes(self.capacity_bytes)} are in use: short by "
                f"{format_bytes(short)} ({short} bytes); raise the device budget or plan less on it"
            )
        return self._adopt(_SimDeviceMemory(nbytes, name, self._forget))

    def _adopt(self, memory: _SimMemory) -> Memory:
        if self.poison:
            memory.fill(POISON)
        if self._races is not None:
            self._races.created(memory)
        with self._lock:
            self._memories[id(memory)] = memory
        return memory

    def _forget(self, memory: _SimMemory) -> None:
        with self._lock:
            self._memories.pop(id(memory), None)
        if self._races is not None:
            self._races.forget(memory)

    def peak_memory(self) -> int | None:
        return None

    def acquired_memory(self) -> int:
        with self._lock:
            memories = list(self._memories.values())
        return sum(m.nbytes for m in memories if isinstance(m, _SimDeviceMemory))

    # -- work ----------------------------------------------------------------------------------

    def copy(self, dst: Region, src: Region, stream: Stream) -> Event:
        """See ``Device``. Reads ``src`` and writes ``dst`` as the stream's actor.

        Raises:
            ValueError: the sizes do not fit.
            SchedulerError: the stream is not one of this device's copy streams.
        """
        check_copy(dst, src)
        for mine in self._copy_streams:
            if stream is mine:
                return mine.copy(dst, src)
        raise SchedulerError(
            f"stream {stream.name} does not copy; use h2d, d2h or up of this device"
        )

    def touch(self, actor: str, region: Region, access: Access) -> None:
        """See ``Device`` and the module for when to call it."""
        check_region(region)
        if self._races is not None:
            self._races.touch(actor, region, access)

    def discard(self, region: Region, after: Sequence[Event]) -> None:
        """See ``Device``. The bytes are poisoned just before the last of ``after`` is done, so
        whoever waits for all of them finds the poison in place and never fights it."""
        check_region(region)
        events = [sim_event(e) for e in after]
        if self._races is not None:
            self._races.discard(region, [e.stamp for e in events])
        if not self.poison:
            return
        scrub = _Countdown(len(events), lambda: self._scrub(region))
        for event in events:
            event.before_done(scrub.one_less)

    def _scrub(self, region: Region) -> None:
        with self._lock:
            memory = self._memories.get(id(region.memory))
        if memory is None:
            return  # closed: its pages are gone
        try:
            memory.tensor()[region.offset : region.offset + region.nbytes].fill_(POISON)
        except ClosedError:
            return  # closed on another thread meanwhile
        except Exception as e:  # noqa: BLE001  (on a stream's thread: kept for check())
            self._shared.faults.add(e)

    def signal(self, actor: str) -> Event:
        return finished_event(self._shared, actor)

    def acquire(self, actor: str, event: Event) -> None:
        """See ``Device``.

        Raises:
            SchedulerError: the event is not done.
            Exception: what made the work before the event fail.
        """
        before = sim_event(event)
        if not before.done():
            raise SchedulerError(f"{actor} goes on before {before} is done; wait or use then()")
        if before.error is not None:
            raise before.error
        if self._races is not None:
            self._races.acquire(actor, before.stamp)

    def races(self) -> tuple[str, ...]:
        """All races found so far, oldest first."""
        return self._races.races() if self._races is not None else ()

    def check(self) -> None:
        """Raise the first background error, else the first race."""
        self._shared.check()

    def close(self) -> None:
        """See ``Device``. Reports nothing: call ``check()``, or use the device in a ``with``.

        Raises:
            WatchdogError: a stream did not finish in time.
        """
        with contextlib.ExitStack() as streams:  # closes the second also if the first raises
            for stream in self._copy_streams:
                streams.callback(stream.close)
        with self._lock:
            memories = list(self._memories.values())
        for memory in memories:
            memory.close()


class _Countdown:
    """Calls ``last`` at the ``n``-th call of ``one_less``; at once if there is none to come."""

    def __init__(self, n: int, last: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left = n
        self._last = last
        if not n:
            last()

    def one_less(self) -> None:
        with self._lock:
            self._left -= 1
            ended = self._left == 0
        if ended:
            self._last()
