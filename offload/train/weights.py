"""Weights in RAM: what compute needs now, what it needs next, and what stays for good.

A step runs through the units forward and backward, so when each block is needed next is known.
Room is made by dropping what is needed farthest in the future (Belady 1966): around the turn from
forward to backward blocks stay by themselves. Nothing here is dirty: updates write to the disk
what they change, and into the block's memory if it has some. Routed experts are asked for one by
one while their unit runs, and in which order is known, too (``Agenda``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from offload.blocks import align_up
from offload.cpu_ops.grad_norm import Numbers
from offload.errors import OffloadError, PlanError
from offload.io.store import DEMAND, PREFETCH
from offload.runtime.memory import HostMemory
from offload.train.buffers import BufferPool
from offload.train.layout import Block, TrainLayout
from offload.train.marks import UPDATE, Marks, reading
from offload.train.order import NEVER, NOW, UseOrder
from offload.train.shared import Shared
from offload.train.tiles import numbers
from offload.train.uses import Uses
from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.train.device_weights import DeviceWeights

log = logging.getLogger(__name__)


LOADING_AHEAD = 4
"""Blocks read ahead at once: enough requests for the disk, and few enough that updates, which share
it, are not held up by reads that nobody waits for yet."""


class WeightSource(Protocol):
    """Where a block's weights are read from."""

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        """Start reading the block's ``nbytes`` weights; gaps between pieces may stay undefined."""
        ...


