"""When a unit is used next: the order of the last step, assumed to come again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence

NEVER = 1 << 60
NOW = -NEVER
"""Before any other use."""


class UseOrder:
    """The cycle of units that a step runs through. Not thread-safe: its owner has a lock.

    A step is forward and backward, so what ran last comes back first. The first step is assumed
    to run all units forward and backward; every later one as the one before it did. What comes
    otherwise costs a wrong prefetch and nothing else.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self.set([*range(units), *reversed(range(units))])
        self._recorded: list[int] = []

    def set(self, sequence: Sequence[int]) -> None:
        """Expect this cycle from now on, from its start."""
        self.sequence = list(sequence)
        self._places: list[list[int]] = [[] for _ in range(self._units)]
        for i, unit in enumerate(self.sequence):
            self._places[unit].append(i)
        self.position = 0
        """Index of the next use."""

    def enter(self, unit: int) -> None:
        """``unit`` runs now. Again at once (another micro-batch) is the same use."""
        if self._recorded and self._recorded[-1] == unit:
            return
        self._recorded.append(unit)
        places = self._places[unit]
        if places:
            i = bisect_right(places, self.position - 1)
            self.position = (places[i] if i < len(places) else places[0]) + 1

    def end_step(self) -> None:
        """The step is over: the next one is expected to be like it."""
        if self._recorded:
            self.set(self._recorded)
        self._recorded = []

    def forget(self) -> None:
        """What ran since the last step (an evaluation) says nothing about the next one."""
        self._recorded = []
        self.position = 0

    def distance(self, unit: int) -> int:
        """Uses of other units before the next one of ``unit``."""
        places, n = self._places[unit], len(self.sequence)
        if not places:
            return NEVER
        i = bisect_right(places, self.position - 1)
        return places[i] - self.position if i < len(places) else places[0] + n - self.position

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """(distance, unit) of the next uses, one cycle long."""
        n = len(self.sequence)
        for i in range(n):
            yield i, self.sequence[(self.position + i) % n]


class Agenda:
    """The blocks that the unit which runs will ask for one by one (its routed experts), in the
    order of use; one may come several times. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing of it is needed any more."""
        self._blocks: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._position = 0

    def put_first(self, blocks: Sequence[int], instead: Collection[int] = ()) -> None:
        """``blocks`` come before what is still expected, of which ``instead`` is not any more."""
        self._blocks = [*blocks, *(b for b in self.rest() if b not in instead)]
        self._position = 0
        self._places = {}
        for i, block in enumerate(self._blocks):
            self._places.setdefault(block, []).append(i)

    def reached(self, block: int) -> None:
        """``block`` is used now, and what was expected before it is not."""
        i = self._next(block)
        if i is not None:
            self._position = i + 1

    def distance(self, block: int) -> int | None:
        """When it is used next, as a number that is below every distance between units; None: not
        by this unit."""
        i = self._next(block)
        return None if i is None else i - self._position - (1 << 40)

    def rest(self) -> list[int]:
        """What is still expected."""
        return self._blocks[self._position :]

    def soon(self, count: int) -> list[int]:
        """The first ``count`` of what is still expected."""
        return self._blocks[self._position : self._position + count]

    def _next(self, block: int) -> int | None:
        places = self._places.get(block)
        if places is None:
            return None
        i = bisect_left(places, self._position)
        return places[i] if i < len(places) else None
