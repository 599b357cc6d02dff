"""The LM head and its loss on a device: what is there, and what a step copies for it.

Pure: numbers in, numbers out. The head goes up slice by slice, as the loss asks for it: in
ascending order, and back for the gradients. What is needed last gives way (Belady), so of n slices
with k slots the last k of a pass are there when the next one begins, which comes back to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.blocks import DTYPE_BYTES, align_up
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.packing import packed_bytes
from offload.io.pack_manifest import Layout, Part
from offload.train.head_weights import slices_of
from offload.train.layout import TrainLayout

LEAST_SLOTS = 2
"""One slice is used, the next one on its way."""


class Cut(NamedTuple):
    """Bytes of a block's memory in RAM."""

    block: int
    offset: int
    nbytes: int


class HeadSlice(NamedTuple):
    """What is copied of a head for its rows ``first:end``."""

    first: int
    end: int
    weight: Cut
    bias: Cut | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def bias_at(self) -> int:
        """Where in its slot the bias begins."""
        return align_up(self.weight.nbytes)

    @property
    def slot_bytes(self) -> int:
        return self.bias_at + (0 if self.bias is None else align_up(self.bias.nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlacement:
    """The head on a device. Sizes in bytes."""

    unit: int | None
    """The head's, where it is one."""
    slices: tuple[HeadSlice, ...]
    slots: int
    """Slices that are there at a time."""
    width: int
    dtype: str
    part: Part | None = None
    """What its packed bytes are; None: they are values."""
    trained: bool
    shared: bool
    """Something else uses its weights, too, and in RAM."""
    arguments: int
    """Of the hidden state and its labels, without gaps."""
    results: int
    """Of the hidden state's gradient and the loss, without gaps."""
    gradients: tuple[int, ...] = ()
    """Of each slice's."""
    work_bytes: int
    """Of logits, sums and gradients while the loss is computed."""
    host_bytes: int
    """Of RAM meanwhile."""

    @property
    def blocks(self) -> frozenset[int]:
        """That its slices are of."""
        cuts = (cut for s in self.slices for cut in (s.weight, s.bias))
        return frozenset(cut.block for cut in cuts if cut is not None)

    @property
    def slot_bytes(self) -> int:
        return max(s.slot_bytes for s in self.slices)

    @property
    def unpacked_bytes(self) -> int:
        """Of a slice whose packed bytes are unpacked there."""
        if self.part is None:
            return 0
        rows = max(s.end - s.first for s in self.slices)
        return align_up(rows * self.width * DTYPE_BYTES[self.dtype])

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes + self.unpacked_bytes

    @property
    def least_slots(self) -> int:
        return min(LEAST_SLOTS, len(self.slices))

    @property
    def stays(self) -> bool:
        """Once it is there nothing of it is needed in RAM."""
        return not self.trained and not self.shared and self.slots == len(self.slices)

    def copied(self, micro_batches: int) -> tuple[float, float]:
        """(bytes that go up in a step while it computes, bytes that it waits for first)."""
        n, k = len(self.slices), self.slots
        sizes = [s.nbytes for s in self.slices]
        there, back = sum(sizes[k:]), sum(sizes[: n - k])
        total = micro_batches * (there + back)
        first = 0
        if self.trained:  # the update has dropped all of it
            total += sum(sizes) - there
            first = sizes[0]
        return float(total - first), float(first)


def head_slices(
    layout: TrainLayout, weight: str, bias: str | None, recipes: Mapping[int, Any] = {},
) -> tuple[tuple[HeadSlice, ...], Part | None] | str:  # fmt: skip
    """(a head's slices, what their packed bytes are if they are packed), or why there are none.

    Args:
        weight, bias: parameters of the head.
        recipes: by block, how it is packed (``packed_base.Packed``).
    """
    block, piece = _place(layout, weight)
    columns = piece.shape[1]
    recipe = recipes.get(block.index)
    part: Part | None = None
    base, row = piece.offset * DTYPE_BYTES[block.dtype], columns * DTYPE_BYTES[block.dtype]
    if recipe is not None:
        if not recipe.table:
            return "packed with something else, it is unpacked in RAM"
        part = recipe.fills[0].part
        base = recipe.fills[0].at + part.offset
    found = []
    for first, end in slices_of(piece.shape[0]):
        if part is None:
            low, high = first * row, end * row
        else:
            low, high = _packed_rows(part, first), min(part.nbytes, _packed_rows(part, end))
        found.append(
            HeadSlice(first, end, Cut(block.index, base + low, high - low),
                      _bias_cut(layout, bias, first, end))
        )  # fmt: skip
    return tuple(found), part


def _bias_cut(layout: TrainLayout, bias: str | None, first: int, end: int) -> Cut | None:
    if bias is None:
        return None
    block, piece = _place(layout, bias)
    size = DTYPE_BYTES[block.dtype]
    return Cut(block.index, (piece.offset + first) * size, (end - first) * size)


def _place(layout: TrainLayout, name: str) -> tuple[Any, Any]:
    return next((b, p) for b in layout.blocks for p in b.pieces if p.param == name)


def _packed_rows(part: Part, rows: int) -> int:
    """Bytes of a part's first rows; tiles of 16 of them whole."""
    if part.layout is Layout.PLAIN:
        return rows * part.shape[1] * DTYPE_BYTES[part.format]
    if part.layout is Layout.ROWS:
        return rows * get_format(part.format).row_bytes(part.shape[1])
    return packed_bytes(get_format(part.format), rows, part.shape[1])


__all__ = ["Cut", "HeadPlacement", "HeadSlice", "head_slices"]
