"""Packed blocks in RAM, and their values while somebody uses them.

A block that is held has its values unpacked when they are first asked for, and loses them when it
is let go: what stays in RAM is packed. Tables (embeddings, heads) are never unpacked whole. An
embedding's parameter is given address space for all of its rows, of which those that tokens ask for
are filled in, and only those take memory; the head's loss gets slice by slice.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.cpu_ops.grad_norm import Numbers
from offload.io.memory import anonymous
from offload.models.shadow import shadow
from offload.runtime.memory import HostMemory
from offload.train.buffers import BufferPool
from offload.train.layout import Block, TrainLayout
from offload.train.marks import Marks
from offload.train.order import UseOrder
from offload.train.packed_base import Packed, PackedBase
from offload.train.packed_values import Unpacker
from offload.train.tiles import numbers
from offload.train.weights import Entry, Shared, Weights, WeightSource


class PackedWeights(Weights):
    """``Weights`` some of whose blocks are packed."""

    def __init__(
        self, layout: TrainLayout, order: UseOrder, source: WeightSource, shared: Shared,
        limit: int, pinned: Iterable[int], base: PackedBase, *, marks: Marks | None = None,
        memory: Callable[[int, str], HostMemory] = HostMemory,
    ) -> None:  # fmt: skip
        super().__init__(layout, order, source, shared, limit, pinned, marks=marks, memory=memory)
        self.base = base
        self._work = BufferPool(base.work_bytes(layout), "unpacked weights")
        self._unpacker = Unpacker()
        self._slice = torch.empty(0)

    def _entry(self, spec: Block, memory: HostMemory) -> Entry:
        recipe = self.base.recipes.get(spec.index)
        if recipe is None:
            return super()._entry(spec, memory)
        return PackedEntry(spec, memory, recipe, self._work, self._unpacker)

    def release(self, block: int) -> None:
        with self._shared.changed:
            entry = self._entries[block]
            if isinstance(entry, PackedEntry) and entry.pins == 1:
                entry.forget()
            super().release(block)

    def table_rows(self, block: int, first: int, end: int) -> torch.Tensor | None:
        """Rows ``first:end`` of a table that is held; valid until the next call. None: no table."""
        entry = self._entries.get(block)
        if not isinstance(entry, PackedEntry) or not entry.recipe.table:
            return None
        dtype: torch.dtype = getattr(torch, entry.block.dtype)
        shape = end - first, entry.block.pieces[0].shape[1]
        if self._slice.numel() < shape[0] * shape[1] or self._slice.dtype != dtype:
            self._slice = torch.empty(shape[0] * shape[1], dtype=dtype)
        out = self._slice[: shape[0] * shape[1]].view(shape)
        entry.rows(first, end, out)
        return out

    def attach(self) -> Iterator[Callable[[], Any]]:
        """Let modules that own a table have their rows filled in before they run; yields what
        undoes it. Before an engine is made: it wraps what it finds."""
        for unit in self.layout.units:
            for block in unit.blocks:
                if block in self.base.recipes and self.base.recipes[block].table:
                    yield self._fill_before(unit.module, block)

    def _fill_before(self, module: Any, block: int) -> Callable[[], Any]:
        inner = module.forward
        looks_up = isinstance(module, nn.Embedding)

        def forward(*args: Any, **kwargs: Any) -> Any:
            entry = self._entries[block]
            assert isinstance(entry, PackedEntry)
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            ids = [x for x in given if not x.is_floating_point()]
            entry.need(torch.cat([x.flatten() for x in ids]) if looks_up and ids else None)
            return inner(*args, **kwargs)

        return shadow(module, "forward", forward)

    def close(self) -> None:
        super().close()
        self._work.close()


class PackedEntry(Entry):
    """A packed block's memory, and its values while it is held."""

    __slots__ = ("_filled", "_raw", "_unpacker", "_values", "_work", "_work_pool", "recipe")

    def __init__(
        self, block: Block, memory: HostMemory, recipe: Packed, pool: BufferPool, unpacker: Unpacker
    ) -> None:
        self.block = block
        self.memory = memory
        self.pins = 0
        self.ready = False
        self.missing = 0
        self.recipe = recipe
        self._raw = memory.tensor()
        self._work_pool = pool
        self._unpacker = unpacker
        self._work: HostMemory | None = None
        self._values: torch.Tensor | None = None
        self._filled: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """[count] in the compute dtype. Of a table only the rows that were asked for (``need``)."""
        if self._values is None:
            dtype: torch.dtype = getattr(torch, self.block.dtype)
            if self.recipe.table:
                self._values = torch.frombuffer(_sparse(self.block.value_bytes), dtype=dtype)
            else:
                self._work = self._work_pool.take(self.block.value_bytes)
                self._values = self._work.tensor()[: self.block.value_bytes].view(dtype)
                for fill in self.recipe.fills:
                    self._unpacker.fill(fill, self._raw, self._values)
        return self._values

    @property
    def numbers(self) -> Numbers:
        flat = self.tensor.view(torch.uint8).numpy()
        return numbers(flat, self.block.dtype)

    def copy(self, start: int, end: int) -> torch.Tensor:
        if not self.recipe.table:
            return super().copy(start, end)
        piece = self.block.pieces[0]
        out = torch.zeros(end - start, dtype=getattr(torch, self.block.dtype))
        columns = piece.shape[1]
        stop = min(end, piece.count)
        if start < stop:
            first, last = start // columns // 16 * 16, -(-stop // columns)
            rows = out.new_empty(last - first, columns)
            self.rows(first, last, rows)
            at = first * columns
            out[: stop - start] = rows.view(-1)[start - at : stop - at]
        return out

    def rows(self, first: int, end: int, out_NK: torch.Tensor) -> None:
        """Rows ``first:end`` of a table; ``first`` is a multiple of 16."""
        part, raw = self._table()
        self._unpacker.rows(part, raw, first, end, out_NK)

    def need(self, ids: torch.Tensor | None) -> None:
        """Fill in the rows ``ids`` of a table, as far as they are not; None: all of them."""
        part, raw = self._table()
        whole = self.tensor[: self.block.pieces[0].count].view(self.block.pieces[0].shape)
        if self._filled is None:
            self._filled = torch.zeros(len(whole), dtype=torch.bool)
        if ids is None:
            ids = torch.arange(len(whole))
        wanted = torch.zeros_like(self._filled)
        wanted[ids.long()] = True
        missing = (wanted & ~self._filled).nonzero().squeeze(1)
        self._unpacker.some_rows(part, raw, missing, whole)
        self._filled |= wanted

    def _table(self) -> tuple[Any, torch.Tensor]:
        fill = self.recipe.fills[0]
        at = fill.at + fill.part.offset
        return fill.part, self._raw[at : at + fill.part.nbytes]

    def forget(self) -> None:
        """Nobody uses the values any more."""
        self._values = self._filled = None
        if self._work is not None:
            self._work_pool.give(self._work)
            self._work = None


def _sparse(nbytes: int) -> mmap.mmap:
    """Zeros that take memory where they are written to, page by page."""
    area = anonymous(nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return area


__all__ = ["PackedEntry", "PackedWeights"]
