"""A ring of addresses: room for blocks that arrive and leave in nearly the same order.

Streaming a cyclic trace allocates in trace order and frees in trace order, so next-fit behaves as
a ring buffer that never fragments, and unlike fixed slots it wastes nothing on blocks of
different sizes. When the order is disturbed (a shared layer kept for its next use, a failed read)
next-fit also finds the gaps between live ranges, which a strict ring buffer would lose until the
oldest range is freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence


class Ring:
    """Allocates ``[offset, offset + nbytes)`` ranges inside ``[base, base + capacity)``.

    A range is contiguous: it never wraps. Linear in the number of live ranges, of which a ring
    has tens.
    """

    __slots__ = ("_live", "_next", "base", "capacity", "used")

    def __init__(self, base: int, capacity: int) -> None:
        self.base = base
        self.capacity = capacity
        self.used = 0
        """Bytes in live ranges."""
        self._live: list[tuple[int, int]] = []  # (offset, nbytes), sorted
        self._next = base  # end of the latest range: the search starts here

    def __len__(self) -> int:
        return len(self._live)

    def gaps(self, nbytes: int) -> list[int]:
        """Where a range could go now: the next fit, then the first fit if that is another."""
        offsets = []
        for start in (self._next, self.base):
            offset = _gap(self._live, start, self.base + self.capacity, nbytes)
            if offset is not None and offset not in offsets:
                offsets.append(offset)
        return offsets

    def take(self, offset: int, nbytes: int) -> None:
        """Allocate at an offset that ``gaps`` has just returned.

        Raises:
            ValueError: ``nbytes`` is not positive (two empty ranges could not be told apart), or
                the range is not free.
        """
        end = offset + nbytes
        if nbytes <= 0 or offset < self.base or end > self.base + self.capacity:
            raise ValueError(f"no range of {nbytes} bytes at {offset} in a ring at {self.base}")
        i = bisect_left(self._live, (offset, 0))
        if (i and sum(self._live[i - 1]) > offset) or (
            i < len(self._live) and self._live[i][0] < end
        ):
            raise ValueError(f"[{offset}, {end}) is not free")
        self._live.insert(i, (offset, nbytes))
        self._next = end
        self.used += nbytes

    def free(self, offset: int) -> None:
        """Give a range back. Raises KeyError if it is not allocated."""
        i = bisect_left(self._live, (offset, 0))
        if i == len(self._live) or self._live[i][0] != offset:
            raise KeyError(offset)
        self.used -= self._live.pop(i)[1]
        if not self._live:
            self._next = self.base

    def packs(self, fixed: Iterable[tuple[int, int]], sizes: Sequence[int]) -> bool:
        """Whether ranges of ``sizes`` find room one after the other, first fit, in a ring that
        holds nothing but the ``fixed`` ranges (offset, nbytes)."""
        live = sorted(fixed)
        for nbytes in sizes:
            offset = _gap(live, self.base, self.base + self.capacity, nbytes)
            if offset is None:
                return False
            insort(live, (offset, nbytes))
        return True


def _gap(live: list[tuple[int, int]], start: int, end: int, nbytes: int) -> int | None:
    """The first offset at or after ``start`` where ``nbytes`` fit between sorted ranges."""
    i = bisect_left(live, (start, 0))
    if i and (before := live[i - 1])[0] + before[1] > start:
        start = before[0] + before[1]
    for offset, n in live[i:]:
        if start + nbytes <= offset:
            return start
        start = offset + n
    return start if start + nbytes <= end else None
