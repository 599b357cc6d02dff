"""Follow the real order of use when it is another cycle than the planned one.

An encoder runs once and then the decoder goes round alone; a shared block runs between the
layers. When the prediction fails at the same unit twice, what ran in between is the cycle to look
ahead in from now on. If that was a part that happened to run twice (a head that somebody tried),
all the rest is unexpected, and shows as the cycle at its own second time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from offload.scheduler.trace import Step, Trace

logger = logging.getLogger(__name__)


class OrderWatcher:
    """Remembers which units ran lately."""

    def __init__(self, planned_steps: int) -> None:
        self._recent: deque[tuple[str, tuple[str, ...]]] = deque(maxlen=4 * planned_steps + 8)
        self._lost_at: dict[str, int] = {}
        """Where each unit was last unexpected, in units seen before."""
        self._seen = 0

    def note(self, unit: str, blocks: Sequence[str], *, expected: bool) -> Trace | None:
        """A unit runs; ``expected``: as predicted. Returns the new cycle if one shows.

        It begins with this unit.
        """
        cycle = None
        if not expected:
            length = self._seen - self._lost_at.get(unit, self._seen)
            if 0 < length <= len(self._recent):
                cycle = list(self._recent)[-length:]
            self._lost_at[unit] = self._seen
        self._recent.append((unit, tuple(blocks)))
        self._seen += 1
        if cycle is None:
            return None
        logger.info("the order of use changed: a cycle of %d units now", len(cycle))
        return Trace([Step(unit=u, blocks=b) for u, b in cycle])


__all__ = ["OrderWatcher"]
