"""The parts of a head's loss: whose weights, which tokens, and the gradient of a slice."""

# N tokens with a label, H width of the hidden state, V vocabulary, s rows of one slice

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.errors import OffloadError

IGNORE = -100
"""Label of a token that has none, as in transformers and torch."""

HEAD_ROWS = 4096
"""Rows of a slice of a streamed head: fixed, as results depend on it."""


def slices_of(vocabulary: int) -> list[tuple[int, int]]:
    """Rows ``(first, end)`` of the slices that a streamed head comes in."""
    return [(a, min(a + HEAD_ROWS, vocabulary)) for a in range(0, vocabulary, HEAD_ROWS)]


class HeadWeights(Protocol):
    """A head ``[V, H]`` that comes and whose gradient goes slice by slice."""

    @property
    def slices(self) -> Sequence[tuple[int, int]]:
        """Rows ``(first, end)`` of every slice; together ``range(V)`` without gaps."""
        ...

    def weight(self, i: int) -> AbstractContextManager[Tensor]:
        """Slice ``i``, ``[s, H]`` in the hidden state's dtype, valid inside the ``with``.

        Asked for in the order 0, 1, ..., n - 1, and, for gradients, n - 1, ..., 1, 0.
        """
        ...

    def bias(self, i: int) -> Tensor | None:
        """Bias ``[s]`` of slice ``i`` in the hidden state's dtype, None if the head has none."""
        ...

    def gradient(self, i: int, weight: Tensor, bias: Tensor | None) -> None:
        """Take the gradients ``[s, H]`` and ``[s]`` of slice ``i``; they are overwritten after."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """What a model does between head and loss: ``c tanh(factor x / c)`` with softcap ``c``."""

    factor: float = 1.0
    softcap: float | None = None


PLAIN = Transform()


def shift_labels(labels: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Labels of tokens ``[..., S]`` moved to the positions that predict them, flat.

    Position t gets the label of t + 1, the last of a row none: as transformers shifts.
    """
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index).reshape(-1)


class ResidentHead:
    """A head that lies in memory whole; its gradients, too. Slices of ``rows`` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rows: int = 4096) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        starts = range(0, weight.shape[0], rows)
        self.slices = [(a, min(a + rows, weight.shape[0])) for a in starts]
        self.weight_grad: Tensor | None = None
        self.bias_grad: Tensor | None = None

    def weight(self, i: int) -> AbstractContextManager[Tensor]:
        first, end = self.slices[i]
        return nullcontext(self._weight[first:end])

    def bias(self, i: int) -> Tensor | None:
        first, end = self.slices[i]
        return None if self._bias is None else self._bias[first:end]

    def gradient(self, i: int, weight: Tensor, bias: Tensor | None) -> None:
        first, end = self.slices[i]
        if self.weight_grad is None:
            self.weight_grad = torch.empty_like(self._weight, dtype=weight.dtype)
        self.weight_grad[first:end] = weight
        if bias is not None:
            if self.bias_grad is None:
                self.bias_grad = weight.new_empty(self._weight.shape[0])
            self.bias_grad[first:end] = bias


class SliceGradient:
    """The gradient of a slice: one product, or several added in the wide dtype. Buffers stay."""

    def __init__(
        self, like: Tensor, widest: int, width: int, several: bool, has_bias: bool, out: torch.dtype
    ) -> None:
        wide = wide_dtype(like.dtype)
        self._several, self._out = several, out
        self._product_sH = like.new_empty(widest, width)
        summed = several or (out == wide != like.dtype)
        self._sum_sH = like.new_empty(widest if summed else 0, width, dtype=wide)
        self._bias_s = like.new_empty(widest if has_bias else 0, dtype=wide)
        self._parts = self._rows = 0

    def begin(self, rows: int) -> None:
        self._parts, self._rows = 0, rows
        self._bias_s.zero_()

    def add_bias(self, gradient: Tensor) -> None:
        if self._bias_s.numel():
            self._bias_s[: self._rows].add_(gradient.sum(0))

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        product = torch.mm(gradient.t(), hidden, out=self._product_sH[: self._rows])
        if self._several:
            total = self._sum_sH[: self._rows]
            total.add_(product) if self._parts else total.copy_(product)
        self._parts += 1

    def result(self) -> tuple[Tensor, Tensor | None]:
        product, total = self._product_sH[: self._rows], self._sum_sH[: self._rows]
        if not self._parts:
            product.zero_()
        if self._several and self._parts:
            weight = product.copy_(total) if self._out == product.dtype else total.to(self._out)
        elif self._out == total.dtype and total.shape == product.shape:
            weight = total.copy_(product)
        else:
            weight = product.to(self._out)
        return weight, self._bias_s[: self._rows].to(self._out) if self._bias_s.numel() else None


def check(hidden: Tensor, labels: Tensor, head: HeadWeights, ignore: int) -> Tensor:
    """The rows that have labels."""
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise OffloadError(
            f"the head's loss takes hidden states [T, H] and labels [T], not "
            f"{list(hidden.shape)} and {list(labels.shape)}: flatten batches, and shift the labels"
        )
    vocabulary = 0
    for first, end in head.slices:
        if first != vocabulary or end <= first:
            raise OffloadError(
                f"the head's slices must follow each other: rows {first}..{end} after {vocabulary}"
            )
        vocabulary = end
    rows = (labels != ignore).nonzero().squeeze(1)
    found = labels[rows]
    bad = (found < 0) | (found >= vocabulary)
    if bool(bad.any()):
        raise OffloadError(
            f"label {int(found[bad][0])} is outside the vocabulary of {vocabulary} tokens: the "
            f"tokenizer is another model's, or the label for 'none' is not {ignore}"
        )
    return rows


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is added up in: float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
