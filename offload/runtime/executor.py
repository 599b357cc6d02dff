"""Carries out the scheduler's instructions on real lanes and makes compute wait for its blocks.

One executor owns one model's arenas, its store and its device. The residency state machine
decides under the executor's lock; reads go to the store's own threads, copies to the device's
streams; completions come back from those threads, are fed to the state machine, and what it
answers is started at once, so the read lane never waits for Python in the computing thread.

Every ordering between lanes is an event, and every wait on one goes through ``_order``, which
names the edge it enforces: a race detector checks that each is there, tests remove them in turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future

import torch

from offload.blocks import Tier
from offload.errors import (
    ClosedError,
    DeviceError,
    OffloadError,
    SchedulerError,
    StoreError,
    WatchdogError,
)
from offload.io.store import DEMAND, PREFETCH, Receipt, Span, Store
from offload.runtime.arena import Arena, Lease
from offload.runtime.cpu_site import CpuSite, Ground, Work
from offload.runtime.device import Device, Event
from offload.runtime.interrupts import Shield
from offload.runtime.order import OrderWatcher
from offload.runtime.road import Conducting, Road
from offload.runtime.stats import Stats
from offload.runtime.timeline import Recorder, Story
from offload.scheduler.plan import EXPERT_ACTIVATIONS, Plan
from offload.scheduler.policy import Scores
from offload.scheduler.residency import Drop, Fetch, Instruction, Residency
from offload.scheduler.split import Schedule
from offload.scheduler.timeline import H2D, READ

logger = logging.getLogger(__name__)

WATCHDOG_S = 120.0
"""A wait without any transfer finishing for this long is an error, never a hang."""

_SIGNAL_S = 0.25

Views = dict[str, torch.Tensor]
"""A block's tensors by name, on the device that computes; valid while the block is held."""


