"""Room in the rings: where a block can go, and which blocks make way.

Room is contiguous, so a step could lock itself out by the gaps between its own blocks. A block
therefore goes only to where the rest of its step still finds room beside it: then a ring as small
as the largest step is enough, and in trace order nothing is ever read twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from offload.scheduler.plan import Plan
from offload.scheduler.shelf import NEVER, Entry, Pool, Shelf, Stock


class Rings:
    """Places blocks in the rings of a ``Stock`` and keeps the prefetch pointers."""

    def __init__(self, stock: Stock, plan: Plan) -> None:
        self.fill = dict.fromkeys(stock.tiers, 0)
        """By tier: the absolute use up to which everything is there or on its way."""
        self._stock = stock
        self._blocks = plan.blocks

    def offset(
        self,
        block: str,
        shelf: Shelf,
        step: Sequence[str] = (),
        *,
        first_fit: bool = False,
    ) -> int | None:
        """Where in the ring a block can go so that what its step still lacks would find room
        beside it. Without ``step``: wherever there is room."""
        ring = shelf.ring
        nbytes = self._blocks[block].slot_nbytes
        if nbytes > ring.capacity - ring.used:
            return None
        gaps = ring.gaps(nbytes)
        if not gaps or not step:
            return gaps[-1 if first_fit else 0] if gaps else None
        there = [(e.offset, e.nbytes) for b in step if (e := shelf.ringed.get(b)) is not None]
        lacks = [
            self._blocks[b].slot_nbytes
            for b in dict.fromkeys(step)
            if b != block and b not in shelf.ringed and b not in shelf.pinned
        ]
        for offset in gaps:
            if not lacks or ring.packs([*there, (offset, nbytes)], lacks):
                return offset
        return None

    def enter(self, block: str, shelf: Shelf, offset: int, until: int, *, demand: bool) -> None:
        """Fetch a block to an offset that ``offset`` has just returned."""
        shelf.ring.take(offset, self._blocks[block].slot_nbytes)
        self._stock.fetch(block, shelf, Pool.RING, offset, until, demand=demand)

    def found(self, block: str, shelf: Shelf, offset: int, until: int) -> Entry:
        """Enter a block that is there, and that a unit holds, at its offset in the ring."""
        nbytes = self._blocks[block].slot_nbytes
        shelf.ring.take(offset, nbytes)
        entry = Entry(Pool.RING, offset, nbytes, until)
        entry.ready, entry.holds = True, 1
        shelf.entries[block] = shelf.ringed[block] = entry
        self._stock.note(block, "found at {}", (shelf.tier, offset))
        return entry

    def rewind(self, shelf: Shelf, entry: Entry) -> None:
        """The prefetch pointer goes back to the use an entry was there for."""
        self.fill[shelf.tier] = min(self.fill[shelf.tier], max(entry.until, 0))

    def make_room(self, shelf: Shelf, nbytes: int, kept: Collection[str]) -> bool:
        """Drop the block whose use is furthest away; False if nothing can go now.

        What is in flight cannot be dropped: it is doomed instead, no more of it than needed, and
        its room comes back when the transfer has ended.
        """
        idle = [
            (e.until, b)
            for b, e in shelf.ringed.items()
            if not e.holds and not e.doomed and e.until != NEVER and b not in kept
        ]
        ready = [item for item in idle if shelf.ringed[item[1]].ready]
        if ready:
            block = max(ready)[1]
            entry = shelf.ringed[block]
            self.rewind(shelf, entry)
            self._stock.drop(shelf, block, entry)
            return True
        coming = sum(e.nbytes for e in shelf.ringed.values() if e.doomed)
        for _, block in sorted(idle, reverse=True):
            if coming >= nbytes:
                break
            entry = shelf.ringed[block]
            entry.doomed = True
            self.rewind(shelf, entry)
            coming += entry.nbytes
        return False

    def place_ahead(self, block: str, shelf: Shelf, step: Sequence[str], fill: int) -> bool:
        """Fetch a block for use ``fill``, displacing only what is for later uses (there is such
        only after the order was disturbed)."""
        while (offset := self.offset(block, shelf, step)) is None:
            later = [
                (e.until, b)
                for b, e in shelf.ringed.items()
                if fill < e.until != NEVER and e.ready and not e.holds
            ]
            if not later:
                return False
            worst = max(later)[1]
            self._stock.drop(shelf, worst, shelf.ringed[worst])
        self.enter(block, shelf, offset, fill, demand=False)
        return True
