"""The residency state machine: events in, instructions out.

It knows which blocks are in which tier, at which address, who holds them and what is on its way;
it decides what to fetch next, what to drop, and where things go. It does no I/O, holds no lock
and no clock: the executor feeds it events under one lock and carries out the instructions; the
simulator does the same on a virtual clock. Illegal events raise ``SchedulerError`` with the
block's story; ``validate()`` re-derives every invariant from scratch.

Weights follow a cyclic trace and pass through a ring in each tier, in order: prefetch runs ahead
of the cursor as far as there is room, and a block is dropped after its last use before the
prefetch window (in a cyclic trace the block just used is the one needed last, so any recency
policy would keep exactly the wrong ones). Experts live in equal slots under ``ExpertCache``.
"""

from __future__ import annotations

import enum
import sys
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from offload.blocks import BlockKind, Tier
from offload.errors import SchedulerError
from offload.scheduler.expert_cache import ExpertCache
from offload.scheduler.plan import Home, Plan
from offload.scheduler.ring import Ring
from offload.scheduler.trace import Trace

_STORY = 4096
"""Transitions remembered, of all blocks together: one log for each would not scale to 100,000."""
_NEVER = sys.maxsize
"""``until`` of entries that no step makes stale: pinned blocks, slots, blocks passing through."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a block up one tier. ``src_offset`` is None when it comes from disk."""

    block: str
    src: Tier
    dst: Tier
    src_offset: int | None
    dst_offset: int
    demand: bool
    """Compute is waiting for it: goes before what is only fetched ahead."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A block's bytes in a tier are void; its room may be given to the next ``Fetch``."""

    block: str
    tier: Tier
    offset: int


Instruction = Fetch | Drop


class _State(enum.Enum):
    INCOMING = "incoming"
    READY = "ready"


class _Entry:
    """A block in one tier."""

    __slots__ = ("doomed", "holds", "nbytes", "offset", "pool", "state", "until")

    def __init__(self, pool: str, offset: int, nbytes: int, until: int) -> None:
        self.pool = pool  # "pinned", "ring", "slot"
        self.offset = offset
        self.nbytes = nbytes
        self.state = _State.INCOMING
        self.holds = 0
        self.until = until  # ring: the absolute use it was last fetched or kept for
        self.doomed = False  # drop on arrival: cannot be cancelled in flight


class _Use:
    """One run of a unit: what it needs and what it holds so far."""

    __slots__ = ("blocks", "held", "position")

    def __init__(self, blocks: tuple[str, ...], position: int | None) -> None:
        self.blocks = blocks
        self.position = position
        self.held: set[str] = set()


class _Shelf:
    """One tier: its entries and where free room is."""

    __slots__ = ("cache", "entries", "fill", "in_flight", "ring", "ringed", "slots", "tier")

    def __init__(self, tier: Tier, plan: Plan) -> None:
        layout = plan.tiers[tier]
        self.tier = tier
        self.entries: dict[str, _Entry] = {}
        self.ringed: dict[str, _Entry] = {}  # the few of them in the ring: scanned at each step
        self.in_flight = 0
        self.ring = Ring(layout.ring_base, layout.ring_bytes)
        # Lowest address first: a pool that is not full yet touches no more memory than it needs.
        self.slots = [layout.slot_base + i * layout.slot_bytes for i in range(layout.slots)][::-1]
        self.cache = ExpertCache(list(plan.groups))
        self.fill = 0  # prefetch pointer: absolute index into trace.uses


