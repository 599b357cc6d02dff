"""A map from disjoint byte ranges to values. Sorted lists and bisect: no dependency, and a lookup
among ten thousand ranges costs a microsecond."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class IntervalMap(Generic[V]):
    """Disjoint ranges ``[start, stop)`` of integers, each with a value; gaps hold nothing.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._values: list[V] = []

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        return zip(self._starts, self._stops, self._values, strict=True)

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Indices [i, j) of the ranges that share bytes with [start, stop)."""
        return bisect_right(self._stops, start), bisect_left(self._starts, stop)

    def overlapping(self, start: int, stop: int) -> list[tuple[int, int, V]]:
        """The parts of the stored ranges inside ``[start, stop)``, in order."""
        if start >= stop:
            return []
        i, j = self._range(start, stop)
        return [
            (max(self._starts[k], start), min(self._stops[k], stop), self._values[k])
            for k in range(i, j)
        ]

    def remove(self, start: int, stop: int) -> None:
        """Forget ``[start, stop)``; ranges across its ends keep the part outside."""
        self._splice(start, stop, [])

    def put(self, start: int, stop: int, value: V) -> None:
        """Give all of ``[start, stop)`` the value, in place of what was there."""
        self._splice(start, stop, [(start, stop, value)])

    def replace(self, start: int, stop: int, parts: list[tuple[int, int, V]]) -> None:
        """Put ``parts`` (sorted, disjoint, inside) in place of what was in ``[start, stop)``."""
        self._splice(start, stop, parts)

    def _splice(self, start: int, stop: int, parts: list[tuple[int, int, V]]) -> None:
        if start >= stop:
            return
        i, j = self._range(start, stop)
        if i < j:
            if self._starts[i] < start:
                parts = [(self._starts[i], start, self._values[i]), *parts]
            if self._stops[j - 1] > stop:
                parts = [*parts, (stop, self._stops[j - 1], self._values[j - 1])]
        self._starts[i:j] = [p[0] for p in parts]
        self._stops[i:j] = [p[1] for p in parts]
        self._values[i:j] = [p[2] for p in parts]
