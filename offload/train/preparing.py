"""Before a run: everything is checked and planned, and no weight is loaded."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offload.cpu_ops.crowding import watched
from offload.errors import OffloadError, StoreError
from offload.io.engines import Engine
from offload.io.memory import Staging
from offload.io.tile_store import reserved, stored_identity
from offload.models.expert_groups import expert_groups
from offload.models.meta import MetaModel, build, pick_dtype, read_config, resolve
from offload.models.naming import model_name
from offload.models.options import SAFE_SHARE, beyond_free, safe_share
from offload.models.packed_card import check_card
from offload.models.prompt_time import read_time
from offload.models.workspace import limit_kernels
from offload.runtime.choice import STAGED, budget, flash, staged_copies, warm_up
from offload.runtime.cuda_stream import staging_reserve
from offload.runtime.heap import can_keep_freed, give_back, return_large_blocks, share_one_heap
from offload.runtime.rss import available_ram, current_rss, reset_peak_rss
from offload.train.causal import check_causal
from offload.train.checks import (
    check_device,
    check_dtypes,
    check_options,
    state_directory,
)
from offload.train.choosing import Shape, choose
from offload.train.commits import check_states, state_versions
from offload.train.data.obstacles import packing_obstacle
from offload.train.data.opening import TrainData, open_data
from offload.train.device_updates import card_rate
from offload.train.identity import PROMPT_TIME
from offload.train.layout import TrainLayout
from offload.train.needs import (
    step_rates,
)
from offload.train.options import TrainOptions
from offload.train.output import with_spare
from offload.train.output_target import check_target
from offload.train.output_tensors import check_writable
from offload.train.packed_base import (
    Choice,
    PackedBase,
    choose_base,
    refuse_full,
)
from offload.train.packed_source import PackedSource
from offload.train.predicting import StepRates
from offload.train.rates import Site, card_site, copy_rates
from offload.train.result import adapter_directory, last_output
from offload.train.router_loss import check_router_loss
from offload.train.run import Run
from offload.train.schedule import Schedule
from offload.train.source import CheckpointSource, MadeBlocks
from offload.train.updates import Updater
from offload.train.warm import warm_training
from offload.units import format_bytes


@watched()
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
    limit_kernels(ram, trained=True)
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
    device = check_device(options)
    warm_up(device)
    if choice is not None:
        if device.kind == "cuda":
            check_card()
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
    need = with_spare(run.output_bytes())
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
            f"{model_name(meta.directory)} has no tokenizer that transformers can load: "
            f"{first[0] if first else type(error).__name__}"
        ) from error
    config = meta.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    obstacle = packing_obstacle(type(meta.model), config) if options.packing else None
    cache = states.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the directory {cache}: {error.strerror}; give another --disk or --output"
        ) from error
    # A template with the date gives the rows that the run has begun with, on any day.
    before = stored_identity(states) if options.resume else None
    return open_data(
        options, tokenizer, moment=read_time((before or {}).get(PROMPT_TIME)),
        max_positions=getattr(text, "max_position_embeddings", None),
        vocab_size=getattr(text, "vocab_size", None),
        obstacle=obstacle, cache=cache, note=notes.append,
    )  # fmt: skip


def _plan(
    meta: MetaModel, data: TrainData, options: TrainOptions, states: Path, baseline: int, ram: int,
    notes: list[str], base: PackedBase | None, reserve: int = 0,
) -> Run:  # fmt: skip
    check_router_loss(meta.model, options.router_aux_loss)
    if options.skip_untouched_experts and not expert_groups(meta.model):
        raise OffloadError(
            "--skip-untouched-experts cannot take effect: the model has no fused experts; drop it"
        )
    total = options.max_steps or math.ceil(options.epochs * data.steps_per_epoch)
    schedule = Schedule.of(options, total)

    def process_bytes() -> int:
        gc.collect()
        return max(0, current_rss() - baseline) + (8 << 20)

    device = check_device(options)
    more = {"trace": reserve} if reserve else {}
    if (refused := staged_copies(device)) is not None:
        notes.append(STAGED.format(why=refused))
        more["staged copies"] = staging_reserve(both_ways=True)

    def open_source(layout: TrainLayout, engine: Engine, staging: Staging) -> MadeBlocks:
        if base is None:
            return CheckpointSource(layout, meta.mapping, engine, staging)
        return PackedSource(layout, base, engine, staging, {})

    def card_updates(layout: TrainLayout, card: Site) -> float | None:
        kinds = Updater.kinds(layout, options.states)
        most = max(layout.trained, key=lambda b: b.count)
        try:
            return card_rate(card.place, card.settle, kinds[most.dtype])
        except OffloadError as error:
            notes.append(f"all states are updated in RAM: {error}")
            return None

    keeps_freed = device.kind == "cpu" and can_keep_freed()

    def rates_of(shape: Shape) -> StepRates | None:
        with contextlib.ExitStack() as stack:
            card = stack.enter_context(card_site(device)) if device.kind == "cuda" else None
            found = step_rates(
                meta, shape.layout, shape.modules, shape.form, options, states, shape.tables,
                shape.away, card, base, open_source, keeps_freed,
            )  # fmt: skip
            if found is not None and card is not None and options.gpu_updates != "off":
                found = replace(found, update_away=card_updates(shape.layout, card))
        if found is None or device.kind == "cpu":
            return found
        up, down = copy_rates(device)
        return replace(found, up=up, down=down)

    chosen = choose(
        meta, options, ram=ram, versions=state_versions(options, states, total), notes=notes,
        process_bytes=process_bytes, base=base, more=more,
        gpu=budget(device, options.gpu, ram), rates_of=rates_of,
        card_flash=flash(device) if device.kind == "cuda" else None, keeps_freed=keeps_freed,
    )  # fmt: skip
    notes += safe_share(options.ram)
    notes += beyond_free(chosen.plan.ram_bytes)
    run = Run(
        meta,
        data,
        options,
        states,
        baseline,
        chosen.layout,
        chosen.form,
        chosen.plan,
        schedule,
        total,
        chosen.grad_dtype,
        notes,
        chosen.adapters,
        base,
    )
    run.prediction = chosen.prediction
    gc.collect()
    give_back()  # what timing a step has left between blocks that stay
    reset_peak_rss()
    return run


__all__ = ["prepare"]
