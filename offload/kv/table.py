"""Which blocks hold a layer's tokens: one ordered list for each sequence.

    B sequences, H heads, T tokens, D head size

All sequences of a layer have the same number of tokens (a batch is padded), so tokens of one index
lie in one column of blocks. Sequences that went apart (beams) share the blocks before: a column
then has fewer blocks than sequences, and each is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from offload.errors import OffloadError
from offload.kv.shape import BlockLayout
from offload.kv.store import Block, BlockStore


class Use(NamedTuple):
    """A block and what it holds: ``filled`` tokens from ``first`` on, of the sequences ``rows``."""

    block: Block
    first: int
    filled: int
    rows: tuple[int, ...]


class Held(NamedTuple):
    """A block in RAM. ``key`` and ``value``: addresses of ``[H, n, D]`` for the layout's ``n``
    tokens, of which ``filled`` count; they are good until the next block is asked for."""

    slot: int
    key: int
    value: int
    first: int
    filled: int
    rows: tuple[int, ...]


class LayerTable:
    """The blocks of one layer."""

    def __init__(self, store: BlockStore, layer: int, layout: BlockLayout) -> None:
        self.layout = layout
        self.length = 0
        """Tokens of each sequence."""
        self._store = store
        self._layer = layer
        self._rows: list[list[Block]] = []
        self._uses: list[Use] | None = None

    @property
    def sequences(self) -> int:
        return len(self._rows)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store T tokens behind those that are there: ``[B, H, T, D]``, any strides.

        Raises:
            OffloadError: another number of sequences than before, or no room is left.
            StoreError: a block could not be read back.
        """
        if not self._rows:
            self._rows = [[] for _ in range(keys.shape[0])]
            self._store.expect(len(self._rows))
        if keys.shape[0] != len(self._rows):
            raise OffloadError(
                f"the KV cache holds {len(self._rows)} sequences, and got {keys.shape[0]}; start "
                f"with an empty one"
            )
        size, tokens, start = self.layout.tokens, keys.shape[2], self.length
        done = 0
        while done < tokens:
            column, offset = divmod(start + done, size)
            count = min(size - offset, tokens - done)
            for row, blocks in enumerate(self._rows):
                if offset == 0:
                    blocks.append(self._store.new(self._layer))
                else:
                    blocks[column] = self._store.writable(blocks[column])
                block = blocks[column]
                if block.slot is None:
                    raise AssertionError(block)
                into_k, into_v = self._store.pool.tensors(block.slot, self.layout)
                into_k[:, offset : offset + count].copy_(keys[row, :, done : done + count])
                into_v[:, offset : offset + count].copy_(values[row, :, done : done + count])
                if offset + count == size:
                    self._store.filled(block)
            done += count
            # After each column: what an error leaves behind is whole.
            self.length = start + done
            self._renew(column)

    def uses(self) -> list[Use]:
        """The blocks in the order in which attention reads them: by token, then by sequence."""
        if self._uses is None:
            self._uses = list(self._columns(0))
        return self._uses

    def _renew(self, column: int) -> None:
        """From there on ``uses`` are others: at a long context listing all of them for every token
        would take longer than attending to some."""
        if self._uses is not None:
            first = column * self.layout.tokens
            while self._uses and self._uses[-1].first >= first:
                self._uses.pop()
            self._uses += self._columns(column)

    def _columns(self, start: int) -> Iterator[Use]:
        size = self.layout.tokens
        for column in range(start, -(-self.length // size)):
            first = column * size
            owners: dict[Block, list[int]] = {}
            for row, blocks in enumerate(self._rows):
                owners.setdefault(blocks[column], []).append(row)
            filled = min(size, self.length - first)
            for block, rows in owners.items():
                yield Use(block, first, filled, tuple(rows))

    def walk(self, behind: Iterator[Block]) -> Iterator[Held]:
        """Visit the blocks by ascending token while those on disk stream through the window; this
        is what an attention kernel loops over. ``behind``: what will be read after this layer.

        Raises:
            StoreError: a block could not be read.
        """
        uses = self.uses()
        pool, value_at = self._store.pool, self.layout.value_at
        for index, slot in self._store.walk([u.block for u in uses], behind):
            use = uses[index]
            address = pool.address(slot)
            yield Held(slot, address, address + value_at, use.first, use.filled, use.rows)

    def runs(self, behind: Iterator[Block], skip: int = 0) -> Iterator[list[tuple[Use, int]]]:
        """As ``walk`` from the ``skip``-th use on, several at a time: uses and the addresses of
        their blocks."""
        uses = self.uses()[skip:]
        pool = self._store.pool
        with closing(self._store.runs([u.block for u in uses], behind)) as runs:
            for run in runs:
                yield [(uses[index], pool.address(slot)) for index, slot in run]

    def gather(self, keys: torch.Tensor, values: torch.Tensor, behind: Iterator[Block]) -> None:
        """Copy all tokens into the first ``length`` of ``[B, H, T, D]``."""
        pool, layout = self._store.pool, self.layout
        for held in self.walk(behind):
            from_k, from_v = pool.tensors(held.slot, layout)
            stop = held.first + held.filled
            for row in held.rows:
                keys[row, :, held.first : stop].copy_(from_k[:, : held.filled])
                values[row, :, held.first : stop].copy_(from_v[:, : held.filled])

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        keep = -(-length // self.layout.tokens)
        for blocks in self._rows:
            for block in blocks[keep:]:
                self._store.drop(block)
            del blocks[keep:]
        self.length = length
        self._uses = None

    def select(self, rows: Sequence[int]) -> None:
        """Sequence i becomes what sequence ``rows[i]`` was; nothing is copied."""
        before = self._rows
        self._rows = [list(before[row]) for row in rows]
        for blocks in self._rows:
            for block in blocks:
                self._store.fork(block)
        for blocks in before:
            for block in blocks:
                self._store.drop(block)
        self._store.expect(len(self._rows))
        self._uses = None

    def clear(self) -> None:
        """Hold nothing, of no sequence."""
        self.truncate(0)
        self._rows = []
