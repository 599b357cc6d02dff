"""Streams of a card: torch's own for computing, one of ours for each direction of copies.

A copy of pinned memory is queued by the thread that asks for it. A copy of memory that the system
would not pin goes through two small pinned buffers on a thread of the stream's; from the first such
copy on, that thread queues all the stream's operations, because only so they keep their order.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import ClosedError
from offload.runtime.cuda_api import CardApi
from offload.runtime.cuda_event import CudaEvent, Watcher, cuda_event
from offload.runtime.device import Event, Region

STAGING_BYTES = 8 << 20
"""Of each of a stream's two buffers. At 10 GB/s of memcpy a chunk takes 0.8 ms, so that what each
costs besides (some 20 µs) is not felt."""

SMALL_STAGING_BYTES = 1 << 20
"""As much for a stream of small copies."""


def staging_reserve(*, both_ways: bool) -> int:
    """Bytes of RAM that staged copies take: weights up, and, ``both_ways``, activations between the
    card and the CPU."""
    return 2 * STAGING_BYTES + (2 * (STAGING_BYTES + SMALL_STAGING_BYTES) if both_ways else 0)


class ComputeStream:
    """Whichever stream torch puts the calling thread's computation on."""

    name = "compute"

    def __init__(self, api: CardApi, watcher: Watcher) -> None:
        self._api = api
        self._watcher = watcher
        self._lock = threading.Lock()
        self._last: dict[Any, CudaEvent] = {}

    def _stream(self) -> Any:
        return self._api.current_stream()

    def record(self) -> Event:
        """See ``Stream``. Never raises: on a card that has failed the event has, too. Who records
        is about to let go of memory, and has to be able to."""
        try:
            stream = self._stream()
            event = CudaEvent(self._watcher, self._api.record(stream))
        except RuntimeError as error:
            event = CudaEvent(self._watcher, recorded=False)
            event.settle(self._watcher.fault("when compute was to be followed", error))
            return event
        with self._lock:
            self._last[stream] = event
        return event

    def wait(self, event: Event) -> None:
        """See ``Stream``. Raises DeviceError if the card, or the work before ``event``, failed."""
        waited = cuda_event(event)
        if waited.settled:
            if waited.error is not None:
                raise waited.error
            return
        waited.order(self._stream())  # asking the card whether it is done would cost more

    def last(self) -> list[CudaEvent]:
        """The last event recorded on each stream that was ever computed on."""
        with self._lock:
            return list(self._last.values())


class UpdateStream(ComputeStream):
    """A stream of its own, that another thread computes on."""

    name = "update"

    def __init__(self, api: CardApi, watcher: Watcher) -> None:
        super().__init__(api, watcher)
        self.raw = api.compute_stream()

    def _stream(self) -> Any:
        return self.raw

    def computing(self) -> AbstractContextManager[None]:
        """What the calling thread computes inside is queued here."""
        return self._api.computing_on(self.raw)


