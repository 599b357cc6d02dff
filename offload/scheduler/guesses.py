"""Experts fetched on a guess, into disk time that nothing else can use.

Between the last expert of a MoE layer and the routing of the next one the disk has nothing to do:
what it will be asked for is not known yet. The next layer's gate, applied to this layer's input
(the *stale gate* of Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with
Offloading", section 3.2), names three in four of its experts right; its first choices nine in ten.

The rules keep a wrong guess cheap: nothing is read while compute waits for anything or the disk
has more than the last of its requests to do; only into slots kept free for it, never a live
expert's; and a guess that the next routing does not confirm makes way at once. What a routing
confirms counts as a miss, because it was read for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from offload.scheduler.plan import Home, Plan
from offload.scheduler.shelf import NEVER, Pool, Stock

MOST_SPARE = 4
"""Slots kept free for guesses: as many as a disk reads while a layer's attention runs."""

SPARE_SHARE = 16
"""One slot in so many at most, where slots bring hits."""

LOW_WATER = 4
"""Guesses start while fewer fetches than this are in flight: the last ones that compute waits for
are on their way, and the disk's queue does not run dry before the guess is in it."""


def guess_count(top_k: int) -> int:
    """How many experts to guess for a layer that uses about ``top_k``: the best three quarters.
    The gate's first choices hold far more often than its last, and those that hold are often in
    memory already: what is left to read has the lower ranks."""
    return max(1, 3 * top_k // 4)


def spare_slots(slots: int, top_k: Mapping[str, int]) -> int:
    """How many of a pool's slots are kept free for guesses; ``top_k`` by layer."""
    spare = slots // SPARE_SHARE
    if slots < sum(top_k.values()):
        # Less than one token's experts: hardly any is there when it comes round again, and all
        # that a layer does not need at once is of more use for guesses.
        spare = max(spare, min(slots // 3, slots - max(top_k.values()) - 1))
    return max(0, min(MOST_SPARE, spare))


class Guesses:
    """Decides over fetches on a guess. The compute tier must read from disk itself."""

    def __init__(self, stock: Stock, plan: Plan) -> None:
        self.read = 0
        """Experts fetched on a guess."""
        self.right = 0
        """Those of them that the next routing asked for."""
        self._stock = stock
        self._shelf = stock.top
        self._blocks = plan.blocks
        self._homes = plan.homes
        usable = plan.guesses and not stock.stacked
        self._spare = spare_slots(self._shelf.layout.slots, plan.top_k) if usable else 0
        self._next: deque[str] = deque()  # not begun, best first
        self._open: dict[str, None] = {}  # begun, and not asked for yet

    @property
    def waiting(self) -> bool:
        """Whether a guess has not begun yet."""
        return bool(self._next)

    def offer(self, experts: Sequence[str], wanted: Collection[str]) -> None:
        """The next layer may use ``experts``, the likeliest first. ``wanted``: what the running
        layer uses, which stays whatever happens."""
        if not self._spare:
            return
        shelf, homes = self._shelf, self._homes
        absent = [b for b in experts if b not in shelf.entries and homes.get(b) is Home.CACHED]
        self._next = deque(dict.fromkeys(absent[: self._spare]))

        def idle(b: str) -> bool:
            e = shelf.entries[b]
            return not e.holds and e.ready and b not in wanted and b not in self._open

        # The slots that demands have taken since the last guess: what the cache would hold one
        # miss later makes way now.
        while len(shelf.slots) < len(self._next):
            victim = shelf.cache.victim(idle)
            if victim is None:
                break
            self._stock.drop(shelf, victim, shelf.entries[victim])

    def settle(self, wanted: Collection[str]) -> set[str]:
        """A layer has been routed: returns the guesses it confirms, lets the others go."""
        self._next.clear()
        confirmed: set[str] = set()
        entries = self._shelf.entries
        for block in self._open:
            entry = entries.get(block)
            if entry is None:
                continue
            if block in wanted:
                confirmed.add(block)
            elif not entry.ready:
                entry.doomed = True
            elif not entry.holds:
                self._stock.drop(self._shelf, block, entry)
        self._open.clear()
        self.right += len(confirmed)
        return confirmed

    def serve(self) -> None:
        """Begin what the disk has time for."""
        shelf = self._shelf
        while self._next and shelf.slots and shelf.in_flight < LOW_WATER:
            block = self._next.popleft()
            if block in shelf.entries:
                continue
            self._stock.fetch(block, shelf, Pool.SLOT, shelf.slots.pop(), NEVER, demand=False)
            shelf.cache.touch(block, self._blocks[block].group)
            self._open[block] = None
            self.read += 1

    def failed(self, block: str) -> None:
        """A fetch has failed: whoever needs the block asks for it."""
        self._open.pop(block, None)
