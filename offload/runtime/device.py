"""The device protocol: streams, events, bounded memory, copies.

Three implementations: ``NullDevice`` (the CPU computes in RAM, there is no third tier),
``SimDevice`` (an accelerator simulated on CPU memory, with real threads and a race detector) and
the CUDA device. Everything above this module is written against the protocol, so that the path
through three tiers is the same with and without a card.

Ordering is explicit. An operation on a stream starts after the operations submitted to it
before, and after the events the stream was told to wait for; nothing else is promised. Host
threads take part as *actors*: the thread that computes, and the I/O lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

if TYPE_CHECKING:
    from offload.runtime.memory import HostMemory

Access = Literal["r", "w"]


class Event(Protocol):
    """A point in a stream's or an actor's work."""

    def done(self) -> bool:
        """Whether the work before this point has finished."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block the calling host thread (the *host* actor) until done.

        Raises:
            WatchdogError: after ``timeout`` seconds.
            Exception: whatever made the work before this point fail.
        """
        ...

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call back once when done, from any thread, with the error or None."""
        ...


class Stream(Protocol):
    """Operations in order."""

    name: str

    def record(self) -> Event:
        """An event that is done when everything submitted so far has finished."""
        ...

    def wait(self, event: Event) -> None:
        """Work submitted from now on starts after ``event``. Does not block the host, unless
        the stream is the host itself (compute on the null and simulated devices)."""
        ...


class Memory(Protocol):
    """A fixed range of bytes of one tier."""

    name: str
    nbytes: int

    def tensor(self) -> torch.Tensor:
        """All of it as a 1-d ``uint8`` tensor at a 4096-aligned address."""
        ...

    def view(self) -> memoryview:
        """All of it as writable bytes. Host memory only."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent; raises nothing while views exist."""
        ...


@dataclass(frozen=True, slots=True)
class Region:
    """``nbytes`` at ``offset`` of a memory."""

    memory: Memory
    offset: int
    nbytes: int


class Device(Protocol):
    """Where computation happens."""

    kind: str
    """``null``, ``sim`` or ``cuda``."""
    torch_device: torch.device
    """Where tensors of the compute tier live, as torch names it."""
    runs_ahead: bool
    """Whether compute waits for events on its own stream, and not the host for it."""
    notes: list[str]
    """What a user should know about how this device works here."""
    compute: Stream
    h2d: Stream
    d2h: Stream
    up: Stream
    """Small copies to the device that must not come behind the weights on ``h2d``."""
    update: Stream
    """What is computed beside ``compute``, on another thread: optimizer updates."""

    def updating(self) -> AbstractContextManager[None]:
        """What is computed inside, by the calling thread, is on ``update``."""
        ...

    def host_memory(self, nbytes: int, name: str) -> Memory:
        """Host memory that I/O can fill and copies can read (pinned where that means something)."""
        ...

    def buffer_memory(self, nbytes: int, name: str) -> HostMemory:
        """Host memory that comes and goes while copies are under way elsewhere. Its owner closes it
        when none of it is, and before the device."""
        ...

    def device_memory(self, nbytes: int, name: str) -> Memory:
        """Memory of the device tier. Raises PlanError with numbers if it does not fit."""
        ...

    def copy(self, dst: Region, src: Region, stream: Stream) -> Event:
        """Queue a copy of ``src.nbytes`` on ``stream``; returns the event of its end."""
        ...

    def touch(self, actor: str, region: Region, access: Access) -> None:
        """Declare that ``actor`` (a stream's name, or ``host``, ``read``, ``write``) uses the
        region now. Costs nothing except on a device that checks for races."""
        ...

    def discard(self, region: Region, after: Sequence[Event]) -> None:
        """Declare the bytes worthless once all of ``after`` are done: a lease ended. Whoever
        writes the region next must come after the same events. Costs nothing except on a device
        that poisons."""
        ...

    def signal(self, actor: str) -> Event:
        """A finished event that stands for everything ``actor`` has done so far."""
        ...

    def acquire(self, actor: str, event: Event) -> None:
        """Declare that what ``actor`` does from now on comes after ``event``, which is done."""
        ...

    def acquired_memory(self) -> int:
        """Bytes of device memory handed out now."""
        ...

    def peak_memory(self) -> int | None:
        """Most bytes in use on the device at once since it was opened, whoever used them; None if
        that is not known apart from the host's."""
        ...

    def check(self) -> None:
        """Raise what went wrong in the background (a race, a failed copy), if anything did."""
        ...

    def close(self) -> None:
        """Drain the streams, stop threads, free memory. Idempotent."""
        ...
