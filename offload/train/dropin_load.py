"""From a checkpoint and a budget to a model that foreign loops train:
``offload.load(train=...)``."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError, PlanError
from offload.io.safetensors import CheckpointIndex
from offload.io.whole_file import expanded
from offload.models.meta import MetaModel, build, pick_dtype, read_config, resolve
from offload.models.options import SAFE_SHARE
from offload.models.workspace import limit_kernels
from offload.runtime.heap import can_keep_freed, return_large_blocks
from offload.runtime.rss import available_ram, current_rss, reset_peak_rss
from offload.train.checks import check_dtypes
from offload.train.dropin import DropinOptions, check_place, choose_trained, open_trainable
from offload.train.footprint import measure_training
from offload.train.layout import TrainLayout, lay_out
from offload.train.options import STATES, TrainOptions
from offload.train.placing import make_plan
from offload.train.plan import (
    FREED,
    LOSS,
    WORKING,
    Needs,
    TrainPlan,
    affordable,
    freed_bytes,
)
from offload.train.spilling import KEPT, KeptInputs, input_sizes, plans
from offload.train.updates import Updater
from offload.train.warm import warm_training
from offload.units import format_bytes, parse_bytes

log = logging.getLogger(__name__)

LOOP_BYTES = 16 << 20
"""For the loop's own Python: data loaders, logs."""


def load_trainable(
    path: str | Path, options: DropinOptions, *, ram: str | int | None, disk: str | Path | None,
    dtype: str | torch.dtype | None, context: int, batch: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> Any:  # fmt: skip
    """Plan, and open. ``context``, ``batch``: tokens of a sequence and sequences of a micro-batch
    that memory is set aside for.

    Raises:
        OffloadError: with one clear message; PlanError says how much RAM a step needs.
    """
    if options.states not in STATES:
        raise OffloadError(f"states={options.states!r}: choose one of {', '.join(STATES)}")
    if batch < 1 or context < 1:
        raise OffloadError(f"batch={batch} and context={context} must be at least 1")
    where = None if disk is None else expanded(Path(disk))
    _check_states(options, where)
    directory = resolve(path)
    budget = int(available_ram() * SAFE_SHARE) if ram is None else parse_bytes(ram)
    limit_kernels(budget, trained=True)
    return_large_blocks()
    config = read_config(directory)
    compute = pick_dtype(dtype, config, CheckpointIndex.open(directory))
    like = TrainOptions(
        model=str(directory), data=Path(), output=Path(), states=options.states, seq_len=context,
        batch_size=batch,
    )  # fmt: skip
    check_dtypes(like, str(compute).removeprefix("torch."))
    baseline = warm_training(config, compute, like)
    reset_peak_rss()
    meta = build(directory, compute)
    meta.model.train()
    choose_trained(meta.model, options.train)
    layout = lay_out(meta.model)
    plan = plan_dropin(meta, layout, options, budget, baseline, context, batch)
    log.info("%s of RAM for a step: %s", format_bytes(plan.ram_bytes), plan.ram)
    model = open_trainable(
        meta, layout, plan.placement, options, where, progress or (lambda *_: None)
    )
    model.offload.plan = plan
    model.offload.engine.keep_freed(plan.placement.freed_bytes, baseline + plan.limit)
    model.offload.engine.bound_freed(plan.ahead, baseline + plan.budget)
    return model


def _check_states(options: DropinOptions, where: Path | None) -> None:
    """Before anything is planned. Raises OffloadError."""
    if options.train == "adapters":
        if options.resume is not False:
            raise OffloadError(
                "resume= cannot take effect with train='adapters': no weights are trained here "
                "whose states could go on; drop it, and load the adapters with PEFT"
            )
        return
    check_place(where, options.resume)


def plan_dropin(
    meta: MetaModel, layout: TrainLayout, options: DropinOptions, budget: int, baseline: int,
    context: int, batch: int,
) -> TrainPlan:  # fmt: skip
    """Place everything for a loop about which nothing is known but its sizes: the model's own loss
    with whole logits, all gradients kept until the step, a head that may be read beside its
    unit."""
    units = [u.module for u in layout.units]
    footprint = measure_training(meta.model, units, batch, context)
    text = meta.model.config.get_text_config()
    logits = batch * context * int(getattr(text, "vocab_size", 0))
    head = getattr(meta.model.get_output_embeddings(), "weight", None)
    gc.collect()
    fixed = {
        WORKING: footprint.unit_bytes,
        KEPT: footprint.boundary_bytes + 2 * footprint.shared_bytes,
        LOSS: logits * (2 * meta.dtype.itemsize + 8),
        "a weight read outside of its unit": 0 if head is None else head.nbytes,
        "Python": max(0, current_rss() - baseline) + LOOP_BYTES,
    }
    fetched = max(
        (2 * layout.blocks[ids[0]].nbytes for u in layout.units for ids in u.experts.values()),
        default=0,
    )
    needs = Needs(
        fixed=fixed, kinds=Updater.kinds(layout, options.states), grad_dtype=options.grad_dtype,
        fetched_bytes=fetched,
    )  # fmt: skip
    inputs = KeptInputs(sizes=input_sizes(layout, units, footprint))
    make = partial(make_plan, layout, budget=budget, versions=options.keep + 1, clipping=True)
    plan = plans(make, needs, inputs)[0]
    freed = freed_bytes(footprint.unit_bytes, fixed[LOSS]) if can_keep_freed() else 0
    if freed and affordable(freed, budget):
        with contextlib.suppress(PlanError):  # without room they leave
            plan = plans(make, replace(needs, fixed={**fixed, FREED: freed}), inputs)[0]
    return plan


__all__ = ["load_trainable", "plan_dropin"]
