"""Experts on two sites: what a MoE layer has routed to, who computes it, what moves up for that.

As ``routing``, where a device and the CPU share a layer's experts (``Plan.split``). The sites are
chosen when the layer has been routed, by ``split``, and must not depend on how fast anything was:
two sites may round differently, and the same run must give the same text. So all that the choice
sees is counted in events of the computing thread:

* what a slot of the device holds: experts go up in the order of the schedule, and each takes a slot
  that was named when the layer was routed. An expert that leaves is either unused by the layer, and
  then it leaves at once, or was the next one to be computed, and leaves when it has been;
* what RAM holds is taken from a *ledger* that the same eviction policy keeps over the routings
  alone. What really lies in RAM is the residency's affair and may differ a little, by what was on
  its way at the time: then something is read that the schedule took for present, and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.plan import Home, Plan
from offload.scheduler.policies import make_policy
from offload.scheduler.policy import Scores
from offload.scheduler.routing import Routes
from offload.scheduler.shelf import NEVER, Pool, Stock
from offload.scheduler.split import Job, Place, Schedule, Site, split


class HybridRoutes(Routes):
    """``Routes`` for a plan with a ``split``."""

    def __init__(self, stock: Stock, plan: Plan) -> None:
        super().__init__(stock, plan)
        if plan.split is None or not stock.stacked:
            raise SchedulerError("experts are split between a device and the CPU below it")
        self.sites: dict[str, Site] = {}
        """Of the experts of the running layer."""
        self.schedule: Schedule | None = None
        """Of the running layer; None between layers, and where nothing moves."""
        self._costs = plan.split
        self._alone = False  # the device computes the running layer, in its caller's order
        self._homes = plan.homes
        self._lifts: deque[str] = deque()  # to go up, in this order
        self._owed = 0  # of them, those that get the slot of one that is computed before
        layout = plan.tiers[Tier.RAM]
        self._kept = layout.pinned
        self._room = layout.slots
        self._ledger = make_policy(plan.expert_policy, plan.groups, plan.kept.get(Tier.RAM, ()))

    # -- events ---------------------------------------------------------------------------

    def route(
        self,
        group: str,
        experts: Sequence[str],
        scores: Scores | None = None,
        loads: Mapping[str, int] | None = None,
    ) -> None:
        """As ``Routes.route``; ``loads``: tokens of each expert. Without them the device computes
        all that the layer uses."""
        self.end()
        self._ledger.begin_pass(group, scores)
        super().route(group, experts, scores, loads)
        wanted = list(self._wanted)
        if not wanted or any(self._homes.get(b) is not Home.CACHED for b in wanted):
            self.sites = dict.fromkeys(wanted, Site.SLOT)
            return
        if loads is None:
            # A prompt, whose experts come up as they arrive: what its last layer leaves in the
            # slots may depend on time.
            self._alone = True
            self.sites = dict.fromkeys(wanted, Site.SLOT)
            self._note_in_ledger(group, wanted)
            return
        jobs = [self._job(b, loads.get(b, 1)) for b in wanted]
        found = split(jobs, self._costs, cpu=True)
        if not found.cpu:  # then the caller's order is as good as any
            reads = tuple(j.expert for j in jobs if j.place is not Place.SLOT)
            found = replace(found, device=tuple(wanted), reads=reads)
        self.schedule = found
        on_cpu = set(found.cpu)
        going_up = set(found.reads) - on_cpu
        self.sites = {
            b: Site.CPU if b in on_cpu else Site.MOVE if b in going_up else Site.SLOT
            for b in wanted
        }
        self._lifts.extend(b for b in found.device if b in going_up)
        self._wanted = {b: i for i, b in enumerate(dict.fromkeys((*found.reads, *found.device)))}
        self._queue = [(self._wanted[b], b) for b in found.reads]
        self._make_room()
        self._note_in_ledger(group, found.reads)

    def hurry(self, expert: str) -> None:
        super().hurry(expert)
        if self._alone:
            return
        if expert not in self._top.entries and expert not in self._lifts:
            # Not routed, or lost on its way up.
            self._lifts.appendleft(expert)
            self._make_room()
        elif expert in self._lifts and self._lifts[0] != expert:
            self._lifts.remove(expert)
            self._lifts.appendleft(expert)

    def released(self, expert: str) -> None:
        super().released(expert)
        entry = self._top.entries[expert]
        if self._owed and entry.pool is Pool.SLOT:
            self._owed -= 1
            self._stock.drop(self._top, expert, entry)

    def end(self) -> None:
        super().end()
        self._alone = False
        self._lifts.clear()
        self._owed = 0
        self.sites = {}
        self.schedule = None

    def hold_below(self, expert: str) -> bool:
        """Hold an expert in RAM for the CPU; False if it is not there yet."""
        entry = self._ram.entries.get(expert)
        if entry is None or not entry.ready:
            return False
        entry.holds += 1
        self._unqueue(expert)
        if entry.pool is Pool.SLOT:
            self._ram.cache.touch(expert, self._blocks[expert].group)
        return True

    def release_below(self, expert: str) -> None:
        """The CPU has used it."""
        entry = self._stock.entry(Tier.RAM, expert)
        if not entry.holds:
            raise SchedulerError(
                f"{expert} is released in RAM but not held; {self._stock.story(expert)}"
            )
        entry.holds -= 1
        if self.sites.get(expert) is Site.CPU:
            self._wanted.pop(expert, None)

    # -- progress -------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return bool(self._queue or self._lifts)

    def serve(self) -> None:
        """Read what is wanted in RAM, in order; copy up what is next and has a slot."""
        if self._alone:
            super().serve()
            return
        self._lift()
        below, pinned = self._ram.entries, self._top.pinned
        for rank, block in tuple(self._queue):
            if block in below or block in pinned:
                continue
            if not self._place(block, self._ram, rank):
                break  # what comes later must not take the room of the first

    def _lift(self) -> None:
        """Copies up, strictly in order: which slot an expert gets must not depend on what has
        come first."""
        lifts, top, below = self._lifts, self._top, self._ram.entries
        while lifts:
            block = lifts[0]
            if block not in top.entries:
                source = below.get(block)
                if source is None or not source.ready or not top.slots:
                    break
                group = self._blocks[block].group
                self._stock.fetch(block, top, Pool.SLOT, top.slots.pop(), NEVER, demand=True)
                top.cache.touch(block, group)
                if source.pool is Pool.SLOT:
                    self._ram.cache.touch(block, group)
            lifts.popleft()
            self._unqueue(block)

    # -- choosing -------------------------------------------------------------------------

    def _job(self, block: str, tokens: int) -> Job:
        if block in self._top.entries or block in self._top.pinned:
            place = Place.SLOT
        elif block in self._kept or block in self._ledger:
            place = Place.RAM
        else:
            place = Place.DISK
        return Job(block, tokens, place, self._blocks[block].nbytes)

    def _make_room(self) -> None:
        """Name the slot of everything that goes up."""
        shelf, wanted = self._top, self._wanted
        entries = shelf.entries
        for block, entry in entries.items():
            if entry.pool is Pool.SLOT and not entry.ready and block not in wanted:
                entry.doomed = True  # left by a layer that was broken off

        def idle(b: str) -> bool:
            e = entries[b]
            return not e.holds and e.ready and b not in wanted

        while len(shelf.slots) + self._owed < len(self._lifts):
            victim = shelf.cache.victim(idle)
            if victim is None:
                self._owed = len(self._lifts) - len(shelf.slots)
                break
            self._stock.drop(shelf, victim, entries[victim])

    def _note_in_ledger(self, group: str, reads: Iterable[str]) -> None:
        """What RAM would hold after this layer if everything came at once."""
        if not self._room:
            return
        wanted, ledger = self._wanted, self._ledger
        for block in reads:
            if block in self._kept:
                continue
            if block not in ledger and len(ledger) >= self._room:
                victim = ledger.victim(lambda b: b not in wanted)
                if victim is None:
                    continue  # a layer that uses more than RAM holds
                ledger.discard(victim)
            ledger.touch(block, group)
