"""Made-up routings for simulations: which experts a token uses, without a model.

Each layer has its own order of its experts, and the expert of rank r is drawn with a weight: Zipf's
r^-s, or a given one. A token's experts are drawn without replacement; each of the last token's
stays with the chance ``repeat``, which is the locality in time that real routings show. The same
seed gives the same routing, whatever is asked when.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

_TRIES = 64
"""Draws for each expert, those that have been drawn already among them."""


class Draws:
    """A ``simulate.Routing``."""

    def __init__(
        self,
        experts: Mapping[str, Sequence[str]],
        top_k: Mapping[str, int],
        weights: Sequence[float] | float = 0.0,
        *,
        repeat: float = 0.0,
        tokens: int = 1,
        seed: int = 0,
    ) -> None:
        """``weights``: by rank, as many as a layer has experts, or Zipf's exponent (0: even).

        Raises:
            ValueError: weights that are negative, or fewer above zero than a token uses; a
                ``repeat`` outside [0, 1).
        """
        if not 0.0 <= repeat < 1.0:
            raise ValueError(f"a chance to stay must be in [0, 1), got {repeat}")
        if tokens < 1:
            raise ValueError(f"a pass has at least one token, got {tokens}")
        self._top_k = dict(top_k)
        self._repeat = repeat
        self._tokens = tokens
        self._seed = seed
        self._ranked: dict[str, list[str]] = {}
        self._place = {g: {b: i for i, b in enumerate(blocks)} for g, blocks in experts.items()}
        self._sums: dict[int, list[float]] = {}
        self._sums_of: dict[str, list[float]] = {}
        self._last: dict[str, tuple[int, list[str]]] = {}
        for group, blocks in experts.items():
            ranked = list(blocks)
            random.Random(f"{seed}/{group}/ranks").shuffle(ranked)
            self._ranked[group] = ranked
            n = len(ranked)
            if n not in self._sums:
                self._sums[n] = list(accumulate(_weights(weights, n, top_k[group])))
            self._sums_of[group] = self._sums[n]

    def __call__(self, number: int, group: str) -> list[str]:
        """The experts of a pass, in the layer's order. Passes of a layer come in order."""
        known = self._last.get(group)
        if known is not None and known[0] == number:
            return known[1]
        rng = random.Random(f"{self._seed}/{group}/{number}")
        place = self._place[group]
        used: set[str] = set()
        # Of the pass before: a simulation that starts over draws what it drew at first.
        last = set(known[1]) if known is not None and known[0] == number - 1 else set()
        for _ in range(self._tokens):
            if len(used) == len(place):
                break
            last = self._token(group, last, rng)
            used |= last
        chosen = sorted(used, key=place.__getitem__)
        self._last[group] = (number, chosen)
        return chosen

    def hottest(self) -> list[str]:
        """All experts, the likeliest first; of equal rank, in the order of the layers."""
        longest = max(map(len, self._ranked.values()), default=0)
        return [r[i] for i in range(longest) for r in self._ranked.values() if i < len(r)]

    def _token(self, group: str, last: set[str], rng: random.Random) -> set[str]:
        ranked, sums, k = self._ranked[group], self._sums_of[group], self._top_k[group]
        chosen: set[str] = set()
        if self._repeat:
            for block in sorted(last, key=self._place[group].__getitem__):
                if len(chosen) < k and rng.random() < self._repeat:
                    chosen.add(block)
        total = sums[-1]
        for _ in range(_TRIES * k):
            if len(chosen) == k:
                return chosen
            chosen.add(ranked[min(len(sums) - 1, bisect_left(sums, rng.random() * total))])
        # So steep that the rest is hardly ever drawn: the likeliest of it.
        for block in ranked:
            if len(chosen) == k:
                break
            chosen.add(block)
        return chosen


def _weights(weights: Sequence[float] | float, n: int, top_k: int) -> list[float]:
    if isinstance(weights, (int, float)):
        if not 0.0 <= weights <= 10.0:
            raise ValueError(f"Zipf's exponent must be in [0, 10], got {weights}")
        return [(rank + 1) ** -float(weights) for rank in range(n)]
    if len(weights) != n:
        raise ValueError(f"{len(weights)} weights for {n} experts")
    if min(weights) < 0 or sum(w > 0 for w in weights) < top_k:
        raise ValueError(f"weights cannot be negative, and {top_k} of them must be above zero")
    return [float(w) for w in sorted(weights, reverse=True)]
