"""Gradients between backward and the update: summed, measured, kept in RAM or spilled.

What autograd has made of a parameter is taken as it is: no copy where it stays in RAM. A block
whose gradients are *spilled* is written, tile by tile, to a private file while the next unit runs,
and read back beside the tile's states.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.blocks import DTYPE_BYTES, align_up
from offload.cpu_ops import grad_norm
from offload.cpu_ops.grad_norm import Numbers
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.io.store import DEMAND, PREFETCH
from offload.train.buffers import BufferPool
from offload.train.layout import Block, Piece, TrainLayout
from offload.train.tiles import numbers
from offload.train.weights import Shared, as_numbers

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """A block's gradients: one tensor for each piece that has any."""

    pieces: dict[int, torch.Tensor] = field(default_factory=dict)
    spilled: set[int] = field(default_factory=set)
    """Pieces whose bytes are in the file."""


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
        self._engine = engine
        self._spill = frozenset(spill)
        self._file = file
        self._workers = workers
        self._held: dict[int, _Held] = {}
        self._leaving: dict[int, _Held] = {}
        """What a step has taken, until the block's update is through."""
        self._factors: dict[tuple[int, int], float] = {}
        self._sums: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self._offsets = spill_offsets(layout, self._spill, dtype)
        self._staging = BufferPool(SPILL_BUFFERS * align_up(4 * _largest(layout)), "spill")
        self._writing: dict[int, int] = {}
        self._parting: deque[tuple[Block, dict[int, torch.Tensor]]] = deque()
        """What the spilling thread has yet to copy out; at most one unit's."""
        self._spiller: threading.Thread | None = None
        self._closed = False
        self.written_bytes = 0
        self.read_bytes = 0

    def dtype_of(self, block: Block) -> str:
        return self.dtype or block.dtype

    # -- backward -------------------------------------------------------------------------

    def add(
        self, block: int, piece: int, gradient: torch.Tensor, rows: slice | None = None
    ) -> None:
        """Add ``gradient`` (any shape of the piece's size; [rows] of its first dimension with
        ``rows``) to a piece's. May keep the tensor itself: the caller lets go of it."""
        spec = self.layout.blocks[block]
        held = self._held.setdefault(block, _Held())
        self._sums.pop((block, piece), None)
        factor = self._factors.pop((block, piece), 1.0)
        if piece in held.spilled:
            self._fetch(spec, held)
        if factor != 1.0 and piece in held.pieces:
            held.pieces[piece] = held.pieces[piece] * factor
        dtype: torch.dtype = getattr(torch, self.dtype_of(spec))
        flat = gradient.detach().reshape(-1)
        total = held.pieces.get(piece)
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

    def seal(self, block: int) -> None:
        """No more gradients of this block in this step: measure them, and spill them if planned."""
        spec = self.layout.blocks[block]
        held = self._held.get(block)
        if held is None:
            return
        if held.spilled:
            self._fetch(spec, held)
        for i, tensor in held.pieces.items():
            flat = as_numbers(tensor)
            sums = np.empty(grad_norm.chunks(flat.size), np.float64)
            grad_norm.squares(flat, sums, workers=self._workers)
            self._sums[block, i] = sums
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
        with self._shared.changed:
            self._writing[block] = self._writing.get(block, 0) + 1
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
        if piece in held.pieces:
            return held.pieces[piece].clone()
        spec = self.layout.blocks[block]
        copy = _Held(spilled={piece})
        self._fetch(spec, copy)
        return copy.pieces[piece]

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
        assert self._file is not None
        self.read_bytes += into.nbytes
        return self._engine.read(self._file, self._offsets[tile], into, PREFETCH)

    def of_tile(
        self, block: Block, tile: int, buffer: npt.NDArray[np.uint8] | None
    ) -> Iterator[tuple[int, Piece, int, int, Numbers | None]]:
        """(piece index, piece, start in the tile, count, gradient or None) of each piece in it."""
        held = self._leaving.get(block.index)
        spec = self.layout.tiles[tile]
        for i, piece, low, high in overlaps(block, spec.start, spec.start + spec.count):
            gradient: Numbers | None = None
            if held is not None and i in held.pieces:
                whole = as_numbers(held.pieces[i])
                gradient = whole[low - piece.offset : high - piece.offset]
            elif held is not None and i in held.spilled and buffer is not None:
                whole = numbers(buffer, self.dtype_of(block))
                gradient = whole[low - spec.start : high - spec.start]
            yield i, piece, low - spec.start, high - low, gradient

    def leaving_bytes(self) -> int:
        """Bytes in RAM of gradients that updates wait to use."""
        return sum(t.nbytes for h in list(self._leaving.values()) for t in list(h.pieces.values()))

    def drop(self, block: int) -> None:
        """The block's update is through."""
        self._leaving.pop(block, None)

    def _wait_for_room(self, nbytes: int) -> None:
        """With the lock held."""
        self._shared.wait_for(lambda: self._staging.fits(nbytes), "room for spilled gradients")

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
                    self._writing[block.index] -= 1
                    shared.notify()
        except BaseException as error:
            if not self._closed:
                log.debug("gradients could not be spilled", exc_info=True)
                shared.fail(error)

    def _write(self, block: Block, pieces: dict[int, torch.Tensor]) -> None:
        size = DTYPE_BYTES[self.dtype_of(block)]
        for index in block.tiles:
            tile = self.layout.tiles[index]
            nbytes = align_up(tile.count * size)
            with self._shared.changed:
                self._wait_for_room(nbytes)
                memory = self._staging.take(nbytes)
            target = numbers(memory.tensor().numpy(), self.dtype_of(block))
            for i, piece, low, high in overlaps(block, tile.start, tile.start + tile.count):
                part = target[low - tile.start : high - tile.start]
                tensor = pieces.get(i)
                if tensor is None:
                    part[:] = 0
                else:
                    part[:] = as_numbers(tensor)[low - piece.offset : high - piece.offset]
            assert self._file is not None
            self.written_bytes += nbytes
            with self._shared.changed:
                self._writing[block.index] += 1
            future = self._engine.write(self._file, self._offsets[index], memory.view())
            future.add_done_callback(self._done(block.index, memory))

    def _done(self, block: int, memory: Any) -> Callable[[Future[int]], None]:
        def done(future: Future[int]) -> None:
            error = future.exception()
            with self._shared.changed:
                self._staging.give(memory)
                self._writing[block] -= 1
                if error is not None:
                    self._shared.fail(error)
                self._shared.notify()

        return done

    def settle(self, block: int) -> None:
        """Wait until what was spilled of a block is in the file."""
        with self._shared.changed:
            self._shared.wait_for(lambda: not self._writing.get(block), "spilled gradients")

    def _fetch(self, block: Block, held: _Held) -> None:
        """Bring spilled gradients back, to add to them."""
        self.settle(block.index)
        assert self._file is not None
        size = DTYPE_BYTES[self.dtype_of(block)]
        dtype: torch.dtype = getattr(torch, self.dtype_of(block))
        for i in held.spilled:
            held.pieces[i] = torch.empty(block.pieces[i].count, dtype=dtype)
        pool = self._staging
        for index in block.tiles:
            tile = self.layout.tiles[index]
            nbytes = align_up(tile.count * size)
            with self._shared.changed:
                self._wait_for_room(nbytes)
                memory = pool.take(nbytes)
            try:
                self.read_bytes += nbytes
                view = memory.view()
                self._engine.read(self._file, self._offsets[index], view, DEMAND).result()
                source = numbers(memory.tensor().numpy(), self.dtype_of(block))
                for i, piece, low, high in overlaps(block, tile.start, tile.start + tile.count):
                    if i in held.spilled:
                        whole = as_numbers(held.pieces[i])
                        whole[low - piece.offset : high - piece.offset] = source[
                            low - tile.start : high - tile.start
                        ]
            finally:
                with self._shared.changed:
                    pool.give(memory)
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
        self._staging.close()
        if self._file is not None:
            self._file.close()


SPILL_BUFFERS = 3
"""Tiles of gradients on their way to the disk."""


def _largest(layout: TrainLayout) -> int:
    return max((t.count for t in layout.tiles), default=1)


def spill_offsets(layout: TrainLayout, spill: Iterable[int], dtype: str | None) -> dict[int, int]:
    """Tile -> its offset in the file of spilled gradients; -1: the file's bytes."""
    out, end = {}, 0
    for b in sorted(spill):
        block = layout.blocks[b]
        size = DTYPE_BYTES[dtype or block.dtype]
        for index in block.tiles:
            out[index] = end
            end += align_up(layout.tiles[index].count * size)
    out[-1] = end
    return out


def overlaps(block: Block, start: int, stop: int) -> Iterator[tuple[int, Piece, int, int]]:
    """(index, piece, first, last + 1 element of the block) of what lies in ``start:stop``."""
    for i, piece in enumerate(block.pieces):
        low, high = max(piece.offset, start), min(piece.offset + piece.count, stop)
        if low < high:
            yield i, piece, low, high
