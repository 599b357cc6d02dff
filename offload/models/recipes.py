"""From a model's blocks to the store that fills them.

Blocks whose tensors are the checkpoint's own bytes are read from the original files. The rest
(cast to another dtype, or permuted by transformers' conversion) is converted once, block by
block, into a private packed file in the ``disk`` directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from offload.blocks import ALIGN, BlockKind, BlockSpec, Tier, layout
from offload.errors import CheckpointError, OffloadError
from offload.io.engines import Engine
from offload.io.memory import Staging
from offload.io.pack import PackStore
from offload.io.ranges import Piece
from offload.io.safetensors import CheckpointIndex
from offload.io.store import DEMAND, Receipt, Span, Store
from offload.io.stores import RangeStore, Recipe
from offload.io.whole_file import expanded
from offload.models.layouts import lay_as_in_file, lay_for_card, lay_on_lines
from offload.models.params import Param
from offload.models.sources import CheckpointMap, Ranges, Run, Source
from offload.models.units import Cut
from offload.runtime.cache_folder import cache_folder
from offload.runtime.memory import HostMemory
from offload.scheduler.plan import Plan


class RoutedStore:
    """Several stores as one: each block comes from the store that has it."""

    def __init__(self, stores: Sequence[Store], engine: Engine, staging: Staging) -> None:
        self._stores = list(stores)
        self._engine = engine
        self._staging = staging
        self._of = {block: store for store in stores for block in store.ids()}

    @property
    def writable(self) -> bool:
        return False

    def ids(self) -> Iterable[str]:
        return self._of.keys()

    def spec(self, block_id: str) -> BlockSpec:
        return self._of[block_id].spec(block_id)

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        return self._of[block_id].read_into(block_id, dst, priority=priority)

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        return self._of[block_id].read_spans_into(block_id, spans, dst, priority=priority)

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        return self._of[block_id].write_from(block_id, src)

    def close(self) -> None:
        """Close the stores, then the engine's threads and the staging they share."""
        for store in self._stores:
            store.close()
        self._engine.close()
        self._staging.close()


@dataclass(slots=True)
class Recipes:
    """What can be read in place, and which blocks have to be converted first."""

    direct: dict[str, Recipe]
    convert: list[str]
    reasons: dict[str, str]
    """Block -> why it has to be converted."""

    @property
    def staged(self) -> bool:
        """Whether most bytes are copied once more on their way from the files to their place."""
        pieces = [p for _, block in self.direct.values() for p in block]
        copied = sum(p.nbytes for p in pieces if (p.src - p.dst) % ALIGN)
        return 2 * copied > sum(p.nbytes for p in pieces)

    def convert_bytes(self, blocks: Mapping[str, BlockSpec]) -> int:
        return sum(blocks[b].slot_nbytes for b in self.convert)


def find_source(param: Param, sources: Mapping[str, Source]) -> Source:
    """The checkpoint's entry for a parameter, under whichever of its names it is there."""
    for name in param.names:
        if name in sources:
            return sources[name]
    raise CheckpointError(f"no tensor of the checkpoint is {param.name}")


def placed_and_made(
    params: Iterable[Param], mapping: CheckpointMap
) -> tuple[dict[str, int], dict[int, int]]:
    """For ``cut``: the phases of what the checkpoint holds, by name, and the bytes of what it does
    not hold (sinusoids that the model's own initialisation computes), by identity."""
    phases: dict[str, int] = {}
    made: dict[int, int] = {}
    for param in params:
        if any(name in mapping.map.sources for name in param.names):
            phases[param.name] = mapping.phase(find_source(param, mapping.map.sources).target)
        else:
            made[id(param.tensor)] = param.nbytes
    return phases, made


