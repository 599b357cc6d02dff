"""The gradient of a table of which only some rows were looked up.

torch's gradient of an embedding is as large as the table, and zero but for the rows of a step's
tokens: with a vocabulary of 128k and 512 tokens 99.6 % of half a gigabyte, which is allocated,
measured, spilled and read back. Here only those rows exist (``torch.nn.Embedding(sparse=True)``
keeps a row for every token; here tokens of one row are summed as the dense gradient sums them).
Where the dense gradient is asked for, piece by piece, it has the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.cpu_ops import grad_norm
from offload.cpu_ops.grad_norm import CHUNK, Numbers, Sums
from offload.train.layout import TrainLayout
from offload.train.weights import as_numbers

BATCH = 256
"""Chunks that are measured at a time: a megabyte of elements."""


class RowGradient:
    """``values`` [n, width] of the rows ``ids`` [n] (ascending, each once) of a table's gradient;
    all other rows are zero."""

    def __init__(self, ids: Tensor, values: Tensor) -> None:
        self.ids, self.values = ids, values

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes

    @property
    def width(self) -> int:
        return self.values.shape[1]

    def to(self, dtype: torch.dtype) -> RowGradient:
        return RowGradient(self.ids, self.values.to(dtype))

    def scaled(self, factor: float) -> RowGradient:
        return RowGradient(self.ids, self.values * factor)

    def plus(self, other: RowGradient) -> RowGradient:
        """The sum, in this one's dtype, rounded as the sum of the dense gradients is."""
        ids = torch.unique(torch.cat([self.ids, other.ids]))
        values = self.values.new_zeros(len(ids), self.width)
        values[torch.searchsorted(ids, self.ids)] = self.values
        at = torch.searchsorted(ids, other.ids)
        values[at] = values[at].add_(other.values)
        return RowGradient(ids, values)

    def add_to(self, dense: Tensor) -> None:
        """``dense`` [rows * width] += the gradient."""
        table = dense.view(-1, self.width)
        table[self.ids] = table[self.ids].add_(self.values)

    def dense(self, count: int) -> Tensor:
        """[count], flat."""
        out = self.values.new_zeros(count)
        out.view(-1, self.width)[self.ids] = self.values
        return out

    def parts(self, low: int, high: int) -> Iterator[tuple[int, Numbers]]:
        """(first, numbers) of what is not zero in elements ``low:high`` of the flat gradient."""
        width = self.width
        flat = as_numbers(self.values)
        ids = self.ids.numpy()
        first, last = np.searchsorted(ids, [low // width, -(-high // width)])
        for i in range(first, last):
            start = int(ids[i]) * width
            a, b = max(start, low), min(start + width, high)
            at = i * width - start
            yield a, flat[at + a : at + b]

    def squares(self, count: int) -> Sums:
        """What ``grad_norm.squares`` says of the dense gradient [count]; bit-equal."""
        sums = np.zeros(grad_norm.chunks(count), np.float64)
        starts = self.ids.numpy() * self.width
        spans = [np.arange(a // CHUNK, (a + self.width - 1) // CHUNK + 1) for a in starts]
        touched = np.unique(np.concatenate(spans)) if spans else np.empty(0, np.int64)
        flat = as_numbers(self.values)
        for at in range(0, len(touched), BATCH):
            chunks = touched[at : at + BATCH]
            room = np.zeros(len(chunks) * CHUNK, flat.dtype)
            for k, chunk in enumerate(chunks.tolist()):
                low = chunk * CHUNK
                for first, part in self.parts(low, min(low + CHUNK, count)):
                    where = k * CHUNK + first - low
                    room[where : where + len(part)] = part
            measured = np.empty(len(chunks), np.float64)
            grad_norm.squares(room, measured)
            sums[chunks] = measured
        return sums


Take = Callable[[RowGradient], None]


class Lookups(TorchFunctionMode):
    """Inside, the gradients of these tables go to their takers as rows, and not to autograd."""

    def __init__(self, tables: Mapping[int, Take]) -> None:
        """``tables``: by the identity of the parameter."""
        super().__init__()
        self._tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            out = self._looked_up(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)

    def _looked_up(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """None for what is no such table, or asks for more than a sum of rows."""
        take = self._tables.get(id(weight))
        plain = max_norm is None and not scale_grad_by_freq and not sparse
        if take is None or not plain or not torch.is_grad_enabled() or not weight.requires_grad:
            return None
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        return _Lookup.apply(input, weight, padding_idx, take)  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, take: Take
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ids)
        ctx.padding, ctx.take = padding, take
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        ctx.take(rows_of(grads[0], ids, ctx.padding))
        return None, None, None, None


def rows_of(gradient: Tensor, ids: Tensor, padding: int | None) -> RowGradient:
    """``gradient`` [..., width] of what was looked up for ``ids`` [...] (of ``padding`` none), by
    rows. torch's own kernel sums the tokens of a row, in their order, on a table of these rows
    alone."""
    if gradient.is_meta:
        most = ids.numel()
        return RowGradient(ids.new_empty(most), gradient.new_empty(most, gradient.shape[-1]))
    rows, places = torch.unique(ids, return_inverse=True)
    none = -1
    if padding is not None:
        found = (rows == padding).nonzero()
        none = int(found) if len(found) else -1
    values = torch.ops.aten.embedding_dense_backward(
        gradient.reshape(-1, gradient.shape[-1]), places.reshape(-1), len(rows), none, False
    )
    return RowGradient(rows, values)


@contextlib.contextmanager
def taking_rows(tables: Mapping[int, Take]) -> Iterator[None]:
    """``Lookups`` inside, or nothing if there are no such tables."""
    if not tables:
        yield
        return
    with Lookups(tables):
        yield


def lookup_tables(layout: TrainLayout) -> dict[str, bool]:
    """Trained parameters that modules look rows up in -> whether nothing else uses them."""
    out = {}
    for block in layout.trained:
        for piece in block.pieces:
            places = layout.params[piece.param].places
            tables = [p for p in places if isinstance(p.module, nn.Embedding)]
            whole = piece.expert is None and len(piece.shape) == 2
            if tables and whole and all(_sums_rows(p.module) for p in tables):
                out[piece.param] = len(tables) == len(places) == 1
    return out


def _sums_rows(module: nn.Module) -> bool:
    assert isinstance(module, nn.Embedding)
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
