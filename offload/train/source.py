"""Where weights come from: the tiles that updates have written, before that the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.blocks import ALIGN, DTYPE_BYTES, BlockKind, BlockSpec, TensorSpec, layout
from offload.errors import OffloadError
from offload.io.engines import Engine
from offload.io.memory import Staging
from offload.io.pack import PackStore
from offload.io.ranges import Piece as FilePiece
from offload.io.stores import RangeStore, Recipe
from offload.models.recipes import TensorReader, find_source, split_rows, to_pieces
from offload.models.sources import CheckpointMap, Ranges
from offload.runtime.memory import HostMemory
from offload.train.layout import Block, Piece, TrainLayout
from offload.train.tiles import COPY, SlotKind, narrow, numbers
from offload.train.updates import Tiles


class MadeBlocks:
    """Blocks that cannot be read as they are: trained ones go to their tiles (``import_made``),
    frozen ones are converted once into a private file."""

    def __init__(self, train: TrainLayout, engine: Engine, staging: Staging) -> None:
        self.layout = train
        self._engine = engine
        self._staging = staging
        self._converted: PackStore | None = None
        self.read_bytes = 0
        self.made: dict[int, str] = {}
        """Blocks that are made -> why."""

    def converted(self, block: Block) -> PackStore:
        """What holds a block that was made."""
        if self._converted is None:
            raise OffloadError(f"block {block.id} was not converted")
        return self._converted

    def convert_frozen(self, directory: Path, progress: Callable[[int, int], None]) -> None:
        """Convert what is frozen and cannot be read as it is, once, into a private file."""
        blocks = [b for b in self.layout.blocks if b.index in self.made and not b.trained]
        if not blocks:
            return
        specs = [layout(b.id, BlockKind.WEIGHT, [("weights", b.dtype, (b.count,))]) for b in blocks]
        self._converted = PackStore.create(directory, specs, self._engine, self._staging)
        scratch = HostMemory(max(s.slot_nbytes for s in specs), "conversion")
        total, done = sum(s.nbytes for s in specs), 0
        try:
            for block, spec in zip(blocks, specs, strict=True):
                self.make(block, scratch.tensor().numpy())
                view = scratch.view()[: spec.slot_nbytes]
                self._converted.write_from(spec.id, view).result()
                done += spec.nbytes
                progress(done, total)
        finally:
            scratch.close()

    def make(self, block: Block, out: Any) -> None:
        """Write the block's weights, converted to its dtype, to ``out`` (uint8 [>= nbytes])."""
        size = DTYPE_BYTES[block.dtype]
        for piece in block.pieces:
            value = self.value(piece).to(getattr(torch, block.dtype)).contiguous()
            at = piece.offset * size
            raw = torch.from_numpy(out[at : at + piece.count * size])
            raw.copy_(value.view(-1).view(torch.uint8))

    def value(self, piece: Piece) -> torch.Tensor:
        """A piece as the source has it: in its own dtype where it is only cast."""
        raise NotImplementedError

    def close(self) -> None:
        if self._converted is not None:
            self._converted.close()


