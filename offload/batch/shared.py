"""What sequences that run together share: units that are held for them, and a MoE layer's experts.

Fetched once for all that wait there, given back when the last has been through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from typing import Any

from offload.batch.sequence import Sequence
from offload.runtime.executor import Executor
from offload.scheduler.policy import Scores

EXPERT, RUN = "expert", "run"
"""What a sequence waits for within a layer: one expert, or as many as are there."""


Resume = Callable[[Sequence, Any], None]
"""Lets a sequence run to where it waits next, with what it has waited for."""
Fail = Callable[[Listing[Sequence], Exception], None]
"""Lets sequences run with an error that is theirs to handle."""


class Held:
    """A unit that is held for those who are in it."""

    def __init__(self, ticket: int, blocks: Listing[str]) -> None:
        self.ticket, self.blocks = ticket, blocks
        self.inside: set[Sequence] = set()
        self.let_go: Callable[[], None] | None = None


class SharedUnits:
    """All units that are held now. A sequence waits with (unit, blocks, what lets go of them)."""

    def __init__(self, executor: Executor, resume: Resume, fail: Fail) -> None:
        self._executor, self._resume, self._fail = executor, resume, fail
        self._held: dict[str, Held] = {}

    @property
    def inside(self) -> set[Sequence]:
        """Who is in a unit."""
        return {s for held in self._held.values() for s in held.inside}

    def open(self, waiting: list[Sequence]) -> None:
        """Bring a unit's blocks, unless they are held, and let all in."""
        unit, blocks, _ = waiting[0].payload
        held = self._held.get(unit)
        if held is None:
            try:
                held = Held(self._executor.enter(unit, blocks), blocks)
            except Exception as error:  # noqa: BLE001  theirs to handle
                self._fail(waiting, error)
                return
            self._held[unit] = held
        for sequence in waiting:
            held.let_go = sequence.payload[2]
            self._resume(sequence, held)

    def leave(self, sequence: Sequence, ticket: int | None = None) -> None:
        """A sequence is through the unit of that ticket; None: through all that it was in."""
        for held in self._held.values():
            if ticket in (None, held.ticket):
                held.inside.discard(sequence)

    def let_go(self) -> None:
        """Of units that nobody is in any more."""
        for unit in [name for name, held in self._held.items() if not held.inside]:
            held = self._held.pop(unit)
            if held.let_go is not None:
                held.let_go()
            self._executor.leave(held.ticket, held.blocks)


class SharedLayer:
    """The MoE layer whose experts are fetched now, in ascending order, for all who are in it."""

    def __init__(
        self, executor: Executor, resume: Resume, fail: Fail,
        ranks: Mapping[str, Mapping[str, int]],
    ) -> None:  # fmt: skip
        """``ranks``: of each layer's experts."""
        self._executor, self._resume, self._fail = executor, resume, fail
        self._ranks = ranks
        self.routed: set[Sequence] = set()
        """Who is in it."""
        self._wanted: list[str] = []  # of its experts, by rank
        self._guesses: dict[str, list[Listing[str]]] = {}

    def open(self, waiting: list[Sequence]) -> None:
        """Announce what any is routed to, and let all in; each gets the experts' ranks. A sequence
        waits with (group, experts, scores)."""
        group = waiting[0].payload[0]
        ranks = self._ranks[group]
        wanted = sorted({b for s in waiting for b in s.payload[1]}, key=ranks.__getitem__)
        scores = [s.payload[2] for s in waiting if s.payload[2] is not None]
        try:
            self._executor.route(group, wanted, _Together(scores) if scores else None)
        except Exception as error:  # noqa: BLE001  theirs to handle
            self._fail(waiting, error)
            return
        self._wanted = wanted
        self.routed = set(waiting)
        for sequence in waiting:
            self._resume(sequence, ranks)
        for group, lists in self._guesses.items():
            # The likeliest of each first: they compete for the same idle disk.
            longest = max(map(len, lists))
            mixed = [names[i] for i in range(longest) for names in lists if i < len(names)]
            self._executor.guess(group, list(dict.fromkeys(mixed)))
        self._guesses.clear()

    def guess(self, group: str, experts: Listing[str]) -> None:
        """One of those who are being let in says what the next layer may need."""
        if experts:
            self._guesses.setdefault(group, []).append(experts)

    def bring_expert(self, waiting: list[Sequence]) -> None:
        """Hold an expert while all who wait for it use it: (expert,)."""
        (expert,) = waiting[0].payload
        try:
            views = self._executor.acquire(expert)
        except Exception as error:  # noqa: BLE001  theirs to handle
            self._fail(waiting, error)
            return
        try:
            for sequence in waiting:
                self._resume(sequence, views)
        finally:
            self._executor.release(expert)

    def bring_run(self, waiting: list[Sequence]) -> None:
        """As ``bring_expert``, with those behind it that are there: (experts, how many at most)."""
        experts, most = waiting[0].payload
        at = self._wanted.index(experts[0])
        names = self._wanted[at : at + most]
        try:
            found = self._executor.acquire_run(names, most)
        except Exception as error:  # noqa: BLE001  theirs to handle
            self._fail(waiting, error)
            return
        there = dict(zip(names, found, strict=False))
        try:
            while waiting:
                for sequence in waiting:
                    mine: list[int] = []
                    for expert in sequence.payload[0]:
                        if expert not in there:
                            break
                        mine.append(there[expert])
                    self._resume(sequence, mine)
                waiting = [s for s in self.routed if s.call == RUN and s.payload[0][0] in there]
        finally:
            self._executor.release_run(list(there))

    def leave(self, sequence: Sequence) -> None:
        """A sequence is through, or gone."""
        if sequence in self.routed:
            self.routed.discard(sequence)
            if not self.routed:
                self._executor.end_route()


class _Together:
    """What a layer's router says of the tokens of several sequences."""

    def __init__(self, parts: Listing[Scores]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Any:
        for part in self._parts:
            yield from part


__all__ = ["EXPERT", "RUN", "Held", "SharedLayer", "SharedUnits"]
