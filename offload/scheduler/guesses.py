"""Experts fetched on a guess, into disk time that nothing else can use.

Between the last expert of a MoE layer and the routing of the next one the disk has nothing to do:
what it will be asked for is not known yet. The next layer's gate, applied to this layer's input
(the *stale gate* of Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with
Offloading", section 3.2), names three in four of its experts right; its first choices nine in ten.
How often each rank holds differs between models and layers, so it is counted, at no cost: a gate's
choices are compared with the routing whether they were read or not.

The rules keep a wrong guess cheap: nothing is read while compute waits for anything or the disk
has more than the last of its requests to do; only into slots kept free for it, never a live
expert's; and a guess that its layer's routing does not confirm makes way at once. What a routing
confirms counts as a miss, because it was read for it.

Where that leaves the disk without work still, the layer after the next one is guessed, too, from
the same input, if its ranks hold: a layer's computing is shorter than one read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from offload.scheduler.plan import Home, Plan
from offload.scheduler.shelf import NEVER, Pool, Stock

MOST_SPARE = 12
"""Slots kept free for guesses, at most, and never more than a layer's experts. Where computing
takes less time than reading, the guess of one layer should keep the disk busy until the next has
been routed: with four a disk idled for 8 of 57 ms per token, with all eight of a layer for 3."""

SPARE_SHARE = 16
"""One slot in so many at most, where slots bring hits."""

LOW_WATER = 4
"""Guesses start while fewer fetches than this are in flight: the last ones that compute waits for
are on their way, and the disk's queue does not run dry before the guess is in it."""

FAR_WATER = 2
"""Guesses of the layer after the next one start while fewer fetches are in flight: what the next
layer turns out to miss comes behind no more than one of them."""

SURE = 0.65
"""A rank is read ahead if it has held this often lately. A right guess saves its read from the time
that computing waits; a wrong one costs as much, where the disk is never idle."""

FIRST_TRUST = 0.7
"""What a rank is taken for before it has been seen: it is tried, and dropped after two misses."""

MEMORY = 16
"""Routings over which the average of a rank forgets."""


