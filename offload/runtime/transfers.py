"""Leases of both tiers, and the reads and copies that fill them: instructions on real lanes.

Reads go to the store's own threads, copies to the device's streams. Every ordering between lanes
is an event, and every wait on one goes through ``Transfers.order``, which names the edge it
enforces: a race detector checks that each is there, tests remove them in turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch

from offload.blocks import Tier
from offload.errors import DeviceError, OffloadError, SchedulerError, StoreError
from offload.io.store import DEMAND, PREFETCH, Receipt, Store
from offload.runtime.arena import Arena, Lease
from offload.runtime.device import Device, Event, Region
from offload.runtime.stats import Stats
from offload.runtime.timeline import Recorder
from offload.scheduler.plan import Plan
from offload.scheduler.residency import Drop, Fetch, Instruction
from offload.scheduler.timeline import H2D, READ

logger = logging.getLogger(__name__)

Places = npt.NDArray[np.int64]
Finished = Callable[[Fetch, BaseException | None], None]


class Transfers:
    """Of one executor, and under its lock, which completions take. Decides nothing."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        device: Device,
        *,
        changed: threading.Condition,
        stats: Stats,
        finished: Finished,
        moved: Callable[[], None],
        story: Callable[[str], str],
        recorder: Recorder | None,
    ) -> None:
        """
        Args:
            changed: the executor's lock.
            finished: told of each transfer that has ended, from any thread, under the lock.
            moved: told when one has of which that was said before (``promote``), likewise.
            story: of a block, for messages.
            recorder: of what the lanes do when.
        """
        self.moving = 0
        """Transfers under way."""
        self._plan, self._store, self._device = plan, store, device
        self._changed, self._stats, self._finished = changed, stats, finished
        self._moved = moved
        self._story, self._recorder = story, recorder
        self._shown: dict[str, tuple[Places, int]] = {}
        self._in_use = 0  # blocks that compute reads
        self._user = 0  # the thread that computes
        self._lanes: list[str] = []  # names of reads that are free again
        self._n_lanes = 0
        self._arenas: dict[Tier, Arena] = {}
        self._leases: dict[Tier, dict[str, Lease]] = {Tier.RAM: {}, Tier.DEVICE: {}}
        self._top = self._leases[plan.compute_tier]
        # Where everything is over when its call returns, orders would be asked for in vain, some
        # thousand calls for a token of a MoE.
        self._ordered = device.kind != "null"
        # Copies up that have been asked for, of blocks that stay in RAM: see ``promote``.
        self._queued: dict[str, Fetch] = {}
        self._stays = plan.tiers[Tier.RAM].pinned if device.runs_ahead else {}
        # By who used it: one's last use says nothing about another's.
        self._last_use: dict[tuple[Tier, str], dict[str, Event]] = {}

    def open(self) -> None:
        """Get the memory of all tiers. Raises PlanError: there is no room on the device."""
        for tier, layout in self._plan.tiers.items():
            make = self._device.host_memory if tier is Tier.RAM else self._device.device_memory
            if layout.nbytes:
                self._arenas[tier] = Arena(make(layout.nbytes, tier.name.lower()), self._device)

    def release_all(self) -> None:
        """End all leases."""
        for tier, leases in self._leases.items():
            for block in list(leases):
                self._release(tier, block)

    def close(self) -> None:
        """Give the memory back; not under the lock. Idempotent."""
        for arena in self._arenas.values():
            arena.close()

    # -- leases ---------------------------------------------------------------------------

    def lease(self, block: str, tier: Tier | None = None) -> Lease:
        """Of a block that is in a tier (default: where compute reads it)."""
        return (self._top if tier is None else self._leases[tier])[block]

    def filled(self, block: str) -> bool:
        """Whether a block's bytes are where compute reads them, with nothing to wait for."""
        lease = self._top.get(block)
        return lease is not None and lease.ready is not None and lease.ready.done()

    def places(self, blocks: Sequence[str]) -> Places:
        """Addresses of blocks where compute reads them, 0 of those that are not there: [n], from
        now on as they change. In host memory."""
        table = np.zeros(len(blocks), np.int64)
        self._shown |= {block: (table, i) for i, block in enumerate(blocks)}
        for block in blocks:
            self.show(block)
        return table

    def show(self, block: str) -> None:
        """The block has arrived, and stays until it is dropped."""
        if block in self._shown and self.filled(block):
            table, at = self._shown[block]
            table[at] = self._top[block].address

    def live(self, tier: Tier) -> list[str]:
        """Blocks that have a lease in a tier."""
        return list(self._leases[tier])

    # -- instructions ---------------------------------------------------------------------

    def begin(self, instruction: Instruction) -> None:
        """Carry one out: at once, or a transfer that ends later."""
        if isinstance(instruction, Drop):
            self._release(instruction.tier, instruction.block)
        elif instruction.dst is Tier.RAM:
            self._read(instruction)
        else:
            self._copy_up(instruction)

    def _take_lease(self, fetch: Fetch) -> Lease:
        spec = self._plan.blocks[fetch.block]
        lease = self._arenas[fetch.dst].lease(spec, fetch.dst_offset)
        self._leases[fetch.dst][fetch.block] = lease
        return lease

    def _release(self, tier: Tier, block: str) -> None:
        """Give a slot back; its next owner comes after the last use of the bytes."""
        lease = self._leases[tier].pop(block)
        if tier is self._plan.compute_tier and block in self._shown:
            table, at = self._shown[block]
            table[at] = 0
        used = self._last_use.pop((tier, block), None)
        if used is not None:
            last = tuple(used.values())
        else:  # filled but never used: the next owner comes after the transfer that filled it
            last = () if lease.ready is None else (lease.ready,)
        self._arenas[tier].release(lease, *last)

    def _read(self, fetch: Fetch) -> None:
        lease = self._take_lease(fetch)
        # An actor for each read in flight: what one has finished says nothing about the others.
        if not self._lanes:
            self._lanes.append(f"read/{self._n_lanes}")
            self._n_lanes += 1
        lane = self._lanes.pop()
        self.moving += 1
        asked = time.perf_counter()
        priority = DEMAND if fetch.demand else PREFETCH
        try:
            if self._ordered:
                for event in lease.after:
                    self.order("host-slot-free", lane, event)
                self._device.touch(lane, lease.region, "w")
            future = self._store.read_into(fetch.block, lease.view, priority=priority)
        except (OffloadError, OSError) as error:
            future = Future()
            future.set_exception(error)

        def on_read(done: Future[Receipt]) -> None:
            error = done.exception() if not done.cancelled() else StoreError("read cancelled")
            with self._changed:
                if error is None:
                    self.count(done.result())
                    self._stats.read_blocks += 1
                # Also after an error: it has written something, and the next owner comes after.
                lease.ready = self._device.signal(lane)
                self._lanes.append(lane)
                self._end(READ, fetch, asked, error)

        future.add_done_callback(on_read)

    def _copy_up(self, fetch: Fetch) -> None:
        source = self._leases[Tier.RAM][fetch.block]
        lease = self._take_lease(fetch)
        for event in lease.after:
            self.order("device-slot-free", "h2d", event)
        self.order("host-block-ready", "h2d", source.ready)
        copied = self._device.copy(lease.region, source.region, self._device.h2d)
        lease.ready = copied
        self.used(Tier.RAM, fetch.block, "h2d", copied)
        self.moving += 1
        self._stats.h2d_bytes += lease.region.nbytes
        asked = time.perf_counter()
        if fetch.block in self._stays:
            self._queued[fetch.block] = fetch

        def on_copied(error: BaseException | None) -> None:
            with self._changed:
                known = fetch.block in self._stays and self._queued.get(fetch.block) is not fetch
                if not known:
                    self._queued.pop(fetch.block, None)
                self._end(H2D, fetch, asked, error, known=known)

        copied.then(on_copied)

    def promote(self, block: str) -> bool:
        """Somebody wants a block whose copy up has been asked for. Where compute waits for that on
        its own stream, the block is as good as there: so it is said to be now, and not at the end
        of the copy, of which the host hears some tenths of a millisecond later, with the device
        standing still. Whether it was. Only of blocks that stay in RAM: else the bytes that are
        copied could be overwritten meanwhile."""
        fetch = self._queued.pop(block, None)
        if fetch is None:
            return False
        self._finished(fetch, None)
        return True

    def promote_all(self) -> bool:
        """``promote`` for all: what somebody wants has no room beside those that are on their way,
        and nothing that is on its way can make room. Whether there was any."""
        queued = list(self._queued)
        for block in queued:
            self.promote(block)
        return bool(queued)

    def _end(
        self, lane: str, fetch: Fetch, asked: float, error: BaseException | None, *,
        known: bool = False,
    ) -> None:  # fmt: skip
        """A transfer has ended; ``known``: it has been said before that it has. What was asked for
        together is laid one behind the other when the timeline is read."""
        if self._recorder is not None:
            nbytes = self._plan.blocks[fetch.block].nbytes
            self._recorder.add(lane, fetch.block, asked, time.perf_counter(), nbytes)
        self.moving -= 1
        if not known:
            self._finished(fetch, error)
            return
        if error is not None:  # the device keeps it for whoever uses the block, and all behind
            logger.error("the copy up of %s, which is in use, failed: %s", fetch.block, error)
        self._moved()

    def count(self, receipt: Receipt) -> None:
        """What a read has moved."""
        self._stats.disk_read_bytes += receipt.physical_bytes
        self._stats.payload_read_bytes += receipt.payload_bytes
        self._stats.copied_bytes += receipt.copied_bytes

    # -- passes that repeat (``laps``) ----------------------------------------------------

    def region(self, tier: Tier, block: str, offset: int) -> Region:
        """The bytes of a block at an offset of a tier, whoever has them now."""
        return Region(self._arenas[tier].memory, offset, self._plan.blocks[block].slot_nbytes)

    def views_at(self, block: str, offset: int) -> dict[str, torch.Tensor]:
        """A block's tensors where compute will read them when it lies at an offset."""
        return self._arenas[self._plan.compute_tier].views_at(self._plan.blocks[block], offset)

    def count_use(self, blocks: int) -> None:
        """Compute, in this thread, reads so many blocks more, or fewer."""
        self._in_use += blocks
        self._user = threading.get_ident()

    def all_after(self, used: Event, copied: Event, held: Mapping[str, int]) -> None:
        """What has been done where no lease was: compute has used all of it up to ``used``, and the
        copies up have ended with ``copied``. ``held``: blocks that are there, and their offsets."""
        tier = self._plan.compute_tier
        arena = self._arenas[tier]
        arena.all_after(used, copied)
        for block in self._leases[Tier.RAM]:
            self.used(Tier.RAM, block, "h2d", copied)
        for block, offset in held.items():
            lease = self._top[block] = arena.lease(self._plan.blocks[block], offset)
            lease.ready = copied

    # -- order ----------------------------------------------------------------------------

    def order(self, edge: str, waiter: str, event: Event | None) -> None:
        """Make ``waiter`` come after ``event``; ``edge`` says what would break without."""
        if event is None:
            raise SchedulerError(f"{edge}: {waiter} would use bytes that nobody has filled")
        if waiter == "h2d":
            self._device.h2d.wait(event)
        elif waiter == "d2h":
            self._device.d2h.wait(event)
        elif waiter == "up":
            self._device.up.wait(event)
        elif waiter == "compute":
            self._device.compute.wait(event)
        else:
            # The state machine frees a host slot only after the copy out of it has ended.
            self._device.acquire(waiter, event)

    def used(self, tier: Tier, block: str, actor: str, event: Event) -> None:
        """``actor`` has used a block's bytes in a tier up to ``event``."""
        self._last_use.setdefault((tier, block), {})[actor] = event

    def begin_use(self, blocks: Iterable[str]) -> None:
        """Compute, in this thread, reads blocks from now on. Raises DeviceError."""
        for block in blocks:
            lease = self._top[block]
            if self._ordered or lease.ready is None:
                try:
                    self.order("block-ready", "compute", lease.ready)
                except DeviceError as error:  # the card failed after the copy was queued
                    raise DeviceError(f"{error} (block {block}; {self._story(block)})") from error
                self._device.touch("compute", lease.region, "r")
            self._in_use += 1
        self._user = threading.get_ident()

    def end_use(self, blocks: Iterable[str]) -> None:
        """Compute has read blocks."""
        event = self._device.compute.record()
        for block in blocks:
            if self._ordered:
                self.used(self._plan.compute_tier, block, "compute", event)
            self._in_use -= 1

    def begin_unasked(self) -> None:
        """Compute, in this thread, reads what ``places`` say."""
        self._in_use += 1
        self._user = threading.get_ident()

    def end_unasked(self) -> None:
        """Compute has read it: the processor does so at once, nothing comes after."""
        self._in_use -= 1

    def used_elsewhere(self) -> bool:
        """Whether another thread computes. What this thread holds while it closes is left over
        from a forward that a Ctrl-C has ended."""
        alive = self._user in {t.ident for t in threading.enumerate()}
        return self._in_use > 0 and alive and self._user != threading.get_ident()


__all__ = ["Transfers"]
