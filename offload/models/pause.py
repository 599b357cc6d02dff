"""Points between a model's units at which somebody may end the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Pause:
    """A forward pre-hook that changes nothing but may raise. Whoever runs several units at once
    calls it before them, and no more often."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        self._call()


def pause_before(modules: Iterable[Any], call: Callable[[], Any]) -> None:
    """Have ``call`` called before each module runs, or before several that run as one."""
    pause = Pause(call)
    for module in modules:
        # First of the hooks: nothing is held for the unit yet.
        module.register_forward_pre_hook(pause, prepend=True)


__all__ = ["Pause", "pause_before"]
