"""The order in which blocks are used: what a plan and the prefetcher look ahead in.

A *step* is one use of one unit (a decoder layer, a slice of the LM head): the blocks it needs at
once. A *trace* is the cycle of steps that a forward pass repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``unit`` runs and needs ``blocks``; ``group`` names the experts it may route to."""

    unit: str
    blocks: tuple[str, ...]
    group: str = ""


class Trace:
    """An immutable cycle of steps with a flat view of its block uses.

    Positions are absolute and grow forever: position ``p`` is step ``p % len(trace)`` of pass
    ``p // len(trace)``, so that a prefetcher can run over the end of one token into the next.
    """

    __slots__ = ("_first_use", "_of_unit", "steps", "uses")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        # (block, step index), in order; the prefetcher walks this list.
        self.uses: list[tuple[str, int]] = []
        self._first_use: list[int] = []
        self._of_unit: dict[str, list[int]] = {}
        for i, step in enumerate(self.steps):
            self._first_use.append(len(self.uses))
            self.uses.extend((b, i) for b in step.blocks)
            self._of_unit.setdefault(step.unit, []).append(i)

    def __repr__(self) -> str:
        return "Trace(" + ", ".join(f"{s.unit}: {' '.join(s.blocks)}" for s in self.steps) + ")"

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def first_use(self, step: int) -> int:
        """Index in ``uses`` of the first block of step ``step`` (absolute positions allowed)."""
        if not self.steps:
            return 0
        cycle, i = divmod(step, len(self.steps))
        return cycle * len(self.uses) + self._first_use[i]

    def next_position(self, unit: str, after: int) -> int | None:
        """The nearest absolute step position ≥ ``after`` that runs ``unit``; None if it never
        does."""
        where = self._of_unit.get(unit)
        if not where:
            return None
        n = len(self.steps)
        cycle, i = divmod(after, n)
        for j in where:
            if j >= i:
                return cycle * n + j
        return (cycle + 1) * n + where[0]
