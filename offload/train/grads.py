"""Gradients between backward and the update: summed, measured, kept in RAM or spilled.

What autograd has made of a parameter is taken as it is: no copy where it stays in RAM. A block
whose gradients are *spilled* is written, tile by tile, to a private file while the next unit runs,
and read back beside the tile's states.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from offload.blocks import DTYPE_BYTES, align_up
from offload.cpu_ops import grad_norm
from offload.cpu_ops.grad_norm import CHUNK, Numbers
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.train.grad_spill import GradientFile, largest_tile
from offload.train.layout import Block, Piece, Tile, TrainLayout
from offload.train.row_grads import RowGradient
from offload.train.tiles import numbers
from offload.train.weights import Shared, as_numbers

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """A block's gradients: one for each piece that has any."""

    pieces: dict[int, torch.Tensor | RowGradient] = field(default_factory=dict)
    spilled: set[int] = field(default_factory=set)
    """Pieces whose bytes are in the file."""
    unwritten: dict[int, Numbers | None] | None = None
    """Of a block whose gradients leave by slices (``add_slice``): its tiles that are not in the
    file yet, and what there is of them; None of any other block."""


class Gradients:
    """The gradients of one step, block by block."""

    def __init__(
        self, layout: TrainLayout, shared: Shared, engine: Engine, *, dtype: str | None,
        spill: Collection[int], file: DirectFile | None, workers: int | None = None,
    ) -> None:  # fmt: skip
        """``dtype``: in which gradients are summed and kept; None: in their weights' dtype.
        ``spill``: blocks that go to ``file``, which has room for ``spill_bytes``.
        """
        self.layout = layout
        self.dtype = dtype
        self._shared = shared
        self._spill = frozenset(spill)
        self._workers = workers
        self._held: dict[int, _Held] = {}
        self._leaving: dict[int, _Held] = {}
        """What a step has taken, until the block's update is through."""
        self._factors: dict[tuple[int, int], float] = {}
        self._sums: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self.file = GradientFile(layout, shared, engine, file, self._spill, dtype)
        self._parting: deque[tuple[Block, dict[int, torch.Tensor | RowGradient]]] = deque()
        """What the spilling thread has yet to copy out; at most one unit's."""
        self._zeros: dict[str, Numbers] = {}
        """Of the largest tile, by dtype: where gradients of rows are spread out. The updating
        thread's."""
        self._spiller: threading.Thread | None = None
        self._closed = False

    def dtype_of(self, block: Block) -> str:
        return self.dtype or block.dtype

    # -- backward -------------------------------------------------------------------------

    def add(
        self, block: int, piece: int, gradient: torch.Tensor, rows: slice | None = None
    ) -> None:
        """Add ``gradient`` (any shape of the piece's size; [rows] of its first dimension with
        ``rows``) to a piece's. May keep the tensor itself: the caller lets go of it."""
        spec = self.layout.blocks[block]
        held = self._open(spec, piece)
        dtype: torch.dtype = getattr(torch, self.dtype_of(spec))
        flat = gradient.detach().reshape(-1)
        total = held.pieces.get(piece)
        if isinstance(total, RowGradient):
            total = held.pieces[piece] = total.dense(spec.pieces[piece].count)
        if rows is not None:
            shape = spec.pieces[piece].shape
            if total is None:
                total = held.pieces[piece] = torch.zeros(spec.pieces[piece].count, dtype=dtype)
                total.view(shape)[rows].copy_(gradient)
            else:
                total.view(shape)[rows].add_(gradient)
        elif total is None:
            held.pieces[piece] = flat.to(dtype)
        else:
            total.add_(flat)

    def add_rows(self, block: int, piece: int, gradient: RowGradient) -> None:
        """Add a gradient that is zero but for some rows of the piece."""
        spec = self.layout.blocks[block]
        held = self._open(spec, piece)
        total = held.pieces.get(piece)
        if total is None:
            dtype: torch.dtype = getattr(torch, self.dtype_of(spec))
            held.pieces[piece] = gradient.to(dtype)
        elif isinstance(total, RowGradient):
            held.pieces[piece] = total.plus(gradient)
        else:
            gradient.add_to(total)

    def add_slice(
        self, block: int, piece: int, gradient: torch.Tensor, rows: slice
    ) -> None:  # fmt: skip
        """As ``add`` with ``rows``, for slices that come once in a step and are all there is of the
        piece: of a spilled block each is measured and written at once, so that the whole gradient
        is never in RAM. (A head of 128k rows is half a gigabyte, in bfloat16.)"""
        spec = self.layout.blocks[block]
        held = self._held.setdefault(block, _Held())
        begun = held.unwritten is not None
        width = spec.pieces[piece].count // spec.pieces[piece].shape[0]
        first, count = rows.start * width, (rows.stop - rows.start) * width
        if (
            block not in self._spill
            or first % CHUNK
            or ((held.pieces or held.spilled) and not begun)
        ):
            self.add(block, piece, gradient, rows)
            return
        if held.unwritten is None:
            held.unwritten = dict.fromkeys(spec.tiles)
        key = block, piece
        if piece not in held.spilled:
            self._sums[key] = np.zeros(grad_norm.chunks(spec.pieces[piece].count), np.float64)
            held.spilled.add(piece)
        dtype: torch.dtype = getattr(torch, self.dtype_of(spec))
        flat = as_numbers(gradient.detach().to(dtype).contiguous())
        chunk = first // CHUNK
        sums = self._sums[key][chunk : chunk + grad_norm.chunks(count)]
        grad_norm.squares(flat, sums, workers=self._workers)
        low = spec.pieces[piece].offset + first
        for index in spec.tiles:
            tile = self.layout.tiles[index]
            a, b = max(low, tile.start), min(low + count, tile.start + tile.count)
            if a >= b:
                continue
            part = flat[a - low : b - low]
            if b - a == tile.count:
                self.file.write(spec, index, partial(np.copyto, src=part))
                del held.unwritten[index]
                continue
            room = held.unwritten[index]
            if room is None:
                room = held.unwritten[index] = np.zeros(tile.count, flat.dtype)
            room[a - tile.start : b - tile.start] = part

    def _flush(self, spec: Block, held: _Held) -> None:
        """Write the rest of a block whose gradients have left by slices."""
        if held.unwritten is None:
            return
        for index, room in held.unwritten.items():

            def fill(target: Numbers, room: Numbers | None = room, index: int = index) -> None:
                target[:] = 0 if room is None else room
                self._fill(spec, index, held.pieces, target)

            self.file.write(spec, index, fill)
        held.unwritten = None
        held.spilled.update(held.pieces)
        held.pieces = {}

    def _open(self, spec: Block, piece: int) -> _Held:
        """The block's gradients, with this piece's in RAM and its factor applied."""
        key = spec.index, piece
        held = self._held.setdefault(spec.index, _Held())
        self._sums.pop(key, None)
        factor = self._factors.pop(key, 1.0)
        if piece in held.spilled:
            self._fetch(spec, held)
        if factor != 1.0 and piece in held.pieces:
            total = held.pieces[piece]
            if isinstance(total, RowGradient):
                held.pieces[piece] = total.scaled(factor)
            else:
                held.pieces[piece] = total * factor
        return held

    def seal(self, block: int) -> None:
        """No more gradients of this block in this step: measure them, and spill them if planned."""
        spec = self.layout.blocks[block]
        held = self._held.get(block)
        if held is None:
            return
        if held.spilled and held.unwritten is None:
            self._fetch(spec, held)
        for i, tensor in held.pieces.items():
            if isinstance(tensor, RowGradient):
                self._sums[block, i] = tensor.squares(spec.pieces[i].count)
                continue
            flat = as_numbers(tensor)
            sums = np.empty(grad_norm.chunks(flat.size), np.float64)
            grad_norm.squares(flat, sums, workers=self._workers)
            self._sums[block, i] = sums
        self._flush(spec, held)
        self.park(block)

    def park(self, block: int) -> None:
        """Write a spilled block's gradients to the file, also if more will be added.

        A thread does that while the next unit is run again: staging is a copy, and the disk may be
        busy with the weights that this unit waits for.
        """
        held = self._held.get(block)
        if held is None or block not in self._spill or not held.pieces:
            return
        if held.spilled:  # all of a block is written at once
            self._fetch(self.layout.blocks[block], held)
        if self._spiller is None:
            self._spiller = threading.Thread(target=self._serve, name="offload-spill", daemon=True)
            self._spiller.start()
        self.file.write_begins(self.layout.blocks[block])
        with self._shared.changed:
            self._parting.append((self.layout.blocks[block], held.pieces))
            self._shared.notify()
        held.spilled.update(held.pieces)
        held.pieces = {}

    def norm(self) -> float:
        """The norm of all sealed gradients: exact sums over pieces in the order of the layout."""
        return grad_norm.norm(self._sums[key] for key in sorted(self._sums))

    def first_bad(self) -> str | None:
        """A parameter whose gradient is not finite, if there is one."""
        for (block, piece), sums in sorted(self._sums.items(), key=lambda item: item[0]):
            if not np.isfinite(sums).all():
                return self.layout.blocks[block].pieces[piece].param
        return None

    def pieces(self, block: int) -> frozenset[int]:
        """The pieces of a block that have gradients."""
        held = self._held.get(block)
        return frozenset() if held is None else frozenset(held.pieces) | held.spilled

    def blocks(self) -> list[int]:
        """The blocks that have gradients."""
        return sorted(self._held)

    def sealed(self, block: int) -> bool:
        """Whether a block's gradients, all there are, have been measured."""
        return all((block, i) in self._sums for i in self.pieces(block))

    def forget(self) -> None:
        """Drop what no update waits for: the gradients of a step that is not taken."""
        for block in {key[0] for key in self._sums} | {b for b in self._held}:
            self.settle(block)
            self._held.pop(block, None)
        self.clear_sums()

    def clear_sums(self) -> None:
        self._sums.clear()
        self._factors.clear()

    # -- one piece, for loops that are not ours ---------------------------------------------

    def squares(self, block: int, piece: int) -> float | None:
        """The sum of squares of a piece's measured gradient; None if it has none."""
        sums = self._sums.get((block, piece))
        return None if sums is None else float(sums.sum())

    def multiply(self, block: int, piece: int, factor: float) -> None:
        """Have the step (or the next ``add``) multiply a piece's gradient; factors multiply."""
        key = block, piece
        self._factors[key] = self._factors.get(key, 1.0) * factor

    def factor(self, block: int, piece: int) -> float:
        return self._factors.get((block, piece), 1.0)

    def value(self, block: int, piece: int) -> torch.Tensor | None:
        """A copy of a piece's gradient, flat, without its factor; None if it has none."""
        held = self._held.get(block)
        if held is None or piece not in self.pieces(block):
            return None
        spec = self.layout.blocks[block]
        self._flush(spec, held)
        if piece not in held.pieces:
            held = _Held(spilled={piece})
            self._fetch(spec, held)
            value = held.pieces[piece]
            assert isinstance(value, torch.Tensor)
            return value
        value = held.pieces[piece]
        if isinstance(value, RowGradient):
            return value.dense(spec.pieces[piece].count)
        return value.clone()

    def discard(self, block: int, piece: int) -> None:
        """Drop a piece's gradient."""
        self._sums.pop((block, piece), None)
        self._factors.pop((block, piece), None)
        held = self._held.get(block)
        if held is None:
            return
        held.pieces.pop(piece, None)
        held.spilled.discard(piece)
        if not held.pieces and not held.spilled:
            self.settle(block)
            del self._held[block]

    # -- updates --------------------------------------------------------------------------

    def hand_over(self, block: int) -> None:
        """A step takes the block's gradients: they belong to its update from now on."""
        held = self._held.pop(block, None)
        if held is not None:
            self._leaving[block] = held

    def tile_bytes(self, block: Block, count: int) -> int:
        """Bytes that a tile's spilled gradients take in a buffer; 0 where they are in RAM."""
        if block.index not in self._spill:
            return 0
        return align_up(count * DTYPE_BYTES[self.dtype_of(block)])

    def read_tile(self, block: Block, tile: int, into: memoryview) -> Future[int] | None:
        """Start reading a tile's spilled gradients."""
        held = self._leaving.get(block.index)
        if held is None or not held.spilled:
            return None
        return self.file.read_ahead(tile, into)

    def of_tile(
        self, block: Block, tile: int, buffer: npt.NDArray[np.uint8] | None
    ) -> Iterator[tuple[int, Piece, int, int, Numbers | None]]:
        """(piece index, piece, start in the tile, count, gradient or None) of each piece in it."""
        held = self._leaving.get(block.index)
        spec = self.layout.tiles[tile]
        for i, piece, low, high in overlaps(block, spec.start, spec.start + spec.count):
            gradient: Numbers | None = None
            if held is not None and i in held.pieces:
                mine = held.pieces[i]
                if isinstance(mine, RowGradient):
                    with self._spread(mine, block, low - piece.offset, high - piece.offset) as rows:
                        yield i, piece, low - spec.start, high - low, rows
                    continue
                whole = as_numbers(mine)
                gradient = whole[low - piece.offset : high - piece.offset]
            elif held is not None and i in held.spilled and buffer is not None:
                whole = numbers(buffer, self.dtype_of(block))
                gradient = whole[low - spec.start : high - spec.start]
            yield i, piece, low - spec.start, high - low, gradient

    @contextlib.contextmanager
    def _spread(
        self, rows: RowGradient, block: Block, low: int, high: int
    ) -> Iterator[Numbers]:  # fmt: skip
        """Elements ``low:high`` of a gradient with its zeros: in one array for all tiles, which is
        cleared behind each where it is not zero."""
        dtype = self.dtype_of(block)
        if dtype not in self._zeros:
            nbytes = largest_tile(self.layout) * DTYPE_BYTES[dtype]
            self._zeros[dtype] = numbers(np.zeros(nbytes, np.uint8), dtype)
        whole = self._zeros[dtype][: high - low]
        parts = [
            (slice(at - low, at - low + len(part)), part) for at, part in rows.parts(low, high)
        ]
        for where, part in parts:
            whole[where] = part
        try:
            yield whole
        finally:
            for where, _ in parts:
                whole[where] = 0

    def leaving_bytes(self) -> int:
        """Bytes in RAM of gradients that updates wait to use."""
        return sum(t.nbytes for h in list(self._leaving.values()) for t in list(h.pieces.values()))

    def drop(self, block: int) -> None:
        """The block's update is through."""
        self._leaving.pop(block, None)

    # -- the file -------------------------------------------------------------------------

    def _serve(self) -> None:
        """The spilling thread."""
        shared = self._shared
        try:
            while True:
                with shared.changed:
                    shared.changed.wait_for(
                        lambda: self._parting or self._closed or shared.error is not None
                    )
                    if self._closed or shared.error is not None:
                        return
                    block, pieces = self._parting[0]
                self._write(block, pieces)
                del pieces
                with shared.changed:
                    self._parting.popleft()
                self.file.write_ended(block)
        except BaseException as error:
            if not self._closed:
                log.debug("gradients could not be spilled", exc_info=True)
                shared.fail(error)

    def _write(self, block: Block, pieces: Mapping[int, torch.Tensor | RowGradient]) -> None:
        for index in block.tiles:

            def fill(target: Numbers, index: int = index) -> None:
                if len(pieces) < len(block.pieces):
                    target[:] = 0
                self._fill(block, index, pieces, target)

            self.file.write(block, index, fill)

    def _fill(
        self, block: Block, index: int, pieces: Mapping[int, torch.Tensor | RowGradient],
        target: Numbers,
    ) -> None:  # fmt: skip
        """Put what a tile holds of these pieces into it."""
        tile = self.layout.tiles[index]
        for i, piece, low, high in overlaps(block, tile.start, tile.start + tile.count):
            part = target[low - tile.start : high - tile.start]
            mine = pieces.get(i)
            if isinstance(mine, RowGradient):
                part[:] = 0
                for at, row in mine.parts(low - piece.offset, high - piece.offset):
                    first = at + piece.offset - low
                    part[first : first + len(row)] = row
            elif mine is not None:
                part[:] = as_numbers(mine)[low - piece.offset : high - piece.offset]

    def settle(self, block: int) -> None:
        """Wait until what was spilled of a block is in the file."""
        self.file.settle(block)

    def _fetch(self, block: Block, held: _Held) -> None:
        """Bring spilled gradients back, to add to them."""
        self._flush(block, held)
        self.settle(block.index)
        dtype: torch.dtype = getattr(torch, self.dtype_of(block))
        back = {i: torch.empty(block.pieces[i].count, dtype=dtype) for i in held.spilled}
        for index in block.tiles:
            tile = self.layout.tiles[index]

            def use(source: Numbers, tile: Tile = tile) -> None:
                for i, piece, low, high in overlaps(block, tile.start, tile.start + tile.count):
                    if i in back:
                        whole = as_numbers(back[i])
                        part = source[low - tile.start : high - tile.start]
                        whole[low - piece.offset : high - piece.offset] = part

            self.file.read(block, index, use)
        held.pieces.update(back)
        held.spilled.clear()

    def close(self) -> None:
        with self._shared.changed:
            self._closed = True
            self._shared.notify()
        if self._spiller is not None:
            self._spiller.join()
        self._parting.clear()
        self._held.clear()
        self._leaving.clear()
        self.file.close()


def overlaps(block: Block, start: int, stop: int) -> Iterator[tuple[int, Piece, int, int]]:
    """(index, piece, first, last + 1 element of the block) of what lies in ``start:stop``."""
    for i, piece in enumerate(block.pieces):
        low, high = max(piece.offset, start), min(piece.offset + piece.count, stop)
        if low < high:
            yield i, piece, low, high