def make_recipes(cut: Cut, mapping: CheckpointMap, *, card: bool = False) -> Recipes:
    """Find for every block the file ranges of its tensors.

    Blocks that can be read as they are get a new layout in ``cut.blocks``, see ``lay_as_in_file``;
    ``card``: all get one for the card that computes, see ``lay_for_card``.
    """
    sources, index = mapping.map.sources, mapping.index
    out = Recipes({}, [], {})
    expert_rows: dict[str, list[list[Run]]] = {}
    expert_of = {b: (g, e) for g in cut.groups for e, b in enumerate(g.blocks)}
    slice_of = dict(zip(cut.head.blocks, cut.head.rows, strict=True)) if cut.head else {}
    for block, spec in cut.blocks.items():
        found: list[list[Piece]] = []
        for _, param in zip(spec.tensors, cut.params[block], strict=True):
            source = find_source(param, sources)
            if source.placed is None:
                out.reasons.setdefault(block, source.why_not)
                continue
            if block in expert_of:
                rows = expert_rows.get(param.name)
                if rows is None:
                    rows = expert_rows[param.name] = split_rows(source.placed)
                runs = rows[expert_of[block][1]]
            elif block in slice_of:
                a, b = slice_of[block]
                runs = source.placed.narrow(0, a, b - a).runs
            else:
                runs = source.placed.runs
            found.append(to_pieces(runs, index, 0))
        if card:
            first = expert_of[block][1] if block in expert_of else 0
            rows_before = slice_of[block][0] if block in slice_of else 0
            spec = cut.blocks[block] = lay_for_card(spec, first, rows_before)
        if block in out.reasons:
            out.convert.append(block)
        else:
            if not card:
                spec = cut.blocks[block] = lay_as_in_file(spec, found)
            pieces = [
                p._replace(dst=t.offset + p.dst)
                for t, of_tensor in zip(spec.tensors, found, strict=True)
                for p in of_tensor
            ]
            out.direct[block] = (spec, tuple(pieces))
    return out


def align_pins(plan: Plan, cut: Cut, recipes: Recipes) -> Plan:
    """Lay what is pinned where it is multiplied with on cache lines, see ``lay_on_lines``.

    Only in RAM: what a device pins comes through RAM's slots, and its offsets are the same there.
    Sizes do not change, so the arena's division holds. The new layouts go into the plan that is
    returned, into ``cut.blocks`` and into ``recipes.direct``.
    """
    if plan.compute_tier is not Tier.RAM:
        return plan
    for block in plan.tiers[Tier.RAM].pinned:
        # Converted blocks are on cache lines already, and a table that is looked up gains nothing.
        if block in recipes.direct and block not in plan.by_row:
            spec, pieces = lay_on_lines(*recipes.direct[block])
            recipes.direct[block] = spec, pieces
            cut.blocks[block] = spec
    return replace(plan, blocks={block: cut.blocks[block] for block in plan.blocks})


def split_rows(array: Ranges) -> list[list[Run]]:
    """The runs of each element of the first dimension, in one sweep."""
    n = array.shape[0]
    per = math.prod(array.shape[1:])
    out: list[list[Run]] = []
    runs = iter(array.runs)
    current, used = next(runs, None), 0
    for _ in range(n):
        row: list[Run] = []
        left = per
        while left and current is not None:
            take = min(left, current.count - used)
            row.append(Run(current.name, current.start + used, take))
            left -= take
            used += take
            if used == current.count:
                current, used = next(runs, None), 0
        out.append(row)
    return out


def to_pieces(runs: Iterable[Run], index: CheckpointIndex, at: int) -> list[Piece]:
    """File pieces of consecutive runs, placed from offset ``at`` of a block."""
    pieces = []
    for run in runs:
        file, tensor = index.tensors[run.name]
        size = tensor.nbytes // max(1, math.prod(tensor.shape))
        pieces.append(Piece(file, tensor.offset + run.start * size, at, run.count * size))
        at += run.count * size
    return pieces