class Entry:
    """A block's memory."""

    __slots__ = ("_numbers", "_tensor", "block", "memory", "missing", "pins", "ready")

    def __init__(self, block: Block, memory: HostMemory) -> None:
        self.block = block
        self.memory = memory
        self.pins = 0
        self.ready = False
        self.missing = 0
        """Reads under way."""
        dtype: torch.dtype = getattr(torch, block.dtype)
        self._tensor = memory.tensor()[: block.nbytes].view(dtype)
        self._numbers = numbers(memory.tensor().numpy()[: block.nbytes], block.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        """[count] in the compute dtype."""
        return self._tensor

    @property
    def numbers(self) -> Numbers:
        return self._numbers

    def copy(self, start: int, end: int) -> torch.Tensor:
        """A copy of elements ``start:end``."""
        return self.tensor[start:end].clone()


class Weights:
    """The blocks in RAM. All methods take the engine's lock themselves."""

    def __init__(
        self, layout: TrainLayout, order: UseOrder, source: WeightSource, shared: Shared,
        limit: int, pinned: Iterable[int], *, marks: Marks | None = None,
        memory: Callable[[int, str], HostMemory] = HostMemory,
    ) -> None:  # fmt: skip
        """``limit``: bytes for all of it; ``pinned``: blocks that never leave; ``marks``: told who
        writes them, if a device copies from them; ``memory``: makes what they lie in."""
        self.layout = layout
        self.uses = Uses(layout, order)
        self.pinned = frozenset(pinned)
        self._source = source
        self._shared = shared
        self._pool = BufferPool(limit, "weights", memory)
        self._marks = marks
        self.above: DeviceWeights | None = None
        """Set: what is copied to a device from here."""
        self._entries: dict[int, Entry] = {}
        self._loose: dict[int, Entry] = {}
        """Those of them that may leave."""
        self.stale: set[int] = set()
        """Blocks whose update is pending: nobody may read them before."""
        self.unsettled: dict[int, int] = {}
        """Block -> writes of it under way: it cannot be read from the disk."""
        self._updating = -1
        """The block whose update is under way: its memory stays."""
        self._loading = 0
        self._pinning = False
        self._awaiting = 0
        """Threads that wait instead of computing."""

    # -- for compute ----------------------------------------------------------------------

    def acquire(self, block: int) -> Entry:
        """The block's current weights, in RAM until ``release``. Waits for its pending update."""
        with self._shared.changed:
            while (entry := self._hold(block)) is None:
                self._await(block)
            self._until_ready(entry)
            return entry

    def acquire_all(self, blocks: Iterable[int]) -> list[Entry]:
        """``acquire`` of each; what is missing is read at once, and before anything that is needed
        later: that would take the room, be dropped for these, and be read again."""
        shared = self._shared
        held: dict[int, Entry | None] = {}
        with shared.changed:
            try:
                for block in blocks:
                    held[block] = self._hold(block)
                self.pump()
                for block, entry in held.items():
                    # While others were waited for there may have come room for it, and what would
                    # have told of more be through.
                    while entry is None and (entry := self._hold(block)) is None:
                        self._await(block)
                    held[block] = entry
                    self._until_ready(entry)
            except BaseException:
                for entry in held.values():
                    if entry is not None:
                        entry.pins -= 1
                raise
        return [entry for entry in held.values() if entry is not None]

    def _hold(self, block: int) -> Entry | None:
        """The block's memory, pinned, if its weights are there or can be read now."""
        self._shared.check()
        if block in self.stale:
            return None
        entry = self._entries.get(block)
        if entry is not None:
            entry.pins += 1
        elif block not in self.unsettled and self._room(block, NOW):
            # Pinned from now on: its next use is far away, and reads ahead would drop it.
            entry = self._load(block, DEMAND, pins=1)
        return entry

    def _until_ready(self, entry: Entry) -> None:
        self._shared.wait_for(lambda: entry.ready, f"reading {entry.block.id}")

    def _await(self, block: int) -> None:
        name = self.layout.blocks[block].id
        if self._stuck(block):
            held = sum(e.memory.nbytes for e in self._entries.values() if e.pins)
            raise PlanError(
                f"no room for the weights of {name} "
                f"({format_bytes(self.layout.blocks[block].nbytes)}): {format_bytes(held)} of "
                f"{format_bytes(self._pool.limit)} are in use at this moment; raise --ram"
            )
        with self.idle():
            self._shared.wait_for_change(f"waiting for the weights of {name}")

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, the caller waits and lets go of no weights: an update must not wait for that.
        With the lock held."""
        self._awaiting += 1
        self._shared.notify()
        try:
            yield
        finally:
            self._awaiting -= 1

    def _stuck(self, block: int) -> bool:
        """Whether nothing under way could ever make room."""
        return (
            block not in self._entries
            and not self.stale
            and not self.unsettled
            and not self._loading
            and not (self.above is not None and self.above.rising)
        )

    def release(self, block: int) -> None:
        with self._shared.changed:
            entry = self._entries[block]
            entry.pins -= 1
            self.pump()
            self._shared.notify()

    # -- for updates ----------------------------------------------------------------------

    def entry_for_update(self, block: int, *, must: bool) -> Entry | None:
        """The memory that a pending update shall write to, made if there is room for it or will be
        once the unit that computes is through; it stays until ``updated``. To be asked once for
        each update of a block. Without it new weights go to the disk, to be read again at once.

        ``must``: wait for room, and for the current weights to be in it.
        """
        shared = self._shared
        with shared.changed:
            while True:
                shared.check()
                entry = self._entries.get(block)
                if entry is None:
                    distance = self.uses.next_use(block, default=0)
                    if self._room(block, NOW if must else distance):
                        if not must:
                            entry = self._add(block)
                            entry.ready = True  # stale until the update is through
                            return self._for_update(entry)
                        entry = self._load(block, DEMAND, pins=1)
                        self._until_ready(entry)
                        entry.pins -= 1
                        return self._for_update(entry)
                    if not must and not self._room_comes(block, distance):
                        return None
                elif entry.ready and not entry.pins:
                    return self._for_update(entry)
                shared.wait_for_change("an update waits for memory")

    def _for_update(self, entry: Entry) -> Entry:
        self._updating = entry.block.index
        if self._marks is not None:
            self._marks.write(UPDATE, entry.memory)
        return entry

    def make_stale(self, blocks: Iterable[int]) -> None:
        with self._shared.changed:
            self.stale.update(blocks)
            if self.above is not None:
                self.above.forget(blocks)

    def updated(self, block: int) -> None:
        """The update is through: what is in memory, or on the disk once settled, is current."""
        with self._shared.changed:
            self.stale.discard(block)
            if self._marks is not None and self._updating == block:
                self._marks.written(UPDATE, self._entries[block].memory)
            self._updating = -1
            self.pump()
            self._shared.notify()

    def write_begins(self, block: int) -> None:
        with self._shared.changed:
            self.unsettled[block] = self.unsettled.get(block, 0) + 1

    def write_ended(self, block: int) -> None:
        with self._shared.changed:
            self.unsettled[block] -= 1
            if not self.unsettled[block]:
                del self.unsettled[block]
            self.pump()
            self._shared.notify()

    def enter(self, unit: int, *, backward: bool) -> None:
        """``unit`` runs now. Where experts are read before they are routed to, all of its are
        expected: what runs before the routing must not take their place."""
        with self._shared.changed:
            self.uses.enter(unit, backward=backward)

    def expect(self, blocks: Sequence[int], instead: Collection[int] = ()) -> None:
        """The unit that runs asks for these one by one from now on, before what else it was
        expected to ask for, ``instead`` of what it is not: begin to read them as far as there is
        room."""
        with self._shared.changed:
            self.uses.expect(blocks, instead)
            self.pump()

    def reached(self, block: int) -> None:
        """The unit that runs is at ``block`` of what it was expected to ask for."""
        with self._shared.changed:
            self.uses.agenda.reached(block)

    def expect_nothing(self) -> None:
        """The unit that runs asks for nothing more."""
        with self._shared.changed:
            self.uses.agenda.clear()

    # -- inside, with the lock held ----------------------------------------------------------

    def hold_ready(self, blocks: Iterable[int]) -> list[Entry] | None:
        """These, if all of them are there and current, until ``release``; else None."""
        found = [self._entries.get(block) for block in blocks]
        entries = [e for e in found if e is not None and e.ready]
        if len(entries) < len(found) or any(e.block.index in self.stale for e in entries):
            return None
        for entry in entries:
            entry.pins += 1
        return entries

    def pump(self) -> None:
        """Start reading what is needed next, as far as there is room for it; and copying."""
        shared = self._shared
        if shared.closed or shared.error is not None or self._pinning:
            return
        self._read_ahead()
        if self.above is not None:
            self.above.pump()

    def _held_or_away(self, block: int) -> bool:
        """Whether there is nothing to read ahead: it is there, here or on the device, or cannot be
        read yet."""
        if block in self._entries or block in self.stale or block in self.unsettled:
            return True
        return self.above is not None and self.above.has(block)

    def _read_ahead(self) -> None:
        if len(self._entries) == len(self.layout.blocks):
            return
        for block, distance in self.uses.upcoming(LOADING_AHEAD):
            if self._loading >= LOADING_AHEAD:
                return
            if self._held_or_away(block):
                continue
            if not self._room(block, distance):
                return
            self._load(block, PREFETCH)

    def _room(self, block: int, distance: int) -> bool:
        """Make room by dropping what is needed later than ``distance`` (``NOW``: anything)."""
        pool, need = self._pool, align_up(self.layout.blocks[block].nbytes)
        if pool.fits(need):
            return True
        # The farthest first; and only if it suffices, or something would be read again for nothing.
        later = sorted(
            (when, b)
            for b, e in self._loose.items()
            if e.ready and not e.pins and b != self._updating
            if (when := self._distance(b)) > distance
        )
        victims: list[int] = []
        missing = need - pool.room
        while later and missing > 0:
            victims.append(later.pop()[1])
            missing -= self._entries[victims[-1]].memory.nbytes
        if missing > 0:
            return False
        for victim in victims:
            self._drop(victim)
        return True

    def _room_comes(self, block: int, distance: int) -> bool:
        """Whether there will be room, dropping what is needed later than ``distance``, as soon as
        the unit that computes lets go of its weights. Not while it waits for some itself."""
        if self._awaiting:
            return False
        room = self._pool.room
        for b, entry in self._loose.items():
            leaves = entry.ready and b != self._updating
            if leaves and self._distance(b) > distance:
                room += entry.memory.nbytes
        return room >= align_up(self.layout.blocks[block].nbytes)

    def _distance(self, block: int) -> int:
        if self.above is not None and self.above.has(block):
            return NEVER  # computed with where it has been copied to
        return self.uses.next_use(block)

    def _add(self, block: int) -> Entry:
        spec = self.layout.blocks[block]
        entry = self._entries[block] = self._entry(spec, self._pool.take(spec.nbytes))
        if block not in self.pinned:
            self._loose[block] = entry
        return entry

    def _drop(self, block: int) -> None:
        self._loose.pop(block, None)
        self._pool.give(self._entries.pop(block).memory)

    def _entry(self, spec: Block, memory: HostMemory) -> Entry:
        return Entry(spec, memory)

    def _load(self, block: int, priority: int, pins: int = 0) -> Entry:
        entry = self._add(block)
        entry.pins = pins  # before a read can end, whose callback makes room for others
        try:
            self._read(entry, priority)
        except BaseException:
            self._drop(block)
            raise
        return entry

    def _read(self, entry: Entry, priority: int) -> None:
        """Begin to fill an entry from the source."""
        self._loading += 1
        if self._marks is not None:
            self._marks.write(reading(entry.block.index), entry.memory)
        try:
            futures = self._source.read(entry.block, entry.memory.view(), priority)
        except BaseException:
            self._loading -= 1
            raise
        entry.missing = len(futures)
        for future in futures:
            future.add_done_callback(partial(self._read_done, entry))
        if not futures:
            self._loading -= 1
            self._is_read(entry)

    def _read_done(self, entry: Entry, future: Future[Any]) -> None:
        error = future.exception()
        with self._shared.changed:
            if error is not None:
                self._shared.fail(error)
            entry.missing -= 1
            if not entry.missing:
                self._loading -= 1
                if error is None:
                    self._is_read(entry)
                self.pump()
            self._shared.notify()

    def _is_read(self, entry: Entry) -> None:
        entry.ready = True
        if self._marks is not None:
            self._marks.written(reading(entry.block.index), entry.memory)

    def pin_all(self) -> None:
        """Read what stays for good. Waits.

        Raises:
            OffloadError: it does not fit (a bug of the plan), or cannot be read.
        """
        # Nothing is read ahead before: each of these reads would begin others as it ends, in room
        # that is theirs, and what is being read cannot be dropped.
        self._pinning = True
        try:
            for block in sorted(self.pinned):
                with self._shared.changed:
                    if block not in self._entries and not self._room(block, NOW):
                        raise OffloadError("the plan pins more weights than it has room for")
                    if block not in self._entries:
                        self._load(block, PREFETCH)
            for block in sorted(self.pinned):
                self.acquire(block)
                self.release(block)
        finally:
            self._pinning = False

    def reread(self, switch: Callable[[], None]) -> None:
        """``switch`` makes the source another state: get rid of what is in RAM of the one before.

        Trained blocks that come and go are dropped, those that stay are read again into the same
        memory, one after the other. Nothing may be in use or waiting for an update.
        """
        with self._shared.changed:
            self._shared.wait_for(lambda: not self._loading, "reads under way")
            switch()
            mine = [e for e in self._entries.values() if e.block.trained]
            if self.above is not None:
                self.above.forget(b.index for b in self.layout.trained)
            for entry in mine:
                if entry.block.index not in self.pinned:
                    self._drop(entry.block.index)
                else:
                    entry.ready = False
            for entry in mine:
                if entry.block.index in self.pinned:
                    self._read(entry, DEMAND)
                    self._until_ready(entry)

    def close(self) -> None:
        """Forget everything. Reads under way must have ended."""
        with self._shared.changed:
            for entry in self._entries.values():
                self._pool.give(entry.memory)
            self._entries.clear()
            self._loose.clear()
            self._pool.close()


def as_numbers(tensor: torch.Tensor) -> Numbers:
    """A contiguous float32 or bfloat16 tensor as what kernels take, flat, without a copy."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()  # type: ignore[no-any-return]


__all__ = ["Entry", "Shared", "WeightSource", "Weights", "as_numbers"]
