"""A ring of addresses: room for blocks that arrive and leave in nearly the same order.

Streaming a cyclic trace allocates in trace order and frees in trace order, so next-fit behaves as
a ring buffer that never fragments, and unlike fixed slots it wastes nothing on blocks of
different sizes. When the order is disturbed (a shared layer kept for its next use, a failed read)
next-fit also finds the gaps between live ranges, which a strict ring buffer would lose until the
oldest range is freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort


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

    def alloc(self, nbytes: int) -> int | None:
        """The offset of a new range, or None if no gap is wide enough now."""
        offset = self._gap(self._next, self.base + self.capacity, nbytes)
        if offset is None:
            offset = self._gap(self.base, self.base + self.capacity, nbytes)
        if offset is None:
            return None
        insort(self._live, (offset, nbytes))
        self._next = offset + nbytes
        self.used += nbytes
        return offset

    def free(self, offset: int) -> None:
        """Give a range back. Raises KeyError if it is not allocated."""
        i = bisect_left(self._live, (offset, 0))
        if i == len(self._live) or self._live[i][0] != offset:
            raise KeyError(offset)
        self.used -= self._live.pop(i)[1]
        if not self._live:
            self._next = self.base

    def _gap(self, start: int, end: int, nbytes: int) -> int | None:
        """The first fitting offset at or after ``start``."""
        i = bisect_left(self._live, (start, 0))
        if i and (before := self._live[i - 1])[0] + before[1] > start:
            start = before[0] + before[1]
        for offset, n in self._live[i:]:
            if start + nbytes <= offset:
                return start
            start = offset + n
        return start if start + nbytes <= end else None
