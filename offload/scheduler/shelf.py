"""What lies where: the entries of each tier, their room, and the instructions that change them.

A *shelf* is one tier. It holds blocks in three pools: pinned ones at offsets the plan has chosen,
ring blocks that stream through, and experts in equal slots. The *stock* is all shelves together
with the instructions that have not been handed out yet and the story of what happened. Nothing is
decided here: ``streaming`` and ``routing`` decide, this module carries out and keeps the books.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from offload.blocks import BlockKind, Tier
from offload.errors import SchedulerError
from offload.scheduler.plan import Plan
from offload.scheduler.policies import make_policy
from offload.scheduler.ring import Ring

NEVER = sys.maxsize
"""``until`` of entries that no step makes stale: pinned blocks, slots, blocks passing through."""

_STORY = 4096
"""Transitions remembered, of all blocks together: one log for each would not scale to 100,000."""


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


def _words(detail: object) -> object:
    if isinstance(detail, Tier):
        return detail.name
    return f"{detail[0].name}@{detail[1]}" if isinstance(detail, tuple) else detail


class Pool(enum.Enum):
    """How an entry's room was found, and how it is given back."""

    PINNED = "pinned"
    RING = "ring"
    SLOT = "slot"


class Entry:
    """A block in one tier."""

    __slots__ = ("doomed", "holds", "nbytes", "offset", "pool", "ready", "until")

    def __init__(self, pool: Pool, offset: int, nbytes: int, until: int) -> None:
        self.pool = pool
        self.offset = offset
        self.nbytes = nbytes
        self.ready = False  # False while its fetch is in flight
        self.holds = 0  # units, experts' users and copies up that need the bytes to stay
        self.until = until  # ring: the absolute use it was last fetched or kept for
        self.doomed = False  # drop on arrival: cannot be cancelled in flight

    @property
    def state(self) -> str:
        """For stories."""
        return "ready" if self.ready else "incoming"


class Shelf:
    """One tier: its entries and where free room is."""

    __slots__ = ("cache", "entries", "in_flight", "layout", "pinned", "ring", "ringed", "slots",
                 "source", "tier")  # fmt: skip

    def __init__(self, tier: Tier, plan: Plan) -> None:
        layout = plan.tiers[tier]
        self.tier = tier
        self.source = Tier(tier - 1)
        self.layout = layout
        self.pinned = layout.pinned
        self.entries: dict[str, Entry] = {}
        self.ringed: dict[str, Entry] = {}  # the few of them in the ring: scanned at each step
        self.in_flight = 0
        self.ring = Ring(layout.ring_base, layout.ring_bytes)
        # Lowest address first: a pool that is not full yet touches no more memory than it needs.
        self.slots = [layout.slot_base + i * layout.slot_bytes for i in range(layout.slots)][::-1]
        self.cache = make_policy(plan.expert_policy, plan.groups, plan.kept.get(tier, ()))


