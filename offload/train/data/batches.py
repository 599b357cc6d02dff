"""Which examples each step sees, and as what tensors.

A micro-batch is a pure function of (seed, step, index): epochs are permutations that need no
memory, so a run resumes in the middle of an epoch by counting. Each epoch shows every example
exactly once: its last step has fewer micro-batches, and the last of them fewer rows, where the
numbers do not divide. Steps do not reach over the end of an epoch.

Packed rows are kept apart by ``position_ids`` that restart with each example. transformers makes
block-diagonal masks of them, windows included, if the model gets no attention mask and no cache:
call it with ``use_cache=False``. (A ready 4D mask would be one for all layers, wrong for those
with sliding windows.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offload.train.data.bins import Bins
from offload.train.data.permutation import Permutation
from offload.train.data.store import LABEL, Entry, TokenStore

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of what is not to be predicted, as transformers has it."""
WIDTH_MULTIPLE = 8
"""Micro-batches are as wide as their longest row, rounded up to this, but never above seq_len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows of S tokens. Legend: B rows, S tokens of the longest row, rounded up."""

    input_ids: torch.Tensor
    """int64 [B, S]."""
    labels: torch.Tensor
    """int64 [B, S], at the same places as ``input_ids`` (the model shifts); -100: not a label.
    The first token of every example is none."""
    position_ids: torch.Tensor
    """int64 [B, S], from 0 in every example; padding at the end of a packed row counts as one."""
    attention_mask: torch.Tensor | None
    """int64 [B, S], 0 for padding; None if packed."""
    lengths: tuple[int, ...]
    """Tokens of each row without padding, which is on the right."""
    rows: tuple[str, ...]
    """Where the examples came from, as "train.jsonl:17", in order and each once."""
    tokens: int
    """Without padding."""
    label_tokens: int
    """Predictions that count in the loss; at least 1."""


class Batches:
    """The micro-batches of a run.

    Args:
        place: names a row of the source by file and line.
        batch_size: rows of a micro-batch.
        grad_accum: micro-batches of a step.
        seq_len: the widest a micro-batch may be.
        pad_id: the token that fills rows up.
        seed: of the shuffle; None: the order of the source, in every epoch.
    """

    def __init__(
        self,
        store: TokenStore,
        bins: Bins,
        place: Callable[[int, int], str],
        *,
        batch_size: int,
        grad_accum: int,
        seq_len: int,
        packing: bool,
        pad_id: int,
        seed: int | None,
    ) -> None:
        self._store, self._bins, self._place = store, bins, place
        self._batch_size, self._grad_accum = batch_size, grad_accum
        self._seq_len, self._packing, self._pad_id = seq_len, packing, pad_id
        self._seed = seed

    @property
    def examples(self) -> int:
        """Of an epoch."""
        return self._bins.examples

    @property
    def tokens(self) -> int:
        """Of an epoch, without padding."""
        return self._bins.tokens

    @property
    def sequences(self) -> int:
        """Rows of an epoch: bins if packed, else examples."""
        return len(self._bins)

    @property
    def steps_per_epoch(self) -> int:
        """Rounded up: the last step of an epoch may be smaller."""
        return -(-self.sequences // (self._batch_size * self._grad_accum))

    def micro_batches(self, step: int) -> int:
        """How many micro-batches step ``step`` (from 0) has: ``grad_accum``, or fewer at the end
        of an epoch, but at least 1."""
        _, begin, end = self._range(step)
        return -(-(end - begin) // self._batch_size)

    def micro_batch(self, step: int, index: int) -> Batch:
        """Micro-batch ``index`` of step ``step``, both from 0.

        Raises:
            IndexError: the step has no such micro-batch.
            StoreError: the tokens cannot be read.
            ClosedError: after ``close``.
        """
        epoch, begin, end = self._range(step)
        first = begin + index * self._batch_size
        if index < 0 or first >= end:
            raise IndexError(
                f"step {step} has {self.micro_batches(step)} micro-batches, no {index}"
            )
        order = np.arange(first, min(end, first + self._batch_size))
        if self._seed is not None:
            order = Permutation(self.sequences, self._seed, epoch)(order)
        return self._collate([self._bins[number] for number in order.tolist()])

    def _range(self, step: int) -> tuple[int, int, int]:
        """Epoch of a step, and which places of the epoch's order it has."""
        if step < 0:
            raise IndexError(f"steps count from 0, not {step}")
        epoch, within = divmod(step, self.steps_per_epoch)
        size = self._batch_size * self._grad_accum
        return epoch, within * size, min(self.sequences, (within + 1) * size)

    def _collate(self, bins: list[list[int]]) -> Batch:
        import torch

        entries = [[self._store.entry(example) for example in members] for members in bins]
        lengths = tuple(sum(entry.length for entry in row) for row in entries)
        width = -(-max(lengths) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        shape = (len(entries), min(width, self._seq_len))
        ids = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for b, row in enumerate(entries):
            at = 0
            for entry in row:
                words, here = self._store.words(entry), slice(at, at + entry.length)
                tokens = words & ~LABEL
                ids[b, here] = tokens
                labels[b, here] = np.where(words & LABEL, tokens.astype(np.int64), IGNORED)
                positions[b, here] = np.arange(entry.length)
                at += entry.length
            # Unpacked rows count on: with a mask, a restart would mean nothing but a smaller range.
            start = 0 if self._packing else at
            positions[b, at:] = np.arange(start, start + shape[1] - at)
        mask = None
        if not self._packing:
            inside = np.arange(shape[1]) < np.array(lengths)[:, None]
            mask = torch.from_numpy(inside.astype(np.int64))
        return Batch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions),
            attention_mask=mask,
            lengths=lengths,
            rows=self._places([entry for row in entries for entry in row]),
            tokens=sum(lengths),
            label_tokens=int((labels != IGNORED).sum()),
        )

    def _places(self, entries: list[Entry]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._place(e.file, e.line) for e in entries))
