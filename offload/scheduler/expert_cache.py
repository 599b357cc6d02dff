"""Which expert to evict: a global LRU that knows the order of the layers.

Experts of all layers share one pool of equal slots; layers with wide routing take more of it than
layers with narrow routing, which is why one global pool beats a quota per layer on real traces.
Plain LRU has two weak spots on a cyclic layer order, and both come from comparing clocks instead
of *missed chances*. Between two passes of a layer every other layer is used, so the oldest entry
always belongs to a layer that is about to run, the worst one to evict; and if the pool holds less
than one token's experts, LRU evicts each entry just before its reuse and never hits at all.

So an entry's age is counted in passes of *its own* layer that did not use it. The victim is the
entry with the highest age; among equals, the one whose layer runs furthest in the future. Within
a layer the order is LRU. With uniform random routing this keeps the hit rate at the cache share
(plain LRU loses up to k/E of it between whole numbers of passes), below one token's bytes it
degrades to a stable pinned set, and with real locality it equals global LRU.

Pure bookkeeping: no I/O, no clock, no randomness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from offload.scheduler.policy import Scores


class ExpertCache:
    """Recency of cached experts, grouped by layer. The caller owns slots and states."""

    __slots__ = ("_ages", "_entries", "_group_of", "_now", "_order", "_passes")

    def __init__(self, groups: Sequence[str]) -> None:
        """``groups``: layer names in the order in which they run."""
        # Last layer first: from the running one on, this is the order of the distance to the
        # next run, furthest first.
        self._order = {g: i for i, g in enumerate(reversed(groups))}
        # by layer: {expert: the layer's pass number of its last use}, least recent first
        self._entries: list[OrderedDict[str, int]] = [OrderedDict() for _ in groups]
        self._passes = [0] * len(groups)
        self._ages = [-1] * len(groups)  # of the layer's oldest entry; -1: it has none
        self._group_of: dict[str, int] = {}
        self._now = max(0, len(groups) - 1)  # the first layer

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block: str) -> bool:
        return block in self._group_of

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        """A layer runs: what it does not use now has missed a chance. Scores do not count."""
        g = self._now = self._order[group]
        self._passes[g] += 1
        if self._entries[g]:
            self._ages[g] += 1

    def touch(self, block: str, group: str) -> None:
        """Insert a block, or mark it as used in its layer's current pass."""
        g = self._order[group]
        if self._group_of.setdefault(block, g) != g:
            self.discard(block)
            self._group_of[block] = g
        entries = self._entries[g]
        entries[block] = self._passes[g]
        entries.move_to_end(block)
        self._ages[g] = self._passes[g] - next(iter(entries.values()))

    def discard(self, block: str) -> None:
        """Forget a block (evicted or failed). No-op if unknown."""
        g = self._group_of.pop(block, None)
        if g is not None:
            entries = self._entries[g]
            del entries[block]
            self._ages[g] = self._passes[g] - next(iter(entries.values())) if entries else -1

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        """The block to evict, or None if none is ``evictable`` (pinned, in flight, wanted)."""
        oldest = max(self._ages, default=-1)
        if oldest < 0:
            return None
        # Nearly always an entry of the highest age will do, and list.index finds its layer three
        # times faster than a loop over all layers does.
        try:
            g = self._ages.index(oldest, self._now)
        except ValueError:
            g = self._ages.index(oldest)
        last = self._passes[g] - oldest
        for block, used in self._entries[g].items():
            if used != last:
                break
            if evictable(block):
                return block
        return self._search(evictable)

    def _search(self, evictable: Callable[[str], bool]) -> str | None:
        """The rule in full: highest age, then furthest layer, then least recent."""
        n = len(self._entries)
        best: str | None = None
        best_age = -1
        for g in (i % n for i in range(self._now, self._now + n)):
            if self._ages[g] <= best_age:
                continue
            passes = self._passes[g]
            for block, last in self._entries[g].items():
                if passes - last <= best_age:
                    break  # LRU order: younger entries of this layer cannot win either
                if evictable(block):
                    best, best_age = block, passes - last
                    break
        return best
