"""Where a unit runs: what it is called with and returns, at home in RAM or on a visit elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from offload.train.landing import plain
from offload.train.same_again import Sums

Tensors = list[torch.Tensor | None]


class Visit(Protocol):
    """Where a unit runs."""

    def up(
        self, tensors: Sequence[torch.Tensor | None], *, same: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Tensors:  # fmt: skip
        """These where the unit runs, without their history. Valid until the end of the visit.

        ``same``: which of them other units get, too; ``kept``: which were kept in RAM, and are
        brought from there.
        """
        ...

    def leave(self, tensors: Sequence[torch.Tensor | None], *, wanted: bool) -> Tensors:
        """These for whoever comes next; the last thing of a visit. ``wanted``: in RAM, soon."""
        ...

    def down(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """These in RAM, for good, and now."""
        ...

    def same(self, before: Sums, now: Sums) -> bool:
        """Whether these are equal, of which the last one was computed in this visit."""
        ...


class AtHome:
    """The unit runs in RAM: everything is where it is."""

    def up(
        self, tensors: Sequence[torch.Tensor | None], *, same: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Tensors:  # fmt: skip
        del same, kept
        return [plain(tensor) for tensor in tensors]

    def leave(self, tensors: Sequence[torch.Tensor | None], *, wanted: bool) -> Tensors:
        del wanted
        return list(tensors)

    def down(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        return list(tensors)

    def same(self, before: Sums, now: Sums) -> bool:
        return now.same(before)


AT_HOME = AtHome()


__all__ = ["AT_HOME", "AtHome", "Tensors", "Visit"]
