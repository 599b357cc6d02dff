"""transformers' logits processors for one row on the CPU: the same scores to the bit, sooner.

    V tokens

A nucleus (Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020, section 3.1)
is found by sorting the vocabulary with its indices, 14 ms for 152,000 tokens in torch. The values
alone say where it begins, and numpy sorts them with vector instructions in 0.6 ms. Behind a top-k
all but k are minus infinity, and only those are sorted. Which of several equal scores stay where
the nucleus begins between them is the order's that torch's sort happens to give them; then, and
whenever a processor is not one of these to the letter, transformers' own runs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation import logits_process as theirs

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``input_ids`` [1, S] int64, ``scores`` float32 [1, V] → float32 [1, V]."""

_BLOCK = 64
"""Sums go by lanes of at most so many numbers: whole blocks of zeros at the front change none."""

_KEPT = ("filter_value", "min_tokens_to_keep")
"""Of a processor, beside its setting. One that keeps more is of a version that may do more."""


def faster(processors: Iterable[Any]) -> list[Scores]:
    """What gives the same as each of ``processors``.

    Raises:
        ValueError: of transformers: one of them needs more arguments than it gets here.
    """
    return [_faster(processor) for processor in processors]


def _faster(processor: Any) -> Scores:
    kind = type(processor)
    for stock, setting, own in (
        (theirs.TopKLogitsWarper, "top_k", _TopK),
        (theirs.TopPLogitsWarper, "top_p", _TopP),
        (theirs.MinPLogitsWarper, "min_p", _MinP),
    ):
        known = vars(processor).keys() <= {setting, *_KEPT} if kind is stock else False
        if known and kind.__call__.__qualname__ == f"{kind.__name__}.__call__":
            return own(processor)
    # As a list of transformers does for every token, 50 us each.
    names = list(inspect.signature(processor.__call__).parameters)
    if len(names) > 2:
        raise ValueError(
            f"Make sure that all the required parameters: {names} for {kind} are passed to the "
            f"logits processor."
        )
    scores: Scores = processor
    return scores


def _row(scores: torch.Tensor) -> npt.NDArray[np.float32] | None:
    """The numbers of ``scores``, if they are one row in RAM."""
    if scores.dim() != 2 or scores.shape[0] != 1 or scores.dtype != torch.float32:
        return None
    if scores.device.type != "cpu" or scores.requires_grad or not scores.is_contiguous():
        return None
    return scores.detach().numpy()[0]


class _TopK:
    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row, k = _row(scores), self._stock.top_k
        if row is None or not 0 < k < len(row):
            result: torch.Tensor = self._stock(input_ids, scores)
            return result
        # NaN is the largest in both orders.
        least = np.partition(row, len(row) - k)[len(row) - k]
        return scores.masked_fill(scores < float(least), self._stock.filter_value)


class _TopP:
    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        least = self._least(scores)
        if least is None:
            result: torch.Tensor = self._stock(input_ids, scores)
            return result
        return scores.masked_fill(scores < least, -math.inf)

    def _least(self, scores: torch.Tensor) -> float | None:
        """Of the nucleus; None: that is for torch's sort to say."""
        row, keep = _row(scores), self._stock.min_tokens_to_keep
        if row is None or self._stock.filter_value != -math.inf:
            return None
        there = row[row != -math.inf]
        away = _enough(len(row) - len(there), len(row))
        ascending = np.full(away + len(there), -math.inf, np.float32)
        ascending[away:] = np.sort(there)
        if len(there) < keep or not ascending[-1] < math.inf:  # a NaN, too
            return None
        cumulative = torch.from_numpy(ascending).softmax(dim=-1).cumsum(dim=-1)
        # What is out comes first, as sums of what is not negative only rise.
        out = min(int((cumulative <= 1 - self._stock.top_p).sum()), len(ascending) - keep)
        least = float(ascending[out])
        if out > away and ascending[out - 1] == least:
            return None
        return least


def _enough(away: int, count: int) -> int:
    """How many of ``away`` numbers at minus infinity have to be in front of the others to have
    each of these in its lane."""
    few = _BLOCK + away % _BLOCK
    return few if few < away and _has_lanes(count) else away


@functools.cache
def _has_lanes(count: int) -> bool:
    """Whether torch sums so many numbers by lanes, seen by trying."""
    generator = torch.Generator("cpu").manual_seed(0)
    for there in (1, 20, 50, 333):
        if there >= count:
            continue
        whole = torch.full((count,), -math.inf, dtype=torch.float32, device="cpu")
        whole[-there:] = (
            (4 * torch.randn(there, generator=generator, dtype=torch.float32, device="cpu"))
            .sort()
            .values
        )
        part = whole[-(there + _BLOCK + (count - there) % _BLOCK) :].clone()
        if not torch.equal(whole.softmax(-1)[-there:], part.softmax(-1)[-there:]):
            return False
    return True


class _MinP:
    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # The most probable one stays by itself, unless it is asked for more than there is.
        if self._stock.min_tokens_to_keep != 1 or not 0 <= self._stock.min_p <= 1:
            result: torch.Tensor = self._stock(input_ids, scores)
            return result
        probabilities = torch.softmax(scores, dim=-1)
        least = self._stock.min_p * probabilities.amax(dim=-1, keepdim=True)
        return scores.masked_fill(probabilities < least, self._stock.filter_value)


__all__ = ["Scores", "faster"]
