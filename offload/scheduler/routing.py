"""Experts: what a MoE layer has routed to, in which order it comes, what it displaces.

Experts live in equal slots. Across passes an eviction ``policy`` decides what stays; inside a pass
the order of use is known exactly, so a wanted expert displaces one that is wanted later, which
makes a route longer than the slots run in waves. Each expert has a *rank*, its place in that order;
one that compute waits for goes before all that it does not wait for yet, whatever the route said.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from offload.blocks import BlockKind
from offload.errors import SchedulerError
from offload.scheduler.guesses import Guesses
from offload.scheduler.link_guesses import LinkGuesses
from offload.scheduler.plan import Home, Plan
from offload.scheduler.policy import Scores
from offload.scheduler.shelf import NEVER, Pool, Shelf, Stock

_URGENT = -(1 << 62)
"""Ranks from here up are of experts that compute waits for, first come first."""


class Routes:
    """Decides over experts. Works on a ``Stock``; knows nothing of weights that stream."""

    def __init__(self, stock: Stock, plan: Plan) -> None:
        self.hits = 0
        """Routed experts that were above the disk when asked for."""
        self.misses = 0
        """Routed experts that had to be read from disk."""
        self.calm = 0
        """Routings since the last one that missed something."""
        self.guesses = (LinkGuesses if stock.stacked else Guesses)(stock, plan)
        self._stock = stock
        self._top = stock.top
        self._ram = stock.ram
        self._blocks = plan.blocks
        self._groups = frozenset(plan.groups)
        self._wanted: dict[str, int] = {}  # experts of the running pass -> rank
        self._queue: list[tuple[int, str]] = []  # those of them not in the compute tier, sorted
        self._urgent = _URGENT
        for block, home in plan.homes.items():
            if home is Home.CACHED:
                self._check_slots(block)

    # -- events ---------------------------------------------------------------------------

    def route(
        self,
        group: str,
        experts: Sequence[str],
        scores: Scores | None = None,
        loads: Mapping[str, int] | None = None,
    ) -> None:
        """A layer will use ``experts`` in this order. What was wanted before is not any more.
        ``scores``: what its router says of them, for policies that listen. ``loads``: tokens of
        each, for who has a choice of sites (see ``hybrid``)."""
        if group not in self._groups:
            raise SchedulerError(f"the plan has no layer {group!r} with experts")
        entries, blocks, cache = self._top.entries, self._blocks, self._top.cache
        unknown = [b for b in experts if b not in entries and b not in blocks]
        if unknown:
            raise SchedulerError(f"{group} routes to {unknown[0]}, which the plan does not know")
        for shelf in self._stock.shelves.values():
            shelf.cache.begin_pass(group, scores)
        self._wanted = wanted = {b: i for i, b in enumerate(dict.fromkeys(experts))}
        guessed = self.guesses.settle(wanted)
        self._queue = queue = []
        below, missed = self._ram.entries, self.misses
        for block, rank in wanted.items():
            entry = entries.get(block)
            if entry is not None:
                entry.doomed = False  # a wrong guess of a while ago, still on its way
                if block in guessed and not self._stock.stacked:  # read from disk for it
                    self.misses += 1
                else:
                    self.hits += 1
                if entry.pool is Pool.SLOT:
                    cache.touch(block, group)
                continue
            queue.append((rank, block))
            if block in below:
                self.hits += 1
            else:
                self.misses += 1
        self.calm = self.calm + 1 if self.misses == missed else 0

    def hurry(self, expert: str) -> None:
        """Compute waits for an expert that is not there: it goes first."""
        if expert not in self._blocks or self._blocks[expert].kind is not BlockKind.EXPERT:
            raise SchedulerError(f"{expert} is acquired but is no expert of the plan")
        rank = self._wanted.get(expert, 0)
        if rank >= 0:
            self._unqueue(expert)
            rank = self._wanted[expert] = self._urgent
            self._urgent += 1
        if expert not in self._top.entries and not self._is_queued(rank, expert):
            insort(self._queue, (rank, expert))

    def released(self, expert: str) -> None:
        """Nobody uses the expert any more in this pass."""
        self._wanted.pop(expert, None)

    def failed(self, expert: str) -> None:
        """A fetch has failed: not tried again before compute asks for it."""
        self._unqueue(expert)
        self.guesses.failed(expert)

    def end(self) -> None:
        """Nothing is wanted any more."""
        self._wanted.clear()
        self._queue.clear()

    def guess(self, group: str, experts: Sequence[str], *, far: bool = False) -> None:
        """The layer ``group``, which runs next (``far``: after the next), may use ``experts``, the
        likeliest first."""
        if group not in self._groups:
            raise SchedulerError(f"the plan has no layer {group!r} with experts")
        offer = self.guesses.offer_far if far else self.guesses.offer
        offer(experts, self._wanted)

    # -- progress -------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether an expert is wanted and not in the compute tier yet."""
        return bool(self._queue)

    def wants(self, expert: str) -> bool:
        """Whether the running pass will use the expert."""
        return expert in self._wanted

    def serve(self) -> None:
        """Start what can be started, in rank order; what has no slot yet stays queued."""
        queue, self._queue = self._queue, []  # experts displaced meanwhile queue up again
        lifting = fetching = True  # what comes later must not take the slot of the first
        left: list[tuple[int, str]] = []
        for i, (rank, block) in enumerate(queue):
            if not (lifting or fetching):
                left += queue[i:]
                break
            if block in self._top.entries:
                continue
            if not self._stock.stacked:
                if not self._place(block, self._top, rank):
                    left += queue[i:]
                    break
                continue
            below = self._ram.entries.get(block)
            if below is None:
                # A device-pinned one passes the ring, not a slot: see Streams.pin.
                if fetching and block not in self._top.pinned:
                    fetching = self._place(block, self._ram, rank)
            elif below.ready and lifting:
                lifting = self._place(block, self._top, rank)
                if lifting:
                    if below.pool is Pool.SLOT:
                        self._ram.cache.touch(block, self._blocks[block].group)
                    continue
            left.append((rank, block))
        if self._queue:
            for item in left:
                insort(self._queue, item)
        else:
            self._queue = left

    def _place(self, block: str, shelf: Shelf, rank: int) -> bool:
        """Fetch an expert into a slot (or to where it is pinned); False if none can be had."""
        offset = shelf.pinned.get(block)
        if offset is not None:
            self._stock.fetch(block, shelf, Pool.PINNED, offset, NEVER, demand=True)
            return True
        if not shelf.slots:
            victim = self._victim(shelf, rank)
            if victim is None:
                return False
            self._stock.drop(shelf, victim, shelf.entries[victim])
            if shelf is self._top and victim in self._wanted:
                insort(self._queue, (self._wanted[victim], victim))  # its turn comes again
        self._stock.fetch(block, shelf, Pool.SLOT, shelf.slots.pop(), NEVER, demand=True)
        shelf.cache.touch(block, self._blocks[block].group)
        return True

    def _victim(self, shelf: Shelf, rank: int) -> str | None:
        """What leaves for a wanted expert of this rank: first what this pass does not want (or
        has in the tier above already), then what it wants last, if that is later than this."""
        entries, wanted = shelf.entries, self._wanted
        above = self._top.entries if shelf is not self._top else {}

        def idle(b: str) -> bool:
            e = entries[b]
            return not e.holds and e.ready and (b not in wanted or b in above)

        victim = shelf.cache.victim(idle)
        if victim is not None:
            return victim
        latest, latest_rank = None, rank
        for b, r in wanted.items():
            if r > latest_rank:
                e = entries.get(b)
                if e is not None and e.pool is Pool.SLOT and not e.holds and e.ready:
                    latest, latest_rank = b, r
        return latest

    def _check_slots(self, block: str) -> None:
        """Refuse a plan under which an expert could only be waited for, for ever."""
        for tier, shelf in self._stock.shelves.items():
            if any(block in self._stock.shelves[t].pinned for t in self._stock.tiers if t >= tier):
                continue
            nbytes = self._blocks[block].slot_nbytes
            if not shelf.layout.slots or nbytes > shelf.layout.slot_bytes:
                raise SchedulerError(
                    f"expert {block} ({nbytes} bytes) has no place in {tier.name}: it is not "
                    f"pinned, and there are {shelf.layout.slots} slots of "
                    f"{shelf.layout.slot_bytes} bytes"
                )

    def _is_queued(self, rank: int, expert: str) -> bool:
        i = bisect_left(self._queue, (rank, expert))
        return i < len(self._queue) and self._queue[i][1] == expert

    def _unqueue(self, expert: str) -> None:
        rank = self._wanted.get(expert)
        if rank is not None and self._is_queued(rank, expert):
            del self._queue[bisect_left(self._queue, (rank, expert))]
