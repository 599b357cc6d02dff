"""What a run needs besides weights, gradients and states, and what a step of it costs here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from offload.blocks import TensorSpec
from offload.errors import StoreError
from offload.models.params import parameters
from offload.models.request import expert_top_k
from offload.models.workspace import kernel_bytes
from offload.runtime.heap import keeping_freed
from offload.train.beside import Updating, measure_updating
from offload.train.fetching import OpenSource, measure_fetching
from offload.train.footprint import TrainFootprint
from offload.train.head_find import HeadForm
from offload.train.head_loss import workspace_bytes
from offload.train.head_weights import slices_of
from offload.train.layout import TrainLayout
from offload.train.options import TrainOptions
from offload.train.packed_base import PackedBase
from offload.train.predicting import StepRates
from offload.train.rates import Computing, Site, compute_seconds, disk_mix
from offload.train.row_grads import lookup_tables
from offload.train.stopwatch import timed
from offload.train.updates import Updater, update_workers

logger = logging.getLogger(__name__)

LARGEST_SAMPLE = 1 << 30
"""A unit of more bytes is not run to predict a step: its weights would be made up first."""


class OnMeta(Protocol):
    """``MetaModel``, or a model that has no checkpoint."""

    @property
    def model(self) -> Any: ...


def step_rates(
    meta: OnMeta, layout: TrainLayout, modules: list[Any], form: HeadForm | None,
    options: TrainOptions, states: Path, tables: Sequence[torch.Tensor],
    away: frozenset[int] = frozenset(), card: Site | None = None,
    base: PackedBase | None = None, open_source: OpenSource | None = None,
    keeps_freed: bool = False,
) -> StepRates | None:  # fmt: skip
    """Measure what a prediction needs; None where it cannot be. ``tables``: parameters whose
    gradients from lookups leave by rows. ``away``: units that run on ``card``. ``base``: frozen
    weights that stay packed. ``open_source``: what weights are read from, which is asked for some
    of them. ``keeps_freed``: the rates are of a run that keeps freed blocks, and say what it costs
    not to."""
    if max((sum(p.nbytes for p in parameters(m).values()) for m in modules), default=0) > (
        LARGEST_SAMPLE
    ):
        return None
    with contextlib.ExitStack() as kept:
        if keeps_freed:
            kept.enter_context(keeping_freed())
        measured = compute_seconds(
            meta.model, modules, form, options.batch_size, options.seq_len, tables,
            {u.module for u in layout.units if u.index in away}, card, layout, base,
        )  # fmt: skip
        if measured is None:
            return None
        sample, faults = measured.sample, 1.0
        try:
            read, write = disk_mix(states.parent)
            updating = _updating(layout, options, states, measured, card=card is not None)
            fetching = None
            if open_source is not None:
                work = None if sample is None else sample.both
                fetching = measure_fetching(layout, open_source, work)
            kept.close()
            if keeps_freed and sample is not None:
                (without,) = timed(sample.both)
                faults = max(1.0, without / measured.sample_s)
        except StoreError as error:
            # Whether there is room for the run is asked, and said, elsewhere.
            logger.info("the disk cannot be measured: %s", error)
            return None
        finally:
            if sample is not None:
                sample.close()
    by_module = dict(zip(map(id, modules), measured.units, strict=True))
    head = None if form is None else meta.model.get_submodule(form.head)
    micro = options.grad_accum
    return StepRates(
        units={
            u.index: (micro * forward, micro * backward)
            for u in layout.units
            if id(u.module) in by_module
            for forward, backward in [by_module[id(u.module)]]
        },
        head=micro * measured.head,
        head_away=None if measured.head_away is None else micro * measured.head_away,
        head_unit=next((u.index for u in layout.units if u.module is head), None),
        disk_read=read, disk_write=write, update=updating.adam, lane=updating.lane,
        beside=updating.beside, fetch=None if fetching is None else fetching.rate,
        fetch_beside=None if fetching is None else fetching.beside, faults=faults,
    )  # fmt: skip


def _updating(
    layout: TrainLayout, options: TrainOptions, states: Path, computing: Computing, *, card: bool
) -> Updating:
    """Of the kind of tile that most of what is trained is in; see ``beside``."""
    most = max(layout.trained, key=lambda b: b.count)
    kind = Updater.kinds(layout, options.states)[most.dtype]
    return measure_updating(
        states.parent, kind, sum_dtype(options) or most.dtype,
        None if computing.sample is None else computing.sample.both,
        largest=max(layout.tiles[t].count for t in most.tiles), count=len(layout.tiles),
        workers=update_workers(card=card),
    )  # fmt: skip


def graph_sizes(
    layout: TrainLayout, modules: Sequence[Any], footprint: TrainFootprint, options: TrainOptions
) -> dict[int, int]:  # fmt: skip
    """``KeptGraphs.sizes``: of units between the first and the head whose weights are all in place
    while they run (no fused experts), and whose forward adds no loss of its own."""
    if options.router_aux_loss is not None:
        return {}
    measured = dict(zip(map(id, modules), footprint.graphs, strict=False))
    inputs = dict(zip(map(id, modules), footprint.inputs, strict=False))
    sizes = {
        u.index: measured.get(id(u.module), 0)
        for u in layout.units
        if not u.groups and inputs.get(id(u.module), 0)
    }
    return {unit: size for unit, size in sizes.items() if size}


def product_bytes(layout: TrainLayout, options: TrainOptions, ram: int) -> int:
    """What compiled products take: of each matrix one forward and two backward, and of an expert's
    for each number of tokens that it gets."""
    dense: set[tuple[int, ...]] = set()
    experts: set[tuple[int, ...]] = set()
    for block in layout.blocks:
        for piece in block.pieces:
            if len(piece.shape) >= 2:
                (dense if piece.expert is None else experts).add(piece.shape)
    tokens = options.batch_size * options.seq_len if experts else 1
    specs = [
        TensorSpec(name="matrix", dtype="bfloat16", shape=shape, offset=0)
        for shape in experts or dense
    ]
    return kernel_bytes(specs, 3 * tokens, ram, trained=True)


def touched_shares(
    meta: OnMeta, layout: TrainLayout, options: TrainOptions, micro_batches: int | None = None
) -> dict[int, float]:
    """Block of an expert -> how likely a step's tokens reach it, T tokens that each choose k of E
    evenly: 1 - (1 - k/E)^T. Routers that are not even reach fewer. ``micro_batches``: of so many,
    not of a whole step."""
    top = expert_top_k(meta.model.config.get_text_config())
    tokens = options.batch_size * options.seq_len * (micro_batches or options.grad_accum)
    return {
        block: 1.0 - (1.0 - min(1.0, top / len(ids))) ** tokens
        for unit in layout.units
        for ids in unit.experts.values()
        for block in ids
    }


def sum_dtype(options: TrainOptions) -> str | None:
    """In which gradients are summed; None: in their weights' dtype."""
    if options.grad_dtype is None:
        return "float32" if options.grad_accum > 1 else None
    return {"bf16": "bfloat16", "fp32": "float32"}[options.grad_dtype]


