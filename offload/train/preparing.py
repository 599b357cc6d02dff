"""Before a run: everything is checked and planned, and no weight is loaded."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError, StoreError
from offload.io.tile_store import reserved
from offload.models.expert_groups import expert_groups
from offload.models.meta import MetaModel, build, pick_dtype, read_config, resolve
from offload.models.options import SAFE_SHARE
from offload.models.workspace import limit_kernels
from offload.runtime.heap import return_large_blocks, share_one_heap
from offload.runtime.rss import available_ram, current_rss, reset_peak_rss
from offload.train.causal import check_causal
from offload.train.checks import check_dtypes, check_options, state_directory
from offload.train.commits import check_states, state_versions
from offload.train.data.obstacles import packing_obstacle
from offload.train.data.opening import TrainData, open_data
from offload.train.footprint import measure_training
from offload.train.head_find import find_head
from offload.train.keeping import KeptGraphs, plans_keeping
from offload.train.layout import lay_out
from offload.train.loop import HEAD_ROWS
from offload.train.lora import Adapters, inject
from offload.train.needs import (
    graph_sizes,
    head_in_slices,
    loss_bytes,
    product_bytes,
    row_tables,
    rows_in_ram,
    step_rates,
    sum_dtype,
    touched_shares,
)
from offload.train.options import TrainOptions
from offload.train.output_target import check_target
from offload.train.output_tensors import check_writable
from offload.train.packed_base import Choice, PackedBase, choose_base, refuse_full
from offload.train.plan import ORDERS, Needs, TrainPlan, make_plan
from offload.train.predicting import predict
from offload.train.result import adapter_directory, last_output
from offload.train.run import Run
from offload.train.schedule import Schedule
from offload.train.spilling import KEPT, KeptInputs, best, input_sizes, plans
from offload.train.updates import Updater
from offload.train.warm import warm_training
from offload.units import format_bytes


def prepare(options: TrainOptions, *, reserve: int = 0) -> Run:
    """Check everything that can be checked, read the data, and plan. Loads no weights.

    ``reserve``: bytes of the budget that somebody else takes (a trace).

    Raises:
        OffloadError: something to change: an option, the data, the model, the budget, the disk.
    """
    check_options(options)
    if options.method == "full":
        refuse_full(options.model)
    ram = options.ram if options.ram is not None else int(available_ram() * SAFE_SHARE)
    limit_kernels(ram)
    return_large_blocks()
    share_one_heap()
    choice = choose_base(options.model, options.quant) if options.method == "lora" else None
    directory = resolve(options.model) if choice is None else choice.directory
    config = read_config(directory)
    check_causal(config)
    dtype = _pick_dtype(options, config, directory, choice)
    check_dtypes(options, str(dtype).removeprefix("torch."))
    output = options.output.expanduser()
    check_target(output, directory)
    check_target(adapter_directory(options), directory)
    if options.kept == "both":
        also = replace(options, output=last_output(options))
        check_target(also.output, directory)
        check_target(adapter_directory(also), directory)
    states = state_directory(options)
    check_states(states, resume=options.resume)
    notes: list[str] = []
    if choice is not None:
        choice.compile(dtype)
        notes.append(f"the base stays packed: {choice.pack.path}")
    baseline = warm_training(config, dtype, options)
    reset_peak_rss()
    base = None if choice is None else choice.open(dtype)
    meta = build(directory, dtype) if base is None else base.meta
    meta.model.train()
    check_writable(meta.mapping)
    data = _open_data(meta, options, states, notes)
    try:
        run = _plan(meta, data, options, states, baseline, ram, notes, base, reserve)
        _check_room(run)
        return run
    except BaseException:
        data.close()
        raise


def _pick_dtype(
    options: TrainOptions, config: Any, directory: Path, choice: Choice | None
) -> torch.dtype:
    """The compute dtype. Packed weights have none of their own: bfloat16 unless told otherwise."""
    from offload.io.safetensors import CheckpointIndex

    if choice is None:
        return pick_dtype(options.dtype, config, CheckpointIndex.open(directory))
    dtype: torch.dtype = getattr(torch, options.dtype or "bfloat16")
    return dtype


def _check_room(run: Run) -> None:
    """Refuse to begin what would end without room for its output. For the states there is room, or
    they are not made; what they will take of the same disk is not there for the output any more."""
    paths = (run.options.output.expanduser().absolute(), run.states)
    parents = [next(p for p in path.parents if p.exists()) for path in paths]
    taken = run.plan.spill_bytes + run.plan.inputs_bytes
    taken += max(0, run.plan.disk_bytes - reserved(run.states))
    need = run.output_bytes()
    if os.stat(parents[0]).st_dev != os.stat(parents[1]).st_dev:
        taken = 0
    disk = os.statvfs(parents[0])
    free = disk.f_bavail * disk.f_frsize
    if free < need + taken:
        more = f" and training another {format_bytes(taken)}" if taken else ""
        raise StoreError(
            f"the output needs {format_bytes(need)} in {parents[0]}{more}, {format_bytes(free)} "
            f"are free: {format_bytes(need + taken - free)} too little; free some, or choose "
            f"another --output or --disk{_less_for_last(run)}"
        )


def _less_for_last(run: Run) -> str:
    """Another way out where the best evaluation's weights take space."""
    if run.options.kept == "last" or run.options.resume:
        return ""
    versions = state_versions(replace(run.options, keep="last"), run.states, run.total)
    less = run.plan.disk_bytes // run.plan.versions * (run.plan.versions - versions)
    if run.options.kept == "both":
        less += run.output_bytes() // 2
    if not less:
        return ""
    return f", or give --keep last, which needs {format_bytes(less)} less"


