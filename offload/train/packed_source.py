"""Where a packed base's bytes come from: the pack's bundles, every block compared with its
checksum as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.io.engines import Engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_manifest import Block as PackBlock
from offload.io.pack_manifest import Layout, again
from offload.models.pack_source import Experts
from offload.train.layout import Block, Piece, TrainLayout
from offload.train.packed_base import PackedBase
from offload.train.packed_values import plain, unpacked
from offload.train.source import MadeBlocks


class PackReader:
    """Single tensors of a pack, whole and in memory: what is small, and what is written at last.

    The last block that was read is kept: norms share theirs.
    """

    def __init__(self, base: PackedBase, engine: Engine, staging: Staging) -> None:
        self.base = base
        self.store = base.pack.store(engine, staging)
        self._last: tuple[str, torch.Tensor] | None = None
        self._biases: tuple[str, dict[str, torch.Tensor]] | None = None

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor outside of experts: in ``dtype``, or its own where the pack has it plain."""
        found = self.base.pack.tensors.get(name)
        if found is None:
            path = self.base.pack.path
            raise CheckpointError(f"{path}: {name} is not in the pack; {again(path)}")
        raw = self._block(found.block)
        part = found.part
        return unpacked(part, raw[part.offset : part.offset + part.nbytes], dtype)

    def bias(self, group: str, param: str) -> torch.Tensor:
        """A parameter ``[E, outputs]`` that a pack has expert by expert: reads all of them."""
        if self._biases is None or self._biases[0] != group:
            self._biases = group, self._read_biases(group)
        return self._biases[1][param]

    def _read_biases(self, group: str) -> dict[str, torch.Tensor]:
        item, packed = self.base.experts[group], self.base.pack.experts[group]
        small = [
            (t.slice, packed.part(t.name)) for t in item.parts
            if t.slice is not None and len(t.shape) == 1
        ]  # fmt: skip
        out: dict[str, torch.Tensor] = {}
        blocks = {b.name: b for b in self.base.pack.manifest.blocks}
        for expert, name in enumerate(packed.blocks):
            raw = self._block(blocks[name])
            for where, part in small:
                if part.layout is not Layout.PLAIN:
                    continue
                value = plain(part, raw[part.offset : part.offset + part.nbytes])
                whole = out.get(where.param)
                if whole is None:
                    shape = item.count, self._outputs(item, where.param)
                    whole = out[where.param] = torch.zeros(shape, dtype=value.dtype)
                last = where.base + where.step * (len(value) - 1)
                whole[expert, where.base : last + 1 : where.step] = value
        return out

    @staticmethod
    def _outputs(item: Experts, param: str) -> int:
        """Of a bias that may be in the pack in two parts."""
        return sum(t.shape[0] for t in item.parts if t.slice is not None and t.slice.param == param)

    def _block(self, block: PackBlock) -> torch.Tensor:
        """uint8: the block's bytes, valid until another is read."""
        if self._last is None or self._last[0] != block.name:
            self._last = None
            with AlignedBuffer(block.spec().slot_nbytes) as buffer:
                self.store.read_into(block.name, buffer).result()
                whole = torch.frombuffer(buffer, dtype=torch.uint8).clone()
            self._last = block.name, whole
        return self._last[1]

    def close(self) -> None:
        self._last = self._biases = None
        self.store.close()


class PackedSource(MadeBlocks):
    """``weights.WeightSource`` of a packed base; adapters come from ``initial``."""

    def __init__(
        self, train: TrainLayout, base: PackedBase, engine: Engine, staging: Staging,
        initial: Mapping[str, Callable[[], torch.Tensor]],
    ) -> None:  # fmt: skip
        super().__init__(train, engine, staging)
        self._base = base
        self._initial = initial
        self._reader = PackReader(base, engine, staging)
        self.made = {
            b.index: "no checkpoint holds it" if b.trained else "the pack has it plain"
            for b in train.blocks
            if b.index not in base.recipes
        }

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        self.read_bytes += block.nbytes
        if block.index in self.made:
            view = into[: block.nbytes]
            return [self.converted(block).read_into(block.id, view, priority=priority)]
        reads = self._base.recipes[block.index].reads
        store = self._reader.store
        return [
            store.read_into(name, into[at : at + size], priority=priority)
            for name, at, size in reads
        ]

    def value(self, piece: Piece) -> torch.Tensor:
        """A piece as the pack has it."""
        make = self._initial.get(piece.param)
        param = self.layout.params[piece.param]
        if make is not None:
            whole = make()
        elif (group := piece.param.rpartition(".")[0]) in self._base.experts:
            whole = self._reader.bias(group, piece.param)
        else:
            name = next((n for n in param.names if n in self._base.pack.tensors), piece.param)
            whole = self._reader.read(name, param.tensor.dtype)
        return whole.reshape(-1)[piece.start : piece.start + piece.count].view(piece.shape)

    def close(self) -> None:
        self._reader.close()
        super().close()


__all__ = ["PackReader", "PackedSource"]
