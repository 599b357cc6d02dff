"""The CPU is the device: computation reads RAM, there is no third tier, nothing is asynchronous."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from offload.errors import PlanError
from offload.runtime.device import Access, Event, Memory, Region, Stream
from offload.runtime.memory import HostMemory
from offload.runtime.regions import check_copy, copy_bytes
from offload.units import format_bytes

log = logging.getLogger(__name__)


class _DoneEvent:
    """Everything on this device is over when its call returns, so one event stands for all."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        del timeout

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        try:
            callback(None)
        # The same rule as on devices with threads, where nobody is there to catch it: check().
        except Exception as e:
            log.error("a callback failed: %s", e, exc_info=e)
            self._errors.append(e)


class _NullStream:
    def __init__(self, name: str, done: _DoneEvent) -> None:
        self.name = name
        self._done = done

    def record(self) -> Event:
        return self._done

    def wait(self, event: Event) -> None:
        event.wait()


class NullDevice:
    """A ``Device`` without memory of its own: copies run at once, events are done at record."""

    kind = "null"
    runs_ahead = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.notes: list[str] = []
        self._errors: list[BaseException] = []
        self._done = _DoneEvent(self._errors)
        self.compute: Stream = _NullStream("compute", self._done)
        self.h2d: Stream = _NullStream("h2d", self._done)
        self.d2h: Stream = _NullStream("d2h", self._done)
        self.up: Stream = _NullStream("up", self._done)
        self.update: Stream = _NullStream("update", self._done)
        self._memories: list[HostMemory] = []

    def updating(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def host_memory(self, nbytes: int, name: str) -> Memory:
        """See ``HostMemory``. Closed with the device if its owner did not."""
        memory = HostMemory(nbytes, name)
        self._memories = [m for m in self._memories if not m.closed]
        self._memories.append(memory)
        return memory

    def buffer_memory(self, nbytes: int, name: str) -> HostMemory:
        """See ``Device``."""
        return HostMemory(nbytes, name)

    def device_memory(self, nbytes: int, name: str) -> Memory:
        raise PlanError(
            f"'{name}' asks for {format_bytes(nbytes)} of device memory, but the CPU is the device "
            "and computes in RAM; drop the device budget or choose a device that has memory"
        )

    def copy(self, dst: Region, src: Region, stream: Stream) -> Event:
        """Copy now. ``stream`` means nothing here. Raises ValueError if the sizes do not fit."""
        del stream
        check_copy(dst, src)
        copy_bytes(dst, src)
        return self._done

    def touch(self, actor: str, region: Region, access: Access) -> None:
        """Nothing to check."""

    def discard(self, region: Region, after: Sequence[Event]) -> None:
        """Nothing to do: the next owner overwrites the bytes."""

    def signal(self, actor: str) -> Event:
        del actor
        return self._done

    def acquire(self, actor: str, event: Event) -> None:
        """Nothing to order."""

    def peak_memory(self) -> int | None:
        return None

    def acquired_memory(self) -> int:
        return 0

    def check(self) -> None:
        """Raise the first error of a callback, if there was one."""
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        for memory in self._memories:
            memory.close()
        self._memories.clear()
