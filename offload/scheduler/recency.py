"""Eviction by recency: global LRU, CLOCK, and LRU beside a set that stays.

None of them looks at layers. On the cyclic order of a model that has a price: with slots for less
than one token's experts LRU evicts each entry just before its reuse and never hits, see
``expert_cache`` for the way round. They are here to be compared with, and for routings with so
much locality that it does not matter.

Pure bookkeeping, deterministic; see ``policy`` for what the methods mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from offload.scheduler.policy import Scores

SWEEP = 64
"""Used entries that the clock's hand passes at most before it takes one: a full turn over 100,000
entries would be a pause of milliseconds."""


class Lru:
    """The least recently used entry goes, whatever its layer. O(1)."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: OrderedDict[str, None] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: str) -> bool:
        return block in self._entries

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        """Layers do not count."""

    def touch(self, block: str, group: str) -> None:
        self._entries[block] = None
        self._entries.move_to_end(block)

    def discard(self, block: str) -> None:
        self._entries.pop(block, None)

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        # What is not evictable is in use, so among the youngest: nearly always the first will do.
        for block in self._entries:
            if evictable(block):
                return block
        return None


class Clock:
    """Second chance (Corbato, "A Paging Experiment with the Multics System", 1968).

    Entries stand in a circle with one bit each, clear when they come and set by a use. The hand
    clears bits as it passes and takes the first entry whose bit is clear. After ``SWEEP`` set bits
    it takes the first that it has cleared, as after a full turn. O(1).
    """

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used: OrderedDict[str, bool] = OrderedDict()  # the hand points at the first

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, block: str) -> bool:
        return block in self._used

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        """Layers do not count."""

    def touch(self, block: str, group: str) -> None:
        self._used[block] = block in self._used

    def discard(self, block: str) -> None:
        self._used.pop(block, None)

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        used = self._used
        cleared, first = 0, None
        for _ in range(len(used)):
            block = next(iter(used))
            if evictable(block):
                if not used[block]:
                    return block
                if cleared == SWEEP:
                    return first
                used[block] = False
                cleared += 1
                first = first or block
            used.move_to_end(block)
        if first is not None:  # a full turn, and the hand goes on to it past what cannot go
            while (block := next(iter(used))) != first:
                used.move_to_end(block)
        return first


class PinnedLru:
    """LRU, but what is ``kept`` goes only when nothing else can.

    Kept entries come like all others, when they are first used, and then stay. The caller keeps
    fewer than there are slots; if all the same nothing else can go (a prompt whose layer needs
    more experts than there are other slots), the least recent kept one does: never stuck. O(1).
    """

    __slots__ = ("_kept", "_pinned", "_rest")

    def __init__(self, kept: Collection[str]) -> None:
        self._kept = frozenset(kept)
        self._pinned = Lru()
        self._rest = Lru()

    def __len__(self) -> int:
        return len(self._pinned) + len(self._rest)

    def __contains__(self, block: str) -> bool:
        return block in self._pinned or block in self._rest

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        """Layers do not count."""

    def touch(self, block: str, group: str) -> None:
        self._side(block).touch(block, group)

    def discard(self, block: str) -> None:
        self._side(block).discard(block)

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        found = self._rest.victim(evictable)
        return found if found is not None else self._pinned.victim(evictable)

    def _side(self, block: str) -> Lru:
        return self._pinned if block in self._kept else self._rest
