"""Tokens handed on as they are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class TokenTap(ABC):
    """A stopping criterion of one sequence that gets each new token. ``generation.loop`` hands them
    over by themselves; transformers' loop calls it with the whole text, as any criterion.

    Attributes:
        is_ours: whether nobody but this package gets them.
    """

    is_ours = False

    def __init__(self) -> None:
        self._seen: int | None = None

    @abstractmethod
    def take(self, token: int) -> bool:
        """A token has been chosen; True ends the generation behind it."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        """``input_ids``: (1, S) int64, the new tokens last. Returns (1,) bool: stop now."""
        length, stop = input_ids.shape[1], False
        for token in input_ids[0, length - 1 if self._seen is None else self._seen :].tolist():
            stop = self.take(token)
        self._seen = length
        return torch.full((1,), stop, dtype=torch.bool, device=input_ids.device)


__all__ = ["TokenTap"]
