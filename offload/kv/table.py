"""Which blocks hold a layer's tokens: one ordered list for each sequence.

    B sequences, H heads, T tokens, D head size

All sequences of a layer have the same number of tokens (a batch is padded), so tokens of one index
lie in one column of blocks. Sequences that went apart (beams) share the blocks before: a column
then has fewer blocks than sequences, and each is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from typing import NamedTuple

import torch

from offload.errors import OffloadError, SchedulerError
from offload.kv.coarse import Coarse
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

    def __init__(
        self, store: BlockStore, layer: int, layout: BlockLayout, coarse: Coarse | None = None
    ) -> None:
        """``coarse``: how blocks are quantised when they are full; ``store`` then has those."""
        self.layout = layout
        self.coarse = coarse
        self.length = 0
        """Tokens of each sequence that are here."""
        self.evicted = 0
        """Those that were here before."""
        self._whole_from = 0
        """From that column on nothing is missing."""
        self._store = store
        self._tails = store if coarse is None else coarse.tails
        self._layer = layer
        self._rows: list[list[Block]] = []
        self._uses: list[Use] | None = None
        self.heard: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None
        """Told of every block as it is quantised: bytes of keys and values (``Coarse.parts``) in
        memory that is used again, and its tokens."""

    @property
    def seen(self) -> int:
        """Tokens of each sequence that came, evicted ones included."""
        return self.length + self.evicted

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
            self._tails.expect(len(self._rows))
        if keys.shape[0] != len(self._rows):
            raise OffloadError(
                f"the KV cache holds {len(self._rows)} sequences, and got {keys.shape[0]}; start "
                f"with an empty one"
            )
        try:
            self._append(keys, values)
        except BaseException:
            # Some rows may have a block of a column that others have no room for: left there, the
            # next append would put its own behind it and write into this one.
            columns = -(-self.length // self.layout.tokens)
            for blocks in self._rows:
                for block in blocks[columns:]:
                    block.owner.drop(block)
                del blocks[columns:]
            if self.coarse is not None and self.length % self.layout.tokens:
                self._restore(self.coarse, columns - 1)
            raise

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        size, tokens, start = self.layout.tokens, keys.shape[2], self.length
        done = 0
        while done < tokens:
            column, offset = divmod(start + done, size)
            count = min(size - offset, tokens - done)
            for row, blocks in enumerate(self._rows):
                if offset == 0:
                    blocks.append(self._tails.new(self._layer))
                else:
                    blocks[column] = self._tails.writable(blocks[column])
                block = blocks[column]
                if block.slot is None:
                    raise AssertionError(block)
                into_k, into_v = self._tails.pool.tensors(block.slot, self.layout)
                into_k[:, offset : offset + count].copy_(keys[row, :, done : done + count])
                into_v[:, offset : offset + count].copy_(values[row, :, done : done + count])
                if offset + count == size:
                    if self.coarse is not None:
                        block = blocks[column] = self._quantised(self.coarse, block)
                    self._store.filled(block)
            done += count
            # After each column: what an error leaves behind is whole.
            self.length = start + done
            self._renew(column)

    def _quantised(self, coarse: Coarse, block: Block) -> Block:
        found = self._store.new(self._layer)
        if found.slot is None or block.slot is None:
            raise AssertionError(block)
        plain = self._tails.pool.tensors(block.slot, self.layout)
        coarse.quantise(plain, self._store.pool, found.slot)
        if self.heard is not None:
            self.heard(*coarse.parts(self._store.pool, found.slot), self.layout.tokens)
        self._tails.drop(block)
        return found

    def append_rounded(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a full block of one sequence as ``heard`` was told of it, behind full blocks.

        Raises:
            OffloadError: it is no such block, tokens are there that fill none, or no room is left.
        """
        coarse, size = self.coarse, self.layout.tokens
        if coarse is None or self.length % size or len(self._rows) > 1:
            raise OffloadError(
                f"a rounded block cannot follow {self.length} tokens of {len(self._rows)} sequences"
            )
        if not self._rows:
            self._rows = [[]]
            self._tails.expect(1)
        block = self._store.new(self._layer)
        if block.slot is None:
            raise AssertionError(block)
        parts = coarse.parts(self._store.pool, block.slot)
        for name, to, new in zip(("keys", "values"), parts, (keys, values), strict=True):
            if (to.shape, to.dtype) != (new.shape, new.dtype):
                self._store.drop(block)
                raise OffloadError(
                    f"a block's {name} must be uint8 {list(to.shape)}, got {new.dtype} "
                    f"{list(new.shape)}"
                )
            to.copy_(new)
        self._rows[0].append(block)
        self._store.filled(block)
        self.length += size
        self._renew(self.length // size - 1)

    def _restore(self, coarse: Coarse, column: int) -> None:
        """Blocks of a column back into full precision, as far as they are known."""
        made: dict[Block, Block] = {}
        for blocks in self._rows:
            old = blocks[column]
            if old.owner is self._tails:
                continue
            if old in made:
                self._tails.fork(made[old])
            else:
                new = made[old] = self._tails.new(self._layer)
                if new.slot is None:
                    raise AssertionError(new)
                into = self._tails.pool.tensors(new.slot, self.layout)
                for _, slot in self._store.walk([old]):
                    coarse.restore(self._store.pool, slot, into)
            blocks[column] = made[old]
            self._store.drop(old)

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
        after = behind
        for owner, some in groupby(self.uses()[skip:], key=lambda use: use.block.owner):
            uses, pool = list(some), owner.pool
            with closing(owner.runs([u.block for u in uses], after)) as runs:
                for run in runs:
                    yield [(uses[index], pool.address(slot)) for index, slot in run]
            after = iter(())  # the newest blocks are in RAM

    def gather(self, keys: torch.Tensor, values: torch.Tensor, behind: Iterator[Block]) -> None:
        """Copy all tokens into the first ``length`` of ``[B, H, T, D]``."""
        pool, layout = self._store.pool, self.layout
        for held in self.walk(behind):
            from_k, from_v = pool.tensors(held.slot, layout)
            stop = held.first + held.filled
            for row in held.rows:
                keys[row, :, held.first : stop].copy_(from_k[:, : held.filled])
                values[row, :, held.first : stop].copy_(from_v[:, : held.filled])

    def evict(self, column: int) -> None:
        """Forget the tokens of a full block in the middle; those behind it move up."""
        size = self.layout.tokens
        if not 0 <= column < self.length // size:
            raise SchedulerError(f"no full block {column} among {self.length} tokens")
        for blocks in self._rows:
            block = blocks.pop(column)
            block.owner.drop(block)
        self.length -= size
        self.evicted += size
        before = self._whole_from
        self._whole_from = max(column, before - (before > column))
        self._renew(column)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on.

        Raises:
            OffloadError: tokens before it have been evicted.
        """
        if length < self._whole_from * self.layout.tokens:
            raise OffloadError(
                f"{self.length - length} tokens cannot be taken off the KV cache: tokens before "
                f"them have been evicted; raise kv_keep (--kv-keep)"
            )
        keep = -(-length // self.layout.tokens)
        for blocks in self._rows:
            for block in blocks[keep:]:
                block.owner.drop(block)
            del blocks[keep:]
        if self.coarse is not None and length % self.layout.tokens:
            self._restore(self.coarse, keep - 1)
        self.length = length
        self._uses = None

    def select(self, rows: Sequence[int]) -> None:
        """Sequence i becomes what sequence ``rows[i]`` was; nothing is copied."""
        before = self._rows
        self._rows = [list(before[row]) for row in rows]
        for blocks in self._rows:
            for block in blocks:
                block.owner.fork(block)
        for blocks in before:
            for block in blocks:
                block.owner.drop(block)
        self._tails.expect(len(self._rows))
        self._uses = None

    def clear(self) -> None:
        """Hold nothing, of no sequence."""
        self.evicted = self._whole_from = 0
        self.truncate(0)
        self._rows = []
