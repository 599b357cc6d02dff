"""Page-aligned memory under one limit, kept for reuse by size.

Blocks of a model come in few sizes (layers, experts, tiles), so what was freed is handed out again
instead of being unmapped: a fresh page costs more than reading a page from a fast disk does.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.blocks import align_up
from offload.errors import PlanError
from offload.runtime.memory import HostMemory
from offload.units import format_bytes


class BufferPool:
    """At most ``limit`` bytes of buffers. Not thread-safe: its owner has a lock."""

    def __init__(
        self, limit: int, name: str, make: Callable[[int, str], HostMemory] = HostMemory
    ) -> None:
        """``make``: what a buffer is made by, of (bytes, name)."""
        self.limit = limit
        self.name = name
        self.used = 0
        """Bytes handed out."""
        self._make = make
        self._idle: dict[int, list[HostMemory]] = {}
        self._idle_bytes = 0

    @property
    def room(self) -> int:
        """Bytes that can still be taken."""
        return self.limit - self.used

    def fits(self, nbytes: int) -> bool:
        """Whether ``take`` would succeed now."""
        return self.used + align_up(nbytes) <= self.limit

    def take(self, nbytes: int) -> HostMemory:
        """A buffer of ``nbytes`` rounded up to a page; what is in it is undefined.

        Raises:
            PlanError: the limit would be exceeded.
        """
        size = align_up(max(nbytes, 1))
        if self.used + size > self.limit:
            raise PlanError(
                f"{self.name}: {format_bytes(size)} more than the {format_bytes(self.used)} in use "
                f"would exceed {format_bytes(self.limit)}"
            )
        idle = self._idle.get(size)
        if idle:
            self._idle_bytes -= size
            memory = idle.pop()
        else:
            self._shrink(self.limit - self.used - size)
            memory = self._make(size, self.name)
        self.used += size
        return memory

    def give(self, memory: HostMemory) -> None:
        """Take a buffer back. The caller keeps no view of it."""
        self.used -= memory.nbytes
        self._idle.setdefault(memory.nbytes, []).append(memory)
        self._idle_bytes += memory.nbytes

    def _shrink(self, room: int) -> None:
        """Free idle buffers until they take at most ``room`` bytes, largest sizes first."""
        for size in sorted(self._idle, reverse=True):
            while self._idle[size] and self._idle_bytes > room:
                self._idle[size].pop().close()
                self._idle_bytes -= size
            if not self._idle[size]:
                del self._idle[size]

    def close(self) -> None:
        """Free what is idle; the rest when it is given back and this is called again."""
        self._shrink(0)