class Way(enum.Enum):
    """Which side of a staged copy is the host's."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class _Op:
    """Wait for ``after``, copy ``src`` to ``dst``, record ``event``; each part may be absent."""

    after: CudaEvent | None = None
    copy: tuple[torch.Tensor, torch.Tensor] | None = None  # dst, src
    staged: Way | None = None
    event: CudaEvent | None = None


class CopyStream:
    """Copies of one direction, in order. Thread-safe."""

    def __init__(
        self, name: str, api: CardApi, watcher: Watcher, staging_bytes: int = STAGING_BYTES
    ) -> None:
        """``staging_bytes``: of each of its two buffers, if it has to have them."""
        self.name = name
        self._staging_bytes = staging_bytes
        self.raw = api.stream()
        self._api = api
        self._watcher = watcher
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Op] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: BaseException | None = None
        self._staging: Staging | None = None

    def record(self) -> Event:
        """See ``Stream``. Raises ClosedError."""
        event = CudaEvent(self._watcher, recorded=False)
        self._submit(_Op(event=event))
        return event

    def wait(self, event: Event) -> None:
        """See ``Stream``. On a card that has failed the copies behind fail. Raises ClosedError."""
        after = cuda_event(event)
        if after.settled and after.error is None:
            return  # nothing queued from now on could come before
        self._submit(_Op(after=after))

    def copy(self, dst: Region, src: Region, staged: Way | None = None) -> CudaEvent:
        """Queue a copy whose sizes were checked; its event fails if the card does.

        ``staged``: the host's side is not pinned, and which it is. Raises ClosedError.
        """
        into = dst.memory.tensor()[dst.offset : dst.offset + src.nbytes]
        out_of = src.memory.tensor()[src.offset : src.offset + src.nbytes]
        event = CudaEvent(self._watcher, recorded=False)
        self._submit(_Op(copy=(into, out_of), staged=staged, event=event))
        return event

    def end(self) -> CudaEvent:
        """An event after all that was queued, also on a stream that is closed."""
        event = CudaEvent(self._watcher, recorded=False)
        with self._changed:
            if self._thread is not None and not self._closing:
                self._queue.append(_Op(event=event))
                self._changed.notify()
            else:
                self._perform(_Op(event=event))
        return event

    def _submit(self, op: _Op) -> None:
        with self._changed:
            if self._closing:
                raise ClosedError(f"the card's stream {self.name} is closed")
            if op.staged is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"offload-cuda-stage-{self.name}", daemon=True
                )
                self._thread.start()
            if self._thread is not None:
                self._queue.append(op)
                self._changed.notify()
                return
            self._perform(op)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                op = self._queue.popleft()
            self._perform(op)

    def _perform(self, op: _Op) -> None:
        """Queue the operation on the card. An error breaks the stream: later work would use what is
        not there, so it fails with the same error."""
        raw = None
        if self._broken is None:
            try:
                if op.after is not None:
                    op.after.order(self.raw)
                if op.copy is not None and op.staged is not None:
                    if self._staging is None:
                        self._staging = Staging(self._api, self._staging_bytes)
                    self._staging.copy(*op.copy, self.raw, op.staged)
                elif op.copy is not None:
                    self._api.copy(*op.copy, self.raw)
                if op.event is not None:
                    raw = self._api.record(self.raw)
            # On the thread nobody is above, and in line the caller cannot do better than the event.
            except Exception as error:  # noqa: BLE001
                self._broken = self._watcher.fault(f"when {self.name} was to be queued", error)
        if op.event is not None:
            if self._broken is not None:
                op.event.settle(self._broken)
            else:
                op.event.record(raw)

    def close(self) -> bool:
        """Queue what was asked for and end the thread; whether that was possible in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(self._watcher.watchdog_s)
        return not self._thread.is_alive()


class Staging:
    """Copies of memory that is not pinned, through two pinned buffers in turn, or through the
    driver's own buffers where not even those could be had. Belongs to one stream's thread."""

    def __init__(self, api: CardApi, nbytes: int = STAGING_BYTES) -> None:
        self._api = api
        self._nbytes = nbytes
        self._buffers: list[torch.Tensor] = []
        self._read: list[Any] = [None, None]  # the card's event of the last copy out of each
        try:
            self._buffers = [api.pinned(nbytes), api.pinned(nbytes)]
        except RuntimeError:
            # Then the driver copies through its own: slower, and the call blocks.
            self._buffers = []

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any, way: Way) -> None:
        """``src`` to ``dst``. On return the host's side may be reused if it was the source, and
        holds the bytes if it was the target."""
        if not self._buffers:
            self._api.copy(dst, src, stream)
            self._api.block(self._api.record(stream))
            return
        for i, start in enumerate(range(0, len(src), self._nbytes)):
            stop = min(start + self._nbytes, len(src))
            buffer = self._buffers[i % 2][: stop - start]
            if self._read[i % 2] is not None:
                self._api.block(self._read[i % 2])
            if way is Way.UP:
                buffer.copy_(src[start:stop])
                self._api.copy(dst[start:stop], buffer, stream)
                self._read[i % 2] = self._api.record(stream)
            else:
                self._api.copy(buffer, src[start:stop], stream)
                self._api.block(self._api.record(stream))
                dst[start:stop].copy_(buffer)


__all__ = [
    "SMALL_STAGING_BYTES", "STAGING_BYTES", "ComputeStream", "CopyStream", "Staging",
    "UpdateStream", "Way", "staging_reserve",
]  # fmt: skip
