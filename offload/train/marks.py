"""Who used a buffer of weights last, told to the device that copies from it.

Reads from the disk and updates write such a buffer, copies to the device read it. Locks order them
already (a block that is being copied is held); here each says so to the device, so that one that
checks for races finds an order that is missing, and copies wait on the device's own terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.runtime.device import Device, Event, Memory, Region

UPDATE = "update"
"""The actor of the thread that updates."""


def reading(block: int) -> str:
    """The actor of the reads of a block: several are under way at a time, each one of its own."""
    return f"read/{block}"


@dataclass(slots=True)
class _Last:
    written: Event
    copied: Event | None = None
    """The last copy from it; copies are in order."""


class Marks:
    """By buffer: its last write, and the last copy since. Called with the engine's lock held."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: dict[int, _Last] = {}

    def write(self, actor: str, memory: Memory) -> None:
        """``actor`` writes the buffer from now on; whoever used it before is done."""
        last = self._last.pop(id(memory), None)
        if last is not None:
            self._device.acquire(actor, last.written)
            if last.copied is not None:
                self._device.acquire(actor, last.copied)
        self._device.touch(actor, Region(memory, 0, memory.nbytes), "w")

    def written(self, actor: str, memory: Memory) -> None:
        """What ``actor`` wrote is in place."""
        self._last[id(memory)] = _Last(self._device.signal(actor))

    def arrived(self, memory: Memory) -> Event:
        """What a copy from the buffer comes after."""
        return self._last[id(memory)].written

    def copied(self, memory: Memory, end: Event) -> None:
        """A copy from the buffer is over with ``end``."""
        self._last[id(memory)].copied = end