class Stock:
    """All shelves, the instructions not handed out yet, and the story."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tiers = [
            t for t in (Tier.RAM, Tier.DEVICE) if t in plan.tiers and t <= plan.compute_tier
        ]
        self.shelves = {t: Shelf(t, plan) for t in self.tiers}
        self.ram = self.shelves[Tier.RAM]
        self.top = self.shelves[plan.compute_tier]
        self.stacked = self.top is not self.ram  # two tiers: everything passes RAM on its way
        self.held = False
        """Compute uses experts in their slots without asking: those that are there stay."""
        self._out: list[Instruction] = []
        # Formatted only when a story is told: most transitions are never read.
        self._log: deque[tuple[str, str, object]] = deque(maxlen=_STORY)

    # -- moves ----------------------------------------------------------------------------

    def fetch(
        self, block: str, shelf: Shelf, pool: Pool, offset: int, until: int, *, demand: bool
    ) -> None:
        """Enter a block on a shelf at a free offset and ask for its bytes from the tier below."""
        source: int | None = None
        if shelf is not self.ram:
            below = self.entry(Tier.RAM, block)
            if not below.ready:
                raise SchedulerError(f"{block} copied up before it arrived; {self.story(block)}")
            below.holds += 1
            source = below.offset
        entry = Entry(pool, offset, self.plan.blocks[block].slot_nbytes, until)
        shelf.entries[block] = entry
        if pool is Pool.RING:
            shelf.ringed[block] = entry
        shelf.in_flight += 1
        tier = shelf.tier
        self._out.append(Fetch(block, shelf.source, tier, source, offset, demand))
        self.note(
            block, "fetched on demand to {}" if demand else "fetched ahead to {}", (tier, offset)
        )

    def land(self, block: str, tier: Tier) -> Entry:
        """A fetch has ended: what it read in the tier below is free. The caller says how."""
        entry = self.entry(tier, block)
        if entry.ready:
            raise SchedulerError(
                f"a fetch of {block} to {tier.name} ended, but none is in flight; "
                f"{self.story(block)}"
            )
        self.shelves[tier].in_flight -= 1
        if tier != Tier.RAM:
            below = self.entry(Tier.RAM, block)
            below.holds -= 1
            if below.pool is Pool.RING and not below.holds:
                self.drop(self.ram, block, below)
        return entry

    def drop(self, shelf: Shelf, block: str, entry: Entry) -> None:
        """Void a block's bytes and give its room back."""
        if entry.holds:
            raise SchedulerError(f"{block} dropped while held; {self.story(block)}")
        if self.held and entry.pool is Pool.SLOT and entry.ready and not entry.doomed:
            raise SchedulerError(f"{block} dropped while all are held; {self.story(block)}")
        del shelf.entries[block]
        if entry.pool is Pool.RING:
            del shelf.ringed[block]
            shelf.ring.free(entry.offset)
        elif entry.pool is Pool.SLOT:
            shelf.slots.append(entry.offset)
            shelf.cache.discard(block)
        self._out.append(Drop(block, shelf.tier, entry.offset))
        self.note(block, "dropped from {}", shelf.tier)

    def take(self) -> list[Instruction]:
        """The instructions since the last call."""
        out, self._out = self._out, []
        return out

    # -- books ----------------------------------------------------------------------------

    def entry(self, tier: Tier, block: str) -> Entry:
        """The block's entry in a tier. Raises SchedulerError if it is not there."""
        try:
            return self.shelves[tier].entries[block]
        except KeyError:
            raise SchedulerError(f"{block} is not in {tier.name}; {self.story(block)}") from None

    def note(self, block: str, what: str, detail: object = None) -> None:
        """Remember a transition; ``{}`` in ``what`` stands for ``detail``."""
        self._log.append((block, what, detail))

    def story(self, block: str) -> str:
        """The block's latest transitions, for error messages."""
        moves = [what.format(_words(detail)) for b, what, detail in self._log if b == block]
        return f"story of {block}: " + ("; ".join(moves) or "no move lately")

    def validate(self) -> None:
        """Re-derive every invariant. Raises SchedulerError. Linear in the number of entries."""
        for shelf in self.shelves.values():
            self._validate_room(shelf)
            self._validate_index(shelf)

    def _validate_room(self, shelf: Shelf) -> None:
        layout, tier = shelf.layout, shelf.tier.name
        spans = sorted((e.offset, e.offset + e.nbytes, b) for b, e in shelf.entries.items())
        for (_, end, a), (start, _, b) in pairwise(spans):
            if start < end:
                raise SchedulerError(
                    f"{a} and {b} overlap in {tier}; {self.story(a)}; {self.story(b)}"
                )
        ring_end = layout.ring_base + layout.ring_bytes
        for start, end, b in spans:
            entry = shelf.entries[b]
            if entry.pool is Pool.RING:
                good = layout.ring_base <= start and end <= ring_end
            elif entry.pool is Pool.SLOT:
                i, odd = divmod(start - layout.slot_base, layout.slot_bytes)
                good = not odd and 0 <= i < layout.slots and end - start <= layout.slot_bytes
            else:
                good = layout.pinned.get(b) == start and end <= layout.nbytes
            if not good:
                raise SchedulerError(
                    f"{b} at [{start}, {end}) is outside the {entry.pool.value} room of {tier}"
                )
        for b, e in shelf.entries.items():
            if e.holds < 0:
                raise SchedulerError(f"{b} has {e.holds} holds; {self.story(b)}")
            if e.pool is Pool.SLOT and self.plan.blocks[b].kind is not BlockKind.EXPERT:
                raise SchedulerError(f"{b} is not an expert but has a slot")

    def _validate_index(self, shelf: Shelf) -> None:
        tier = shelf.tier.name
        slotted = [b for b, e in shelf.entries.items() if e.pool is Pool.SLOT]
        if len(slotted) + len(shelf.slots) != shelf.layout.slots:
            raise SchedulerError(f"{tier} slots leaked")
        if len(shelf.cache) != len(slotted) or any(b not in shelf.cache for b in slotted):
            raise SchedulerError(f"{tier} cache and slots disagree")
        ringed = {b for b, e in shelf.entries.items() if e.pool is Pool.RING}
        if ringed != shelf.ringed.keys():
            raise SchedulerError(f"{tier} ring index disagrees with the entries")
        used = sum(e.nbytes for e in shelf.ringed.values())
        if used != shelf.ring.used:
            raise SchedulerError(f"{tier} ring holds {shelf.ring.used}, entries {used}")
        waiting = sum(not e.ready for e in shelf.entries.values())
        if shelf.in_flight != waiting:
            raise SchedulerError(f"{tier}: {shelf.in_flight} in flight, {waiting} incoming")
