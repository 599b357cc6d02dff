"""Keeping some of a long context: which blocks of a layer stay when there are too many.

    B sequences, n queries, a block's column: its place in the order of tokens

The first block stays (attention sinks: what a softmax has to spend goes there; Xiao et al., 2023),
and so do the newest. Among the others the one with the lowest score goes; scores come from an
``Importance`` for each layer. Whole blocks go: the others' keys keep the rotation of their places,
and nothing is moved. What is gone is gone: lossy, and off unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.errors import OffloadError
from offload.kv.shape import BLOCK_TOKENS

SINKS = 1
"""First blocks that stay."""

WINDOW_SHARE = 4
"""The newest blocks that stay are one in so many, at least one."""

LEAST_BLOCKS = SINKS + 2
"""First, newest, and one to be chosen."""

LEAST_TOKENS, GOOD_BLOCKS = 16, 16
"""The smallest blocks, and how many of them are enough to choose from."""

WATCH_EVERY = 8
"""Decoded tokens of which one is asked how its attention is shared out; a prompt's all are. Asking
costs a call of the kernel for each block instead of one for all."""


class Importance(Protocol):
    """Scores the blocks of one layer. For one generation."""

    def observe(self, shares: Sequence[float], queries: int) -> None:
        """Some queries have attended: what of their attention each block got, by column, as a mean
        over sequences, heads and queries. The shares add up to 1."""
        ...

    def score(self, column: int) -> float:
        """Of a block, which may be newer than what was observed; the lowest one goes."""
        ...

    def forget(self, column: int) -> None:
        """That block has gone; those behind it move up."""
        ...


class AttentionMass:
    """The mean attention that a block got since it came, as in H2O (Zhang et al., 2023). They add
    up; a mean does not hold it against a block that it came late."""

    def __init__(self) -> None:
        self._masses: list[float] = []
        self._queries: list[int] = []

    def observe(self, shares: Sequence[float], queries: int) -> None:
        more = len(shares) - len(self._masses)
        self._masses += [0.0] * more
        self._queries += [0] * more
        for column, share in enumerate(shares):
            self._masses[column] += share * queries
            self._queries[column] += queries

    def score(self, column: int) -> float:
        if column >= len(self._masses):
            return 0.0
        return self._masses[column] / max(1, self._queries[column])

    def forget(self, column: int) -> None:
        if column < len(self._masses):
            del self._masses[column], self._queries[column]


class Recency:
    """The oldest goes: sinks and a window, as StreamingLLM (Xiao et al., 2023) keeps."""

    def observe(self, shares: Sequence[float], queries: int) -> None:
        """Attention does not matter."""

    def score(self, column: int) -> float:
        return float(column)

    def forget(self, column: int) -> None:
        """Columns are what counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Of each sequence and layer at most ``tokens`` tokens stay, in blocks of ``block_tokens``."""

    tokens: int
    block_tokens: int
    importance: Callable[[], Importance] = AttentionMass

    @property
    def window(self) -> int:
        """Newest full blocks that stay."""
        return max(1, self.tokens // self.block_tokens // WINDOW_SHARE)

    @property
    def pass_tokens(self) -> int:
        """Of a longer prompt that are read at once: so many come on top of those that stay."""
        return max(1, self.tokens // self.block_tokens // 2) * self.block_tokens

    def candidates(self, length: int) -> range:
        """Columns of which one has to go, with ``length`` tokens there; none while they fit."""
        if length <= self.tokens:
            return range(0)
        return range(SINKS, max(SINKS, length // self.block_tokens - self.window))


def block_tokens_to_keep(tokens: int, asked: int | None = None) -> int:
    """Tokens of a block where ``tokens`` stay: small enough to choose among some.

    Raises:
        OffloadError: not even the smallest are.
    """
    size = asked or LEAST_TOKENS
    while asked is None and size < BLOCK_TOKENS and 2 * size * GOOD_BLOCKS <= tokens:
        size *= 2
    least = LEAST_BLOCKS * size
    if tokens < least:
        raise OffloadError(
            f"--kv-keep {tokens} is too few: the first block, the newest one and one to be chosen "
            f"make {LEAST_BLOCKS} blocks of {size} tokens; keep {least} or more"
        )
    return size
