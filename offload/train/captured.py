"""What transformers captures inside of a unit: router logits, attention weights.

A model that is asked for them (``output_router_logits``) has hooks put them into lists beside the
layers' results. A unit's forward runs without autograd: they would be constants, and a loss of
them (that which balances experts, say) would have its value and no gradient. So they are results of
the unit: captured apart, handed to the lists from outside of it, and captured again in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers.utils.output_capturing import _active_collector

Lists = dict[str, list[Any]]
"""By kind, in the order of their modules."""


class Capture:
    """What one call of a unit captures, the first time and whenever it runs again."""

    def __init__(self) -> None:
        """Of what is asked for now."""
        held = _active_collector.get() or {}
        # Hooks look at how many are there, and at what is beside the lists: the same again.
        self._before = {k: len(v) if isinstance(v, list) else v for k, v in held.items()}
        self._lists = {k for k, v in held.items() if isinstance(v, list)}

    @contextlib.contextmanager
    def apart(self) -> Iterator[Lists]:
        """Inside, what is captured goes to these lists alone."""
        mine: dict[str, Any] = {
            k: [None] * v if k in self._lists else v for k, v in self._before.items()
        }
        found: Lists = {}
        token = _active_collector.set(mine)
        try:
            yield found
        finally:
            _active_collector.reset(token)
            found.update({k: mine[k][self._before[k] :] for k in self._lists})


def hand_over_captured(found: Lists) -> None:
    """Put what a unit captured where whoever asked for it looks."""
    held = _active_collector.get() or {}
    for key, values in found.items():
        held[key].extend(values)


__all__ = ["Capture", "Lists", "hand_over_captured"]
