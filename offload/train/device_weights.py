"""Weights on the device: copies of blocks in RAM, kept there as long as they are what is needed
next and nothing has updated them.

A unit's blocks take one slot, a fused expert another. The copy up waits for what wrote the block in
RAM and for the last use of its slot; compute waits for the copy. What was copied stays until the
slot is needed for something that runs sooner (Belady), or until a step takes the block: its update
changes RAM, and the copy on the device is dropped before. Of a unit that is frozen but for its
adapters these alone are dropped, and copied again into their place. A packed base is copied, and
stays, as packed bytes (``device_values``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from offload.blocks import align_up
from offload.errors import PlanError
from offload.runtime.device import Device, Event, Region
from offload.train.device_head import DeviceHead
from offload.train.device_plan import DevicePlacement
from offload.train.device_values import Copy, DeviceValues, Recipe, as_it_lies
from offload.train.layout import TrainLayout
from offload.train.link import EXPERTS_AHEAD
from offload.train.marks import Marks
from offload.train.order import NOW, UseOrder
from offload.train.weights import Entry, Shared, Weights
from offload.units import format_bytes

log = logging.getLogger(__name__)

EXPERTS_RISING = 2
"""Copies of experts under way at a time: one that the link is at, and one behind it."""


@dataclass(slots=True)
class _Slot:
    region: Region
    guards: tuple[Event, ...] = ()
    """Whoever writes it next comes after these."""


@dataclass(slots=True)
class _Cargo:
    """What is in a slot, or on its way there."""

    slot: _Slot
    copies: list[Copy]
    """As they lie there."""
    ready: Event
    """All that is in it has come."""
    used: Region
    """The bytes of the slot up to the end of what is in it."""
    users: int = 0
    left: Event | None = None
    """The end of its last use."""
    stale: set[int] = field(default_factory=set)
    """Blocks that have been dropped, and must be copied again."""

    @property
    def guards(self) -> tuple[Event, ...]:
        return (self.ready,) if self.left is None else (self.ready, self.left)


@dataclass(slots=True)
class _Pool:
    """Slots of one size."""

    free: list[_Slot]
    values: DeviceValues
    """Of what is used at this moment."""
    cargos: dict[tuple[int, ...], _Cargo] = field(default_factory=dict)
    """By the blocks in it."""


def _parts(slot: _Slot, copies: Sequence[Copy]) -> Iterator[tuple[Copy, Region]]:
    """Where each block of a slot is."""
    at = slot.region.offset
    for copy in copies:
        yield copy, Region(slot.region.memory, at, copy.block.nbytes)
        at += align_up(copy.block.nbytes)


class DeviceWeights:
    """See the module. Thread-safe, by the engine's lock."""

    def __init__(
        self, device: Device, layout: TrainLayout, order: UseOrder, weights: Weights,
        shared: Shared, placement: DevicePlacement, marks: Marks,
        recipes: Mapping[int, Recipe] = {},
    ) -> None:  # fmt: skip
        """``recipes``: by block, how what is packed is unpacked."""
        self.placement = placement
        self.up_bytes = 0
        """Copied to the device so far."""
        self.rising = 0
        """Copies under way; each holds its blocks in RAM."""
        self._device = device
        self._layout = layout
        self._order = order
        self._weights = weights
        self._shared = shared
        self._marks = marks
        self._recipes = recipes
        place = placement
        self._fused = frozenset(
            b for u in place.units for ids in layout.units[u].experts.values() for b in ids
        )
        self._blocks = {u: tuple(layout.units[u].blocks) for u in place.units}
        self._units = self._pool("weights", place.slots, place.slot_bytes, place.unpacked_bytes)
        self._experts = self._pool(
            "experts", place.expert_slots, place.expert_bytes, place.unpacked_expert_bytes
        )
        self._closed = False
        self.head: DeviceHead | None = None
        """Set: the head's slices, which are told of updates, too."""

    def _pool(self, name: str, count: int, nbytes: int, unpacked: int) -> _Pool:
        values = DeviceValues(self._device, unpacked, f"unpacked {name}", self._recipes)
        if not count:
            return _Pool([], values)
        memory = self._device.device_memory(count * nbytes, name)
        return _Pool([_Slot(Region(memory, i * nbytes, nbytes)) for i in range(count)], values)

    # -- for compute ----------------------------------------------------------------------

    def acquire(self, unit: int) -> list[Copy]:
        """The current weights of a unit, until ``release``. Waits for their pending updates."""
        return self._acquire(self._units, self._blocks[unit])

    def acquire_expert(self, block: int) -> Copy:
        """As ``acquire``, of one fused expert."""
        return self._acquire(self._experts, (block,))[0]

    def _acquire(self, pool: _Pool, blocks: tuple[int, ...]) -> list[Copy]:
        with self._shared.changed:
            self._shared.check()
            cargo = self._use(pool, blocks)
            if cargo is None:
                entries = self._weights.acquire_all(blocks)
                cargo = self._use(pool, blocks)
                if cargo is None:
                    cargo = self._raise(pool, blocks, entries, NOW, users=1)
                else:  # copied ahead while these were waited for
                    self._let_go(blocks)
            elif cargo.stale:
                try:
                    entries = self._weights.acquire_all(sorted(cargo.stale))
                except BaseException:
                    cargo.users -= 1
                    raise
                if cargo.stale:
                    self._renew(cargo, entries)
                else:
                    self._let_go(e.block.index for e in entries)
            if cargo is None:
                raise PlanError(
                    f"no room on the device for {self._layout.blocks[blocks[0]].id}: its "
                    f"{format_bytes(self.placement.budget)} are in use at this moment; raise --gpu"
                )
        # Without the lock: copies before this one end with a callback that takes it.
        self._device.compute.wait(cargo.ready)
        self._device.touch("compute", cargo.used, "r")
        return pool.values.take(cargo.copies)

    def _use(self, pool: _Pool, blocks: tuple[int, ...]) -> _Cargo | None:
        """What is there, or on its way, and stays from now on: the unit that runs is needed last,
        and would be the first to go."""
        cargo = pool.cargos.get(blocks)
        if cargo is not None:
            cargo.users += 1
        return cargo

    def release(self, unit: int) -> None:
        self._release(self._units, self._blocks[unit])

    def release_expert(self, block: int) -> None:
        self._release(self._experts, (block,))

    def _release(self, pool: _Pool, blocks: tuple[int, ...]) -> None:
        with self._shared.changed:
            cargo = pool.cargos[blocks]
        pool.values.give()
        self._device.touch("compute", cargo.used, "r")  # until now
        left = self._device.compute.record()
        with self._shared.changed:
            cargo.users -= 1
            cargo.left = left
            self._weights.pump()
            self._shared.notify()

    # -- for weights in RAM, with the lock held ------------------------------------------------

    def has(self, block: int) -> bool:
        """Whether the block's current weights are there, or on their way."""
        if self.head is not None and self.head.has(block):
            return True
        if (block,) in self._experts.cargos:
            return True
        return any(
            block in blocks and block not in cargo.stale
            for blocks, cargo in self._units.cargos.items()
        )

    def forget(self, blocks: Iterable[int]) -> None:
        """These change in RAM: what is here of them is worthless."""
        gone = set(blocks)
        if self.head is not None:
            self.head.forget(gone)
        for pool in self._pools():
            for key in [k for k in pool.cargos if not gone.isdisjoint(k)]:
                cargo = pool.cargos[key]
                if cargo.users:
                    raise AssertionError("weights change that compute uses")
                if cargo.stale.union(gone).issuperset(key):
                    self._drop(pool, key)
                else:
                    self._drop_some(cargo, gone.intersection(key))

    def pump(self) -> None:
        """Begin to copy what is needed next and is in RAM, as far as there is room for it. Experts
        of the unit that runs come first. Units one at a time: the next one's arguments, which
        compute waits for, come behind it."""
        if self._closed or self._shared.closed or self._shared.error is not None:
            return
        self._pump_experts()
        if self.rising or self._all_there():
            return
        for distance, unit in self._order.upcoming():
            if self.rising:
                return
            if unit not in self.placement.units:
                continue
            blocks = self._blocks[unit]
            there = self._units.cargos.get(blocks)
            if there is not None:
                if not there.stale:
                    continue
                entries = self._weights.hold_ready(sorted(there.stale))
                if entries is None:
                    return
                self._renew(there, entries)
                continue
            if not self._can_take(self._units, distance):
                return
            entries = self._weights.hold_ready(blocks)
            if entries is None:
                return
            self._raise(self._units, blocks, entries, distance)

    def _all_there(self) -> bool:
        """Whether no unit is to come: so it is all the time where each has its slot, and every use
        of an expert asks."""
        cargos = self._units.cargos
        return len(cargos) == len(self._blocks) and not any(c.stale for c in cargos.values())

    def _pump_experts(self) -> None:
        pool = self._experts
        if not (pool.free or pool.cargos):
            return
        if self.rising >= EXPERTS_RISING:
            return
        for block, distance in self._weights.uses.experts_soon(EXPERTS_AHEAD, self._expert_there):
            if self.rising >= EXPERTS_RISING:
                return
            victim = None if pool.free else self._victim(pool, distance)
            if victim is None and not pool.free:
                return
            entries = self._weights.hold_ready((block,))
            if entries is None:
                return
            self._raise(pool, (block,), entries, distance, victim=victim)

    def _expert_there(self, block: int) -> bool:
        """Whether there is nothing to copy: it is there, on its way, or never will be."""
        return (block,) in self._experts.cargos or block not in self._fused

    # -- inside, with the lock held ----------------------------------------------------------

    def _pools(self) -> tuple[_Pool, _Pool]:
        return self._units, self._experts

    def _distance(self, blocks: tuple[int, ...]) -> int:
        return min(self._weights.uses.next_use(b) for b in blocks)

    def _victim(self, pool: _Pool, distance: int) -> tuple[int, ...] | None:
        """What is needed last, and later than ``distance`` (``NOW``: whatever it is)."""
        if pool is self._experts:
            found = self._weights.uses.farthest(k for (k,), c in pool.cargos.items() if not c.users)
            return (found[1],) if found is not None and found[0] > distance else None
        idle = [(self._distance(key), key) for key, c in pool.cargos.items() if not c.users]
        if not idle:
            return None
        when, key = max(idle)
        return key if when > distance else None

    def _can_take(self, pool: _Pool, distance: int) -> bool:
        return bool(pool.free) or self._victim(pool, distance) is not None

    def _raise(
        self, pool: _Pool, blocks: tuple[int, ...], entries: list[Entry], distance: int,
        users: int = 0, victim: tuple[int, ...] | None = None,
    ) -> _Cargo | None:  # fmt: skip
        """Begin to copy blocks, which are held in RAM until they are there. ``victim``: what makes
        room, if it has just been found."""
        if not pool.free:
            victim = victim or self._victim(pool, distance)
            if victim is None:
                self._let_go(blocks)
                return None
            # What takes its place may be smaller: then the rest of it is worthless.
            self._drop(pool, victim, keep=self._room_of(victim) == self._room_of(blocks))
        slot = pool.free.pop()
        self._order_slot(slot)
        at, end, copies = slot.region.offset, slot.region.offset, []
        for entry in entries:
            copies.append(as_it_lies(entry.block, slot.region.memory, at))
            end = at + entry.block.nbytes
            at += align_up(entry.block.nbytes)
        used = Region(slot.region.memory, slot.region.offset, end - slot.region.offset)
        ready = self._copy(slot, copies, entries)
        cargo = pool.cargos[blocks] = _Cargo(slot, copies, ready, used, users)
        self._hold_until(cargo.ready, entries)
        return cargo

    def _renew(self, cargo: _Cargo, entries: list[Entry]) -> None:
        """Begin to copy what is stale, which is held in RAM until it is there."""
        cargo.slot.guards = cargo.guards
        self._order_slot(cargo.slot)
        cargo.ready = self._copy(cargo.slot, cargo.copies, entries)
        cargo.stale.clear()
        self._hold_until(cargo.ready, entries)

    def _copy(self, slot: _Slot, copies: list[Copy], entries: list[Entry]) -> Event:
        """Copy these of a slot's blocks to their places in it; the end of the last copy."""
        ready = None
        places = {c.block.index: region for c, region in _parts(slot, copies)}
        for entry in entries:
            source = Region(entry.memory, 0, entry.block.nbytes)
            self._device.h2d.wait(self._marks.arrived(entry.memory))
            ready = self._device.copy(places[entry.block.index], source, self._device.h2d)
            self._marks.copied(entry.memory, ready)
            self.up_bytes += source.nbytes
        assert ready is not None
        return ready

    def _hold_until(self, ready: Event, entries: list[Entry]) -> None:
        """Release these in RAM at ``ready``, which may be at once: for when all that is to be known
        of the copies is in place."""
        self.rising += 1
        ready.then(partial(self._risen, [entry.block.index for entry in entries]))

    def _order_slot(self, slot: _Slot) -> None:
        for event in slot.guards:
            self._device.h2d.wait(event)

    def _risen(self, blocks: Sequence[int], error: BaseException | None) -> None:
        """On the thread of the copies, or at once."""
        if error is not None:
            self._shared.fail(error)
        with self._shared.changed:
            self.rising -= 1
            self._let_go(blocks)

    def _let_go(self, blocks: Iterable[int]) -> None:
        """These of RAM are not needed."""
        for block in blocks:
            self._weights.release(block)

    def _room_of(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._layout.blocks[b].nbytes for b in blocks)

    def _drop(self, pool: _Pool, key: tuple[int, ...], *, keep: bool = False) -> None:
        """``keep``: the bytes are overwritten at once, all of them."""
        cargo = pool.cargos.pop(key)
        cargo.slot.guards = cargo.guards
        if not keep:
            self._device.discard(cargo.slot.region, cargo.guards)
        pool.free.append(cargo.slot)

    def _drop_some(self, cargo: _Cargo, blocks: set[int]) -> None:
        for copy, region in _parts(cargo.slot, cargo.copies):
            if copy.block.index in blocks - cargo.stale:
                self._device.discard(region, cargo.guards)
        cargo.stale |= blocks

    def close(self) -> None:
        """Wait for the copies under way, which read RAM."""
        with self._shared.changed:
            self._closed = True
            ready = [c.ready for pool in self._pools() for c in pool.cargos.values()]
        for event in ready:
            try:
                event.wait()
            except Exception as error:  # noqa: BLE001  ``Device.check`` raises it; closing goes on
                log.error("a copy to the device: %s", error)


__all__ = ["DeviceWeights"]