def rows_in_ram(
    layout: TrainLayout, options: TrainOptions, grad_dtype: str | None
) -> dict[str, int]:  # fmt: skip
    """Tables whose gradients are kept by rows, in RAM -> bytes of them at most: those that nothing
    but lookups uses, where a step's tokens are at most a quarter of the rows."""
    out = {}
    tokens = options.batch_size * options.seq_len * options.grad_accum
    for name, only_looked_up in lookup_tables(layout).items():
        tensor = layout.params[name].tensor
        dtype: torch.dtype = getattr(torch, grad_dtype) if grad_dtype else tensor.dtype
        row = tensor.shape[1] * dtype.itemsize
        if only_looked_up and 4 * tokens <= tensor.shape[0]:
            out[name] = tokens * (row + torch.int64.itemsize)
    return out


def row_tables(layout: TrainLayout, in_ram: Mapping[str, int]) -> frozenset[str]:
    """Parameters whose lookups' gradients are by rows: these, and tables that are a head, too,
    whose rows are added to its gradient."""
    tied = {name for name, only_looked_up in lookup_tables(layout).items() if not only_looked_up}
    return frozenset(tied.union(in_ram))


def head_in_slices(
    layout: TrainLayout, form: HeadForm | None, head: nn.Module | None, options: TrainOptions
) -> frozenset[str]:
    """Parameters of a head whose gradient in a step comes slice by slice, each slice once."""
    if form is None or head is None or options.grad_accum > 1:
        return frozenset()
    unit = next((u.index for u in layout.units if u.module is head), None)
    alone = {b for b, users in enumerate(layout.users) if users == [unit]}
    return frozenset(
        piece.param for b in alone for piece in layout.blocks[b].pieces if len(piece.shape) == 2
    )


def loss_bytes(
    meta: OnMeta, form: HeadForm | None, options: TrainOptions, grad_dtype: str | None
) -> int:
    """Bytes of RAM that the loss of a micro-batch takes: slices of logits, or whole ones."""
    if form is None:
        config = meta.model.config.get_text_config()
        tokens = options.batch_size * options.seq_len
        return tokens * int(getattr(config, "vocab_size", 0)) * 12
    return slices_bytes(meta, form, options, grad_dtype) + kept_bytes(meta, form, options)


def slices_bytes(
    meta: OnMeta, form: HeadForm, options: TrainOptions, grad_dtype: str | None
) -> int:
    """Of the loss by slices, where it is computed: all but its arguments and results."""
    return workspace_bytes(
        options.batch_size * options.seq_len, form.width, slices_of(form.vocabulary),
        _head_dtype(meta, form), softcap=form.transform.softcap is not None,
        grad_dtype=getattr(torch, grad_dtype) if grad_dtype else None,
    )  # fmt: skip


def kept_bytes(meta: OnMeta, form: HeadForm, options: TrainOptions) -> int:
    """Of RAM, for what goes into the loss by slices and comes out of it."""
    tokens = options.batch_size * options.seq_len
    return 3 * tokens * form.width * _head_dtype(meta, form).itemsize


def _head_dtype(meta: OnMeta, form: HeadForm) -> torch.dtype:
    dtype: torch.dtype = next(meta.model.get_submodule(form.head).parameters()).dtype
    return dtype
