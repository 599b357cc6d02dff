"""In which order a model's sequences come to the places where they wait for each other."""

from __future__ import annotations

from collections.abc import Hashable


class Order:
    """The stops of one forward pass, learnt from the sequences that make it.

    A stop that nobody has come to before lies behind the one that the sequence came from: all run
    the same code, so what one has passed, the others pass in the same order (or leave out).
    """

    def __init__(self, first: Hashable) -> None:
        self._stops: list[Hashable] = [first]
        self._index: dict[Hashable, int] = {first: 0}

    def __len__(self) -> int:
        return len(self._stops)

    def __getitem__(self, stop: Hashable) -> int:
        return self._index[stop]

    def learn(self, stop: Hashable, after: Hashable) -> None:
        """Someone who came from ``after`` waits at ``stop``."""
        if stop in self._index:
            return
        self._stops.insert(self._index[after] + 1, stop)
        self._index = {name: i for i, name in enumerate(self._stops)}


__all__ = ["Order"]
