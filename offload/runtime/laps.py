"""Passes that repeat are laid out once, and not decided again.

Where all that streams to the device lies in RAM for good, a pass needs no decisions (see
``scheduler.laps``). Taking them all the same costs 0.2 to 0.4 ms of Python for each unit, and a
wait on the host until a copy has ended costs a thread's wake-up: of a card, whose layers take less
than that, most of the time. So when two passes in a row have run the same units, those after them
queue the same copies behind the same events, and compute waits for them on its own stream: the host
runs ahead of a card.

Meanwhile the state machine leaves the device's ring alone (``Residency.suspend``), and no lease is
in it. Whoever disturbs the order, or looks from outside, has it put back first (``settle``): empty,
but for the blocks of the unit that runs. That costs a ring's bytes once more, and happens once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from offload.blocks import Tier
from offload.errors import DeviceError
from offload.runtime.device import Device, Event, Region
from offload.runtime.stats import Stats
from offload.runtime.timeline import Recorder, Story
from offload.runtime.transfers import Transfers
from offload.scheduler.laps import Copy, Stage, lay_out
from offload.scheduler.plan import Home, Plan
from offload.scheduler.residency import Instruction, Residency
from offload.scheduler.timeline import H2D

logger = logging.getLogger(__name__)

Views = dict[str, torch.Tensor]
Order = tuple[tuple[str, tuple[str, ...]], ...]


def may_repeat(plan: Plan) -> bool:
    """Whether passes under a plan can repeat themselves: nothing is decided by a routing or by the
    disk, and something streams."""
    if plan.compute_tier is not Tier.DEVICE or plan.groups or plan.split or plan.sites:
        return False
    below, above = plan.tiers[Tier.RAM].pinned, plan.tiers[Tier.DEVICE].pinned
    streamed = [b for b, home in plan.homes.items() if home is Home.STREAMED and b not in above]
    return bool(streamed) and all(b in below for b in streamed)


class Laps:
    """Of one executor, under its lock but for ``run``. Tickets are negative.

    Attributes:
        repeating: whether passes run as they were laid out.
        ticket: the last that was given out.
        views: tensors of the blocks of the step that runs, while it does.
        repeated: steps that ran so.
    """

    def __init__(
        self, plan: Plan, device: Device, transfers: Transfers, residency: Residency, stats: Stats,
        *, story: Story | None, recorder: Recorder | None,
    ) -> None:  # fmt: skip
        self.repeating = False
        self.ticket = 0
        self.views: Mapping[str, Views] = {}
        self.repeated = 0
        self._plan, self._device, self._transfers = plan, device, transfers
        self._residency, self._stats, self._story = residency, stats, story
        self._record = None if recorder is None else recorder.add
        self._pinned = frozenset(plan.tiers[Tier.DEVICE].pinned)
        self._sizes = {b: spec.slot_nbytes for b, spec in plan.blocks.items()}
        self._pass: list[tuple[str, tuple[str, ...]]] = []  # so far
        self._last: Order = ()  # the one before
        self._refused: set[Order] = set()  # passes that cannot be laid out
        # While passes repeat:
        self._order: Order = ()
        self._stages: tuple[Stage, ...] = ()
        self._places: list[list[tuple[str, Region]]] = []  # of each step's blocks
        self._known: list[dict[str, Views]] = []
        self._moves: list[list[tuple[Copy, Region, Region]]] = []  # asked for behind each step
        self._copied: dict[str, Event] = {}
        self._used: list[Event] = []
        self._at = 0
        self._inside = False
        # What the step that was entered last waits for: whoever settles takes the rest away.
        self._needs: list[tuple[str, Region, Event]] = []

    # -- passes that are decided ----------------------------------------------------------

    def begins(self, unit: str, blocks: Sequence[str]) -> None:
        """A unit is entered, in the books already."""
        if self._residency.uses > 1:
            self.disturbed()  # one inside of another: such a pass is not repeated
            return
        step = unit, tuple(blocks)
        if step in self._pass and not self._pinned.issuperset(blocks):
            # No pass has the same weights twice: this one went before those that go round, as an
            # encoder before its decoder.
            self._last = tuple(self._pass[self._pass.index(step) :])
            self._pass.clear()
        self._pass.append(step)

    def disturbed(self) -> None:
        """The order is another from here on, or something has failed."""
        self._pass.clear()
        self._last = ()

    def due(self, unit: str) -> bool:
        """A unit is about to be entered: whether it is the one with which a pass begins, and the
        last two were equal, so that the next ones may repeat them (``start``). Never while another
        one runs: that holds its bytes."""
        if not self._pass or self._pass[0][0] != unit or self._residency.uses:
            return False
        order = tuple(self._pass)
        if order == self._last and order not in self._refused:
            return True
        self._last = order
        self._pass.clear()
        return False

    def start(self) -> list[Instruction]:
        """Lay out the last pass, and run it so from now on; what is to be done before. No copy is
        under way: its end would be told to books that know of none."""
        order = self._last
        ring = self._plan.tiers[Tier.DEVICE]
        pinned = self._pinned
        moving = [(u, tuple(b for b in blocks if b not in pinned)) for u, blocks in order]
        found = lay_out(moving, self._sizes, ring.ring_base, ring.ring_bytes)
        self.disturbed()
        if found is None:
            self._refused.add(order)
            return []
        region = self._transfers.region
        self._order, self._stages = order, found
        self._places = [
            [(b, region(Tier.DEVICE, b, at)) for b, at in stage.places] for stage in found
        ]
        self._known = [
            {b: self._transfers.views_at(b, at) for b, at in stage.places} for stage in found
        ]
        self._moves = [
            [(c, region(Tier.DEVICE, c.block, c.offset), self._source(c.block)) for c in stage.then]
            for stage in found
        ]
        self._at, self._inside, self.repeating = 0, False, True
        logger.debug("passes of %d units repeat from here on", len(found))
        return self._residency.suspend()

    def _source(self, block: str) -> Region:
        return self._transfers.lease(block, Tier.RAM).region

    def fill(self) -> None:
        """Ask for what the first pass finds there and later ones asked for in the one before."""
        before = self._device.compute.record()  # all uses of the ring
        self._used = [before] * len(self._stages)
        first = [m for moves in self._moves for m in moves if m[0].early]
        for move in sorted(first, key=lambda m: m[0].step):
            self._ask(move)

    # -- passes that repeat ---------------------------------------------------------------

    def enter(self, unit: str, blocks: Sequence[str]) -> int:
        """The next unit's ticket, or 0: it is another one, and has to be decided."""
        if self._inside or self._order[self._at] != (unit, tuple(blocks)):
            return 0
        self._inside = True
        self.ticket -= 1
        self.repeated += 1
        self.views = self._known[self._at]
        self._needs = [(b, region, self._copied[b]) for b, region in self._places[self._at]]
        self._transfers.count_use(len(blocks))
        return self.ticket

    def run(self, unit: str) -> None:
        """Have compute come after the blocks of the step that was entered. Not under the lock:
        where compute is the host itself, it waits here, and others may settle meanwhile.

        Raises:
            DeviceError: the card has failed.
        """
        story = self._story
        if story is not None:
            story.begins(unit)
            story.waits(unit)
        began = time.perf_counter()
        order, touch = self._transfers.order, self._device.touch
        for block, region, copied in self._needs:
            try:
                order("repeated-block-ready", "compute", copied)
            except DeviceError as error:
                raise DeviceError(
                    f"{error} (block {block}, which comes the same way in each pass)"
                ) from error
            touch("compute", region, "r")
        self._stats.stall_s += time.perf_counter() - began
        if story is not None:
            story.goes_on()

    def leave(self) -> None:
        """The step that was entered has run: what comes behind it."""
        at = self._at
        used = self._used[at] = self._device.compute.record()
        self._inside, self.views = False, {}
        self._transfers.count_use(-len(self._order[at][1]))
        for _, region in self._places[at]:
            self._device.discard(region, (used,))
        for move in self._moves[at]:
            self._ask(move)
        self._at = (at + 1) % len(self._stages)
        if self._story is not None:
            self._story.ends()

    def _ask(self, move: tuple[Copy, Region, Region]) -> None:
        copy, target, source = move
        for step in copy.after:
            self._transfers.order("repeated-slot-free", "h2d", self._used[step])
        copied = self._copied[copy.block] = self._device.copy(target, source, self._device.h2d)
        self._stats.h2d_bytes += target.nbytes
        if self._record is not None:
            copied.then(self._noted(copy.block, time.perf_counter(), target.nbytes))

    def _noted(
        self, block: str, asked: float, nbytes: int
    ) -> Callable[[BaseException | None], None]:
        record = self._record
        assert record is not None
        return lambda _: record(H2D, block, asked, time.perf_counter(), nbytes)

    # -- back to decisions ----------------------------------------------------------------

    def settle(self) -> int:
        """Put the ring back into the books, and decide from here on. Returns the ticket, in them,
        of the unit that runs; 0: none does. What it needs is to be asked for (``advance``)."""
        if not self.repeating:
            return 0
        stage = self._stages[self._at]
        self.repeating = False
        inside, self._inside, self.views = self._inside, False, {}
        held = stage.places if inside else ()
        self._transfers.all_after(
            self._device.compute.record(), self._device.h2d.record(), dict(held)
        )
        ticket = self._residency.resume(stage.unit, held if inside else None)
        self.disturbed()
        self._stages, self._places, self._known, self._moves = (), [], [], []
        self._copied.clear()
        self._used.clear()
        return ticket


__all__ = ["Laps", "may_repeat"]
