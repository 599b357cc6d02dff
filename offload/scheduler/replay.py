"""Replays of recorded routings: what each eviction policy would have hit, and what the best could.

The replay drives the very classes of the real run in the order in which the real run calls them
(see ``routing``): a pass begins, what is there is marked as used, what is not is brought in order
and displaces an entry that the pass does not want. No clock, no lanes: hits and misses only.

The optimum is MIN (Belady, "A study of replacement algorithms for a virtual-storage computer",
1966): the entry whose next use is furthest away goes. It knows the future, so no online policy can
be better, and the gap to it is what a cleverer one could still gain.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from offload.scheduler.policy import ExpertPolicy, Scores

_NEVER = sys.maxsize >> 1


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of a MoE layer."""

    group: str
    experts: Sequence[str]
    """Blocks, each once, in the order of use."""
    scores: Scores | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """What a replay counted."""

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of uses that hit; 0 if there was none."""
        return self.hits / max(1, self.hits + self.misses)


class Replay:
    """A policy over ``slots`` slots, empty at first; fed pass by pass, so that one reading of a
    long routing serves many of them."""

    __slots__ = ("_free", "_hits", "_misses", "_policy", "_slots")

    def __init__(self, policy: ExpertPolicy, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a cache needs a slot, got {slots}")
        self._policy = policy
        self._slots = self._free = slots
        self._hits = self._misses = 0

    @property
    def tally(self) -> Tally:
        """What has been counted so far."""
        return Tally(self._hits, self._misses)

    def feed(self, run: Pass) -> None:
        """One pass. If it wants more than all slots, it runs in waves: what it wants itself is
        displaced when nothing else is left, in the order of the policy."""
        policy, group, experts = self._policy, run.group, run.experts
        policy.begin_pass(group, run.scores)
        absent = []
        for block in experts:
            if block in policy:
                policy.touch(block, group)
            else:
                absent.append(block)
        self._hits += len(experts) - len(absent)
        self._misses += len(absent)
        if not absent:
            return
        wanted = frozenset(experts)

        def idle(block: str) -> bool:
            return block not in wanted

        for block in absent:
            if self._free:
                self._free -= 1
            else:
                victim = policy.victim(idle) or policy.victim(lambda _: True)
                if victim is None:
                    raise ValueError(f"a policy with {self._slots} entries names none to evict")
                policy.discard(victim)
            policy.touch(block, group)


def replay(passes: Iterable[Pass], policy: ExpertPolicy, slots: int) -> Tally:
    """Run an empty policy over a whole routing."""
    run = Replay(policy, slots)
    for one in passes:
        run.feed(one)
    return run.tally


class Future:
    """The uses of a whole routing, numbered, and for each the next use of the same expert: what
    the optimum needs to know. 8 bytes per use, and 4 more for its expert."""

    def __init__(self, passes: Iterable[Pass]) -> None:
        number: dict[str, int] = {}
        self._uses = array("i")  # experts by number
        self._ends = array("q")  # of each pass, in uses
        for run in passes:
            self._uses.extend([number.setdefault(b, len(number)) for b in run.experts])
            self._ends.append(len(self._uses))
        self._next = array("q", bytes(8 * len(self._uses)))
        last = [_NEVER] * len(number)
        for i in range(len(self._uses) - 1, -1, -1):
            expert = self._uses[i]
            self._next[i] = last[expert]
            last[expert] = i

    @property
    def uses(self) -> int:
        """Uses of all passes."""
        return len(self._uses)

    def optimum(self, slots: int) -> Tally:
        """Hits and misses of MIN. An expert that its pass uses cannot leave during the pass, as
        in ``replay``, unless the pass wants more than all slots."""
        if slots < 1:
            raise ValueError(f"a cache needs a slot, got {slots}")
        uses, following = self._uses, self._next
        until: dict[int, int] = {}  # expert in the cache: its next use
        heap: list[tuple[int, int]] = []  # (- next use, expert); those that differ are void
        hits = start = 0
        for end in self._ends:
            run = uses[start:end]
            absent = []
            for i, expert in enumerate(run, start):
                if expert in until:
                    hits += 1
                    until[expert] = following[i]
                    heappush(heap, (-following[i], expert))
                else:
                    absent.append((expert, following[i]))
            if absent:
                wanted = set(run)
                for expert, then in absent:
                    if len(until) == slots:
                        del until[_furthest(heap, until, wanted)]
                    until[expert] = then
                    heappush(heap, (-then, expert))
                if len(heap) > 4 * slots + 64:
                    heap = [(-then, expert) for expert, then in until.items()]
                    heapify(heap)
            start = end
        return Tally(hits, len(uses) - hits)


def _furthest(heap: list[tuple[int, int]], until: Mapping[int, int], wanted: set[int]) -> int:
    """Whose next use is furthest away, and not of this pass if there is another."""
    aside = []
    found = -1
    while heap:
        item = heappop(heap)
        if until.get(item[1]) != -item[0]:
            continue
        if item[1] not in wanted:
            found = item[1]
            break
        aside.append(item)
    if found < 0:
        found = aside.pop(0)[1]
    for item in aside:
        heappush(heap, item)
    return found


def hottest(passes: Iterable[Pass], n: int) -> list[str]:
    """The ``n`` experts that are used most, hottest first; of equals, the one seen first."""
    counts: Counter[str] = Counter()
    for run in passes:
        counts.update(run.experts)
    return [block for block, _ in counts.most_common(n)]
