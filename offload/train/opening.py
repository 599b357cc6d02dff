"""From a checkpoint and a placement to a running engine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.errors import OffloadError
from offload.io.engines import Engine as IoEngine
from offload.io.engines import make_engine
from offload.io.files import DirectFile
from offload.io.memory import Staging
from offload.io.private import nameless_file, reserve
from offload.models.meta import MetaModel, materialise_buffers
from offload.models.recipes import TensorReader
from offload.runtime.device import Device
from offload.runtime.memory import HostMemory
from offload.scheduler.timeline import Record
from offload.train.device_plan import DevicePlacement
from offload.train.device_tier import DeviceTier
from offload.train.device_updates import DeviceUpdates, site_for
from offload.train.engine import Engine
from offload.train.experts import stream_experts
from offload.train.grad_spill import spill_offsets
from offload.train.grads import Gradients
from offload.train.inputs import SpilledInputs
from offload.train.layout import TrainLayout
from offload.train.marks import Marks
from offload.train.order import UseOrder
from offload.train.packed_base import PackedBase
from offload.train.packed_source import PackedSource, PackReader
from offload.train.packed_weights import PackedWeights
from offload.train.recording import RecordedEngine, record_tiles
from offload.train.source import CheckpointSource, MadeBlocks, TileSource, check_dtypes
from offload.train.tiles import Slot, widen
from offload.train.updates import Tiles, Updater
from offload.train.weights import Shared, Weights, as_numbers

STAGING_CHUNKS = 4
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpill:
    """Inputs of units that are kept for backward on the disk."""

    units: frozenset[int]
    largest: int
    """Bytes of the largest one, of one micro-batch."""
    file_bytes: int
    """Of all that are there at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What lives where; made by the plan."""

    weights_bytes: int
    """Of RAM for weights: pinned ones and what comes and goes."""
    pinned: frozenset[int]
    """Blocks whose weights stay in RAM."""
    resident: frozenset[int] = frozenset()
    """Blocks whose states stay in RAM; their weights do, too."""
    spilled: frozenset[int] = frozenset()
    """Blocks whose gradients go to the disk between backward and update."""
    buffers: int = 6
    """Tiles under way in the update lane."""
    gradient_bytes: int | None = None
    """Updates run inside backward: compute waits while more gradients than these wait for them."""
    inputs: InputSpill | None = None
    """Units whose inputs go to the disk between forward and backward; None: all stay in RAM."""
    kept: frozenset[int] = frozenset()
    """Units whose graphs stay in RAM from forward to backward, which does not run them again."""
    device: DevicePlacement | None = None
    """What runs on a device; None: nothing."""
    freed_bytes: int = 0
    """Of blocks that are free and stay on the heap (``heap.keeping_freed``); 0: they leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine computes; none of it but ``states``, ``grad_dtype``, ``seed`` and
    ``skip_untouched`` changes bits."""

    states: str = "fp32"
    grad_dtype: str | None = None
    seed: int = 0
    skip_untouched: bool = False
    """See ``Engine.skip_untouched``."""
    row_tables: frozenset[str] = frozenset()
    """See ``Engine.row_tables``."""
    queue_depth: int = 4
    update_workers: int | None = 1
    directory: Path | None = None
    """Where gradients are spilled to; None: the system's temporary directory."""
    initial: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Values of parameters that no checkpoint holds: ``lora.Adapters.initial``."""
    base: PackedBase | None = None
    """Keep the frozen weights packed; None: they are the checkpoint's."""
    record: Record | None = None
    """Told what every lane does; see ``recording``."""
    device: Device | None = None
    """Where the units of ``Placement.device`` run; closed by whoever made it."""
    progress: Callable[[str, int, int], None] = field(default=lambda *_: None)


