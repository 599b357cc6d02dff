"""Carries out the scheduler's instructions on real lanes and makes compute wait for its blocks.

One executor owns one model's memory, its store and its device. The residency state machine
decides under the executor's lock, and ``Transfers`` carry out; completions come back from the
threads of store and device, are fed to the state machine, and what it answers is started at once,
so the read lane never waits for Python in the computing thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offload.blocks import Tier
from offload.cpu_ops import crowding
from offload.errors import PlanError
from offload.io.store import Span, Store
from offload.runtime.cpu_site import CpuSite, Ground
from offload.runtime.device import Device
from offload.runtime.expert_calls import ExpertCalls, Views
from offload.runtime.interrupts import Shield
from offload.runtime.laps import Laps, may_repeat
from offload.runtime.order import OrderWatcher
from offload.runtime.road import Conducting, Road
from offload.runtime.rows import RowReader
from offload.runtime.stats import Stats
from offload.runtime.timeline import Recorder, Story
from offload.runtime.transfers import Transfers
from offload.runtime.waiting import Waiting
from offload.scheduler.plan import SITE_ACTIVATIONS, Plan
from offload.scheduler.residency import Fetch, Instruction, Residency

logger = logging.getLogger(__name__)

WATCHDOG_S = 120.0
"""A wait without any transfer finishing for this long is an error, never a hang."""


class Executor(ExpertCalls):
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
        story = self._residency.story
        self._waiting = Waiting(self._shield, watchdog_s, story, self._residency.in_flight)
        self._changed = self._waiting.changed  # its lock is the executor's
        self._todo: deque[Instruction] = deque()
        self._draining = False
        self._order_seen = OrderWatcher(len(plan.trace))
        self._rehearsing = False
        self._freed = False
        self._transfers = Transfers(
            plan, store, device, changed=self._changed, stats=self.stats, finished=self._finish,
            moved=self._waiting.moved, story=story, recorder=recorder,
        )  # fmt: skip
        self._rows = RowReader(
            plan, store, self._transfers, self._waiting, self.stats, watchdog_s=watchdog_s,
            recorder=recorder, story=self.story,
        )  # fmt: skip
        self._laps: Laps | None = None
        if may_repeat(plan):
            self._laps = Laps(
                plan, device, self._transfers, self._residency, self.stats,
                story=self.story, recorder=recorder,
            )  # fmt: skip
        self._renamed: dict[int, int] = {}  # tickets of laps that are the books' now
        self._cpu: CpuSite | None = None
        crowding.enter()
        try:
            self._transfers.open()
            if plan.split is not None or plan.sites is not None:
                self._cpu = self._second_site(plan.reserves[Tier.DEVICE][SITE_ACTIVATIONS])
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
                self._waiting.raise_failures(left)
                if progress:
                    progress(total - sum(self.plan.blocks[b].nbytes for b in left), total)
                self._waiting.wait("the pinned weights", left, self._waiting.progress)
        if progress:
            progress(total, total)

    def stop(self) -> None:
        """Refuse whatever asks for blocks from now on, and end every wait for one."""
        with self._shield, self._changed:
            self._waiting.closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for what is in flight or in use, then free memory, files and threads. Idempotent.

        Nothing new is started. A transfer that hangs is waited for as long as the watchdog says,
        then by the store, whose threads nobody can stop.
        """
        with self._shield:
            self._close()

    def _close(self) -> None:
        with self._changed:
            if self._freed or self._waiting.left_behind:
                return
            self._settle_laps()
            self._freed = self._waiting.closed = True
            if self.story is not None:
                self.story.finish()
            self._todo.clear()
            if self._cpu is not None:
                self._cpu.stop()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    not self._transfers.moving
                    and not self._transfers.used_elsewhere()
                    and not (self._cpu is not None and self._cpu.busy)
                ),
                self._watchdog_s,
            )
            self._transfers.release_all()
        # Outside the lock: their threads may be in a completion that takes it.
        try:
            self.store.close()
            self.device.close()
            if self._cpu is not None:
                self._cpu.close()
            self._transfers.close()
        finally:
            crowding.leave()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What runs inside says nothing about the order in which units will run."""
        self._rehearsing, before = True, self._rehearsing
        try:
            yield
        finally:
            self._rehearsing = before

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
            PlanError: it is called while others run, and there is no room for it beside them.
            WatchdogError: nothing has moved for the watchdog's time.
        """
        ticket = 0
        try:
            with self._shield:
                with self._changed:
                    asked = self._repeat(unit, blocks) or self._enter(unit, blocks)
                if asked < 0:
                    self._run_repeated(asked, unit, blocks)
                ticket = asked
        except KeyboardInterrupt:
            if ticket:  # at the shield's end: the caller will never hear of the ticket
                self.leave(ticket, blocks)
            raise
        return ticket

    def _repeat(self, unit: str, blocks: Sequence[str]) -> int:
        """The ticket of a unit that runs as it did a pass ago; 0: it has to be decided."""
        laps = self._laps
        if laps is None:
            return 0
        self._waiting.check_open()
        if not laps.repeating and laps.due(unit):
            while self._transfers.moving and laps.due(unit):
                self._waiting.wait(unit, blocks, self._waiting.progress)
            if laps.due(unit):
                self._submit(laps.start())
                if laps.repeating:
                    laps.fill()
        if not laps.repeating:
            return 0
        ticket = laps.enter(unit, blocks)
        if not ticket:
            self._settle_laps()
        return ticket

    def _run_repeated(self, ticket: int, unit: str, blocks: Sequence[str]) -> None:
        """Raises DeviceError; the ticket is then given up."""
        assert self._laps is not None
        try:
            self._laps.run(unit)
        except BaseException:
            with self._changed:
                self._transfers.count_use(-len(blocks))
                self._settle_laps()
                self._submit(self._residency.done(self._renamed.pop(ticket)))
                if self.story is not None:
                    self.story.ends()
            raise

    def _settle_laps(self) -> None:
        """Have the state machine and the leases know what is where."""
        laps = self._laps
        if laps is None or not laps.repeating:
            return
        if ticket := laps.settle():
            self._renamed[laps.ticket] = ticket
        self._submit(self._residency.advance())

    def _enter(self, unit: str, blocks: Sequence[str]) -> int:
        self._waiting.check_open()
        self._waiting.forgive(blocks)
        if not self._rehearsing:
            expected = self._residency.expects(unit)
            cycle = self._order_seen.note(unit, blocks, expected=expected)
            if cycle is not None:
                if self._laps is not None:
                    self._laps.disturbed()
                self._submit(self._residency.retrace(cycle))
        ticket, todo = self._residency.need(unit, blocks)
        if self._laps is not None:
            self._laps.begins(unit, blocks)
        self._submit(todo)
        story = self.story
        if story is not None:
            story.begins(unit)
        try:
            if missing := self._missing(ticket):
                if story is not None:
                    story.waits(unit)
                self.stats.host_waits["block"] += 1
                began = time.perf_counter()
                while missing:
                    self._waiting.raise_failures(missing)
                    self._check_stuck(unit, ticket)
                    self._waiting.wait(unit, missing, self._waiting.progress)
                    missing = self._missing(ticket)
                self.stats.stall_s += time.perf_counter() - began
                if story is not None:
                    story.goes_on()
        except BaseException:
            if self._laps is not None:
                self._laps.disturbed()
            self._submit(self._residency.done(ticket))
            if story is not None:
                story.ends()
            raise
        self._transfers.begin_use(blocks)
        return ticket

    def _missing(self, ticket: int) -> list[str]:
        """A unit's blocks that it has to wait for."""
        missing = self._residency.missing(ticket)
        promote = self._transfers.promote
        while missing and (any([promote(b) for b in missing]) or self._transfers.promote_all()):
            missing = self._residency.missing(ticket)
        return missing

    def _check_stuck(self, unit: str, ticket: int) -> None:
        """Raises PlanError if only the calling thread could make room, in which the unit waits."""
        if self._transfers.moving or self._transfers.used_elsewhere():
            return
        if self._cpu is not None and self._cpu.busy:
            return
        if (why := self._residency.stuck(ticket)) is not None:
            raise PlanError(
                f"{unit} is called while another layer runs, and cannot come: {why}. Raise the "
                f"budget by that much, or call the layers one after the other"
            )

    def leave(self, ticket: int, blocks: Sequence[str]) -> None:
        """The unit has run. Its views are void from now on."""
        laps = self._laps
        with self._shield, self._changed:
            if ticket < 0:
                if laps is not None and laps.repeating:
                    laps.leave()
                    self._let_close()
                    return
                ticket = self._renamed.pop(ticket)
            self._transfers.end_use(blocks)
            self._submit(self._residency.done(ticket))
            self._let_close()
            if self.story is not None:
                self.story.ends()

    def views(self, block: str) -> Views:
        """The tensors of a block that is held (or pinned where compute runs)."""
        if self._laps is not None and (known := self._laps.views.get(block)) is not None:
            return known
        lease = self._transfers.lease(block)
        return {spec.name: lease.tensor(spec) for spec in lease.spec.tensors}

    def address(self, block: str) -> int:
        """Where a block that is pinned where compute runs lies, in host memory."""
        return self._transfers.lease(block).address

    # -- rows -----------------------------------------------------------------------------

    def read_rows(self, block: str, spans: Sequence[Span], buffer: memoryview) -> None:
        """Fill ``buffer`` with parts of a block, from host memory if it is pinned there (rows of an
        embedding). Raises as ``RowReader.read``."""
        self._rows.read(block, spans, buffer)

    # -- inspection -----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``stop()`` or ``close()`` has been called."""
        return self._waiting.closed

    @property
    def repeated(self) -> int:
        """Units that ran as a pass was laid out, with nothing decided (``laps``)."""
        return 0 if self._laps is None else self._laps.repeated

    def held(self) -> list[str]:
        """Blocks held now; empty when the model does not run."""
        with self._changed:
            self._settle_laps()
            return self._residency.held()

    def settle(self) -> None:
        """Wait until nothing is under way: the prefetch of the next pass has come to rest.

        Raises:
            WatchdogError: nothing has moved for the watchdog's time.
        """
        with self._shield, self._changed:
            self._settle_laps()
            while not self.closed and self._transfers.moving:
                blocks = sorted(self._transfers.live(Tier.RAM)) or ["nothing"]
                self._waiting.wait("settling", blocks, self._waiting.progress)

    def live_leases(self) -> int:
        """Slots that hold a block now; 0 after ``close()``."""
        with self._changed:
            self._settle_laps()
            return sum(len(self._transfers.live(tier)) for tier in self.plan.tiers)

    def validate(self) -> None:
        """Check the state machine's invariants and the device for races. For tests."""
        with self._changed:
            self._settle_laps()
            self._residency.validate()
        self.device.check()

    # -- under the lock -------------------------------------------------------------------

    def _submit(self, todo: Sequence[Instruction]) -> None:
        """Carry out instructions in order. A store may finish at once and call back from
        inside: what that adds runs after what was already decided. Nothing starts after close()."""
        if not todo or self._waiting.closed:  # mostly there is nothing to do
            return
        self._todo.extend(todo)
        if self._draining:
            return
        self._draining = True
        try:
            while self._todo and not self._waiting.closed:
                self._transfers.begin(self._todo.popleft())
        finally:
            self._draining = False

    def _finish(self, fetch: Fetch, error: BaseException | None) -> None:
        """A transfer has ended: tell the state machine and go on."""
        block = fetch.block
        self._waiting.moved()
        if self.closed:
            return
        if error is None:
            self._waiting.forgive((block,))
            self._submit(self._residency.arrived(block, fetch.dst))
            if fetch.dst is self.plan.compute_tier:
                self._transfers.show(block)
            if self._cpu is not None and fetch.dst is Tier.RAM:
                self._cpu.arrived(block)
        else:
            logger.error("fetch of %s to %s failed: %s", block, fetch.dst.name, error)
            if self._laps is not None:
                self._laps.disturbed()
            self._waiting.failed(block, error)
            self._submit(self._residency.failed(block, fetch.dst, str(error)))

    def _second_site(self, nbytes: int) -> CpuSite:
        ground = Ground(
            device=self.device,
            residency=self._residency,
            changed=self._changed,
            transfers=self._transfers,
            submit=self._submit,
            moved=self._waiting.moved,
            record=None if self._recorder is None else self._recorder.add,
        )
        return CpuSite(ground, nbytes)

    def _let_close(self) -> None:
        """``close()`` waits in another thread until nothing is held."""
        if self.closed:
            self._changed.notify_all()


__all__ = ["WATCHDOG_S", "Executor", "Stats", "Views"]
