"""The residency state machine: events in, instructions out.

It knows which blocks are in which tier, at which address, who holds them and what is on its way;
it decides what to fetch next, what to drop, and where things go. It does no I/O, holds no lock
and no clock: the executor feeds it events under one lock and carries out the instructions; the
simulator does the same on a virtual clock. Illegal events raise ``SchedulerError`` with the
block's story; ``validate()`` re-derives every invariant from scratch.

This module is the list of events. What they mean for weights is decided in ``streaming``, for
experts in ``routing``; both move blocks only through the ``Stock`` of ``shelf``, which keeps the
books. The two share no room (rings here, slots there), so events of one never wait for the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.hybrid import HybridRoutes
from offload.scheduler.plan import Plan
from offload.scheduler.policy import Scores
from offload.scheduler.routing import Routes
from offload.scheduler.shelf import Drop, Fetch, Instruction, Pool, Stock
from offload.scheduler.split import Schedule, Site
from offload.scheduler.streaming import Streams
from offload.scheduler.trace import Trace

__all__ = ["Drop", "Fetch", "Instruction", "Residency"]


class Residency:
    """See the module's text. Not thread-safe: the caller holds one lock."""

    def __init__(self, plan: Plan) -> None:
        """Raises SchedulerError if the plan leaves an expert without a place."""
        self.plan = plan
        self._stock = Stock(plan)
        self._streams = Streams(self._stock, plan)
        self._hybrid = HybridRoutes(self._stock, plan) if plan.split is not None else None
        self._routes = self._hybrid or Routes(self._stock, plan)
        self._top = self._stock.top.entries
        self._stays = plan.sites.blocks if plan.sites is not None else frozenset[str]()

    # -- events ---------------------------------------------------------------------------

    def start(self) -> list[Instruction]:
        """Fetch what is pinned, then begin to prefetch. Call once, first."""
        self._streams.start()
        return self._advance()

    def need(self, unit: str, blocks: Sequence[str]) -> tuple[int, list[Instruction]]:
        """A unit is about to run. Holds its blocks; returns a ticket for ``missing``/``done``.

        Tickets are served in order. A unit that waits may lose blocks to one before it; a unit
        that misses nothing keeps what it has until ``done``.

        Raises:
            SchedulerError: the blocks are more than the ring can hold at once, or unknown.
        """
        ticket = self._streams.need(unit, blocks)
        return ticket, self._advance()

    def missing(self, ticket: int) -> list[str]:
        """The ticket's blocks that have not arrived; empty when the unit can run."""
        return self._streams.missing(ticket)

    def stuck(self, ticket: int) -> str | None:
        """Why the ticket's unit could only wait for ever, if nothing but a unit that runs could
        make room for it, and nothing is under way; None: it can go on.

        For where whoever waits is in those units: their ends are behind its own.
        """
        missing = self._streams.missing(ticket)
        running = self._streams.running()
        if not missing or not running or self.in_flight():
            return None
        top = self._stock.top
        lacks = sum(self.plan.blocks[b].slot_nbytes for b in missing)
        kept = sum(running.values())
        return (
            f"it lacks {', '.join(missing[:4])} ({lacks} bytes) beside {kept} bytes of what runs "
            f"({', '.join(running)}), and weights that come and go have room for "
            f"{top.ring.capacity} bytes in {top.tier.name}"
        )

    def done(self, ticket: int) -> list[Instruction]:
        """The unit has run, or gave up waiting: its blocks are free to go."""
        self._streams.done(ticket)
        return self._advance()

    def retrace(self, trace: Trace) -> list[Instruction]:
        """The uses go round another cycle than the plan's; look ahead in this one from now on.

        The next unit to run is the trace's first. Call between uses.
        """
        self._streams.retrace(trace)
        return self._advance()

    def suspend(self) -> list[Instruction]:
        """Somebody else fills the ring where compute runs, until ``resume``: all that is in it
        goes, and nothing streams there. Call while no unit runs and nothing is under way.

        Raises:
            SchedulerError: that is not so.
        """
        self._streams.suspend()
        return self._stock.take()

    def resume(self, unit: str, held: Iterable[tuple[str, int]] | None) -> int:
        """The ring is the state machine's again, and empty.

        Args:
            unit: that runs now, or comes next.
            held: of a unit that runs, its blocks in the ring and where they lie; None: it does not.

        Returns:
            Its ticket; 0: it does not run. Then call ``advance``.
        """
        return self._streams.resume(unit, held)

    def advance(self) -> list[Instruction]:
        """What can be started now."""
        return self._advance()

    def route(
        self,
        group: str,
        experts: Sequence[str],
        scores: Scores | None = None,
        loads: Mapping[str, int] | None = None,
    ) -> list[Instruction]:
        """A MoE layer routes to ``experts``, which will be acquired in this order.

        ``scores``: what its router says of them, for eviction policies that listen. ``loads``:
        tokens of each expert; where the plan has two sites for them, ``sites`` and ``schedule``
        then say who computes which, in which order. Without loads the device computes all.
        """
        self._routes.route(group, experts, scores, loads)
        return self._advance_experts()

    def acquire(self, expert: str) -> tuple[bool, list[Instruction]]:
        """Hold an expert; True if it is there, else wait for its arrival and call again.

        Waiting moves it to the front: also when it was not routed, is acquired out of order, or
        was lost to a failed read.
        """
        entry = self._top.get(expert)
        if entry is not None and entry.ready:
            entry.holds += 1
            return True, []
        self._routes.hurry(expert)
        if entry is None and self._stock.stacked and expert in self._stock.top.pinned:
            self._streams.halted = False
            self._streams.pin(expert)
            return False, self._advance()
        return False, self._advance_experts()

    def acquire_all(self, experts: Sequence[str]) -> list[int] | None:
        """Hold all of the experts if every one is there, in one call for the usual case.

        Returns:
            Their offsets in the compute tier, or None if one is not there: then none is held,
            and ``acquire`` brings them one by one.
        """
        top = self._top
        entries = []
        for expert in experts:
            entry = top.get(expert)
            if entry is None or not entry.ready:
                return None
            entries.append(entry)
        for entry in entries:
            entry.holds += 1
        return [entry.offset for entry in entries]

    def hold_all(self) -> None:
        """Compute uses what it finds: until ``release_all_of`` no expert that is there leaves."""
        self._stock.held = True

    def release_all_of(self, used: Iterable[tuple[str, Sequence[str]]]) -> list[Instruction]:
        """It has used these experts of these layers, in this order; all of them were there."""
        self._stock.held = False
        for group, experts in used:
            self._routes.route(group, experts)
        self._routes.end()
        return self._advance_experts()

    def release(self, expert: str) -> list[Instruction]:
        """The expert has been used; it stays cached until its slot is needed."""
        self._release(expert)
        return self._advance_experts()

    def release_all(self, experts: Sequence[str]) -> list[Instruction]:
        """``release`` for each of the experts."""
        for expert in experts:
            self._release(expert)
        return self._advance_experts()

    def hold_below(self, block: str) -> tuple[bool, list[Instruction]]:
        """Hold a block in RAM, for the CPU: True if it is there; else ask again when something
        has arrived. An expert, if the plan has a ``split``, or one of its ``sites``, which stays
        there for good."""
        if block in self._stays:
            return self._stock.entry(Tier.RAM, block).ready, []
        if self._hybrid is None:
            raise SchedulerError(f"{block} is not computed in RAM under this plan")
        there = self._hybrid.hold_below(block)
        return there, self._advance_experts() if there else []

    def release_below(self, block: str) -> list[Instruction]:
        """The CPU has used a block in RAM."""
        if block in self._stays:
            return []
        assert self._hybrid is not None
        self._hybrid.release_below(block)
        return self._advance_experts()

    def guess(self, group: str, experts: Sequence[str], *, far: bool = False) -> list[Instruction]:
        """The next layer to be routed, ``group``, may use ``experts``, the likeliest first;
        ``far``: the one after it.

        Read when the disk has nothing else to do, if the plan says so; see ``guesses``.
        """
        self._routes.guess(group, experts, far=far)
        return self._advance_experts()

    def end_route(self) -> list[Instruction]:
        """The MoE layer has finished (or failed): nothing is wanted any more."""
        self._routes.end()
        return []

    def arrived(self, block: str, tier: Tier) -> list[Instruction]:
        """A fetch has finished: the block's bytes are in ``tier``."""
        stock = self._stock
        entry = stock.land(block, tier)
        entry.ready = True
        stock.note(block, "arrived in {}", tier)
        if entry.doomed and not entry.holds:
            stock.drop(stock.shelves[tier], block, entry)
        elif entry.pool is Pool.SLOT and not self._streams.waiting:
            return self._advance_experts()  # no ring has changed: nothing else can start
        elif stock.stacked and tier == Tier.RAM:
            wanted = self._streams.lacks(block) or self._routes.wants(block)
            self._streams.lift_pinned(block, demand=wanted)
        return self._advance()

    def failed(self, block: str, tier: Tier, why: str) -> list[Instruction]:
        """A fetch has failed: the block is absent again.

        Every ticket that misses it is lost and must be given up with ``done``; an expert may be
        acquired once more. Nothing is fetched ahead until compute asks again: a dying disk would
        otherwise be hammered with the same request for ever.
        """
        stock = self._stock
        entry = stock.land(block, tier)
        stock.note(block, "failed: {}", why)
        shelf = stock.shelves[tier]
        self._streams.failed(block, shelf, entry)
        self._routes.failed(block)
        stock.drop(shelf, block, entry)
        return self._advance()

    def _advance(self) -> list[Instruction]:
        """Everything that can be started now, most urgent first."""
        self._streams.serve()
        self._routes.serve()
        self._streams.run_ahead()
        self._guess_on()
        return self._stock.take()

    def _advance_experts(self) -> list[Instruction]:
        if self._routes.waiting:
            self._routes.serve()
        self._guess_on()
        return self._stock.take()

    def _guess_on(self) -> None:
        """Last of all, when nothing that is needed waits."""
        guesses = self._routes.guesses
        if guesses.waiting and not self._routes.waiting and not self._streams.waiting:
            guesses.serve()

    def _release(self, expert: str) -> None:
        entry = self._stock.entry(self.plan.compute_tier, expert)
        if not entry.holds:
            raise SchedulerError(f"{expert} is released but not held; {self.story(expert)}")
        entry.holds -= 1
        if not entry.holds:
            self._routes.released(expert)

    # -- inspection -----------------------------------------------------------------------

    @property
    def hits(self) -> int:
        """Routed experts that were above the disk when asked for."""
        return self._routes.hits

    @property
    def misses(self) -> int:
        """Routed experts that had to be read from disk."""
        return self._routes.misses

    @property
    def calm(self) -> int:
        """Routings in a row of experts that were all above the disk, unguessed."""
        return self._routes.calm

    @property
    def sites(self) -> Mapping[str, Site]:
        """Who computes each expert of the running layer; empty where there is no choice."""
        return {} if self._hybrid is None else self._hybrid.sites

    @property
    def schedule(self) -> Schedule | None:
        """In which order; None where there is no choice."""
        return None if self._hybrid is None else self._hybrid.schedule

    @property
    def guessed(self) -> tuple[int, int]:
        """Experts read on a guess, and those of them that were routed to."""
        return self._routes.guesses.read, self._routes.guesses.right

    @property
    def uses(self) -> int:
        """Units that run or wait."""
        return self._streams.uses

    @property
    def trace(self) -> Trace:
        """The cycle that prefetch follows now."""
        return self._streams.trace

    def expects(self, unit: str) -> bool:
        """Whether ``unit`` is the step that the trace predicts now."""
        at = self._streams.cursor
        return self._streams.trace.next_position(unit, at) == at

    def where(self, block: str, tier: Tier | None = None) -> int | None:
        """The block's offset in a tier (default: where compute reads it) if it is there."""
        entries = self._top if tier is None else self._stock.shelves[tier].entries
        entry = entries.get(block)
        return entry.offset if entry is not None and entry.ready else None

    def in_flight(self) -> int:
        """Fetches that have neither arrived nor failed."""
        return sum(s.in_flight for s in self._stock.shelves.values())

    def loading(self) -> list[str]:
        """Pinned blocks that have not arrived yet (or whose fetch has failed)."""
        return [
            b
            for shelf in self._stock.shelves.values()
            for b in shelf.pinned
            if (e := shelf.entries.get(b)) is None or not e.ready
        ]

    def held(self) -> list[str]:
        """Blocks that a unit or a copy holds; empty when nothing runs."""
        return [b for s in self._stock.shelves.values() for b, e in s.entries.items() if e.holds]

    def story(self, block: str) -> str:
        """The block's latest transitions, for error messages."""
        return self._stock.story(block)

    def validate(self) -> None:
        """Re-derive every invariant. Raises SchedulerError. Linear in the number of entries."""
        self._stock.validate()
