"""Eviction by frequency: LFU with dynamic ageing, and HybriMoE's score of the router's scores.

Both order entries by a key that a use can only raise, so a heap may hold old keys: they are lower
bounds, and one is brought up to date when it reaches the top. A use then costs no search. O(log n)
amortised per use; each use repairs at most one old key at the top, so that a long run of hits
leaves no pile of them to the next miss.

Pure bookkeeping, deterministic; see ``policy`` for what the methods mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import exp2, inf, log2

from offload.scheduler.policy import Scores

_Item = tuple[float, int, str]  # key, number of the use that set it, block


class KeyHeap:
    """Blocks by (key, number of their last use), lowest first; keys never fall."""

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        # block: its key and use now, and the use that its item in the heap has
        self._entries: dict[str, tuple[float, int, int]] = {}
        self._heap: list[_Item] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: str) -> bool:
        return block in self._entries

    def set(self, block: str, key: float, use: int) -> None:
        """Insert a block, or raise its key. ``use`` grows from call to call."""
        entry = self._entries.get(block)
        if entry is None:
            self._entries[block] = (key, use, use)
            heappush(self._heap, (key, use, block))
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._compact()
        else:
            self._entries[block] = (key, use, entry[2])
            if self._heap[0][2] == block:
                self._repair()

    def discard(self, block: str) -> None:
        """Forget a block; its item goes when it reaches the top."""
        self._entries.pop(block, None)

    def lowest(self) -> _Item | None:
        """The lowest block with its key, None if there is none."""
        heap = self._heap
        while heap:
            if self._repair():
                return heap[0]
        return None

    def take(self, evictable: Callable[[str], bool]) -> _Item | None:
        """The lowest ``evictable`` one."""
        aside: list[_Item] = []
        found = None
        while (item := self.lowest()) is not None:
            if evictable(item[2]):
                found = item
                break
            aside.append(heappop(self._heap))
        for item in aside:
            heappush(self._heap, item)
        return found

    def _repair(self) -> bool:
        """One step: True if the top item is up to date, else it is replaced or dropped."""
        key, use, block = self._heap[0]
        entry = self._entries.get(block)
        if entry is None or entry[2] != use:
            heappop(self._heap)  # discarded meanwhile, and perhaps inserted anew
            return False
        if entry[1] == use:
            return True
        key, use, _ = entry
        self._entries[block] = (key, use, use)
        heapreplace(self._heap, (key, use, block))
        return False

    def _compact(self) -> None:
        self._heap = [(key, use, block) for block, (key, use, _) in self._entries.items()]
        self._entries = {block: (key, use, use) for key, use, block in self._heap}
        heapify(self._heap)


class Lfu:
    """LFU with dynamic ageing (Arlitt et al., "Evaluating content management techniques for Web
    proxy caches", 2000): an entry's key is its number of uses since it came, plus the key of the
    last entry evicted before its last use. What was popular once does not stay for ever, and no
    constant has to be tuned. Ties go to the least recent."""

    __slots__ = ("_age", "_counts", "_heap", "_use")

    def __init__(self) -> None:
        self._heap = KeyHeap()
        self._counts: dict[str, int] = {}
        self._age = 0
        self._use = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, block: str) -> bool:
        return block in self._counts

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        """Layers do not count."""

    def touch(self, block: str, group: str) -> None:
        self._use += 1
        count = self._counts[block] = self._counts.get(block, 0) + 1
        self._heap.set(block, self._age + count, self._use)

    def discard(self, block: str) -> None:
        if self._counts.pop(block, None) is not None:
            self._heap.discard(block)

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        item = self._heap.take(evictable)
        if item is None:
            return None
        self._age = int(item[0])
        return item[2]


class Mrs:
    """Minus recent score (Zhong et al., "HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management
    for Efficient MoE Inference", 2025, section 4.3): for each token a layer's experts have
    ``S ← α TopP(s) + (1 − α) S``, s the softmax of the router's logits, of which TopP keeps the
    ``p = 2 k`` highest and sets the others to 0; the lowest S of all cached experts goes. S is
    kept for absent experts, too. Ties go to the earlier layer, then to the least recent.

    Here S is known by block, every token of a batch counts in order, and all constants are
    arguments. A layer that runs without scores counts 1 for each expert used: S is then the
    exponentially decayed frequency of LRFU.

    Decay is not carried out: a key is ``log2 S − n log2(1 − α)`` with n the layer's tokens so far,
    which only a token that scores the expert changes.
    """

    __slots__ = (
        "_alpha", "_blind", "_fed", "_group_of", "_heaps", "_keys", "_lows", "_order", "_rate",
        "_tokens", "_use",
    )  # fmt: skip

    def __init__(self, groups: Sequence[str], *, alpha: float = 0.5) -> None:
        """``groups``: layer names in the order in which they run. ``alpha``: in (0, 1)."""
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha is {alpha}, not between 0 and 1")
        self._alpha = alpha
        self._rate = -log2(1.0 - alpha)
        self._order = {g: i for i, g in enumerate(groups)}
        self._keys: list[dict[str, float]] = [{} for _ in groups]
        self._heaps = [KeyHeap() for _ in groups]
        self._lows = [inf] * len(groups)  # log2 of the lowest S of a layer, or a bound below it
        self._tokens = [0] * len(groups)
        self._group_of: dict[str, int] = {}
        self._use = 0
        self._blind = -1  # the running layer, if it has no scores
        self._fed: set[str] = set()

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block: str) -> bool:
        return block in self._group_of

    def score(self, block: str, group: str) -> float:
        """S of an expert now, cached or not."""
        g = self._order[group]
        return exp2(self._keys[g].get(block, -inf) - self._tokens[g] * self._rate)

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        g = self._order[group]
        self._blind = g if scores is None else -1
        self._fed.clear()
        rows = 1 if scores is None else len(scores)
        self._lows[g] -= rows * self._rate
        if scores is None:
            self._tokens[g] += 1
            return
        changed: dict[str, None] = {}
        for row in scores:
            self._tokens[g] += 1
            for block, s in row.items():
                self._feed(g, block, s)
            changed.update(dict.fromkeys(row))
        heap, keys = self._heaps[g], self._keys[g]
        for block in changed:
            if block in heap:
                self._use += 1
                heap.set(block, keys[block], self._use)

    def touch(self, block: str, group: str) -> None:
        g = self._order[group]
        if self._group_of.setdefault(block, g) != g:
            self.discard(block)
            self._group_of[block] = g
        if g == self._blind and block not in self._fed:
            self._fed.add(block)
            self._feed(g, block, 1.0)
        self._use += 1
        key = self._keys[g].setdefault(block, -inf)
        self._heaps[g].set(block, key, self._use)
        self._lows[g] = min(self._lows[g], key - self._tokens[g] * self._rate)

    def discard(self, block: str) -> None:
        g = self._group_of.pop(block, None)
        if g is not None:
            self._heaps[g].discard(block)

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        lows = self._lows
        passed: set[int] = set()
        found: str | None = None
        while lows and (low := min(lows)) < inf:
            g = lows.index(low)
            item = self._heaps[g].take(evictable)
            score = inf if item is None else item[0] - self._tokens[g] * self._rate
            if item is not None and score <= low:
                found = item[2]
                break
            lows[g] = score  # higher than it looked: perhaps another layer's is lower
            passed.add(g)
        for g in passed:
            lowest = self._heaps[g].lowest()
            lows[g] = inf if lowest is None else lowest[0] - self._tokens[g] * self._rate
        return found

    def _feed(self, g: int, block: str, s: float) -> None:
        keys, n = self._keys[g], self._tokens[g]
        before = exp2(keys.get(block, -inf) - (n - 1) * self._rate)
        now = self._alpha * s + (1.0 - self._alpha) * before
        if now > 0.0:
            keys[block] = max(keys.get(block, -inf), log2(now) + n * self._rate)
