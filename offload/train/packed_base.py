"""A frozen base that stays packed (QLoRA: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of
Quantized LLMs", section 3, with the formats of ``offload pack`` in place of NF4).

What is read, and kept in RAM, are a pack's bytes: of q4_0 3.6 times as many layers fit. A unit's
weights are unpacked into the compute dtype when it runs, in forward and again in backward, experts
one by one; gradients flow through those values to the adapters, and the base never changes. So a
run equals, bit for bit, LoRA on a resident model with the unpacked weights.

What a pack has in plain form (norms, routers, biases, what has no kernel) is small and goes the
way of any other frozen weight, from a private file in the compute dtype.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.blocks import align_up
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.isa import choose
from offload.cpu_ops.packing import packed_bytes
from offload.cpu_ops.prefill_kernels import dequantize_kernel
from offload.cpu_ops.warm import Report, compile_ahead
from offload.errors import CheckpointError, OffloadError
from offload.io.gguf_header import is_gguf
from offload.io.pack_manifest import Kind, Layout, Part, again, is_pack
from offload.io.safetensors import CheckpointIndex, TensorRange
from offload.models.choose import model_directory
from offload.models.meta import MetaModel, build, instantiate, read_config, resolve
from offload.models.naming import model_name
from offload.models.pack_outline import outline
from offload.models.pack_reader import PackedModel
from offload.models.pack_source import Experts, Slice
from offload.models.params import parameters
from offload.models.sources import CheckpointMap
from offload.train.layout import Block, Piece, TrainLayout
from offload.train.packed_values import KINDS, SCRATCH_BYTES, Fill, Unpacker

SAMPLE_ROWS, SAMPLE_COLUMNS = 1024, 2048
"""Of the matrix that unpacking is timed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """How a block is kept: whole blocks of the pack, one behind the other."""

    reads: tuple[tuple[str, int, int], ...]
    """(name in the pack, offset, bytes of its slot)."""
    fills: tuple[Fill, ...]
    table: bool = False
    """An embedding or head that is alone in its block and unit: unpacked by rows, never whole."""


