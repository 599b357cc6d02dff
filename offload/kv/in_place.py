"""One layer's keys and values for attention that reads blocks where they are.

Attention "offload" (``offload.models.block_attention``) finds the handle on the keys that a cache
returns. Blocks come in ascending order of tokens, in runs: what lies in RAM in a row, or what has
arrived from the disk while the run before was attended to. How they are cut into runs changes no
bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from offload.cpu_ops import block_layout
from offload.errors import OffloadError
from offload.kv.kernel_layout import kernel_layout
from offload.kv.store import Block
from offload.kv.table import LayerTable, Use

HANDLE = "_tier"
"""Attribute of the keys."""

Group = tuple[block_layout.BlockLayout, list[npt.NDArray[np.int64]]]


class TierHandle:
    """A layer's blocks at one step; ``offload.models.block_attention.KvHandle``."""

    def __init__(
        self,
        table: LayerTable,
        behind: Callable[[int], Iterator[Block]],
        note: Callable[[float], None] | None = None,
    ) -> None:
        """``behind``: given the first token that is read here, what is read after this layer.
        ``note`` is told what quantising costs."""
        self._note = note or (lambda _: None)
        self.length = table.length
        self.evicted = table.evicted
        """Tokens that are not among them any more."""
        self.watched = False
        """Whether ``attended`` wants to know how attention is shared out."""
        self.attended: Callable[[Sequence[float] | None, int], None] | None = None
        """To be called behind attention, if it is there: with what of it each column of blocks got,
        None if it is not ``watched``, and the number of queries."""
        self._table = table
        self._behind = behind
        self._kernel = kernel_layout(table.layout)
        self.used = False
        self.whole: tuple[torch.Tensor, torch.Tensor] | None = None
        """All keys and values before they were quantised, if they are this step's."""

    def groups(self, first: int = 0) -> Iterator[Group]:
        """Runs of blocks: their layout, and for each sequence a table int64 [blocks, 3] of the
        addresses of keys and values and of filled tokens; good until the next is asked for.

        ``first``: no query sees a token before it. Blocks that hold only such tokens are not
        fetched: they are in the tables, with addresses of nothing.

        Raises:
            OffloadError: the cache has changed since.
            StoreError: a block could not be read.
        """
        if self._table.length != self.length:
            raise OffloadError(
                f"the KV cache had {self.length} tokens when attention was asked for, and has "
                f"{self._table.length} now"
            )
        self.used = True
        unseen = [u for u in self._table.uses() if u.first + u.filled <= first]
        if unseen:
            yield self._group([(u, 0) for u in unseen])
        for run in self._table.runs(self._behind(first), len(unseen)):
            yield self._group(run)

    def report(self, error: float) -> None:
        """Of this step's results against those from ``whole``: the largest difference as a part of
        the largest number."""
        self.whole = None
        self._note(error)

    def _group(self, run: list[tuple[Use, int]]) -> Group:
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self._table.sequences)]
        value_at = self._table.layout.value_at
        layout, coarse = self._kernel, self._table.coarse
        if coarse is not None and run[0][0].block.owner is not coarse.tails:
            layout = coarse.layout
            value_at = layout.values_at
        for use, address in run:
            entry = (address, address + value_at, use.filled)
            for row in use.rows:
                rows[row].append(entry)
        return layout, [np.array(entries, np.int64).reshape(-1, 3) for entries in rows]


def tag(keys: torch.Tensor, handle: TierHandle) -> torch.Tensor:
    """The keys of a step with the handle on them; the caller's own tensor stays as it is."""
    found = keys.view(keys.shape)
    setattr(found, HANDLE, handle)
    return found
