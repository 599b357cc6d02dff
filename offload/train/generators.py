"""The generators that a unit's dropout draws from, so that it can be run again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

State = tuple[torch.Tensor, ...]
"""Of each generator, as torch hands it out: uint8 on the CPU."""


class Generators:
    """The CPU's, and that of a device whose tensors draw from another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.cuda and its like have the same functions; for the CPU they are torch's own.
        self._more: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def state(self) -> State:
        own = torch.get_rng_state()
        if self._more is None:
            return (own,)
        return own, self._more.get_rng_state(self._device)

    def set(self, state: State) -> None:
        torch.set_rng_state(state[0])
        if self._more is not None:
            self._more.set_rng_state(state[1], self._device)

    def seed(self, number: int) -> None:
        """Begin anew. ``torch.manual_seed`` would keep the whole stack as text for each kind of
        device that nobody has used yet, which takes milliseconds."""
        torch.default_generator.manual_seed(number)
        if self._more is not None:
            self._more.manual_seed_all(number)

    def rewind(self, key: State | int) -> None:
        """To a state, or seeded."""
        if isinstance(key, int):
            self.seed(key)
        else:
            self.set(key)

    @contextlib.contextmanager
    def again(self, key: State | int) -> Iterator[None]:
        """In a state, or seeded, inside; as they were behind it."""
        before = self.state()
        try:
            self.rewind(key)
            yield
        finally:
            self.set(before)


__all__ = ["Generators", "State"]