def guess_count(top_k: int) -> int:
    """About how many experts of a layer that uses ``top_k`` are guessed right, for predictions: the
    best three quarters."""
    return max(1, 3 * top_k // 4)


def spare_slots(slots: int, top_k: Mapping[str, int]) -> int:
    """How many of a pool's slots are kept free for guesses; ``top_k`` by layer."""
    spare = slots // SPARE_SHARE
    if slots < sum(top_k.values()):
        # Less than one token's experts: hardly any is there when it comes round again, and all
        # that a layer does not need at once is of more use for guesses.
        spare = max(spare, min(slots // 3, slots - max(top_k.values()) - 1))
    return max(0, min(MOST_SPARE, spare, max(top_k.values(), default=0)))


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
        self._far: deque[str] = deque()  # the same of the layer after the next one
        self._open: dict[str, int] = {}  # begun, not asked for yet: the routings that may still do
        self._offered: list[str] = []  # the gate's choices, best first
        self._far_offered: dict[str, list[str]] = {}  # by layer
        self._trust: dict[str, list[float]] = {}  # by layer: how often each rank has held
        self._far_trust: dict[str, list[float]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a guess has not begun yet."""
        return bool(self._next or self._far)

    def offer(self, experts: Sequence[str], wanted: Collection[str]) -> None:
        """The next layer may use ``experts``, the likeliest first. ``wanted``: what the running
        layer uses, which stays whatever happens."""
        if not self._spare or not experts:
            return
        self._offered = list(experts)
        absent = self._absent(experts, self._ranks(len(experts)))
        self._next = deque(dict.fromkeys(absent[: self._spare]))
        self._make_room(wanted)

    def offer_far(self, experts: Sequence[str], wanted: Collection[str]) -> None:
        """``offer`` for the layer after the next one, behind it."""
        if not self._spare or not experts:
            return
        group = self._group(experts[0])
        self._far_offered[group] = list(experts)
        absent = self._absent(experts, _ranks_of(self._far_trust, group, len(experts)))
        room = self._spare - len(self._next) - len(self._open)
        self._far = deque(dict.fromkeys(absent[: max(0, room)]))
        self._make_room(wanted)

    def _absent(self, experts: Sequence[str], trust: Sequence[float]) -> list[str]:
        """Those to read, of ranks that hold."""
        entries, homes = self._shelf.entries, self._homes
        return [
            b
            for b, held in zip(experts, trust, strict=False)
            if held >= SURE and b not in entries and homes.get(b) is Home.CACHED
        ]

    def _make_room(self, wanted: Collection[str]) -> None:
        shelf = self._shelf

        def idle(b: str) -> bool:
            e = shelf.entries[b]
            return not e.holds and e.ready and b not in wanted and b not in self._open

        # The slots that demands have taken since the last guess: what the cache would hold one
        # miss later makes way now.
        while len(shelf.slots) < len(self._next) + len(self._far):
            victim = shelf.cache.victim(idle)
            if victim is None:
                break
            self._stock.drop(shelf, victim, shelf.entries[victim])

    def settle(self, wanted: Collection[str]) -> set[str]:
        """A layer has been routed: returns the guesses it confirms, lets go those it does not."""
        self._next.clear()
        self._far.clear()
        self._learn(wanted)
        confirmed: set[str] = set()
        later: dict[str, int] = {}
        entries, routed = self._shelf.entries, self._group(next(iter(wanted), ""))
        for block, routings in self._open.items():
            entry = entries.get(block)
            if entry is None:
                continue
            if block in wanted:
                confirmed.add(block)
            elif routings > 1 and self._group(block) != routed:
                later[block] = routings - 1
            elif not entry.ready:
                entry.doomed = True
            elif not entry.holds:
                self._stock.drop(self._shelf, block, entry)
        self._open = later
        self.right += len(confirmed)
        return confirmed

    def _learn(self, wanted: Collection[str]) -> None:
        """Compare the gate's choices with the routing, if it is of the layer they were for."""
        offered, routed = self._offered, self._group(next(iter(wanted), ""))
        if offered and routed and self._group(offered[0]) == routed:
            _learn(self._ranks(len(offered)), offered, wanted)
        self._offered = []
        far = self._far_offered.pop(routed, None)
        if far:
            _learn(_ranks_of(self._far_trust, routed, len(far)), far, wanted)

    def _ranks(self, n: int) -> list[float]:
        """How often the ranks of the layer that ``_offered`` is about have held: ``n`` or more."""
        return _ranks_of(self._trust, self._group(self._offered[0]), n)

    def _group(self, block: str) -> str:
        """A block's layer; "" if the plan does not know it."""
        found = self._blocks.get(block)
        return (found.group or "") if found else ""

    def serve(self) -> None:
        """Begin what the disk has time for."""
        shelf = self._shelf
        while self._next and shelf.slots and shelf.in_flight < LOW_WATER:
            self._begin(self._next.popleft(), routings=1)
        while not self._next and self._far and shelf.slots and shelf.in_flight < FAR_WATER:
            self._begin(self._far.popleft(), routings=2)

    def _begin(self, block: str, routings: int) -> None:
        shelf = self._shelf
        if block in shelf.entries:
            return
        self._stock.fetch(block, shelf, Pool.SLOT, shelf.slots.pop(), NEVER, demand=False)
        shelf.cache.touch(block, self._blocks[block].group)
        self._open[block] = routings
        self.read += 1

    def failed(self, block: str) -> None:
        """A fetch has failed: whoever needs the block asks for it."""
        self._open.pop(block, None)


def _ranks_of(table: dict[str, list[float]], group: str, n: int) -> list[float]:
    """A layer's ranks, ``n`` or more."""
    trust = table.setdefault(group, [])
    trust.extend([FIRST_TRUST] * (n - len(trust)))
    return trust


def _learn(trust: list[float], offered: Sequence[str], wanted: Collection[str]) -> None:
    for rank, block in enumerate(offered):
        trust[rank] += ((block in wanted) - trust[rank]) / MEMORY
