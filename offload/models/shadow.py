"""An attribute of an instance in front of its class's, and what takes it away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STANDS_IN = "stands_in"
"""An attribute of a forward, true of those that do what their module's own does."""

CAPTURES = "transformers.utils.output_capturing"
"""Whose hooks stay inside a model once ``output_hidden_states`` or the like has been asked for, and
most of the time do nothing."""


def shadow(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Have ``owner.name`` be ``value``. Returns what puts back what the instance had of that name,
    or leaves it to its class again; those of several are called last one first.

    Past ``nn.Module.__setattr__``: what is no parameter must not become one.
    """
    own = owner.__dict__
    had, before = name in own, own.get(name)
    own[name] = value

    def undo() -> None:
        own.pop(name, None)
        if had:
            own[name] = before

    return undo


__all__ = ["CAPTURES", "STANDS_IN", "shadow"]
