"""The LM head on the device: its slices go up as the loss asks for them, and its gradients down.

The next slice is copied while one is used. What was copied stays as long as it is what is needed
next, across micro-batches and, of a frozen head, across steps; an update drops it, as it does with
layers (``device_weights``). Of a packed head packed bytes go up, and one slice at a time is
unpacked there. While the head is used its blocks are held in RAM, unless all of it is up and stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from offload.runtime.device import Device, Event, Region
from offload.train.card_values import unpacker_for
from offload.train.device_values import typed
from offload.train.head_place import Cut, HeadPlacement, HeadSlice
from offload.train.marks import Marks
from offload.train.packed_values import Unpacker
from offload.train.visit import Visit
from offload.train.visits import Visits
from offload.train.weights import Entry, Shared, Weights


@dataclass(slots=True)
class _There:
    """A slice in a slot, or on its way there."""

    slot: int
    ready: Event
    """All of it has come."""
    left: Event | None = None
    """The end of its last use."""

    @property
    def guards(self) -> tuple[Event, ...]:
        return (self.ready,) if self.left is None else (self.ready, self.left)


class DeviceHead:
    """See the module. One training thread; ``has`` and ``forget`` with the engine's lock held."""

    def __init__(
        self, device: Device, place: HeadPlacement, weights: Weights, visits: Visits,
        shared: Shared, marks: Marks,
    ) -> None:  # fmt: skip
        """
        Raises:
            OffloadError: it is packed, and cannot be unpacked here; names what is missing.
        """
        self.place = place
        self.up_bytes = 0
        self._device = device
        self._weights = weights
        self._visits = visits
        self._shared = shared
        self._marks = marks
        self._memory = device.device_memory(place.slots * place.slot_bytes, "head")
        self._values = (
            device.device_memory(place.unpacked_bytes, "unpacked head")
            if place.unpacked_bytes
            else None
        )
        self._unpacker = Unpacker() if place.part is None else unpacker_for(device)
        self._free = list(range(place.slots))
        self._guards: dict[int, tuple[Event, ...]] = {}
        """Slot -> whoever writes it next comes after these."""
        self._there: dict[int, _There] = {}
        self._held: Mapping[int, Entry] = {}
        self._at: int | None = None
        """The slice that is used, or was last."""
        self._rising = True
        """Slices are asked for in ascending order."""
        self._returns = True
        """They will be asked for in descending order then."""
        self._copied: Event | None = None
        """The last copy up."""

    # -- for the loss ---------------------------------------------------------------------

    @contextlib.contextmanager
    def visiting(self, *, returns: bool) -> Iterator[Visit]:
        """The loss of a micro-batch is computed inside, on what the visit brings up. ``returns``:
        slices are asked for again in descending order, for gradients."""
        self._at, self._rising, self._returns = None, True, returns
        held = [] if self.stays else sorted(self.place.blocks)
        entries = self._weights.acquire_all(held)
        self._held = {entry.block.index: entry for entry in entries}
        try:
            with self._visits.visiting() as visit:
                yield visit
        finally:
            try:
                if self._copied is not None:  # over, unless something went wrong
                    self._copied.wait()  # RAM was read until then
            finally:
                self._held = {}
                for block in held:
                    self._weights.release(block)

    @contextlib.contextmanager
    def weight(self, i: int) -> Iterator[torch.Tensor]:
        """Slice ``i``, [rows, width], on the device."""
        with self._shared.changed:
            self._turn(i)
            there = self._raise(i)
            for ahead in self._next(i):
                self._raise(ahead)
        self._device.compute.wait(there.ready)
        cut, place = self.place.slices[i], self.place
        parts = self._parts(cut, there.slot)
        region = parts[0]
        self._use(parts)
        shape = cut.end - cut.first, place.width
        try:
            if place.part is None:
                dtype: torch.dtype = getattr(torch, place.dtype)
                yield typed(region.memory, region.offset, shape, dtype)
            else:
                with self._unpacked(cut, region, shape) as values:
                    yield values
        finally:
            self._use(parts)  # until now
            there.left = self._device.compute.record()

    def bias(self, i: int) -> torch.Tensor | None:
        """Of the slice that is used."""
        cut = self.place.slices[i]
        if cut.bias is None:
            return None
        at = self._there[i].slot * self.place.slot_bytes + cut.bias_at
        dtype: torch.dtype = getattr(torch, self.place.dtype)
        return typed(self._memory, at, (cut.end - cut.first,), dtype)

    @contextlib.contextmanager
    def _unpacked(
        self, cut: HeadSlice, region: Region, shape: tuple[int, int]
    ) -> Iterator[torch.Tensor]:
        part, memory = self.place.part, self._values
        assert part is not None
        assert memory is not None
        dtype: torch.dtype = getattr(torch, self.place.dtype)
        values = typed(memory, 0, shape, dtype)
        used = Region(memory, 0, values.nbytes)
        self._device.touch("compute", used, "w")
        nbytes = cut.weight.nbytes
        raw = typed(region.memory, region.offset, (nbytes,), torch.uint8)
        rows = replace(part, shape=shape, offset=0, nbytes=nbytes)
        self._unpacker.rows(rows, raw, 0, shape[0], values)
        yield values
        self._device.touch("compute", used, "r")
        self._device.discard(used, (self._device.compute.record(),))

    # -- for weights in RAM, with the lock held ------------------------------------------------

    @property
    def stays(self) -> bool:
        """All of it is there, and will be: nothing is needed in RAM."""
        return self.place.stays and len(self._there) == len(self.place.slices)

    def has(self, block: int) -> bool:
        """Whether the block is not needed in RAM."""
        return block in self.place.blocks and self.stays

    def forget(self, blocks: Collection[int]) -> None:
        """These change in RAM: what is here of them is worthless."""
        if not self.place.blocks.isdisjoint(blocks):
            for i in list(self._there):
                self._drop(i)

    # -- inside, with the lock held ----------------------------------------------------------

    def _turn(self, i: int) -> None:
        if self._at is not None and (i < self._at or i == self._at == len(self.place.slices) - 1):
            self._rising = False
        self._at = i

    def _next(self, i: int) -> list[int]:
        """What is asked for behind slice ``i``; nothing behind the last of a pass."""
        ahead = i + 1 if self._rising else i - 1
        return [ahead] if 0 <= ahead < len(self.place.slices) else []

    def _distance(self, i: int) -> int:
        """Slices until ``i`` is needed, from the one that is used."""
        assert self._at is not None
        now, last = self._at, len(self.place.slices) - 1
        if not self._rising:
            return now - i if i <= now else now + 1 + i
        if i >= now:
            return i - now
        return last - now + 1 + (last - i if self._returns else i)

    def _raise(self, i: int) -> _There:
        """Begin to copy slice ``i``, if it is not there."""
        if i in self._there:
            return self._there[i]
        if not self._free:
            self._drop(max((j for j in self._there if j != self._at), key=self._distance))
        slot, cut = self._free.pop(), self.place.slices[i]
        self._order_slice(slot)
        parts = self._parts(cut, slot)
        ready = self._lift(cut.weight, parts[0])
        if cut.bias is not None:
            ready = self._lift(cut.bias, parts[1])
        self._copied = ready
        found = self._there[i] = _There(slot, ready)
        return found

    def _order_slice(self, slot: int) -> None:
        for event in self._guards.pop(slot, ()):
            self._device.h2d.wait(event)

    def _lift(self, cut: Cut, to: Region) -> Event:
        """Begin to copy a cut to its place in a slot."""
        memory = self._held[cut.block].memory
        self._device.h2d.wait(self._marks.arrived(memory))
        ready = self._device.copy(to, Region(memory, cut.offset, cut.nbytes), self._device.h2d)
        self._marks.copied(memory, ready)
        self.up_bytes += cut.nbytes
        return ready

    def _drop(self, i: int) -> None:
        there = self._there.pop(i)
        for region in self._parts(self.place.slices[i], there.slot):
            self._device.discard(region, there.guards)
        self._guards[there.slot] = there.guards
        self._free.append(there.slot)

    def _parts(self, cut: HeadSlice, slot: int) -> list[Region]:
        """Of a slot, what a slice takes: its weight, and its bias if it has one."""
        at = slot * self.place.slot_bytes
        found = [Region(self._memory, at, cut.weight.nbytes)]
        if cut.bias is not None:
            found.append(Region(self._memory, at + cut.bias_at, cut.bias.nbytes))
        return found

    def _use(self, parts: list[Region]) -> None:
        for region in parts:
            self._device.touch("compute", region, "r")


__all__ = ["DeviceHead"]