class Residency:
    """See the module's text. Not thread-safe: the caller holds one lock."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._trace = plan.trace
        self._top = plan.compute_tier
        self._tiers = [t for t in (Tier.RAM, Tier.DEVICE) if t in plan.tiers and t <= self._top]
        self._shelves = {t: _Shelf(t, plan) for t in self._tiers}
        self._upper = self._shelves[self._top]
        self._cursor = 0  # absolute step position that runs now or next
        self._uses: dict[int, _Use] = {}
        self._tickets = 0
        self._demand: deque[tuple[int, str]] = deque()  # (ticket, block) that wait for room
        self._wanted: dict[str, int] = {}  # experts of the running pass -> rank of their use
        self._queue: list[tuple[int, str]] = []  # wanted experts not asked for yet, by rank
        self._pin_up: deque[str] = deque()  # device-pinned blocks that still have to pass RAM
        self._halted = False  # after a failure nothing is fetched ahead until compute asks
        self._log: deque[tuple[str, str]] = deque(maxlen=_STORY)
        self._out: list[Instruction] = []
        self.hits = 0
        """Routed experts that were above the disk when asked for."""
        self.misses = 0
        """Routed experts that had to be read from disk."""

    # -- events ---------------------------------------------------------------------------

    def start(self) -> list[Instruction]:
        """Fetch what is pinned, then begin to prefetch. Call once, first."""
        for tier in self._tiers:
            for block, offset in self.plan.tiers[tier].pinned.items():
                entry = _Entry("pinned", offset, self.plan.blocks[block].slot_nbytes, _NEVER)
                self._shelves[tier].entries[block] = entry
                if tier == Tier.RAM:
                    self._emit_fetch(block, tier, None, entry, demand=False)
                else:
                    self._pin_up.append(block)
        return self._advance()

    def need(self, unit: str, blocks: Sequence[str]) -> tuple[int, list[Instruction]]:
        """A unit is about to run. Holds its blocks; returns a ticket for ``ready``/``done``."""
        position = self._trace.next_position(unit, self._cursor)
        if position is not None:
            self._cursor = position
            self._forget_before(self._trace.first_use(position))
        self._halted = False
        self._tickets += 1
        ticket = self._tickets
        use = self._uses[ticket] = _Use(tuple(blocks), position)
        for block in blocks:
            entry = self._upper.entries.get(block)
            if entry is None:
                self._demand.append((ticket, block))
            else:
                entry.doomed = False
                entry.holds += 1
                use.held.add(block)
                self._note(block, f"held by {unit} ({entry.state.value})")
        return ticket, self._advance()

    def missing(self, ticket: int) -> list[str]:
        """The ticket's blocks that have not arrived; empty when the unit can run."""
        entries = self._upper.entries
        return [
            b
            for b in self._use(ticket).blocks
            if (e := entries.get(b)) is None or e.state is not _State.READY
        ]

    def done(self, ticket: int) -> list[Instruction]:
        """The unit has run, or gave up waiting: its blocks are free to go."""
        use = self._use(ticket)
        del self._uses[ticket]
        if len(use.held) < len(use.blocks):
            self._demand = deque(d for d in self._demand if d[0] != ticket)
        for block in use.held:
            self._upper.entries[block].holds -= 1
            self._note(block, "let go")
        if use.position is not None and use.position == self._cursor:
            self._cursor += 1
        self._forget_before(self._trace.first_use(self._cursor))
        return self._advance()

    def retrace(self, trace: Trace) -> list[Instruction]:
        """The uses go round another cycle than the plan's; look ahead in this one from now on.

        The next unit to run is the trace's first. Call between uses.
        """
        self._trace = trace
        self._cursor = 0
        first: dict[str, int] = {}
        for i, (block, _) in enumerate(trace.uses):
            first.setdefault(block, i)
        for shelf in self._shelves.values():
            shelf.fill = 0
            for block, entry in shelf.ringed.items():
                if entry.until != _NEVER:
                    entry.until = first.get(block, -1)
        self._forget_before(0)
        return self._advance()

    def route(self, group: str, experts: Sequence[str]) -> list[Instruction]:
        """A MoE layer routes to ``experts``, which will be acquired in this order."""
        self._wanted = {b: i for i, b in enumerate(experts)}
        self._queue = []
        for shelf in self._shelves.values():
            shelf.cache.begin_pass(group)
        upper, lowest = self._upper, self._shelves[Tier.RAM]
        for rank, block in enumerate(experts):
            entry = upper.entries.get(block)
            if entry is not None:
                self.hits += 1
                if entry.pool == "slot":
                    upper.cache.touch(block, group)
            else:
                if lowest is not upper and block in lowest.entries:
                    self.hits += 1
                else:
                    self.misses += 1
                self._queue.append((rank, block))
        return self._advance()

    def acquire(self, expert: str) -> tuple[bool, list[Instruction]]:
        """Hold an expert; True if it is there, else wait for its arrival and call again."""
        entry = self._upper.entries.get(expert)
        if entry is not None and entry.state is _State.READY:
            entry.holds += 1
            return True, []
        if entry is None and all(b != expert for _, b in self._queue):
            # Not routed, or lost to a failed read: asked for before everything else.
            rank = self._wanted.setdefault(expert, -1)
            insort(self._queue, (rank, expert))
        return False, self._advance()

    def release(self, expert: str) -> list[Instruction]:
        """The expert has been used; it stays cached until its slot is needed."""
        entry = self._entry(self._top, expert)
        if not entry.holds:
            raise SchedulerError(f"{expert} is released but not held; {self.story(expert)}")
        entry.holds -= 1
        if not entry.holds:
            self._wanted.pop(expert, None)
        return self._advance() if self._queue else []

    def end_route(self) -> list[Instruction]:
        """The MoE layer has finished (or failed): nothing is wanted any more."""
        self._wanted.clear()
        self._queue.clear()
        return self._advance()

    def arrived(self, block: str, tier: Tier) -> list[Instruction]:
        """A fetch has finished: the block's bytes are in ``tier``."""
        shelf = self._shelves[tier]
        entry = self._entry(tier, block)
        if entry.state is not _State.INCOMING:
            raise SchedulerError(f"{block} arrived twice in {tier.name}; {self.story(block)}")
        entry.state = _State.READY
        shelf.in_flight -= 1
        self._note(block, f"arrived in {tier.name}")
        if tier == Tier.DEVICE:
            self._let_source_go(block)
        if entry.doomed and not entry.holds:
            self._drop(shelf, block, entry)
        elif tier == Tier.RAM and self._top == Tier.DEVICE:
            pinned = self._upper.entries.get(block)
            if pinned is not None and pinned.pool == "pinned":
                self._emit_fetch(block, Tier.DEVICE, entry, pinned, demand=False)
        return self._advance()

    def failed(self, block: str, tier: Tier, why: str) -> list[Instruction]:
        """A fetch has failed: the block is absent again (it may be asked for once more).

        Nothing is fetched ahead until compute asks again: a dying disk would otherwise be
        hammered with the same request for ever.
        """
        shelf = self._shelves[tier]
        entry = self._entry(tier, block)
        if entry.state is not _State.INCOMING:
            raise SchedulerError(f"{block} failed where it was there; {self.story(block)}")
        self._note(block, f"failed in {tier.name}: {why}")
        shelf.in_flight -= 1
        if tier == Tier.DEVICE:
            self._let_source_go(block)
        for use in self._uses.values():
            if block in use.held and shelf is self._upper:
                use.held.discard(block)
                entry.holds -= 1
        shelf.fill = min(shelf.fill, max(entry.until, 0))
        self._drop(shelf, block, entry)
        self._halted = True
        # An expert on its way up is still queued: whoever acquires it gets the error or asks anew.
        self._queue = [item for item in self._queue if item[1] != block]
        if any(b == block for _, b in self._demand):
            return self._take()  # the unit that waits gets the error: no retry behind its back
        return self._advance()

    # -- decisions ------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        """Everything that can be started now, most urgent first."""
        if self._demand:
            self._serve_demand()
        if self._queue:
            self._serve_experts()
        if not self._halted:
            if self._pin_up:
                self._pin_device()
            # Prefetch would fill the ring that pinned blocks still have to pass through.
            if not self._demand and not self._pin_up and self._trace.uses:
                for tier in reversed(self._tiers):
                    # What is pinned above passes RAM first: a block fetched ahead may wait there
                    # for room above until compute moves on, and compute may wait for a pin.
                    if tier > Tier.RAM or not self._pin_up:
                        self._prefetch(tier)
        return self._take()

    def _serve_demand(self) -> None:
        while self._demand:
            ticket, block = self._demand[0]
            entry = self._upper.entries.get(block)
            if entry is None:
                if not self._bring(block):
                    # In order: later ones must not take the room of the first.
                    if not self.in_flight() and self._start_over(ticket):
                        continue
                    return
                entry = self._upper.entries.get(block)
                if entry is None:
                    return  # on its way to the tier below; goes on when it arrives
            entry.doomed = False
            entry.holds += 1
            self._uses[ticket].held.add(block)
            self._demand.popleft()

    def _serve_experts(self) -> None:
        """Start what can be started, in rank order; what has no slot yet stays queued."""
        left: list[tuple[int, str]] = []
        queue, self._queue = self._queue, []
        for i, (rank, block) in enumerate(queue):
            if block in self._upper.entries:
                continue
            placed = self._bring_expert(block)
            if block in self._upper.entries:
                continue
            left.append((rank, block))
            if not placed:
                left.extend(queue[i + 1 :])
                break
        for item in left:  # the queue may hold evicted experts by now
            insort(self._queue, item)

    def _start_over(self, ticket: int) -> bool:
        """The gaps between a waiting unit's own blocks are too narrow for its last ones: let
        all of them go and fetch them again side by side. Costs a second read, is rare (the
        order of use was disturbed), and needs no more room than the unit's blocks have bytes.
        """
        use = self._uses[ticket]
        moved = [b for b in use.blocks if b in use.held and b in self._upper.ringed]
        if not moved:
            return False
        for block in moved:
            entry = self._upper.ringed[block]
            entry.holds -= 1
            use.held.discard(block)
            if not entry.holds:
                self._drop(self._upper, block, entry)
        self._demand = deque(d for d in self._demand if d[0] != ticket)
        missing = [(ticket, b) for b in use.blocks if b not in use.held]
        self._demand.extendleft(reversed(missing))
        return True

    def _bring(self, block: str) -> bool:
        """Start the next hop of a demanded ring block; False if there is no room for it yet."""
        if self._top == Tier.DEVICE:
            below = self._shelves[Tier.RAM].entries.get(block)
            if below is None:
                return self._place(block, Tier.RAM, demand=True)
            below.doomed = False
            if below.state is not _State.READY:
                return True
        return self._place(block, self._top, demand=True)

    def _place(self, block: str, tier: Tier, *, demand: bool, until: int | None = None) -> bool:
        """Find room in a ring and emit the fetch. On demand, prefetched blocks make room."""
        shelf = self._shelves[tier]
        nbytes = self.plan.blocks[block].slot_nbytes
        offset = shelf.ring.alloc(nbytes)
        while offset is None and demand and self._make_room(shelf):
            offset = shelf.ring.alloc(nbytes)
        if offset is None:
            if demand and not shelf.in_flight and not any(e.holds for e in shelf.ringed.values()):
                raise SchedulerError(
                    f"{block} ({nbytes} bytes) does not fit the empty {tier.name} ring of "
                    f"{shelf.ring.capacity} bytes; {self.story(block)}"
                )
            return False
        if until is None:
            until = self._trace.first_use(self._cursor)
        entry = _Entry("ring", offset, nbytes, until)
        shelf.entries[block] = shelf.ringed[block] = entry
        source = self._shelves[Tier.RAM].entries[block] if tier == Tier.DEVICE else None
        self._emit_fetch(block, tier, source, entry, demand=demand)
        return True

    def _make_room(self, shelf: _Shelf) -> bool:
        """Drop the block that was fetched furthest ahead; False if nothing can go now."""
        worst: str | None = None
        until = -1
        for block, entry in shelf.ringed.items():
            idle = not entry.holds and not entry.doomed and entry.until != _NEVER
            if idle and entry.until >= until:
                worst, until = block, entry.until
        if worst is None:
            return False
        entry = shelf.ringed[worst]
        shelf.fill = min(shelf.fill, max(entry.until, 0))
        if entry.state is _State.READY:
            self._drop(shelf, worst, entry)
            return True
        entry.doomed = True  # its room comes back when the transfer has ended
        return self._make_room(shelf)

    def _bring_expert(self, block: str) -> bool:
        """Start the next hop of an expert; False if no slot can be had now."""
        if self._top == Tier.DEVICE:
            shelf = self._shelves[Tier.RAM]
            below = shelf.entries.get(block)
            if below is None:
                return self._place_expert(block, shelf)
            if below.state is not _State.READY:
                return True
            if below.pool == "slot":
                shelf.cache.touch(block, self.plan.blocks[block].group)
        return self._place_expert(block, self._upper)

    def _place_expert(self, block: str, shelf: _Shelf) -> bool:
        spec = self.plan.blocks[block]
        if not shelf.slots:
            victim = self._victim(shelf, self._wanted.get(block, -1))
            if victim is None:
                return False
            self._drop(shelf, victim, shelf.entries[victim])
            if shelf is self._upper and victim in self._wanted:
                insort(self._queue, (self._wanted[victim], victim))  # its turn comes again
        entry = _Entry("slot", shelf.slots.pop(), spec.slot_nbytes, _NEVER)
        shelf.entries[block] = entry
        shelf.cache.touch(block, spec.group)
        source = self._shelves[Tier.RAM].entries[block] if shelf.tier == Tier.DEVICE else None
        self._emit_fetch(block, shelf.tier, source, entry, demand=True)
        return True

    def _victim(self, shelf: _Shelf, rank: int) -> str | None:
        """What leaves for a wanted expert of this rank: first what this pass does not want,
        then what it wants later than this one (the cache's own order is known only across
        passes; inside one the order of use is known exactly)."""
        entries, wanted = shelf.entries, self._wanted

        def idle(b: str) -> bool:
            e = entries[b]
            return b not in wanted and not e.holds and e.state is _State.READY

        victim = shelf.cache.victim(idle)
        if victim is not None:
            return victim
        latest, latest_rank = None, rank
        for b, r in wanted.items():
            e = entries.get(b)
            if (
                e is not None
                and r > latest_rank
                and e.pool == "slot"
                and not e.holds
                and e.state is _State.READY
            ):
                latest, latest_rank = b, r
        return latest

    def _pin_device(self) -> None:
        """Pass device-pinned blocks through RAM and up, as room in the RAM ring allows."""
        ram = self._shelves[Tier.RAM]
        while self._pin_up:
            block = self._pin_up[0]
            if block not in ram.entries and not self._place(
                block, Tier.RAM, demand=False, until=_NEVER
            ):
                return
            self._pin_up.popleft()

    def _prefetch(self, tier: Tier) -> None:
        """Run the tier's fill pointer ahead of the cursor while there is room."""
        shelf = self._shelves[tier]
        uses = self._trace.uses
        n = len(uses)
        start = self._trace.first_use(self._cursor)
        shelf.fill = max(shelf.fill, start)
        while shelf.fill < start + n:
            block = uses[shelf.fill % n][0]
            if not self._passes_ring(block, tier):
                shelf.fill += 1
                continue
            entry = shelf.entries.get(block)
            if entry is not None:
                entry.until = max(entry.until, shelf.fill)
                entry.doomed = False
                shelf.fill += 1
                continue
            if tier == Tier.DEVICE:
                below = self._shelves[Tier.RAM].entries.get(block)
                if below is None or below.state is not _State.READY:
                    return  # in order: what comes later must not overtake it in the ring
            elif self._top == Tier.DEVICE and block in self._upper.entries:
                shelf.fill += 1  # already above: the device's pointer keeps it
                continue
            if not self._place(block, tier, demand=False, until=shelf.fill):
                return
            shelf.fill += 1

    def _forget_before(self, use: int) -> None:
        """Drop ring blocks that were fetched for uses before ``use`` only."""
        for shelf in self._shelves.values():
            stale = [b for b, e in shelf.ringed.items() if e.until < use and not e.holds]
            for block in stale:
                entry = shelf.ringed[block]
                if entry.state is _State.READY:
                    self._drop(shelf, block, entry)
                else:
                    entry.doomed = True

    # -- bookkeeping ----------------------------------------------------------------------

    def _passes_ring(self, block: str, tier: Tier) -> bool:
        """Whether a use of the block brings it through the ring of ``tier``."""
        return self.plan.homes[block] is Home.STREAMED and not any(
            block in self.plan.tiers[t].pinned for t in self._tiers if t >= tier
        )

    def _let_source_go(self, block: str) -> None:
        """The copy up has ended: its source in RAM is free."""
        ram = self._shelves[Tier.RAM]
        below = self._entry(Tier.RAM, block)
        below.holds -= 1
        if below.pool == "ring" and not below.holds:
            self._drop(ram, block, below)

    def _emit_fetch(
        self, block: str, tier: Tier, source: _Entry | None, entry: _Entry, *, demand: bool
    ) -> None:
        offset = None
        if source is not None:
            if source.state is not _State.READY:
                raise SchedulerError(f"{block} copied up before it arrived; {self.story(block)}")
            source.holds += 1
            offset = source.offset
        self._shelves[tier].in_flight += 1
        self._out.append(Fetch(block, Tier(tier - 1), tier, offset, entry.offset, demand))
        self._note(block, f"fetch to {tier.name}@{entry.offset}{' on demand' if demand else ''}")

    def _drop(self, shelf: _Shelf, block: str, entry: _Entry) -> None:
        if entry.holds:
            raise SchedulerError(f"{block} dropped while held; {self.story(block)}")
        del shelf.entries[block]
        if entry.pool == "ring":
            del shelf.ringed[block]
            shelf.ring.free(entry.offset)
        elif entry.pool == "slot":
            shelf.slots.append(entry.offset)
            shelf.cache.discard(block)
        self._out.append(Drop(block, shelf.tier, entry.offset))
        self._note(block, f"dropped from {shelf.tier.name}")

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _use(self, ticket: int) -> _Use:
        try:
            return self._uses[ticket]
        except KeyError:
            raise SchedulerError(f"ticket {ticket} is not held") from None

    def _entry(self, tier: Tier, block: str) -> _Entry:
        try:
            return self._shelves[tier].entries[block]
        except KeyError:
            raise SchedulerError(f"{block} is not in {tier.name}; {self.story(block)}") from None

    def _note(self, block: str, what: str) -> None:
        self._log.append((block, what))

    def story(self, block: str) -> str:
        """The block's latest transitions, for error messages."""
        moves = [what for b, what in self._log if b == block]
        return f"story of {block}: " + ("; ".join(moves) or "no move lately")

    # -- inspection -----------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """The cycle that prefetch follows now."""
        return self._trace

    def expects(self, unit: str) -> bool:
        """Whether ``unit`` is the step that the trace predicts now."""
        return self._trace.next_position(unit, self._cursor) == self._cursor

    def where(self, block: str, tier: Tier | None = None) -> int | None:
        """The block's offset in a tier (default: where compute reads it) if it is there."""
        entry = self._shelves[self._top if tier is None else tier].entries.get(block)
        return entry.offset if entry is not None and entry.state is _State.READY else None

    def in_flight(self) -> int:
        """Fetches that have neither arrived nor failed."""
        return sum(s.in_flight for s in self._shelves.values())

    def loading(self) -> list[str]:
        """Pinned blocks that have not arrived yet (or whose fetch has failed)."""
        return [
            b
            for t in self._tiers
            for b in self.plan.tiers[t].pinned
            if (e := self._shelves[t].entries.get(b)) is None or e.state is not _State.READY
        ]

    def held(self) -> list[str]:
        """Blocks that a unit or a copy holds; empty when nothing runs."""
        return [b for s in self._shelves.values() for b, e in s.entries.items() if e.holds]

    def validate(self) -> None:
        """Re-derive every invariant. Raises SchedulerError. Linear in the number of entries."""
        for tier, shelf in self._shelves.items():
            layout = self.plan.tiers[tier]
            spans = sorted((e.offset, e.offset + e.nbytes, b) for b, e in shelf.entries.items())
            for (_, end, a), (start, _, b) in pairwise(spans):
                if start < end:
                    raise SchedulerError(
                        f"{a} and {b} overlap in {tier.name}; {self.story(a)}; {self.story(b)}"
                    )
            if spans and spans[-1][1] > layout.nbytes:
                raise SchedulerError(f"{spans[-1][2]} ends beyond the {tier.name} arena")
            slotted = [b for b, e in shelf.entries.items() if e.pool == "slot"]
            if len(slotted) + len(shelf.slots) != layout.slots:
                raise SchedulerError(f"{tier.name} slots leaked")
            if len(shelf.cache) != len(slotted) or any(b not in shelf.cache for b in slotted):
                raise SchedulerError(f"{tier.name} cache and slots disagree")
            ring = {b for b, e in shelf.entries.items() if e.pool == "ring"}
            if ring != shelf.ringed.keys():
                raise SchedulerError(f"{tier.name} ring index disagrees with the entries")
            used = sum(e.nbytes for e in shelf.ringed.values())
            if used != shelf.ring.used:
                raise SchedulerError(f"{tier.name} ring holds {shelf.ring.used}, entries {used}")
            # A device-pinned entry is INCOMING from the start, in flight only once it passes RAM.
            waiting = sum(e.state is _State.INCOMING for e in shelf.entries.values())
            if shelf.in_flight > waiting:
                raise SchedulerError(f"{tier.name}: {shelf.in_flight} in flight, {waiting} waiting")
            for b, e in shelf.entries.items():
                if e.holds < 0:
                    raise SchedulerError(f"{b} has {e.holds} holds; {self.story(b)}")
                if e.pool == "slot" and self.plan.blocks[b].kind is not BlockKind.EXPERT:
                    raise SchedulerError(f"{b} is not an expert but has a slot")