class Executor:
    """See the module's text. ``enter``/``leave`` and the expert calls belong to one thread."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        device: Device,
        *,
        watchdog_s: float = WATCHDOG_S,
        recorder: Recorder | None = None,
    ) -> None:
        """``recorder``: of what the lanes do when."""
        self._recorder = recorder
        self.story = None if recorder is None else Story(recorder)
        self.plan = plan
        self.device = device
        self.store = store
        self.stats = Stats()
        self.conductor: Conducting | None = None
        """Whoever runs several sequences on this executor, in its one thread."""
        self._watchdog_s = watchdog_s
        self._residency = Residency(plan)
        self._shield = Shield()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._progress = 0  # completions of any kind, for the watchdog
        self._failures: dict[str, BaseException] = {}
        self._todo: deque[Instruction] = deque()
        self._draining = False
        self._closed = False
        self._moving = 0  # transfers under way
        self._in_use = 0  # blocks that compute reads
        self._user = 0  # the thread that computes
        self._lanes: list[str] = []  # names of reads that are free again
        self._n_lanes = 0
        self._order_seen = OrderWatcher(len(plan.trace))
        self._arenas: dict[Tier, Arena] = {}
        self._leases: dict[Tier, dict[str, Lease]] = {Tier.RAM: {}, Tier.DEVICE: {}}
        # By who used it: one's last use says nothing about another's.
        self._last_use: dict[tuple[Tier, str], dict[str, Event]] = {}
        self._cpu: CpuSite | None = None
        try:
            for tier, layout in plan.tiers.items():
                make = device.host_memory if tier is Tier.RAM else device.device_memory
                if layout.nbytes:
                    self._arenas[tier] = Arena(make(layout.nbytes, tier.name.lower()), device)
            if plan.split is not None:
                self._cpu = self._second_site(plan.reserves[Tier.DEVICE][EXPERT_ACTIVATIONS])
        except BaseException:
            self.close()
            raise

    # -- life -----------------------------------------------------------------------------

    def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load what is pinned, then return; prefetch of the first streamed blocks goes on.

        ``progress(done_bytes, total_bytes)`` is called from the calling thread.
        """
        total = sum(self.plan.blocks[b].nbytes for t in self.plan.tiers.values() for b in t.pinned)
        with self._shield, self._changed:
            self._submit(self._residency.start())
            while left := self._residency.loading():
                self._raise_failures(left)
                if progress:
                    progress(total - sum(self.plan.blocks[b].nbytes for b in left), total)
                self._wait("the pinned weights", left, self._progress)
        if progress:
            progress(total, total)

    def close(self) -> None:
        """Wait for what is in flight or in use, then free memory, files and threads. Idempotent.

        Nothing new is started. A transfer that hangs is waited for as long as the watchdog says,
        then by the store, whose threads nobody can stop.
        """
        with self._shield:
            self._close()

    def _close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self.story is not None:
                self.story.finish()
            self._todo.clear()
            if self._cpu is not None:
                self._cpu.stop()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    not self._moving
                    and not self._used_elsewhere()
                    and not (self._cpu is not None and self._cpu.busy)
                ),
                self._watchdog_s,
            )
            for tier, leases in self._leases.items():
                for block in list(leases):
                    self._release(tier, block)
        # Outside the lock: their threads may be in a completion that takes it.
        self.store.close()
        self.device.close()
        if self._cpu is not None:
            self._cpu.close()
        for arena in self._arenas.values():
            arena.close()

    # -- who asks -------------------------------------------------------------------------

    def road(self) -> Road:
        """Whom the caller has to ask for blocks: the conductor if it is one of its sequences."""
        conductor = self.conductor
        return conductor if conductor is not None and conductor.conducts() else self

    def who(self) -> object:
        """The calling thread."""
        return threading.get_ident()

    # -- weights --------------------------------------------------------------------------

    def enter(
        self, unit: str, blocks: Sequence[str], let_go: Callable[[], None] | None = None
    ) -> int:
        """A unit is about to run: wait until its blocks are there. Returns a ticket, never 0.

        ``let_go`` is for a road that is shared: here the blocks leave with ``leave``.

        Raises:
            StoreError: a block could not be read (the unit may be entered again later).
            WatchdogError: nothing has moved for the watchdog's time.
        """
        with self._shield, self._changed:
            self._check_open()
            self._forgive(blocks)
            cycle = self._order_seen.note(unit, blocks, expected=self._residency.expects(unit))
            if cycle is not None:
                self._submit(self._residency.retrace(cycle))
            ticket, todo = self._residency.need(unit, blocks)
            self._submit(todo)
            story = self.story
            if story is not None:
                story.begins(unit)
            try:
                if missing := self._residency.missing(ticket):
                    if story is not None:
                        story.waits(unit)
                    self.stats.host_waits["block"] += 1
                    began = time.perf_counter()
                    while missing:
                        self._raise_failures(missing)
                        self._wait(unit, missing, self._progress)
                        missing = self._residency.missing(ticket)
                    self.stats.stall_s += time.perf_counter() - began
                    if story is not None:
                        story.goes_on()
            except BaseException:
                self._submit(self._residency.done(ticket))
                if story is not None:
                    story.ends()
                raise
            self._begin_use(blocks)
            return ticket

    def leave(self, ticket: int, blocks: Sequence[str]) -> None:
        """The unit has run. Its views are void from now on."""
        with self._shield, self._changed:
            self._end_use(blocks)
            self._submit(self._residency.done(ticket))
            self._let_close()
            if self.story is not None:
                self.story.ends()

    def views(self, block: str) -> Views:
        """The tensors of a block that is held (or pinned where compute runs)."""
        lease = self._leases[self.plan.compute_tier][block]
        return {spec.name: lease.tensor(spec) for spec in lease.spec.tensors}

    # -- experts --------------------------------------------------------------------------

    def route(self, group: str, experts: Sequence[str], scores: Scores | None = None) -> None:
        """A MoE layer needs these experts, in this order: start reading what is not there.
        ``scores``: what its router says of them, for eviction policies that listen."""
        with self._shield, self._changed:
            self._route(group, experts, scores, None)

    def _route(
        self,
        group: str,
        experts: Sequence[str],
        scores: Scores | None,
        loads: Mapping[str, int] | None,
    ) -> None:
        self._check_open()
        self._forgive(experts)
        self.stats.host_waits["routing"] += 1
        self._submit(self._residency.route(group, experts, scores, loads))
        self.stats.hits = self._residency.hits
        self.stats.misses = self._residency.misses
        self.stats.guessed, self.stats.guessed_right = self._residency.guessed

    def split_route(
        self,
        group: str,
        loads: Mapping[str, int],
        activations: Callable[[Sequence[str]], Sequence[torch.Tensor]],
        scores: Scores | None = None,
    ) -> tuple[Schedule | None, list[torch.Tensor]]:
        """As ``route``, with a choice of sites: who computes which expert, in which order.

        Args:
            loads: the experts, in the order of use, and tokens of each.
            activations: from the CPU's experts, if there are any, to what it needs for them.

        Returns:
            The schedule, or None if the device computes all, in the order of ``loads``; and the
            activations as the CPU will see them. Give it each of its experts with ``on_cpu``, in
            the schedule's order.
        """
        with self._shield, self._changed:
            self._route(group, tuple(loads), scores, loads)
            found = self._residency.schedule
        if self._cpu is None or found is None or not found.cpu:
            return None, []
        return found, self._cpu.send(activations(found.cpu))

    def on_cpu(self, expert: str, work: Work, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Have the CPU compute an expert; ``work``: from its tensors in RAM to a result."""
        assert self._cpu is not None
        with self._shield:
            self._cpu.submit(expert, work, shape, dtype)

    def from_cpu(self, expert: str) -> torch.Tensor:
        """The result of ``on_cpu``, on the device, until the next ``split_route``.

        Raises:
            StoreError, WatchdogError: as ``acquire``.
            Exception: what computing it has raised.
        """
        cpu = self._cpu
        assert cpu is not None
        with self._shield, self._changed:
            self._check_open()
            began = time.perf_counter()
            if cpu.pending(expert):
                self.stats.host_waits["cpu"] += 1
                if self.story is not None:
                    self.story.waits(expert)
                while cpu.pending(expert):
                    seen = self._progress
                    self._raise_failures([expert])
                    self._wait("an expert on the CPU", [expert], seen)
            self.stats.stall_s += time.perf_counter() - began
            self.stats.cpu_experts += 1
            if self.story is not None:
                self.story.goes_on()
        return cpu.take(expert)

    def abandon_cpu(self) -> None:
        """Results that have not been taken are not wanted."""
        if self._cpu is not None:
            with self._shield:
                self._cpu.abandon()

    def guess(self, group: str, experts: Sequence[str]) -> None:
        """The next MoE layer may need these experts, the likeliest first: read them if the disk
        has nothing else to do."""
        with self._shield, self._changed:
            self._check_open()
            self._submit(self._residency.guess(group, experts))

    def acquire(self, expert: str) -> Views:
        """Wait for a routed expert and hold it."""
        with self._shield, self._changed:
            self._check_open()
            self._await_expert(expert)
            self._begin_use((expert,))
            return self.views(expert)

    def acquire_run(self, experts: Sequence[str], most: int) -> list[int]:
        """Wait for the first of some routed experts, and hold it and those behind it that are there
        already, ``most`` at once. Returns the addresses of the bundles held, in order: in host
        memory, until ``release_run``."""
        with self._shield, self._changed:
            self._check_open()
            first = experts[0]
            self._await_expert(first)
            leases = self._leases[self.plan.compute_tier]
            held = [first]
            for expert in experts[1:most]:
                lease = leases.get(expert)
                if lease is None or lease.ready is None or not lease.ready.done():
                    break
                there, todo = self._residency.acquire(expert)
                self._submit(todo)
                if not there:
                    break
                held.append(expert)
            self._begin_use(held)
            return [leases[expert].address for expert in held]

    def release_run(self, experts: Sequence[str]) -> None:
        """These experts have been used."""
        with self._shield, self._changed:
            self._end_use(experts)
            for expert in experts:
                self._submit(self._residency.release(expert))
            self._let_close()

    def address(self, block: str) -> int:
        """Where a block that is pinned where compute runs lies, in host memory."""
        return self._leases[self.plan.compute_tier][block].address

    def release(self, expert: str) -> None:
        """The expert has been used."""
        with self._shield, self._changed:
            self._end_use((expert,))
            self._submit(self._residency.release(expert))
            self._let_close()

    def end_route(self) -> None:
        """The MoE layer has finished or failed."""
        with self._shield, self._changed:
            if not self._closed:
                self._submit(self._residency.end_route())
            if self.story is not None:
                self.story.goes_on()

    # -- rows -----------------------------------------------------------------------------

    def read_rows(self, block: str, spans: Sequence[Span], buffer: memoryview) -> None:
        """Fill ``buffer`` with parts of a block, from host memory if it is pinned there (rows of an
        embedding). Under the lock: ``close()`` in another thread takes the memory away."""
        with self._lock:
            self._check_open()
            self.stats.host_waits["token"] += 1
            if block in self.plan.tiers[Tier.RAM].pinned:
                there = self._leases[Tier.RAM][block].view
                for src, dst, nbytes in spans:
                    buffer[dst : dst + nbytes] = there[src : src + nbytes]
                return
        began = time.perf_counter()
        if self.story is not None:
            self.story.waits(f"rows of {block}")
        reading = self.store.read_spans_into(block, spans, buffer, priority=DEMAND)
        try:
            receipt = reading.result(timeout=self._watchdog_s)
        except TimeoutError:
            raise WatchdogError(
                f"{len(spans)} rows of {block} have not been read for {self._watchdog_s:.0f} s"
            ) from None
        except CancelledError:
            raise ClosedError(f"closed while rows of {block} were read") from None
        with self._lock:
            self._count(receipt)
            self.stats.row_reads += len(spans)
            ended = time.perf_counter()
            self.stats.stall_s += ended - began
            if self._recorder is not None and self.story is not None:
                self._recorder.add(READ, block, began, ended, receipt.payload_bytes)
                self.story.goes_on()

    # -- inspection -----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close()`` has been called."""
        return self._closed

    def held(self) -> list[str]:
        """Blocks held now; empty when the model does not run."""
        with self._lock:
            return self._residency.held()

    def settle(self) -> None:
        """Wait until nothing is under way: the prefetch of the next pass has come to rest.

        Raises:
            WatchdogError: nothing has moved for the watchdog's time.
        """
        with self._shield, self._changed:
            while not self._closed and self._moving:
                blocks = sorted(self._leases[Tier.RAM]) or ["nothing"]
                self._wait("settling", blocks, self._progress)

    def live_leases(self) -> int:
        """Slots that hold a block now; 0 after ``close()``."""
        with self._lock:
            return sum(len(leases) for leases in self._leases.values())

    def validate(self) -> None:
        """Check the state machine's invariants and the device for races. For tests."""
        with self._lock:
            self._residency.validate()
        self.device.check()

    # -- instructions (under the lock) ----------------------------------------------------

    def _submit(self, todo: Iterable[Instruction]) -> None:
        """Carry out instructions in order. A store may finish at once and call back from
        inside: what that adds runs after what was already decided. Nothing starts after close()."""
        if self._closed:
            return
        self._todo.extend(todo)
        if self._draining:
            return
        self._draining = True
        try:
            while self._todo and not self._closed:
                instruction = self._todo.popleft()
                if isinstance(instruction, Drop):
                    self._release(instruction.tier, instruction.block)
                elif instruction.dst is Tier.RAM:
                    self._read(instruction)
                else:
                    self._copy_up(instruction)
        finally:
            self._draining = False

    def _lease(self, fetch: Fetch) -> Lease:
        spec = self.plan.blocks[fetch.block]
        lease = self._arenas[fetch.dst].lease(spec, fetch.dst_offset)
        self._leases[fetch.dst][fetch.block] = lease
        return lease

    def _release(self, tier: Tier, block: str) -> None:
        """Give a slot back; its next owner comes after the last use of the bytes."""
        lease = self._leases[tier].pop(block)
        used = self._last_use.pop((tier, block), None)
        if used is not None:
            last = tuple(used.values())
        else:  # filled but never used: the next owner comes after the transfer that filled it
            last = () if lease.ready is None else (lease.ready,)
        self._arenas[tier].release(lease, *last)

    def _used(self, tier: Tier, block: str, actor: str, event: Event) -> None:
        self._last_use.setdefault((tier, block), {})[actor] = event

    def _read(self, fetch: Fetch) -> None:
        lease = self._lease(fetch)
        # An actor for each read in flight: what one has finished says nothing about the others.
        if not self._lanes:
            self._lanes.append(f"read/{self._n_lanes}")
            self._n_lanes += 1
        lane = self._lanes.pop()
        self._moving += 1
        asked = time.perf_counter()
        priority = DEMAND if fetch.demand else PREFETCH
        try:
            for event in lease.after:
                self._order("host-slot-free", lane, event)
            self.device.touch(lane, lease.region, "w")
            future = self.store.read_into(fetch.block, lease.view, priority=priority)
        except (OffloadError, OSError) as error:
            future = Future()
            future.set_exception(error)

        def on_read(done: Future[Receipt]) -> None:
            error = done.exception() if not done.cancelled() else StoreError("read cancelled")
            with self._changed:
                if error is None:
                    self._count(done.result())
                # Also after an error: it has written something, and the next owner comes after.
                lease.ready = self.device.signal(lane)
                self._lanes.append(lane)
                self._note(READ, fetch, asked)
                self._finish(fetch, error)

        future.add_done_callback(on_read)

    def _copy_up(self, fetch: Fetch) -> None:
        source = self._leases[Tier.RAM][fetch.block]
        lease = self._lease(fetch)
        for event in lease.after:
            self._order("device-slot-free", "h2d", event)
        self._order("host-block-ready", "h2d", source.ready)
        copied = self.device.copy(lease.region, source.region, self.device.h2d)
        lease.ready = copied
        self._used(Tier.RAM, fetch.block, "h2d", copied)
        self._moving += 1
        self.stats.h2d_bytes += lease.region.nbytes
        asked = time.perf_counter()

        def on_copied(error: BaseException | None) -> None:
            with self._changed:
                self._note(H2D, fetch, asked)
                self._finish(fetch, error)

        copied.then(on_copied)

    def _note(self, lane: str, fetch: Fetch, asked: float) -> None:
        """A transfer has ended, for the timeline. What was asked for together is laid one behind
        the other when it is read."""
        if self._recorder is not None:
            nbytes = self.plan.blocks[fetch.block].nbytes
            self._recorder.add(lane, fetch.block, asked, time.perf_counter(), nbytes)

    def _finish(self, fetch: Fetch, error: BaseException | None) -> None:
        """A transfer has ended: tell the state machine and go on."""
        self._progress += 1
        self._moving -= 1
        if self._closed:
            self._changed.notify_all()
            return
        if error is None:
            self._failures.pop(fetch.block, None)
            self._submit(self._residency.arrived(fetch.block, fetch.dst))
            if self._cpu is not None and fetch.dst is Tier.RAM:
                self._cpu.arrived(fetch.block)
        else:
            logger.error("fetch of %s to %s failed: %s", fetch.block, fetch.dst.name, error)
            self._failures[fetch.block] = error
            self._submit(self._residency.failed(fetch.block, fetch.dst, str(error)))
        self._changed.notify_all()

    def _order(self, edge: str, waiter: str, event: Event | None) -> None:
        """Make ``waiter`` come after ``event``; ``edge`` says what would break without."""
        if event is None:
            raise SchedulerError(f"{edge}: {waiter} would use bytes that nobody has filled")
        if waiter == "h2d":
            self.device.h2d.wait(event)
        elif waiter == "d2h":
            self.device.d2h.wait(event)
        elif waiter == "compute":
            self.device.compute.wait(event)
        else:
            # The state machine frees a host slot only after the copy out of it has ended.
            self.device.acquire(waiter, event)

    def _begin_use(self, blocks: Iterable[str]) -> None:
        leases = self._leases[self.plan.compute_tier]
        for block in blocks:
            lease = leases[block]
            try:
                self._order("block-ready", "compute", lease.ready)
            except DeviceError as error:  # the card failed after the copy was queued
                story = self._residency.story(block)
                raise DeviceError(f"{error} (block {block}; {story})") from error
            self.device.touch("compute", lease.region, "r")
            self._in_use += 1
        self._user = threading.get_ident()

    def _end_use(self, blocks: Iterable[str]) -> None:
        tier = self.plan.compute_tier
        event = self.device.compute.record()
        for block in blocks:
            self._used(tier, block, "compute", event)
            self._in_use -= 1

    def _second_site(self, nbytes: int) -> CpuSite:
        def moved() -> None:
            self._progress += 1
            self._changed.notify_all()

        return CpuSite(
            Ground(
                device=self.device,
                residency=self._residency,
                changed=self._changed,
                submit=self._submit,
                order=self._order,
                lease=lambda expert: self._leases[Tier.RAM][expert],
                used=lambda expert, event: self._used(Tier.RAM, expert, "cpu", event),
                moved=moved,
                record=None if self._recorder is None else self._recorder.add,
            ),
            nbytes,
        )

    def _used_elsewhere(self) -> bool:
        """Whether another thread computes. What this thread holds while it closes is left over
        from a forward that a Ctrl-C has ended."""
        alive = self._user in {t.ident for t in threading.enumerate()}
        return self._in_use > 0 and alive and self._user != threading.get_ident()

    def _let_close(self) -> None:
        """``close()`` waits in another thread until nothing is held."""
        if self._closed:
            self._changed.notify_all()

    # -- waiting (under the lock) ---------------------------------------------------------

    def _await_expert(self, expert: str) -> None:
        """Hold a routed expert, as soon as it is there."""
        began = time.perf_counter()
        while True:
            seen = self._progress
            there, todo = self._residency.acquire(expert)
            self._submit(todo)
            if there:
                break
            self.stats.host_waits["block"] += 1
            self._raise_failures([expert])
            if self.story is not None:
                self.story.waits(expert)
            self._wait("an expert", [expert], seen)
        self.stats.stall_s += time.perf_counter() - began
        if self.story is not None:
            self.story.expert(expert)

    def _forgive(self, blocks: Iterable[str]) -> None:
        """Who asks anew gets a new attempt: an old failure was that of a prefetch (logged), or has
        been raised where it was waited for."""
        for block in blocks:
            self._failures.pop(block, None)

    def _wait(self, who: str, blocks: Sequence[str], seen: int) -> None:
        """Wait until more has finished than the ``seen`` of before the caller's last look; an
        error if nothing does for too long. A store may have called back in between, from inside
        the very call that asked it to read."""
        limit = time.monotonic() + self._watchdog_s
        while (left := limit - time.monotonic()) > 0:
            if self._shield.received:
                raise KeyboardInterrupt
            if self._progress != seen or self._closed:
                self._check_open()
                return
            # Whatever moves notifies; only a signal cannot, so it is looked for now and then.
            self._changed.wait(min(left, _SIGNAL_S))
        raise WatchdogError(
            f"{who} has waited {self._watchdog_s:.0f} s for {', '.join(blocks[:4])} and no "
            f"transfer has finished ({self._residency.in_flight()} in flight); "
            f"{self._residency.story(blocks[0])}"
        )

    def _raise_failures(self, blocks: Iterable[str]) -> None:
        for block in blocks:
            error = self._failures.pop(block, None)
            if error is not None:
                kind = next(
                    (k for k in (ClosedError, DeviceError) if isinstance(error, k)), StoreError
                )
                raise kind(f"{error} (block {block}; {self._residency.story(block)})") from error

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this model has been closed; load it again")

    def _count(self, receipt: Receipt) -> None:
        self.stats.disk_read_bytes += receipt.physical_bytes
        self.stats.payload_read_bytes += receipt.payload_bytes
        self.stats.copied_bytes += receipt.copied_bytes


__all__ = ["WATCHDOG_S", "Executor", "Stats", "Views"]
