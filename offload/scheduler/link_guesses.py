"""Experts copied up on a guess, into link time that nothing else can use.

As ``guesses``, one tier higher: what the next layer's gate names and RAM holds goes to a slot of
the device while the link is idle. All of its slots are in use before long, so a guess takes the
place of a live expert, and that has to be worth it (the impact of HybriMoE, Zhong et al., 2025,
section 4.3): a right guess saves a copy that compute would wait for, an expert that has left for it
costs one when its layer comes again. So the chance of the guess, which is that of its rank lately,
is weighed against how often an expert that is kept is used when its layer runs, and the policy's
victim, the least of those, leaves only for the likelier one.

One copy at a time, begun when nothing else is on its way up: a demand waits for one guess at most.
Where the CPU computes experts too (``Plan.split``) nothing is guessed: who computes what depends on
what the slots hold, and time has no say in that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from offload.scheduler.guesses import MEMORY, SURE, Guesses
from offload.scheduler.plan import Home, Plan
from offload.scheduler.shelf import NEVER, Pool, Stock


class LinkGuesses(Guesses):
    """Decides over copies up on a guess. For a plan with a device tier."""

    def __init__(self, stock: Stock, plan: Plan) -> None:
        super().__init__(stock, plan)
        self._usable = plan.guesses and plan.split is None
        self._chance: dict[str, float] = {}  # of what has been offered
        self._running: Collection[str] = ()  # what the running layer uses
        self._experts: dict[str, list[str]] = {}
        for block, home in plan.homes.items():
            if home is Home.CACHED:
                self._experts.setdefault(plan.blocks[block].group, []).append(block)
        # By layer: how often an expert in a slot is used when the layer runs. At first as if even.
        self._live = {g: plan.top_k.get(g, 1) / len(of) for g, of in self._experts.items()}

    def offer(self, experts: Sequence[str], wanted: Collection[str]) -> None:
        """See ``Guesses``; nothing leaves before the link is idle."""
        if not self._usable or not experts:
            return
        self._offered, self._running = list(experts), wanted
        trust, homes = self._ranks(len(experts)), self._homes
        self._chance = {
            b: held
            for b, held in zip(experts, trust, strict=False)
            if held >= SURE and homes.get(b) is Home.CACHED
        }
        self._next = deque(b for b in self._chance if b not in self._shelf.entries)

    def offer_far(self, experts: Sequence[str], wanted: Collection[str]) -> None:
        """Nothing: what is copied up next is known well enough from the next layer."""

    def settle(self, wanted: Collection[str]) -> set[str]:
        """See ``Guesses``."""
        if self._usable:
            self._watch(wanted)
        return super().settle(wanted)

    def serve(self) -> None:
        """Begin a copy if the link has time for it."""
        shelf, below = self._shelf, self._stock.ram.entries
        while self._next and not shelf.in_flight:
            block = self._next.popleft()
            source = below.get(block)
            if block in shelf.entries or source is None or not source.ready:
                continue
            if not shelf.slots and not self._displace(block):
                continue
            self._stock.fetch(block, shelf, Pool.SLOT, shelf.slots.pop(), NEVER, demand=False)
            shelf.cache.touch(block, self._blocks[block].group)
            self._open[block] = 1
            self.read += 1

    def _displace(self, block: str) -> bool:
        """Whether the policy's victim has left for a guess: it is the less likely one."""
        shelf, running = self._shelf, self._running

        def idle(b: str) -> bool:
            e = shelf.entries[b]
            return not e.holds and e.ready and b not in running and b not in self._open

        victim = shelf.cache.victim(idle)
        if victim is None or self._live[self._blocks[victim].group] >= self._chance[block]:
            return False
        self._stock.drop(shelf, victim, shelf.entries[victim])
        return True

    def _watch(self, wanted: Collection[str]) -> None:
        """A layer has been routed: how many of its experts in slots does it use?"""
        first = self._blocks.get(next(iter(wanted), ""))
        if first is None or first.group not in self._experts:
            return
        entries = self._shelf.entries
        kept = [b for b in self._experts[first.group] if b in entries and b not in self._open]
        if kept:
            used = sum(b in wanted for b in kept) / len(kept)
            self._live[first.group] += (used - self._live[first.group]) / MEMORY


__all__ = ["LinkGuesses"]
