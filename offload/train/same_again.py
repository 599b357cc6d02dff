"""Whether a unit that backward runs again is the one that forward ran.

What was changed between the two (dropout by ``eval()``, adapters, hooks, weights by a step) changes
the result, and gradients would be those of a loss that nobody has seen. torch's own checkpointing
compares shapes only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.errors import OffloadError

log = logging.getLogger(__name__)


class Sums:
    """What tells the results of a unit from other ones: their sums, in float64, where they were
    computed. No host waits for them until they are compared."""

    def __init__(self, results: Sequence[Any]) -> None:
        """``results``: of the unit's forward; those that are no floating point tensors are left
        out."""
        self._sums = [
            x.detach().sum(dtype=torch.float64)
            for x in results
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]

    def same(self, other: Sums) -> bool:
        """Whether they are equal to the bit; the host waits for both."""
        return self._numbers() == other._numbers()

    def _numbers(self) -> list[str]:
        return [float(x).hex() for x in self._sums]  # "nan" is equal to itself


def check_same(kind: str, before: Sums, again: Callable[[], Sums]) -> bool:
    """Whether ``again``, forward as it was run, is repeatable at all. To be asked when the run with
    autograd came to another result: torch may choose another kernel for that, which rounds
    otherwise (attention with a mask that wants a gradient does).

    Args:
        kind: of the unit, for people.

    Raises:
        OffloadError: it is repeatable, and has come to something else than ``before``.
    """
    found = again()
    if found.same(before):
        return True
    if not found.same(again()):
        # Sums of a card that come together in any order, say. Once per layer: a run costs time.
        log.warning(
            "a streamed %s comes to another result each time it is run: that nothing was changed "
            "between its forward and its backward is not checked",
            kind,
        )
        return False
    raise OffloadError(
        f"a streamed {kind} is run again in backward, and came to another result than in forward: "
        f"something was changed between the two (train() or eval(), which adapters are on, a hook, "
        f"or its weights by optimizer.step()), and gradients would be those of another loss. Call "
        f"backward() before that, and zero_grad() now"
    )
