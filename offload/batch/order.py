"""In which order a model's sequences come to the places where they wait for each other."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class Order:
    """The stops of one forward pass, learnt from the sequences that make it.

    A stop that nobody has come to before lies behind the one that the sequence came from: all run
    the same code, so what one has passed, the others pass in the same order, or leave out. Where
    they leave some out (a prompt does not wait at linear layers), a guess may be wrong: of two
    stops behind the same one, the second may come before the first. Whoever goes from one to the
    other shows it, and the stops are sorted anew by all that is known.
    """

    def __init__(self, first: Hashable) -> None:
        self._first = first
        self._stops: list[Hashable] = [first]
        self._index: dict[Hashable, int] = {first: 0}
        self._behind: dict[Hashable, set[Hashable]] = {first: set()}

    def __len__(self) -> int:
        return len(self._stops)

    def __getitem__(self, stop: Hashable) -> int:
        return self._index[stop]

    def learn(self, stop: Hashable, after: Hashable) -> None:
        """Someone who came from ``after`` waits at ``stop``."""
        behind = self._behind[after]
        if stop in behind or stop == self._first:
            return
        behind.add(stop)
        if stop not in self._index:
            self._behind[stop] = set()
            self._stops.insert(self._index[after] + 1, stop)
        elif self._index[stop] < self._index[after]:
            self._sort()
        else:
            return
        self._index = {name: i for i, name in enumerate(self._stops)}

    def _sort(self) -> None:
        """Topologically, and as far as that leaves open, as it was (Kahn, 1962)."""
        before = dict.fromkeys(self._stops, 0)
        for behind in self._behind.values():
            for stop in behind:
                before[stop] += 1
        free = [i for i, stop in enumerate(self._stops) if not before[stop]]
        found: list[Hashable] = []
        while free:
            stop = self._stops[heapq.heappop(free)]
            found.append(stop)
            for later in self._behind[stop]:
                before[later] -= 1
                if not before[later]:
                    heapq.heappush(free, self._index[later])
        # A model that runs its parts now so and now otherwise has no order: whoever comes to a
        # place too late waits for the next round.
        if len(found) == len(self._stops):
            self._stops = found


__all__ = ["Order"]
