"""What a run needs besides weights, gradients and states, and what a step of it costs here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from offload.blocks import TensorSpec
from offload.errors import StoreError
from offload.models.meta import MetaModel
from offload.models.params import parameters
from offload.models.request import expert_top_k
from offload.models.workspace import kernel_bytes
from offload.train.head_find import HeadForm
from offload.train.head_loss import workspace_bytes
from offload.train.layout import TrainLayout
from offload.train.loop import HEAD_ROWS
from offload.train.options import TrainOptions
from offload.train.plan import StepRates
from offload.train.rates import UPDATE_BYTES_S, compute_seconds, disk_mix

logger = logging.getLogger(__name__)

LARGEST_SAMPLE = 1 << 30
"""A unit of more bytes is not run to predict a step: its weights would be made up first."""


def step_rates(
    meta: MetaModel, modules: list[Any], form: HeadForm | None, options: TrainOptions, states: Path
) -> StepRates | None:
    """Measure what a prediction needs; None where it cannot be."""
    if max((sum(p.nbytes for p in parameters(m).values()) for m in modules), default=0) > (
        LARGEST_SAMPLE
    ):
        return None
    micro = compute_seconds(meta.model, modules, form, options.batch_size, options.seq_len)
    if micro is None:
        return None
    try:
        read, write = disk_mix(states.parent)
    except StoreError as error:
        # Whether there is room for the run is asked, and said, elsewhere.
        logger.info("the disk cannot be measured: %s", error)
        return None
    return StepRates(
        compute={phase: seconds * options.grad_accum for phase, seconds in micro.items()},
        disk_read=read, disk_write=write, update=UPDATE_BYTES_S,
    )  # fmt: skip


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
    return kernel_bytes(specs, 3 * tokens, ram)


def touched_shares(meta: MetaModel, layout: TrainLayout, options: TrainOptions) -> dict[int, float]:
    """Block of an expert -> how likely a step's tokens reach it, T tokens that each choose k of E
    evenly: 1 - (1 - k/E)^T. Routers that are not even reach fewer."""
    top = expert_top_k(meta.model.config.get_text_config())
    tokens = options.batch_size * options.seq_len * options.grad_accum
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


def loss_bytes(
    meta: MetaModel, form: HeadForm | None, layout: TrainLayout, options: TrainOptions,
    grad_dtype: str | None,
) -> int:  # fmt: skip
    """Bytes of RAM that the loss of a micro-batch takes: slices of logits, or whole ones."""
    tokens = options.batch_size * options.seq_len
    if form is None:
        config = meta.model.config.get_text_config()
        return tokens * int(getattr(config, "vocab_size", 0)) * 12
    slices = [
        (a, min(a + HEAD_ROWS, form.vocabulary)) for a in range(0, form.vocabulary, HEAD_ROWS)
    ]
    dtype = next(meta.model.get_submodule(form.head).parameters()).dtype
    work = workspace_bytes(
        tokens, form.width, slices, dtype, softcap=form.transform.softcap is not None,
        grad_dtype=getattr(torch, grad_dtype) if grad_dtype else None,
    )  # fmt: skip
    return work + 3 * tokens * form.width * dtype.itemsize
