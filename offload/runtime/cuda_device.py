"""A card: the ``Device`` that CUDA (or ROCm, which torch calls the same) gives.

What waits for what, in the steady state:

- streams wait for events, on the card: the copy up for the last use of its slot (``compute``), the
  computation for the copy of its block (``h2d``);
- watchers, threads of ours, block on the events of copies, and tell the executor;
- the computing thread waits on the executor's condition for blocks that are still on their way,
  and nowhere else. Nothing here synchronises the device, not even ``close()``, which waits for the
  last event of each stream.

An error of the card makes the copies behind it fail, and the executor raises it with the block's
story where the block is waited for. After one, nothing on the card is trusted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

from offload.errors import OffloadError, PlanError, SchedulerError
from offload.runtime import cuda_api
from offload.runtime.cuda_api import CardApi
from offload.runtime.cuda_event import CudaEvent, Faults, Watcher, cuda_event
from offload.runtime.cuda_memory import CardMemory, PinnedMemory
from offload.runtime.cuda_stream import (
    SMALL_STAGING_BYTES,
    STAGING_BYTES,
    ComputeStream,
    CopyStream,
    UpdateStream,
    Way,
)
from offload.runtime.device import Access, Event, Memory, Region, Stream
from offload.runtime.memory import HostMemory
from offload.runtime.regions import check_copy
from offload.units import format_bytes

log = logging.getLogger(__name__)

COPY_STREAMS = {"h2d": STAGING_BYTES, "d2h": STAGING_BYTES, "up": SMALL_STAGING_BYTES}
"""And the bytes of a staging buffer of each."""

SMALL_PIN = 1 << 20
"""Bytes pinned to see whether the system allows it."""


class CudaDevice:
    """See the module. Thread-safe.

    Args:
        capacity_bytes: most that ``device_memory`` gives out; None: as much as the card has.
        index: of the card.
        watchdog_s: the longest a wait takes before it raises WatchdogError.
        api: the card itself; None opens ``index``.

    Attributes:
        notes: what a user should know: that host memory could not be pinned, and why.

    Raises:
        OffloadError: there is no such card.
    """

    kind = "cuda"
    runs_ahead = True

    def __init__(
        self,
        capacity_bytes: int | None = None,
        index: int = 0,
        *,
        watchdog_s: float = 120.0,
        api: CardApi | None = None,
    ) -> None:
        self.api = api if api is not None else cuda_api.open_card(index)
        self.torch_device = self.api.device
        self.capacity_bytes = capacity_bytes
        self.notes: list[str] = []
        self._watchdog_s = watchdog_s
        self._faults = Faults()
        self._lock = threading.RLock()
        self.api.reset_peak()
        self._closed = False
        self._hangs = False
        self._cards: list[CardMemory] = []
        self._hosts: list[PinnedMemory] = []
        self._watchers = {
            name: Watcher(name, self.api, self._faults, watchdog_s)
            for name in ("compute", "update", *COPY_STREAMS)
        }
        self._compute = ComputeStream(self.api, self._watchers["compute"])
        self._copies = tuple(
            CopyStream(name, self.api, self._watchers[name], staging)
            for name, staging in COPY_STREAMS.items()
        )
        self._update = UpdateStream(self.api, self._watchers["update"])
        self.compute: Stream = self._compute
        self.update: Stream = self._update
        self.h2d: Stream = self._copies[0]
        self.d2h: Stream = self._copies[1]
        self.up: Stream = self._copies[2]

    def updating(self) -> AbstractContextManager[None]:
        """See ``Device``."""
        return self._update.computing()

    # -- memory --------------------------------------------------------------------------------

    def host_memory(self, nbytes: int, name: str) -> Memory:
        """Pinned host memory, touched at once. Where the system refuses to pin it, it is ordinary
        memory whose copies are staged: ``notes`` and the log say so."""
        memory = PinnedMemory(nbytes, name, self.api, self._drained)
        self._tell_refused(memory)
        with self._lock:
            self._hosts = [m for m in self._hosts if not m.closed]
            self._hosts.append(memory)
        return memory

    def buffer_memory(self, nbytes: int, name: str) -> HostMemory:
        """See ``Device``; pinned as ``host_memory`` is. Closing it waits for nothing: who closes it
        may hold a lock that the end of another copy asks for."""
        memory = PinnedMemory(nbytes, name, self.api)
        self._tell_refused(memory)
        return memory

    def _tell_refused(self, memory: PinnedMemory) -> None:
        if memory.refused is None:
            return
        note = (
            f"the system does not pin {format_bytes(memory.nbytes)} of host memory "
            f"({memory.refused}): copies to the card go through a small pinned buffer, and each "
            f"takes a core's time"
        )
        with self._lock:
            if any(memory.refused in told for told in self.notes):
                return
            self.notes.append(note)
        log.warning("%s", note)

    def device_memory(self, nbytes: int, name: str) -> Memory:
        """See ``Device``. One allocation of torch's: its statistics and its limits count it.

        Raises:
            PlanError: more than is left of the capacity, or than the card has free.
        """
        with self._lock:  # two callers must not both get the last bytes
            used = self.acquired_memory()
            if self.capacity_bytes is not None and used + nbytes > self.capacity_bytes:
                short = used + nbytes - self.capacity_bytes
                raise PlanError(
                    f"device memory '{name}' needs {format_bytes(nbytes)}, but "
                    f"{format_bytes(used)} of {format_bytes(self.capacity_bytes)} are in use: "
                    f"short by {format_bytes(short)} ({short} bytes); raise the device budget or "
                    f"plan less on it"
                )
            memory = CardMemory(nbytes, name, self.api)
            for raw in (*(s.raw for s in self._copies), self._update.raw):
                # Whoever forgets us without close() frees it on the stream it was made on, only.
                self.api.used_by(memory.tensor(), raw)
            self._cards.append(memory)
        return memory

    def peak_memory(self) -> int | None:
        """See ``Device``: what torch's allocator counted, activations and all."""
        return self.api.peak()

    def acquired_memory(self) -> int:
        with self._lock:
            self._cards = [m for m in self._cards if not m.closed]
            return sum(m.nbytes for m in self._cards)

    # -- work ----------------------------------------------------------------------------------

    def copy(self, dst: Region, src: Region, stream: Stream) -> Event:
        """See ``Device``. What goes wrong on the card is the event's error.

        Raises:
            ValueError: the sizes do not fit.
            SchedulerError: the stream is not one of this device's copy streams, or neither side is
                on the card.
        """
        check_copy(dst, src)
        if not isinstance(dst.memory, CardMemory) and not isinstance(src.memory, CardMemory):
            raise SchedulerError(
                f"neither '{src.memory.name}' nor '{dst.memory.name}' is on the card: a copy "
                f"inside RAM is no work for its streams"
            )
        for mine in self._copies:
            if stream is mine:
                return mine.copy(dst, src, _staged(dst.memory, src.memory))
        raise SchedulerError(
            f"stream {stream.name} does not copy; use h2d, d2h or up of this device"
        )

    def touch(self, actor: str, region: Region, access: Access) -> None:
        """Nothing to check."""

    def discard(self, region: Region, after: Sequence[Event]) -> None:
        """Nothing to do: the next owner overwrites the bytes, after the same events."""

    def signal(self, actor: str) -> Event:
        """See ``Device``: what threads of the host have done is done."""
        del actor
        return CudaEvent(self._watchers["h2d"])

    def acquire(self, actor: str, event: Event) -> None:
        """See ``Device``.

        Raises:
            SchedulerError: the event is not done.
            DeviceError: the work before it has failed.
        """
        before = cuda_event(event)
        if not before.done():
            raise SchedulerError(f"{actor} goes on before its event is done; wait or use then()")
        if before.error is not None:
            raise before.error

    def check(self) -> None:
        """Raise the first error of the card or of a callback, if there was one."""
        self._faults.check()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """See ``Device``. Waits for the last event of each stream, at most the watchdog's time;
        memory that a hanging card may still write to is kept. Reports nothing: call ``check()``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for stream in self._copies:
            if not stream.close():
                log.error("the card's stream %s did not come to its end", stream.name)
        self._drained()
        for watcher in self._watchers.values():
            if not watcher.close():
                log.error("the card has not finished what was queued on %s", watcher.name)
        for slots in self._cards:
            slots.close()
        for host in self._hosts:
            host.close()

    def _drained(self) -> bool:
        """Wait until nothing of ours is under way on the card; whether that is so. A card that
        hangs is waited for once."""
        if self._hangs:
            return False
        last = (*self._compute.last(), *self._update.last())
        for event in (*last, *(s.end() for s in self._copies)):
            try:
                event.wait(self._watchdog_s)
            except OffloadError as error:
                # A card that has failed does nothing any more; one that hangs might.
                if event.done():
                    continue
                log.error("closing: %s", error)
                self._hangs = True
                return False
        return True


def _staged(dst: Memory, src: Memory) -> Way | None:
    """Which way a copy is staged; None if the card can do it by itself. Ordinary memory, which
    comes and goes where pinning it each time would hold the card up, is staged, too."""
    if not isinstance(src, CardMemory) and not _pinned(src):
        return Way.UP
    if not isinstance(dst, CardMemory) and not _pinned(dst):
        return Way.DOWN
    return None


def _pinned(memory: Memory) -> bool:
    return isinstance(memory, PinnedMemory) and memory.refused is None


def pinning_refused(api: CardApi) -> str | None:
    """Why the system does not pin even a little memory; None if it does. Asked before planning."""
    memory = PinnedMemory(SMALL_PIN, "pinning test", api)
    refused = memory.refused
    memory.close()
    return refused


__all__ = ["CudaDevice", "pinning_refused"]