class TensorReader:
    """Reads single checkpoint tensors past the page cache, for conversions and buffers."""

    def __init__(self, index: CheckpointIndex, engine: Engine, staging: Staging) -> None:
        recipes: dict[str, Recipe] = {}
        for name, (file, tensor) in index.tensors.items():
            spec = layout(name, BlockKind.WEIGHT, [(name, tensor.dtype, tensor.shape)])
            recipes[name] = (spec, (Piece(file, tensor.offset, 0, tensor.nbytes),))
        self._store = RangeStore([str(f) for f in index.files], recipes, engine, staging)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        spec = self._store.spec(name)
        return self._fill(name, spec, [Span(0, 0, spec.nbytes)], spec.tensors[0].shape)

    def read_row(self, name: str, row: int) -> torch.Tensor:
        """``tensor[row:row + 1]``."""
        spec = self._store.spec(name)
        shape = spec.tensors[0].shape
        nbytes = spec.nbytes // shape[0]
        return self._fill(name, spec, [Span(row * nbytes, 0, nbytes)], (1, *shape[1:]))

    def _fill(
        self, name: str, spec: BlockSpec, spans: list[Span], shape: tuple[int, ...]
    ) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.tensors[0].dtype)
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            flat = out.view(-1).view(torch.uint8) if out.dim() else out.view(1).view(torch.uint8)
            self._store.read_spans_into(name, spans, memoryview(cast(Any, flat.numpy()))).result()
        return out

    def close(self) -> None:
        self._store.close()


def convert_blocks(
    ids: Sequence[str],
    cut: Cut,
    mapping: CheckpointMap,
    reader: TensorReader,
    directory: Path,
    engine: Engine,
    staging: Staging,
    request_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> PackStore:
    """Convert blocks exactly as transformers would and write them to a private packed file.

    The file has no name: it vanishes with the process. One block's tensors are in memory at a
    time (plus what its conversion takes).

    Raises:
        StoreError: not enough space in ``directory`` (checked first), or a failed write.
    """
    specs = [cut.blocks[b] for b in ids]
    total = sum(s.nbytes for s in specs)
    done = 0
    store = PackStore.create(directory, specs, engine, staging, request_bytes=request_bytes)
    expert_of = {b: e for g in cut.groups for e, b in enumerate(g.blocks)}
    slice_of = dict(zip(cut.head.blocks, cut.head.rows, strict=True)) if cut.head else {}
    whole: dict[str, torch.Tensor] = {}  # the head, while its slices are written
    scratch = HostMemory(max((s.slot_nbytes for s in specs), default=1), "conversion")
    try:
        for spec in specs:
            for tensor, param in zip(spec.tensors, cut.params[spec.id], strict=True):
                source = find_source(param, mapping.map.sources)
                if spec.id in expert_of:
                    value = _expert(mapping, source, expert_of[spec.id], reader)
                elif spec.id in slice_of:
                    if source.target not in whole:
                        whole = {source.target: mapping.convert(source.target, reader.read)}
                    a, b = slice_of[spec.id]
                    value = whole[source.target][a:b]
                else:
                    value = mapping.convert(source.target, reader.read)
                into = scratch.tensor()[tensor.offset : tensor.offset + tensor.nbytes]
                into.copy_(value.contiguous().view(-1).view(torch.uint8))
            store.write_from(spec.id, scratch.view()[: spec.slot_nbytes]).result()
            done += spec.nbytes
            if progress:
                progress(done, total)
    except BaseException:
        store.close()
        raise
    finally:
        whole.clear()
        scratch.close()
    return store


def _expert(
    mapping: CheckpointMap, source: Source, expert: int, reader: TensorReader
) -> torch.Tensor:
    def read(name: str, e: int) -> torch.Tensor:
        shape = mapping.index.tensors[name][1].shape
        fused = len(shape) == len(source.shape) and shape[0] == source.shape[0]
        return reader.read_row(name, e) if fused else reader.read(name)

    if source.placed is not None:
        runs = split_rows(source.placed)[expert]
        parts = [reader.read(r.name).view(-1)[r.start : r.start + r.count] for r in runs]
        return torch.cat(parts).view(source.shape[1:])
    return mapping.convert_expert(source.target, expert, read)


def spill_directory(disk: str | Path | None) -> Path:
    """Where private files go: ``disk`` or a folder of the user's cache directory.

    Raises:
        OffloadError: it cannot be made or is no directory.
    """
    import os

    directory = cache_folder() / "spill" if disk is None else expanded(Path(disk))
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OffloadError(f"the disk directory {directory} cannot be used: {error}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise OffloadError(f"the disk directory {directory} is not readable and writable")
    return directory
