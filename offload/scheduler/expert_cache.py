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
from collections.abc import Callable


class ExpertCache:
    """Recency of cached experts, grouped by layer. The caller owns slots and states."""

    __slots__ = ("_entries", "_group_of", "_now", "_order", "_passes")

    def __init__(self, groups: list[str]) -> None:
        """``groups``: layer names in the order in which they run."""
        self._order = {g: i for i, g in enumerate(groups)}
        # group -> {expert: the group's pass number of its last use}, least recent first
        self._entries: list[OrderedDict[str, int]] = [OrderedDict() for _ in groups]
        self._passes = [0] * len(groups)
        self._group_of: dict[str, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block: str) -> bool:
        return block in self._group_of

    def begin_pass(self, group: str) -> None:
        """A layer runs: what it does not use now has missed a chance."""
        self._now = self._order[group]
        self._passes[self._now] += 1

    def touch(self, block: str, group: str) -> None:
        """Insert a block, or mark it as used in its layer's current pass."""
        g = self._order[group]
        if self._group_of.setdefault(block, g) != g:
            self.discard(block)
            self._group_of[block] = g
        entries = self._entries[g]
        entries[block] = self._passes[g]
        entries.move_to_end(block)

    def discard(self, block: str) -> None:
        """Forget a block (evicted or failed). No-op if unknown."""
        g = self._group_of.pop(block, None)
        if g is not None:
            del self._entries[g][block]

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        """The block to evict, or None if none is ``evictable`` (pinned, in flight, wanted)."""
        n = len(self._entries)
        best: str | None = None
        best_key = (-1, -1)
        for g, entries in enumerate(self._entries):
            if not entries:
                continue
            # Distance to the layer's next run; the running layer's is a whole cycle away.
            ahead = (g - self._now - 1) % n
            passes = self._passes[g]
            for block, last in entries.items():
                key = (passes - last, ahead)
                if key <= best_key:
                    break  # LRU order: younger entries of this layer cannot win either
                if evictable(block):
                    best, best_key = block, key
                    break
        return best
