"""The file of spilled gradients: tiles go out through a few buffers, and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from offload.blocks import DTYPE_BYTES, align_up
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.io.store import DEMAND, PREFETCH
from offload.runtime.memory import HostMemory
from offload.train.buffers import BufferPool
from offload.train.layout import Block, TrainLayout
from offload.train.tiles import Numbers, numbers
from offload.train.weights import Shared

SPILL_BUFFERS = 3
"""Tiles of gradients on their way to the disk."""


def largest_tile(layout: TrainLayout) -> int:
    """In elements."""
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


class GradientFile:
    """See the module. Threads may write and read different blocks at once."""

    def __init__(
        self, layout: TrainLayout, shared: Shared, engine: Engine, file: DirectFile | None,
        spill: Iterable[int], dtype: str | None,
    ) -> None:  # fmt: skip
        """``file`` has room for ``spill_offsets``; None: nothing is spilled."""
        self._layout = layout
        self._shared = shared
        self._engine = engine
        self._file = file
        self._dtype = dtype
        self._offsets = spill_offsets(layout, spill, dtype)
        self._staging = BufferPool(SPILL_BUFFERS * align_up(4 * largest_tile(layout)), "spill")
        self._writing: dict[int, int] = {}
        self.written_bytes = 0
        self.read_bytes = 0

    def _dtype_of(self, block: Block) -> str:
        return self._dtype or block.dtype

    def _buffer(self, block: Block, tile: int) -> HostMemory:
        nbytes = align_up(self._layout.tiles[tile].count * DTYPE_BYTES[self._dtype_of(block)])
        with self._shared.changed:
            self._shared.wait_for(
                lambda: self._staging.fits(nbytes), "room for spilled gradients"
            )  # fmt: skip
            return self._staging.take(nbytes)

    def write(self, block: Block, tile: int, fill: Callable[[Numbers], None]) -> None:
        """Have ``fill`` write a tile's gradients into a buffer, and write that to the file."""
        memory = self._buffer(block, tile)
        fill(numbers(memory.tensor().numpy(), self._dtype_of(block))[: self._count(tile)])
        assert self._file is not None
        self.written_bytes += memory.nbytes
        self.write_begins(block)

        def done(future: Future[int]) -> None:
            error = future.exception()
            with self._shared.changed:
                self._staging.give(memory)
                if error is not None:
                    self._shared.fail(error)
            self.write_ended(block)

        future = self._engine.write(self._file, self._offsets[tile], memory.view())
        future.add_done_callback(done)

    def read(self, block: Block, tile: int, use: Callable[[Numbers], None]) -> None:
        """Read a tile's gradients into a buffer, and have ``use`` take them from there."""
        memory = self._buffer(block, tile)
        try:
            assert self._file is not None
            self.read_bytes += memory.nbytes
            self._engine.read(self._file, self._offsets[tile], memory.view(), DEMAND).result()
            use(numbers(memory.tensor().numpy(), self._dtype_of(block))[: self._count(tile)])
        finally:
            with self._shared.changed:
                self._staging.give(memory)

    def read_ahead(self, tile: int, into: memoryview) -> Future[int]:
        """Start reading a tile's gradients into the caller's buffer."""
        assert self._file is not None
        self.read_bytes += into.nbytes
        return self._engine.read(self._file, self._offsets[tile], into, PREFETCH)

    def _count(self, tile: int) -> int:
        return self._layout.tiles[tile].count

    def write_begins(self, block: Block) -> None:
        """The block is not settled until ``write_ended``."""
        with self._shared.changed:
            self._writing[block.index] = self._writing.get(block.index, 0) + 1

    def write_ended(self, block: Block) -> None:
        with self._shared.changed:
            self._writing[block.index] -= 1
            self._shared.notify()

    def settle(self, block: int) -> None:
        """Wait until all that was written of a block is in the file."""
        with self._shared.changed:
            self._shared.wait_for(lambda: not self._writing.get(block), "spilled gradients")

    def close(self) -> None:
        """Free the buffers and close the file. No transfer may be under way."""
        self._staging.close()
        if self._file is not None:
            self._file.close()