def open_engine(
    meta: MetaModel, layout: TrainLayout, placement: Placement, options: EngineOptions,
    make_tiles: Callable[[TrainLayout, Callable[[int], tuple[int, ...]], Any], Tiles],
) -> Engine:  # fmt: skip
    """Open what trains ``meta.model``. ``make_tiles(layout, parts of a tile, I/O engine)``.

    Raises:
        OffloadError: a dtype that cannot be trained, a disk that is too small.
    """
    check_dtypes(layout)
    _check(layout, placement)
    with contextlib.ExitStack() as undo:
        io: IoEngine = make_engine(queue_depth=options.queue_depth)
        undo.callback(io.close)
        if options.record is not None:
            io = RecordedEngine(io, options.record)
        staging = Staging(STAGING_CHUNKS, CHUNK_BYTES)
        undo.callback(staging.close)
        base = options.base
        reader: PackReader | TensorReader
        if base is None or base.of_checkpoint:
            reader = TensorReader(meta.index, io, staging)
        else:
            reader = PackReader(base, io, staging)
        try:
            materialise_buffers(meta.model, meta.mapping, reader.read)
        finally:
            reader.close()
        shared = Shared()
        order = UseOrder(len(layout.units))
        kinds = Updater.kinds(layout, options.states)
        tiles = make_tiles(
            layout,
            lambda i: kinds[layout.blocks[layout.tiles[i].block].dtype].parts(
                layout.tiles[i].count
            ),
            io,
        )
        undo.callback(tiles.close)
        if options.record is not None:
            record_tiles(tiles, options.record)
        checkpoint: CheckpointSource | PackedSource
        initial = {**_computed(meta, layout), **options.initial}
        if base is None:
            checkpoint = CheckpointSource(layout, meta.mapping, io, staging, initial)
        else:
            checkpoint = PackedSource(layout, base, io, staging, initial)
        undo.callback(checkpoint.close)
        if base is None:
            meta.index.check_unchanged()
        directory = options.directory or Path(tempfile.gettempdir())
        checkpoint.convert_frozen(directory, lambda d, t: options.progress("convert", d, t))
        import_made(layout, checkpoint, tiles, kinds, options)
        source = TileSource(layout, tiles, checkpoint, lambda b: kinds[b.dtype])
        held = (layout, order, source, shared, placement.weights_bytes, placement.pinned)
        device = options.device
        marks = None if device is None else Marks(device)
        memory = HostMemory if device is None else device.buffer_memory
        if base is not None:
            weights: Weights = PackedWeights(*held, base, marks=marks, memory=memory)
        else:
            weights = Weights(*held, marks=marks, memory=memory)
        undo.callback(weights.close)
        if isinstance(weights, PackedWeights):
            for detach in weights.attach():
                undo.callback(detach)
        spill = None
        if placement.spilled:
            size = spill_offsets(layout, placement.spilled, options.grad_dtype)[-1]
            spill = _private(directory, "gradients", size)
        gradients = Gradients(
            layout, shared, io, dtype=options.grad_dtype, spill=placement.spilled, file=spill
        )
        undo.callback(gradients.close)
        inputs = None
        if placement.inputs is not None:
            file = _private(directory, "inputs", placement.inputs.file_bytes)
            inputs = SpilledInputs(
                shared, io, file, placement.inputs.units, placement.inputs.largest
            )
            undo.callback(inputs.close)
        away = None
        if device is not None and placement.device is not None and placement.device.updates:
            site = site_for(device, options.seed, options.update_workers, list(kinds.values()))
            away = DeviceUpdates(device, placement.device.updates, site, shared)
        updater = Updater(
            layout, weights, gradients, tiles, shared, states=options.states,
            buffers=placement.buffers, resident=placement.resident, seed=options.seed,
            workers=options.update_workers, away=away,
            memory=HostMemory if away is None else memory,
        )  # fmt: skip
        undo.callback(updater.free)
        undo.callback(updater.close)
        tier = None
        if device is not None and marks is not None and placement.device is not None:
            tier = DeviceTier(
                device, placement.device, layout, order, weights, gradients, shared, marks,
                {} if base is None else base.recipes,
            )  # fmt: skip
            undo.callback(tier.close)
        engine = Engine(meta.model, layout, order, weights, gradients, updater, shared, tier)
        engine.skip_untouched = options.skip_untouched
        engine.row_tables = options.row_tables
        engine.kept_units = placement.kept
        engine.gradient_limit = placement.gradient_bytes
        if isinstance(weights, PackedWeights):
            engine.table_rows = weights.table_rows
        engine.inputs = inputs
        engine.record = updater.record = options.record
        if away is not None:
            away.record = options.record
        engine.checkpoint_bytes = lambda: checkpoint.read_bytes
        for detach in stream_experts(engine):
            engine.on_close(detach)
        engine.on_close(undo.pop_all().close)
        try:
            engine.start()
        except BaseException:
            engine.close()
            raise
    return engine


def _computed(meta: MetaModel, layout: TrainLayout) -> dict[str, Callable[[], torch.Tensor]]:
    """Of frozen parameters that no checkpoint holds (sinusoids of positions), by name, the values
    that the family's own initialisation has computed: see ``materialise_buffers``. Trained ones are
    none of these: an output has the checkpoint's tensors, and would lose them."""
    sources = meta.mapping.map.sources
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for param in layout.params.values():
        if not param.tensor.requires_grad and not any(name in sources for name in param.names):
            value = meta.model.get_parameter(param.name).detach()
            if not value.is_meta:
                found[param.name] = lambda value=value: value  # type: ignore[misc]
    return found


def _private(directory: Path, what: str, nbytes: int) -> DirectFile:
    """A file without a name, with room for ``nbytes``."""
    fd, _ = nameless_file(directory)
    try:
        reserve(fd, nbytes, os.fspath(directory))
    except BaseException:
        os.close(fd)
        raise
    return DirectFile(fd, f"{directory}/({what})")


def _check(layout: TrainLayout, placement: Placement) -> None:
    if not placement.resident <= placement.pinned:
        raise OffloadError("states stay in RAM only of blocks whose weights do")
    if placement.device is not None and (placement.kept or not placement.device.units):
        raise OffloadError("graphs of units that run on a device are not kept")
    if not set(layout.rest) <= placement.pinned:
        raise OffloadError("what is used outside of all units must stay in RAM")


def import_made(
    layout: TrainLayout, source: MadeBlocks, tiles: Tiles, kinds: Any, options: EngineOptions
) -> None:
    """Write the tiles of trained blocks that cannot be read from the checkpoint as they are:
    masters with every bit of it, no moments. Once; a resumed run has them."""
    todo = [b for b in layout.trained if b.index in source.made and not tiles.written(b.tiles[0])]
    total, done = sum(b.nbytes for b in todo), 0
    for block in todo:
        kind = kinds[block.dtype]
        whole = torch.zeros(block.count, dtype=torch.float32)
        for piece in block.pieces:
            value = source.value(piece)
            whole[piece.offset : piece.offset + piece.count] = value.reshape(-1).to(torch.float32)
        weights = whole.to(getattr(torch, block.dtype))
        for index in block.tiles:
            tile = layout.tiles[index]
            span = slice(tile.start, tile.start + tile.count)
            memory = HostMemory(kind.offsets(tile.count)[-1], "import")
            try:
                slot = Slot(kind, tile.count, memory.tensor().numpy())
                slot.start(as_numbers(weights[span]))
                if kind.states != "bf16":
                    widen(as_numbers(whole[span]), slot.part("p").view(np.float32))
                del slot
                tiles.write_from(index, memory.view()).result()
            finally:
                memory.close()
        done += block.nbytes
        options.progress("convert", done, total)
