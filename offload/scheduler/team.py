"""How many threads compute a token while the disk is read beside them: as many as there are, or one
fewer.

Where memory or the disk is what a pass waits for, the last thread computes little, and takes a core
from those that read: what is lost in products is won in bytes. Which of the two wins depends on the
machine and on what it is doing just now, so it is tried: passes with either number, in turns, in
the run itself. Both have to compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

TURN, TURNS = 4, 4
"""Passes with one number before the other's turn, and turns of a trial."""

FIRST_UNPLANNED, FIRST_PLANNED = 4, 64
"""Passes before the first trial: where nobody has predicted which is better, and where somebody
has. The very first ones find memory that is not filled."""

LONGEST = 1024
"""Passes between trials, at most: the time between them doubles while their result stands."""

MARGIN = 0.97
"""The other number has to take less than this share of the time: to change costs a little, and
trials are noisy."""


class Team:
    """Which number of threads the next pass gets. One thread at a time may use it.

    Attributes:
        fewer: whether it is one fewer outside of trials.
        trials: ended so far.
    """

    def __init__(self, *, fewer: bool = False, planned: bool = False) -> None:
        """
        Args:
            fewer: what to begin with.
            planned: whether that was predicted to be the better one.
        """
        self.fewer = fewer
        self.trials = 0
        self._first = FIRST_PLANNED if planned else FIRST_UNPLANNED
        self._wait = self._first
        self._left = self._wait
        self._times: tuple[list[float], list[float]] = [], []

    @property
    def next_fewer(self) -> bool:
        """Whether the next pass gets one thread fewer."""
        return self.fewer ^ (self._left == 0 and self._turn % 2 == 1)

    @property
    def _turn(self) -> int:
        return sum(map(len, self._times)) // TURN

    def took(self, seconds: float) -> None:
        """A pass with ``next_fewer`` has taken so long."""
        if self._left:
            self._left -= 1
            return
        self._times[self._turn % 2].append(seconds)
        if self._turn == TURNS:
            self._decide()

    def _decide(self) -> None:
        as_it_is, other = map(_mean, self._times)
        self.trials += 1
        if other < MARGIN * as_it_is:
            self.fewer = not self.fewer
            self._wait = self._first
        else:
            self._wait = min(LONGEST, 2 * max(self._wait, FIRST_PLANNED))
        self._left = self._wait
        self._times = [], []


def _mean(times: Sequence[float]) -> float:
    """Without the longest, which may have waited for something else."""
    return (sum(times) - max(times)) / (len(times) - 1)


__all__ = ["Team"]
