"""What an eviction policy is, and the names of those there are (``policies`` makes them).

A policy keeps books over the entries of one pool of equal slots and names the one to evict. It
does no I/O, reads no clock, draws no random numbers: the same calls give the same answers, so a
replay of a recorded routing, the planner's simulation and the real run agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol


class Scores(Protocol):
    """For each token of a pass, in order: softmax of the router's logits, in [0, 1], by block, of
    the likeliest ``2 k`` experts of the layer (what is left out counts as 0). May be made as it is
    asked for: a prompt has many tokens."""

    def __len__(self) -> int:
        """Tokens."""

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        """Token by token."""


DEFAULT = "laps"
"""Chosen by replay: see benchmarks/README.md."""

NAMES = ("laps", "lru", "lfu", "clock", "mrs", "pinned")
SCORED = frozenset({"mrs"})
"""Those that learn from the router's scores, and not from the choices alone."""

CYCLIC = frozenset({"lru", "lfu", "clock"})
"""Those that hardly hit with slots for less than one token's experts, and never with a layer's
fewer than that: whatever the layers use once per token is evicted before it comes round again. The
others hold on to something."""


class ExpertPolicy(Protocol):
    """Books over cached experts. The caller owns slots and states, and evicts what it is told."""

    def __len__(self) -> int:
        """Entries."""

    def __contains__(self, block: str) -> bool:
        """Whether the block has an entry."""

    def begin_pass(self, group: str, scores: Scores | None = None) -> None:
        """A layer runs; ``touch`` follows for what it uses."""

    def touch(self, block: str, group: str) -> None:
        """Insert a block, or mark it as used by its layer."""

    def discard(self, block: str) -> None:
        """Forget a block (evicted or failed). No-op if unknown."""

    def victim(self, evictable: Callable[[str], bool]) -> str | None:
        """The block to evict, or None if none is ``evictable`` (held, in flight, wanted). The
        caller evicts it, or does not ask again before the next ``touch``."""


def kept_experts(slots: int, top_k: Mapping[str, int], spare: int = 0) -> int:
    """How many experts ``pinned`` keeps in ``slots`` slots.

    One half, so that the other follows the text; but where that other half would be less than one
    token's experts, LRU over it hardly hits, and all is kept but what a layer needs to run.

    Args:
        top_k: experts that one token uses in each layer.
        spare: slots that are kept free for guesses.
    """
    room = slots - spare - max(top_k.values(), default=0) - 1
    half = slots // 2
    return max(0, min(room, half if slots - half >= sum(top_k.values()) else room))