class PackedBase:
    """A pack and the model whose frozen weights it holds. Make it with ``Choice.open``."""

    def __init__(self, pack: PackedModel, meta: MetaModel, *, of_checkpoint: bool) -> None:
        """``of_checkpoint``: ``meta`` was built from the checkpoint that the pack was made from,
        which is at hand; else from the pack itself.

        Raises:
            CheckpointError: the pack lacks a weight of the model, or has it in another shape.
        """
        self.pack = pack
        self.meta = meta
        self.of_checkpoint = of_checkpoint
        self.experts: dict[str, Experts] = {
            item.name: item for item in outline(meta.model, pack.tensors).items
            if isinstance(item, Experts)
        }  # fmt: skip
        self.names = self._packed_names()
        self.recipes: dict[int, Packed] = {}
        """By block, once ``attach`` has seen the layout."""

    def _packed_names(self) -> frozenset[str]:
        """Parameters outside of experts that have a block of the pack, packed, to themselves."""
        inside = {
            part.slice.param for item in self.experts.values() for part in item.parts if part.slice
        }
        out = set()
        for param in parameters(self.meta.model).values():
            if param.name in inside:
                continue
            found = next(
                (self.pack.tensors[n] for n in param.names if n in self.pack.tensors), None
            )
            if found is None:
                raise self._misfit(param.name, "is not in the pack")
            if found.part.shape != tuple(param.tensor.shape):
                have = f"is {list(found.part.shape)} in the pack"
                raise self._misfit(param.name, f"{have}, {list(param.tensor.shape)} in config.json")
            if found.part.layout is not Layout.PLAIN and len(found.block.parts) == 1:
                out.add(param.name)
        for name, item in self.experts.items():
            group = self.pack.experts.get(name)
            if group is None or len(group.blocks) != item.count:
                raise self._misfit(name, "has not all of its experts in the pack")
            shapes = {part.name: part.shape for part in group.parts}
            for part in item.parts:
                if shapes.get(part.name) != part.shape:
                    raise self._misfit(f"{name}.{part.name}", "is missing or of another shape")
        return frozenset(out)

    def _misfit(self, name: str, why: str) -> CheckpointError:
        path = self.pack.path
        return CheckpointError(f"{model_name(path)}: {name} {why}; {again(path)}")

    @property
    def fingerprint(self) -> str:
        """Of the packed bytes: their formats, places and checksums. Not of where they are."""
        digest = hashlib.sha256()
        for block in self.pack.manifest.blocks:
            digest.update(f"{block.name} {block.parts} {block.checksum}\n".encode())
        return f"{self.pack.manifest.quant} {digest.hexdigest()[:32]}"

    @property
    def formats(self) -> str:
        """Those of packed weights, most bytes first."""
        amounts = self._amounts()
        return ", ".join(sorted(amounts, key=lambda name: -amounts[name])) or "plain"

    def _amounts(self) -> dict[str, int]:
        """Bytes by format of what is packed."""
        out: dict[str, int] = {}
        for block in self.pack.manifest.blocks:
            for part in block.parts:
                if part.layout is not Layout.PLAIN:
                    out[part.format] = out.get(part.format, 0) + part.nbytes
        return out

    @property
    def source(self) -> str:
        """What adapters say they belong to: the checkpoint if there is one, else the pack."""
        origin = self.pack.manifest.source
        if self.of_checkpoint:
            return str(self.meta.directory.resolve())
        known = origin.kind == "safetensors" and Path(origin.path).is_dir()
        return origin.path if known else str(self.pack.path.resolve())

    # -- the layout -----------------------------------------------------------------------

    def attach(self, layout: TrainLayout) -> None:
        """Let every block of ``layout`` that can be packed be packed. The layout was made with
        ``packed=self.names``."""
        for block in layout.blocks:
            if block.trained:
                continue
            recipe = self._recipe(layout, block)
            if recipe is None:
                continue
            _, at, size = recipe.reads[-1]
            layout.blocks[block.index] = replace(block, packed=at + size)
            self.recipes[block.index] = recipe

    def _recipe(self, layout: TrainLayout, block: Block) -> Packed | None:
        """None for what is plain."""
        if block.pieces and block.pieces[0].expert is not None:
            return self._expert(block)
        if block.index in layout.rest or not all(p.param in self.names for p in block.pieces):
            return None
        reads, fills, end = [], [], 0
        kinds = set()
        for piece in block.pieces:
            names = layout.params[piece.param].names
            found = next(self.pack.tensors[n] for n in names if n in self.pack.tensors)
            slot = found.block.spec().slot_nbytes
            reads.append((found.block.name, end, slot))
            fills.append(Fill(part=found.part, at=end, piece=piece))
            kinds.add(found.block.kind)
            end += slot
        owners = {id(layout.units[u].module) for u in layout.users[block.index]}
        places = [p for piece in block.pieces for p in layout.params[piece.param].places]
        table = (
            len(block.pieces) == 1
            and kinds <= {Kind.HEAD, Kind.ROWS}
            and {id(place.module) for place in places} <= owners
        )
        return Packed(reads=tuple(reads), fills=tuple(fills), table=table)

    def _expert(self, block: Block) -> Packed:
        group = block.pieces[0].param.rpartition(".")[0]
        expert = block.pieces[0].expert
        assert expert is not None
        packed = self.pack.experts[group]
        name = packed.blocks[expert]
        by_param = {piece.param: piece for piece in block.pieces}
        fills = []
        for tensor in self.experts[group].parts:
            assert tensor.slice is not None
            piece = by_param.get(tensor.slice.param)
            if piece is not None:  # else a bias, which is plain and of its layer
                fills.append(_fill(packed.part(tensor.name), tensor.slice, piece))
        return Packed(reads=((name, 0, align_up(packed.nbytes)),), fills=tuple(fills))

    # -- what it needs --------------------------------------------------------------------

    def work_bytes(self, layout: TrainLayout, away: Collection[int] = ()) -> int:
        """Most of RAM that is unpacked at a time: a unit's weights, and an expert's. ``away``:
        units that a device unpacks."""
        sizes = {
            b: align_up(layout.blocks[b].value_bytes)
            for b, r in self.recipes.items()
            if not r.table and not all(u in away for u in layout.users[b])
        }
        dense = max((sum(sizes.get(b, 0) for b in u.blocks) for u in layout.units), default=0)
        return dense + max((sizes.get(b, 0) for b in layout.expert_blocks()), default=0)

    def table_bytes(self, layout: TrainLayout, tokens: int, slice_rows: int, sliced: bool) -> int:
        """Most that is unpacked of tables: the rows of ``tokens`` tokens, and ``slice_rows`` of the
        head at a time (all of them unless ``sliced``)."""
        looked_up = head = 0
        for index, recipe in self.recipes.items():
            if recipe.table:
                block = layout.blocks[index]
                rows = block.pieces[0].shape[0]
                row = block.value_bytes // rows
                # A row begins and ends within pages.
                looked_up = max(looked_up, min(block.value_bytes, tokens * align_up(row + 4096)))
                head = max(head, slice_rows * row if sliced else block.value_bytes)
        return looked_up + head

    @property
    def scratch_bytes(self) -> int:
        """Of unpacking itself."""
        widest = max((p.shape[-1] for b in self.pack.manifest.blocks for p in b.parts if p.shape),
                     default=0)  # fmt: skip
        return SCRATCH_BYTES * 3 + 16 * 4 * widest

    # -- time -----------------------------------------------------------------------------

    def unpack_seconds(
        self, layout: TrainLayout, micro_batches: int, passes: int
    ) -> dict[str, float]:
        """Seconds of unpacking in a step by phase, but for experts, whose computing is measured
        with it. Units are unpacked once per pass and direction; the head's slices twice."""
        forward = backward = 0
        experts = set(layout.expert_blocks())
        for index, recipe in self.recipes.items():
            count = layout.blocks[index].count
            if recipe.table:
                backward += 2 * micro_batches * count
            elif index not in experts:
                forward += passes * count
                backward += passes * count
        rate = self._rate()
        return {"forward": forward / rate, "backward": backward / rate}

    def _rate(self) -> float:
        """Values unpacked per second: of the format that most of the pack is in."""
        amounts = self._amounts()
        if not amounts:
            return math.inf
        most = max(amounts, key=lambda name: amounts[name])
        shape = SAMPLE_ROWS, SAMPLE_COLUMNS
        nbytes = packed_bytes(get_format(most), *shape)
        part = Part(name="sample", format=most, layout=Layout.PACKED, shape=shape, offset=0,
                    nbytes=nbytes)  # fmt: skip
        dtype = self.meta.dtype if self.meta.dtype in KINDS else torch.float32
        raw, out = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(shape, dtype=dtype)
        times, unpacker = [], Unpacker()
        for _ in range(4):
            began = time.perf_counter()
            unpacker.rows(part, raw, 0, SAMPLE_ROWS, out)
            times.append(time.perf_counter() - began)
        return out.numel() / min(times)