class CheckpointSource(MadeBlocks):
    """Blocks as the checkpoint has them, for what was never updated.

    Blocks whose tensors are the file's own bytes are read from there. The others (stored in another
    dtype, or permuted) are *made*, once, at the start: trained ones go to their tiles, with masters
    that keep every bit of the checkpoint's (``import_made``), frozen ones to a private file.

    ``initial``: by name, what makes the values of parameters that no checkpoint holds (adapters).
    Blocks with such are made, too, and a resumed run finds them in its tiles.
    """

    def __init__(
        self, train: TrainLayout, mapping: CheckpointMap, engine: Engine, staging: Staging,
        initial: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(train, engine, staging)
        self._mapping = mapping
        self._initial = initial or {}
        self._reader = TensorReader(mapping.index, engine, staging)
        self._rows: dict[str, list[list[Any]]] = {}
        recipes: dict[str, Recipe] = {}
        for block in train.blocks:
            recipe = self._recipe(block)
            if isinstance(recipe, str):
                self.made[block.index] = recipe
            else:
                recipes[block.id] = recipe
        self._rows.clear()
        self._store = RangeStore([str(f) for f in mapping.index.files], recipes, engine, staging)

    def _recipe(self, block: Block) -> Recipe | str:
        size = DTYPE_BYTES[block.dtype]
        specs: list[TensorSpec] = []
        pieces: list[FilePiece] = []
        for piece in block.pieces:
            if piece.param in self._initial:
                return "no checkpoint holds it"
            source = find_source(self.layout.params[piece.param], self._mapping.map.sources)
            if source.placed is None:
                return source.why_not
            at = piece.offset * size
            specs.append(
                TensorSpec(name=piece.param, dtype=block.dtype, shape=piece.shape, offset=at)
            )
            pieces += to_pieces(self._runs(piece, source.placed), self._mapping.index, at)
        spec = BlockSpec(
            id=block.id, kind=BlockKind.WEIGHT, tensors=tuple(specs), nbytes=block.nbytes
        )
        return spec, tuple(pieces)

    def _runs(self, piece: Piece, placed: Ranges) -> list[Any]:
        if piece.expert is None:
            return placed.runs
        if piece.param not in self._rows:
            self._rows[piece.param] = split_rows(placed)
        return self._rows[piece.param][piece.expert]

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        store: Any = self._store
        if block.index in self.made:
            store = self.converted(block)
        self.read_bytes += block.nbytes
        return [store.read_into(block.id, into[: block.nbytes], priority=priority)]

    def value(self, piece: Piece) -> torch.Tensor:
        if piece.param in self._initial:
            whole = self._initial[piece.param]().reshape(-1)
            return whole[piece.start : piece.start + piece.count].view(piece.shape)
        source = find_source(self.layout.params[piece.param], self._mapping.map.sources)
        if source.found is not None:
            runs = (
                source.found.runs if piece.expert is None
                else split_rows(source.found)[piece.expert]
            )  # fmt: skip
            parts = [self._read_run(r.name, r.start, r.count) for r in runs]
            return torch.cat(parts).view(piece.shape)
        whole = self._mapping.convert(source.target, self._reader.read)
        return whole if piece.expert is None else whole[piece.expert]

    def _read_run(self, name: str, start: int, count: int) -> torch.Tensor:
        return self._reader.read(name).view(-1)[start : start + count]

    def close(self) -> None:
        self._reader.close()
        self._store.close()
        super().close()


class TileSource:
    """``weights.WeightSource``: a block's tiles if they were written, else ``before``."""

    def __init__(
        self, layout: TrainLayout, tiles: Tiles, before: Any, kind: Callable[[Block], SlotKind]
    ) -> None:
        self.layout = layout
        self._tiles = tiles
        self._before = before
        self._kind = kind

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        if not block.trained or not self._tiles.written(block.tiles[0]):
            futures: list[Future[Any]] = self._before.read(block, into, priority)
            return futures
        size = DTYPE_BYTES[block.dtype]
        out: list[Future[Any]] = []
        for index in block.tiles:
            tile = self.layout.tiles[index]
            view = into[tile.start * size :]
            if self._tiles.has(index, COPY):
                out.append(self._tiles.read_into(index, COPY, COPY, view, priority))
            else:
                out.append(self._from_masters(block, index, view))
        return out

    def _from_masters(self, block: Block, index: int, view: memoryview) -> Future[Any]:
        """A tile that was written without its copy, because that stayed in RAM: round it anew."""
        tile, kind = self.layout.tiles[index], self._kind(block)
        sizes = kind.parts(tile.count)
        scratch = HostMemory(-(-sizes[1] // ALIGN) * ALIGN, "masters")
        done: Future[Any] = Future()

        def finish(read: Future[Any]) -> None:
            try:
                read.result()
                masters = scratch.tensor().numpy()[: sizes[1]].view(np.float32)
                target = np.frombuffer(view, np.uint8)[: sizes[0]]
                narrow(masters, numbers(target, block.dtype))
            except BaseException as error:  # noqa: BLE001  the waiter gets it
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                scratch.close()

        done.set_running_or_notify_cancel()
        self._tiles.read_into(index, 1, 1, scratch.view()).add_done_callback(finish)
        return done


def check_dtypes(layout: TrainLayout) -> None:
    """Refuse dtypes that cannot be trained. Raises OffloadError."""
    bad = {b.dtype for b in layout.trained} - {"bfloat16", "float32"}
    if bad:
        raise OffloadError(
            f"weights in {', '.join(sorted(bad))} cannot be trained here: gradients would "
            f"underflow or be too slow; give --dtype bfloat16 (masters keep the checkpoint's bits)"
        )


__all__ = ["CheckpointSource", "TileSource", "check_dtypes"]
