"""RAM for blocks: equal slots in one mapping that is allocated once."""

from __future__ import annotations

import torch

from offload.errors import SchedulerError
from offload.kv.shape import BlockLayout
from offload.runtime.memory import HostMemory

Views = tuple[torch.Tensor, torch.Tensor]


class Pool:
    """``slots`` slots of ``slot_bytes`` bytes, lent by number. For one thread at a time.

    Pages count as used only once something was stored there, and never more than
    ``slots * slot_bytes`` do.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        # A cache may be made while generating; tensors made then could not be written afterwards.
        with torch.inference_mode(False):
            self._memory = HostMemory(slots * slot_bytes, "KV blocks")
        self._base = int(self._memory.tensor().data_ptr())
        self._free = list(range(slots - 1, -1, -1))
        self._lent = [False] * slots
        self._views: dict[BlockLayout, list[Views | None]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot, the lowest free one at first; None if all are lent."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._lent[slot] = True
        return slot

    def give(self, slot: int) -> None:
        """Take a slot back. Raises SchedulerError: it is not lent."""
        if not self._lent[slot]:
            raise SchedulerError(f"KV slot {slot} was given back twice")
        self._lent[slot] = False
        self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        """Its bytes, for I/O."""
        start = slot * self.slot_bytes
        return self._memory.view()[start : start + self.slot_bytes]

    def address(self, slot: int) -> int:
        """Of its first byte: what kernels take."""
        return self._base + slot * self.slot_bytes

    def copy(self, into: int, source: int) -> None:
        """All bytes of one slot into another."""
        memory, size = self._memory.tensor(), self.slot_bytes
        memory[into * size : (into + 1) * size].copy_(memory[source * size : (source + 1) * size])

    def tensors(self, slot: int, layout: BlockLayout) -> Views:
        """Keys ``[H, n, D]`` and values of a block in a slot, without a copy."""
        known = self._views.get(layout)
        if known is None:
            known = self._views[layout] = [None] * self.slots
        found = known[slot]
        if found is None:
            found = known[slot] = self._make(slot, layout)
        return found

    def _make(self, slot: int, layout: BlockLayout) -> Views:
        shape = layout.shape
        dtype: torch.dtype = getattr(torch, shape.dtype)
        start = slot * self.slot_bytes
        with torch.inference_mode(False):
            memory = self._memory.tensor()

            def part(offset: int, nbytes: int, heads: int, dim: int) -> torch.Tensor:
                flat = memory[start + offset : start + offset + nbytes]
                return flat.view(dtype).view(heads, layout.tokens, dim)

            return (
                part(0, layout.key_bytes, shape.key_heads, shape.key_dim),
                part(layout.value_at, layout.value_bytes, shape.value_heads, shape.value_dim),
            )

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._views.clear()
        self._memory.close()
