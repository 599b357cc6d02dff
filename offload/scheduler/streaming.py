"""Weights that stream through the rings: who waits, what goes ahead, what has become stale.

Uses follow a cyclic trace. In each tier a fill pointer walks ahead of the cursor and fetches as
far as there is room; a block is dropped after its last use before the window (in a cyclic trace
the block just used is the one needed last, so any recency policy would keep exactly the wrong
ones). What compute waits for goes before what is fetched ahead and displaces the blocks whose use
is furthest away.

Where a block goes and what makes way for it is decided in ``room``. When the order is disturbed,
a unit can get stuck all the same, between its own blocks or those of another: see ``_unlock``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.plan import Home, Plan
from offload.scheduler.room import Rings
from offload.scheduler.shelf import NEVER, Entry, Pool, Shelf, Stock
from offload.scheduler.trace import Trace


class _Use:
    """One run of a unit: what it needs, what it holds, what it still lacks (in order)."""

    __slots__ = ("blocks", "held", "lacks", "packed", "position", "unit")

    def __init__(self, unit: str, blocks: tuple[str, ...], position: int | None) -> None:
        self.unit = unit
        self.blocks = blocks
        self.position = position
        self.held: dict[str, Entry] = {}
        self.lacks: list[str] = []
        self.packed = False  # started over: goes to the first gaps, as was reckoned then


class Streams:
    """Decides over pinned and streamed blocks. Works on a ``Stock``; knows nothing of experts."""

    def __init__(self, stock: Stock, plan: Plan) -> None:
        self.trace = plan.trace
        self.cursor = 0  # absolute step position that runs now or next
        self.halted = False  # after a failure nothing is fetched ahead until compute asks
        self._suspended = False  # others fill the ring where compute runs
        self._stock = stock
        self._top = stock.top
        self._ram = stock.ram
        self._blocks = plan.blocks
        self._uses: dict[int, _Use] = {}
        self._tickets = 0
        self._waiting: list[_Use] = []  # that lack blocks, first come first
        self._pins: deque[str] = deque()  # device-pinned blocks that still have to pass RAM
        self._pins_wanted: deque[str] = deque()  # those of them that compute waits for
        self._rings = Rings(stock, plan)
        # Blocks that compute may leave in RAM (``Plan.sites``), the units that have some, and
        # whether the pass that runs now leaves them there.
        self._apart = plan.sites.blocks if plan.sites is not None else frozenset[str]()
        self._sharing = {
            step.unit for step in plan.trace if not self._apart.isdisjoint(step.blocks)
        }
        self._left_below = False
        self._streamed = {
            t: {
                b
                for b, home in plan.homes.items()
                if home is Home.STREAMED
                and not any(b in plan.tiers[above].pinned for above in stock.tiers if above >= t)
            }
            for t in stock.tiers
        }

    # -- events ---------------------------------------------------------------------------

    def start(self) -> None:
        """Fetch what is pinned."""
        ring = self._ram.ring
        for tier in self._stock.tiers:
            shelf = self._stock.shelves[tier]
            for block, offset in shelf.pinned.items():
                if shelf is self._ram:
                    if block not in shelf.entries:
                        self._stock.fetch(block, shelf, Pool.PINNED, offset, NEVER, demand=False)
                elif block in self._ram.pinned or self._nbytes(block) <= ring.capacity:
                    self._pins.append(block)
                else:
                    raise SchedulerError(
                        f"{block} ({self._nbytes(block)} bytes) is pinned in {tier.name} but "
                        f"cannot pass the RAM ring of {ring.capacity} bytes"
                    )

    def need(self, unit: str, blocks: Sequence[str]) -> int:
        """Hold a unit's blocks, or queue for them; returns its ticket."""
        blocks = tuple(dict.fromkeys(blocks))
        self._check_fits(unit, blocks)
        position = self.trace.next_position(unit, self.cursor)
        if position is not None:
            self.cursor = position
        self.halted = False
        if unit in self._sharing:
            self._follow(blocks)
        now = self.trace.first_use(self.cursor)
        use = _Use(unit, blocks, position)
        self._tickets += 1
        self._uses[self._tickets] = use
        for block in blocks:
            if self._hold(use, block):
                self._stock.note(block, "held by {}", unit)
                continue
            use.lacks.append(block)
            if (below := self._ram.entries.get(block)) is not None:
                below.until = max(below.until, now)
        if use.lacks:
            self._waiting.append(use)
        self._forget()
        return self._tickets

    def missing(self, ticket: int) -> list[str]:
        """The ticket's blocks that have not arrived."""
        held = self._use(ticket).held
        return [b for b in self._use(ticket).blocks if b not in held or not held[b].ready]

    def running(self) -> dict[str, int]:
        """Units that lack nothing, with the bytes that they keep of where compute reads."""
        return {
            use.unit: sum(e.nbytes for b, e in use.held.items() if b in self._top.ringed)
            for use in self._uses.values()
            if use not in self._waiting and all(e.ready for e in use.held.values())
        }

    def done(self, ticket: int) -> None:
        """The unit has run, or gave up waiting."""
        use = self._use(ticket)
        del self._uses[ticket]
        if use in self._waiting:
            self._waiting.remove(use)
        ran = len(use.held) == len(use.blocks) and all(e.ready for e in use.held.values())
        for block, entry in use.held.items():
            entry.holds -= 1
            self._stock.note(block, "let go")
        if ran and use.position == self.cursor:
            self.cursor += 1
        self._forget()

    def failed(self, block: str, shelf: Shelf, entry: Entry) -> None:
        """A fetch has failed, and with it every unit that waits for the block: no retry behind
        their backs. What they hold stays theirs until they give up."""
        for use in self._uses.values():
            lost = block in use.lacks
            if shelf is self._top and use.held.pop(block, None) is not None:
                entry.holds -= 1
                lost = True
            if lost and use in self._waiting:
                self._waiting.remove(use)
                use.lacks.clear()
        self._rings.rewind(shelf, entry)
        self.halted = True

    def retrace(self, trace: Trace) -> None:
        """Follow another cycle from its first step on."""
        self.trace = trace
        self.cursor = 0
        for use in self._uses.values():
            use.position = None  # of the cycle that was
        first: dict[str, int] = {}
        for i, (block, _) in enumerate(trace.uses):
            first.setdefault(block, i)
        for tier, shelf in self._stock.shelves.items():
            self._rings.fill[tier] = 0
            for block, entry in shelf.ringed.items():
                if entry.until != NEVER:
                    entry.until = first.get(block, -1)
        self._forget()

    def suspend(self) -> None:
        """See ``Residency``."""
        if self._uses or self._top.in_flight or self._ram.in_flight:
            raise SchedulerError("the ring is left to others while it is in use")
        for block, entry in list(self._top.ringed.items()):
            self._stock.drop(self._top, block, entry)
        self._suspended = True

    def resume(self, unit: str, held: Iterable[tuple[str, int]] | None) -> int:
        """See ``Residency``."""
        self._suspended = False
        position = self.trace.next_position(unit, self.cursor)
        if position is not None:
            self.cursor = position
        self._rings.fill[self._top.tier] = 0
        if held is None:
            return 0
        places, now = dict(held), self.trace.first_use(self.cursor)
        use = _Use(unit, tuple(places), position)
        for block, offset in places.items():
            use.held[block] = self._rings.found(block, self._top, offset, now)
        self._tickets += 1
        self._uses[self._tickets] = use
        return self._tickets

    def pin(self, block: str) -> None:
        """Compute waits for a device-pinned block that is not on its way (yet, or any more)."""
        if block not in self._ram.entries and block not in self._pins_wanted:
            self._pins_wanted.append(block)

    # -- progress -------------------------------------------------------------------------

    @property
    def uses(self) -> int:
        """Units that run or wait."""
        return len(self._uses)

    @property
    def waiting(self) -> bool:
        """Whether a unit lacks blocks."""
        return bool(self._waiting)

    def lacks(self, block: str) -> bool:
        """Whether a unit waits for the block."""
        return any(block in use.lacks for use in self._waiting)

    def serve(self) -> None:
        """Bring what units wait for, first come first served."""
        fetching = self._pass_pins(self._pins_wanted, (), demand=True)
        while self._waiting and self._serve_in_order(fetching):
            pass

    def run_ahead(self) -> None:
        """Load what is pinned, then fetch ahead of the cursor."""
        if self.halted or self._suspended or self._pins_wanted:
            return
        if self._pins:
            lacked = {b for use in self._waiting for b in use.lacks}
            if not self._pass_pins(self._pins, lacked, demand=False):
                return
        if not self.trace.uses:
            return
        if not self._waiting:
            for tier in reversed(self._stock.tiers):
                self._prefetch(self._stock.shelves[tier])
        elif self._stock.stacked and all(
            b in self._ram.entries or b in self._top.entries
            for use in self._waiting
            for b in use.lacks
        ):
            self._prefetch(self._ram)  # all that is waited for is in RAM: the disk is free

    def lift_pinned(self, block: str, *, demand: bool) -> None:
        """A block has arrived in RAM: if its home is the device, it goes on."""
        if (offset := self._top.pinned.get(block)) is not None and block not in self._top.entries:
            self._stock.fetch(block, self._top, Pool.PINNED, offset, NEVER, demand=demand)

    # -- demand ---------------------------------------------------------------------------

    def _serve_in_order(self, fetching: bool) -> bool:
        """One round over who waits. True if another round may get further."""
        lifting = True  # as ``fetching``: what comes later must not take the room of the first
        ahead: set[str] = set()
        for use in tuple(self._waiting):
            while lifting and use.lacks:
                if not self._hold(use, use.lacks[0]) and not self._lift(use, use.lacks[0]):
                    lifting = False
                    break
                use.lacks.pop(0)
            if not use.lacks:
                self._waiting.remove(use)
                continue
            if not self._stock.stacked:
                break
            for block in use.lacks:
                if (below := self._ram.entries.get(block)) is not None:
                    below.doomed = False
                elif fetching and block not in self._top.entries:
                    fetching = self._place(block, self._ram, kept=ahead)
                ahead.add(block)
        return bool(self._waiting) and self._unlock(self._waiting[0])

    def _hold(self, use: _Use, block: str) -> bool:
        entry = self._top.entries.get(block)
        if entry is None:
            return False
        entry.doomed = False
        entry.holds += 1
        use.held[block] = entry
        return True

    def _lift(self, use: _Use, block: str) -> bool:
        """Fetch a lacked block into the compute tier and hold it, if it can be now."""
        if self._stock.stacked:
            below = self._ram.entries.get(block)
            if below is None or not below.ready:
                return False
        return self._place(block, self._top, use=use) and self._hold(use, block)

    def _unlock(self, use: _Use) -> bool:
        """The first of those who wait may be stuck: no room, and none on its way. True if
        something was let go for it.

        First those behind it let go: two that wait, each holding what the other needs, would do
        so for ever. Then, if only the gaps between its own blocks are too narrow, it starts over.
        That costs a second read and needs no more room than its blocks have bytes. Units that
        run are waited for.
        """
        ringed = self._top.ringed
        below = self._ram.entries.get(use.lacks[0])
        if self._stock.stacked and (below is None or not below.ready):
            return False
        if any(e.doomed for e in ringed.values()):
            return False
        behind = [u for u in self._waiting[1:] if any(b in ringed for b in u.held)]
        for other in behind:
            self._let_go(other, [b for b in other.held if b in ringed])
        if behind:
            return True
        own = [b for b, e in use.held.items() if b in ringed and e.holds == 1]
        if not own or not all(ringed[b].ready for b in own):
            return False
        others = [(e.offset, e.nbytes) for b, e in ringed.items() if b not in own]
        again = [b for b in use.blocks if b in own or b in use.lacks]
        sizes = [self._nbytes(b) for b in again if b not in self._top.pinned]
        if not self._top.ring.packs(others, sizes):
            return False
        self._let_go(use, own)
        for block in own:
            self._stock.drop(self._top, block, ringed[block])
        use.packed = True
        return True

    def _let_go(self, use: _Use, blocks: Collection[str]) -> None:
        for block in blocks:
            use.held.pop(block).holds -= 1
        use.lacks = [b for b in use.blocks if b not in use.held]

    def _place(
        self,
        block: str,
        shelf: Shelf,
        *,
        kept: Collection[str] = (),
        use: _Use | None = None,
        demand: bool = True,
    ) -> bool:
        """Fetch a block that is waited for, displacing what is not. False if it must wait."""
        offset = shelf.pinned.get(block)
        if offset is not None:
            self._stock.fetch(block, shelf, Pool.PINNED, offset, NEVER, demand=demand)
            return True
        nbytes = self._nbytes(block)
        packed = use is not None and use.packed
        step = use.blocks if use is not None and not packed else ()
        while (offset := self._rings.offset(block, shelf, step, first_fit=packed)) is None:
            if not self._rings.make_room(shelf, nbytes, kept):
                # Others run here and stay. Any gap will do: if it is the wrong one, _unlock helps.
                offset = self._rings.offset(block, shelf)
                break
        if offset is None:
            return False
        until = NEVER if block in self._top.pinned else self.trace.first_use(self.cursor)
        self._rings.enter(block, shelf, offset, until, demand=demand)
        return True

    def _check_fits(self, unit: str, blocks: Sequence[str]) -> None:
        """Refuse what could only wait for ever."""
        total = 0
        for block in blocks:
            if block not in self._blocks:
                raise SchedulerError(f"{unit} needs {block}, which the plan does not know")
            if block in self._top.pinned:
                continue
            nbytes = self._nbytes(block)
            total += nbytes
            passes = self._stock.stacked and block not in self._ram.pinned
            if passes and nbytes > self._ram.ring.capacity and block not in self._ram.entries:
                raise SchedulerError(
                    f"{block} ({nbytes} bytes) of {unit} cannot pass the RAM ring of "
                    f"{self._ram.ring.capacity} bytes"
                )
        if total > self._top.ring.capacity:
            raise SchedulerError(
                f"{unit} needs {total} bytes at once, more than the {self._top.tier.name} ring of "
                f"{self._top.ring.capacity} bytes"
            )

    # -- ahead ----------------------------------------------------------------------------

    def _pass_pins(self, pins: deque[str], kept: Collection[str], *, demand: bool) -> bool:
        """Pass device-pinned blocks through RAM, as its ring allows. True if all are on their
        way: until then nothing else is fetched that might stay in their room."""
        while pins:
            block = pins[0]
            there = block in self._ram.entries or block in self._top.entries
            if not there and not self._place(block, self._ram, kept=kept, demand=demand):
                return False
            pins.popleft()
        return True

    def _prefetch(self, shelf: Shelf, *, only_keep: bool = False) -> None:
        """Run the tier's fill pointer ahead of the cursor while there is room (or, ``only_keep``,
        while it meets nothing that would have to be fetched)."""
        uses, steps, streamed = self.trace.uses, self.trace.steps, self._streamed[shelf.tier]
        upper = self._top if shelf is not self._top else None
        n = len(uses)
        start = self.trace.first_use(self.cursor)
        fill = max(self._rings.fill[shelf.tier], start)
        while fill < start + n:
            block, step = uses[fill % n]
            if block in streamed and not (upper is None and self._stays(block)):
                entry = shelf.entries.get(block)
                if entry is not None:
                    entry.until = max(entry.until, fill)
                    entry.doomed = False
                elif only_keep:
                    break
                elif upper is None or block not in upper.entries:
                    # In order: what comes later must not overtake it.
                    if upper is None and self._stock.stacked and not self._is_below(block, fill):
                        break
                    blocks = steps[step].blocks if upper is None else ()
                    if not self._rings.place_ahead(block, shelf, blocks, fill):
                        break
            fill += 1
        self._rings.fill[shelf.tier] = fill

    def _follow(self, blocks: Sequence[str]) -> None:
        """A unit asks for the blocks that may stay below, or for none of them: so will the next."""
        below = self._apart.isdisjoint(blocks)
        if self._left_below and not below:
            self._rings.fill[self._top.tier] = 0  # back to what was passed over
        self._left_below = below

    def _stays(self, block: str) -> bool:
        """Whether compute does not want the block up in the pass that runs now."""
        return self._left_below and block in self._apart

    def _is_below(self, block: str, fill: int) -> bool:
        """Whether the compute tier can fetch the block from RAM now. If it has left RAM (it was
        above when RAM's pointer came by), that pointer goes back for it."""
        below = self._ram.entries.get(block)
        if below is None:
            self._rings.fill[Tier.RAM] = min(self._rings.fill[Tier.RAM], fill)
        return below is not None and below.ready

    # -- common ---------------------------------------------------------------------------

    def _forget(self) -> None:
        """Drop ring blocks that were fetched for uses before the cursor only."""
        now = self.trace.first_use(self.cursor)
        for shelf in self._stock.shelves.values():
            # The window has moved on. If all of it is here, what was used is its new end: a ring
            # that holds the whole cycle never reads again.
            self._prefetch(shelf, only_keep=True)
            stale = [b for b, e in shelf.ringed.items() if e.until < now and not e.holds]
            for block in stale:
                if self._waiting and self.lacks(block):
                    continue
                entry = shelf.ringed[block]
                if entry.ready:
                    self._stock.drop(shelf, block, entry)
                else:
                    entry.doomed = True

    def _nbytes(self, block: str) -> int:
        return self._blocks[block].slot_nbytes

    def _use(self, ticket: int) -> _Use:
        try:
            return self._uses[ticket]
        except KeyError:
            raise SchedulerError(f"ticket {ticket} is not held") from None
