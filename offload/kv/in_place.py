"""One layer's keys and values for attention that reads blocks where they are.

Attention "offload" (``offload.models.block_attention``) finds the handle on the keys that a cache
returns. Blocks come in ascending order of tokens, in runs: what lies in RAM in a row, or what has
arrived from the disk while the run before was attended to. How they are cut into runs changes no
bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from offload.cpu_ops import block_layout
from offload.cpu_ops.block_layout import BlockKind
from offload.errors import OffloadError, UnsupportedModelError
from offload.kv.shape import BlockLayout, KvShape
from offload.kv.store import Block
from offload.kv.table import LayerTable, Use

KINDS = {"bfloat16": BlockKind.BF16, "float32": BlockKind.F32}
"""By torch's name of the dtype."""
HANDLE = "_tier"
"""Attribute of the keys."""

Group = tuple[block_layout.BlockLayout, list[npt.NDArray[np.int64]]]


def is_latent(shape: KvShape) -> bool:
    """Whether a model expands what it caches before it attends (MLA): a compressed vector and a
    rotated key, one of each for all heads. Attention then wants them in one piece."""
    return shape.key_heads == shape.value_heads == 1 and shape.key_dim != shape.value_dim


def kernel_layout(layout: BlockLayout) -> block_layout.BlockLayout:
    """A block as the kernels know it.

    Raises:
        UnsupportedModelError: they have nothing for its dtype, or for different numbers of heads.
        OffloadError: its head sizes or tokens are not what they take.
    """
    shape = layout.shape
    kind = KINDS.get(shape.dtype)
    if kind is None or shape.key_heads != shape.value_heads:
        raise UnsupportedModelError(
            f"attention 'offload' takes keys and values in {' or '.join(KINDS)} and as many heads "
            f"of each, not {shape.key_heads} and {shape.value_heads} in {shape.dtype}; drop "
            f"--attention offload or choose another --dtype"
        )
    found = block_layout.BlockLayout(
        kind, shape.key_heads, shape.key_dim, shape.value_dim, layout.tokens
    )
    if (found.values_at, found.nbytes) != (layout.value_at, layout.nbytes):
        raise AssertionError(f"{found} and {layout} disagree")
    return found


class TierHandle:
    """A layer's blocks at one step; ``offload.models.block_attention.KvHandle``."""

    def __init__(self, table: LayerTable, behind: Callable[[int], Iterator[Block]]) -> None:
        """``behind``: given the first token that is read here, what is read after this layer."""
        self.length = table.length
        self._table = table
        self._behind = behind
        self._kernel = kernel_layout(table.layout)
        self.used = False

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

    def _group(self, run: list[tuple[Use, int]]) -> Group:
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(self._table.sequences)]
        value_at = self._table.layout.value_at
        for use, address in run:
            entry = (address, address + value_at, use.filled)
            for row in use.rows:
                rows[row].append(entry)
        return self._kernel, [np.array(entries, np.int64).reshape(-1, 3) for entries in rows]


def tag(keys: torch.Tensor, handle: TierHandle) -> torch.Tensor:
    """The keys of a step with the handle on them; the caller's own tensor stays as it is."""
    found = keys.view(keys.shape)
    setattr(found, HANDLE, handle)
    return found