def _open_data(meta: MetaModel, options: TrainOptions, states: Path, notes: list[str]) -> TrainData:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(meta.directory, trust_remote_code=False)
    except Exception as error:
        first = str(error).strip().splitlines()
        raise OffloadError(
            f"{meta.directory.name} has no tokenizer that transformers can load: "
            f"{first[0] if first else type(error).__name__}"
        ) from error
    config = meta.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    obstacle = packing_obstacle(type(meta.model), config) if options.packing else None
    cache = states.parent
    cache.mkdir(parents=True, exist_ok=True)
    return open_data(
        options, tokenizer,
        max_positions=getattr(text, "max_position_embeddings", None),
        vocab_size=getattr(text, "vocab_size", None),
        obstacle=obstacle, cache=cache, note=notes.append,
    )  # fmt: skip


def _plan(
    meta: MetaModel, data: TrainData, options: TrainOptions, states: Path, baseline: int, ram: int,
    notes: list[str], base: PackedBase | None, reserve: int = 0,
) -> Run:  # fmt: skip
    if options.router_aux_loss is not None and not expert_groups(meta.model):
        raise OffloadError(
            f"--router-aux-loss {options.router_aux_loss:g} cannot take effect: the model has no "
            f"experts; drop it"
        )
    if options.skip_untouched_experts and not expert_groups(meta.model):
        raise OffloadError(
            "--skip-untouched-experts cannot take effect: the model has no fused experts; drop it"
        )
    adapters = _choose_trained(meta, options)
    form, why = find_head(meta.model)
    if form is None:
        notes.append(f"the model's own loss is used, with whole logits: {why}")
    layout = lay_out(meta.model, packed=() if base is None else base.names)
    if base is not None:
        base.attach(layout)
    total = options.max_steps or math.ceil(options.epochs * data.steps_per_epoch)
    schedule = Schedule.of(options, total)
    clipping = options.max_grad_norm > 0
    vertical = options.grad_accum if options.order == "vertical" else 1
    grad_dtype = sum_dtype(options)
    # The head runs in slices if the form of the loss is known.
    head = None if form is None else meta.model.get_submodule(form.head)
    modules = [u.module for u in layout.units if u.module is not head]
    rows = rows_in_ram(layout, options, grad_dtype)
    tables = [layout.params[name].tensor for name in row_tables(layout, rows)]
    footprint = measure_training(meta.model, modules, options.batch_size, options.seq_len, tables)
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    inputs = KeptInputs(
        sizes=input_sizes(layout, modules, footprint), at_once=vertical,
        micro_batches=options.grad_accum,
    )  # fmt: skip
    graphs = KeptGraphs(
        sizes=graph_sizes(layout, modules, footprint, options), at_once=vertical
    )  # fmt: skip
    fixed = {
        "activations of a unit": footprint.unit_bytes,
        KEPT: footprint.boundary_bytes * vertical + footprint.shared_bytes * (vertical + 1),
        "loss": loss_bytes(meta, form, layout, options, grad_dtype),
        "compiled products": product_bytes(layout, options, ram),
    }
    if reserve:
        fixed["trace"] = reserve
    if base is not None:
        tokens = options.batch_size * options.seq_len * vertical
        fixed["unpacked weights"] = base.work_bytes(layout) + base.scratch_bytes
        fixed["rows of packed tables"] = base.table_bytes(
            layout, tokens, HEAD_ROWS, sliced=form is not None
        )
    gc.collect()
    fixed["Python, data, tokenizer"] = max(0, current_rss() - baseline) + (8 << 20)
    fetched = max(
        (2 * layout.blocks[ids[0]].nbytes for u in layout.units for ids in u.experts.values()),
        default=0,
    )
    needs = Needs(
        fixed=fixed, kinds=Updater.kinds(layout, options.states), grad_dtype=grad_dtype,
        fetched_bytes=fetched, rows=rows, sliced=head_in_slices(layout, form, head, options),
        updated=touched_shares(meta, layout, options) if options.skip_untouched_experts else {},
    )  # fmt: skip
    passes = 1 if vertical > 1 else options.grad_accum
    always = frozenset[int]() if adapters is None else adapters.blocks(layout)
    candidates: list[TrainPlan] = []
    for first in ORDERS:
        make = partial(
            make_plan, layout, budget=ram, versions=state_versions(options, states, total),
            clipping=clipping,
            backwards=passes, first=first, always=always,
        )  # fmt: skip
        candidates += plans(make, needs, inputs)
        if base is None:
            buffers = candidates[-1].placement.buffers
            candidates += plans_keeping(make, needs, graphs, buffers=buffers)
    rates = step_rates(meta, layout, modules, form, options, states, tables)
    plan, prediction = candidates[0], None
    if rates is not None and base is not None:
        rates = rates.with_work(base.unpack_seconds(layout, options.grad_accum, passes))
    if rates is not None:
        predictions = [
            predict(p, layout, needs, rates, clipping=clipping, backwards=passes)
            for p in candidates
        ]
        i = best(candidates, predictions)
        plan, prediction = candidates[i], predictions[i]
    if options.ram is None:
        notes.append(
            f"no --ram given: {SAFE_SHARE:.0%} of the {format_bytes(available_ram())} that are free"
        )
    run = Run(
        meta,
        data,
        options,
        states,
        baseline,
        layout,
        form,
        plan,
        schedule,
        total,
        grad_dtype,
        notes,
        adapters,
        base,
    )
    run.prediction = prediction
    gc.collect()
    reset_peak_rss()
    return run


def _choose_trained(meta: MetaModel, options: TrainOptions) -> Adapters | None:
    """Everything, or nothing but the adapters that are added here."""
    if options.method == "full":
        for parameter in meta.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return None
    adapters = inject(
        meta.model, r=options.lora_r, alpha=options.lora_alpha, dropout=options.lora_dropout,
        targets=options.lora_targets, seed=options.seed,
    )  # fmt: skip
    if options.merge:
        adapters.check_mergeable()
    return adapters


__all__ = ["prepare"]
