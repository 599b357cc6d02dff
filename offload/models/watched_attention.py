"""Attention over blocks that also tells how it was shared out among them.

    B sequences, G key heads, R queries times heads that share keys, C columns of blocks

The kernels merge blocks in ascending order into a running maximum m and sum l of weights
exp(score - m), so the sum after each block, brought to the last maximum, says what that block
added: no kernel of its own, and the same result to the bit. It costs a call for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offload.cpu_ops.block_attention import Array, BlockAttention, Table
from offload.cpu_ops.block_layout import BlockLayout


class WatchedAttention(BlockAttention):
    """As ``BlockAttention``, block by block."""

    def __init__(self, q: Array, **more: Any) -> None:
        super().__init__(q, **more)
        self._sums: list[list[Array]] = [[] for _ in range(self.batch)]
        """For each sequence and column [G, R, 2]: m and l after it."""

    def add(self, layout: BlockLayout, tables: Sequence[Table]) -> None:
        for i in range(max(map(len, tables))):
            super().add(layout, [table[i : i + 1] for table in tables])
            for b, table in enumerate(tables):
                if i < len(table):
                    self._sums[b].append(self._state[b, :, :, self.dim : self.dim + 2].copy())

    def shares(self) -> list[float]:
        """[C], of all attention of each query 1: means over sequences, heads and queries."""
        means = []
        for sums in self._sums:
            top, weights = np.moveaxis(np.stack(sums).astype(np.float64), -1, 0)
            seen, last = weights > 0, np.where(weights[-1] > 0, weights[-1], 1)
            below = np.subtract(top, top[-1], out=np.full_like(top, -np.inf), where=seen)
            upto = weights * np.exp(below) / last
            means.append(np.diff(upto, axis=0, prepend=0).mean(axis=(1, 2)))
        return [float(share) for share in np.mean(means, axis=0)]