def _fill(part: Part, where: Slice, piece: Piece) -> Fill:
    return Fill(
        part=part, at=0, piece=piece, base=where.base, step=where.step, transposed=where.transposed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The pack that a run's base is, before its model is built."""

    pack: PackedModel
    checkpoint: Path | None
    """What it was made from, if that is what the run was given."""

    @property
    def directory(self) -> Path:
        """Where config and tokenizer are."""
        return self.pack.path if self.checkpoint is None else self.checkpoint

    def compile(self, dtype: torch.dtype, report: Report | None = None) -> None:
        """Compile, or load, the kernels that unpack to ``dtype``."""
        formats = {
            p.format for b in self.pack.manifest.blocks for p in b.parts
            if p.layout is Layout.PACKED
        }  # fmt: skip
        kind = KINDS.get(dtype, "f32")
        kernels = [dequantize_kernel(name, kind, choose()) for name in sorted(formats)]
        compile_ahead(kernels, report)
        for kernel in kernels:
            kernel.entry()

    def open(self, dtype: torch.dtype) -> PackedBase:
        """Build the model, on meta.

        Raises:
            CheckpointError: the pack does not fit its config.
            UnsupportedModelError: transformers cannot build the model.
        """
        if self.checkpoint is None:
            return PackedBase(self.pack, meta_of_pack(self.pack, dtype), of_checkpoint=False)
        return PackedBase(self.pack, build(self.checkpoint, dtype), of_checkpoint=True)


def choose_base(model: str, quant: str | None) -> Choice | None:
    """The pack that adapters on ``model`` are trained on; None: a checkpoint as it is.

    A checkpoint with ``quant``, or a GGUF file, is packed now, into the user's cache directory,
    unless that was done before.

    Raises:
        OffloadError: no such model, or it cannot be had in ``quant``.
        StoreError, CheckpointError: the pack is damaged or incomplete, or cannot be made.
    """
    if is_gguf(model):
        return Choice(pack=PackedModel.open(model_directory(model, quant)), checkpoint=None)
    directory = resolve(model)
    if is_pack(directory):
        return Choice(pack=PackedModel.open(model_directory(directory, quant)), checkpoint=None)
    if quant is None:
        return None
    packed = PackedModel.open(model_directory(directory, quant))
    return Choice(pack=packed, checkpoint=directory)


def refuse_full(model: str) -> None:
    """Raise OffloadError if ``model`` is a pack or a GGUF file: only adapters can be trained on
    those."""
    if is_gguf(model):
        raise OffloadError(
            f"{model} is quantised, and its weights are not trained; give --method lora to train "
            f"adapters on it, or --model with the checkpoint it was made from"
        )
    directory = resolve(model)
    if is_pack(directory):
        origin = PackedModel.open(directory).manifest.source
        raise OffloadError(
            f"{directory.name} is a pack, and its weights are not trained; give --method lora to "
            f"train adapters on it, or --model with what it was made from ({origin.path})"
        )


def meta_of_pack(pack: PackedModel, dtype: torch.dtype) -> MetaModel:
    """The model of a pack without its weights, as if there were a checkpoint with a tensor for each
    of its parameters, by their own names: that is also what a merged model is written as.

    Raises:
        CheckpointError: the pack lacks weights.
    """
    config = read_config(pack.path)
    model, chosen = instantiate(config, dtype)
    grouped = tuple(f"{name}." for name in pack.experts)
    tensors: dict[str, tuple[int, TensorRange]] = {}
    known: dict[int, str] = {}
    values: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in values.items():
        if name in pack.tensors or name.startswith(grouped):
            known[id(value)] = name
            own = str(value.dtype).removeprefix("torch.")
            tensors[name] = (0, TensorRange(own, tuple(value.shape), 0, value.nbytes))
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    for name in [n for n in tensors if n in tied]:
        del tensors[name]
    mapping = CheckpointMap(model, _index(pack.path, tensors))
    lost = [name for name in mapping.map.missing if name not in tied]
    if lost or mapping.map.mismatched:
        first = (lost or mapping.map.mismatched)[0]
        raise CheckpointError(
            f"{model_name(pack.path)}: {first} is not in the pack as config.json says; pack the "
            f"model again"
        )
    model.tie_weights(missing_keys=set(mapping.map.missing), recompute_mapping=False)
    return MetaModel(model, mapping.index, mapping, chosen, pack.path)


def _index(directory: Path, tensors: dict[str, tuple[int, TensorRange]]) -> CheckpointIndex:
    return CheckpointIndex(directory=directory, files=(), headers=(), tensors=tensors, mtimes_ns=())


__all__ = [
    "Choice",
    "Packed",
    "PackedBase",
    "choose_base",
    "meta_of_pack",
    "refuse_full",
]
