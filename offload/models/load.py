"""From a checkpoint and budgets to a streamed model: prepare, plan, open.

``prepare`` reads headers, measures what the process weighs and what the model needs besides its
weights, and makes the plan; nothing is loaded. ``Prepared.open`` loads what is pinned and
attaches the hooks. The command line prints the plan in between.
"""

from __future__ import annotations

import gc
import logging
import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.blocks import ALIGN, BlockSpec, Tier, align_up
from offload.errors import OffloadError, PlanError
from offload.io.engines import DEFAULT_QUEUE_DEPTH, DEFAULT_REQUEST_BYTES, make_engine
from offload.io.memory import Staging
from offload.io.safetensors import CheckpointIndex
from offload.io.stores import RangeStore
from offload.models.attach import Attachment, check_expert_loop
from offload.models.footprint import Footprint, measure
from offload.models.handle import OffloadHandle
from offload.models.head_check import ROWS_TRIED, verified_rows
from offload.models.meta import (
    MetaModel,
    build,
    materialise_buffers,
    model_class,
    pick_dtype,
    read_config,
    resolve,
)
from offload.models.recipes import (
    Recipes,
    RoutedStore,
    TensorReader,
    convert_blocks,
    make_recipes,
    placed_and_made,
    spill_directory,
)
from offload.models.split import STEP_BYTES, is_closed, split
from offload.models.toy import Warm, warm_up
from offload.models.units import (
    Cut,
    cut,
    expert_groups,
    head_shape,
    parameters,
    unit_modules,
)
from offload.runtime.device import Device
from offload.runtime.executor import Executor
from offload.runtime.null_device import NullDevice
from offload.runtime.rss import available_ram, current_rss, reset_peak_rss
from offload.scheduler.costs import CostModel
from offload.scheduler.hardware import Hardware
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.scheduler.trace import Step, Trace
from offload.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 1024
"""Tokens of prompt and answer together that memory is set aside for, unless said otherwise."""

SAFE_SHARE = 0.8
"""Of the memory that is free, what a model takes when no budget is given."""

SLACK_SHARE, LEAST_SLACK, MOST_SLACK = 64, 640 * 2**10, 16 * 2**20
"""Set aside for what no plan can count (allocator fragments, thread stacks, Python objects): one
part in 64 of the budget, within these bytes."""

Progress = Callable[[str, int, int], None]
"""``progress(what, done_bytes, total_bytes)``."""


@dataclass(kw_only=True)
class Options:
    """What the user asked for; sizes in bytes."""

    ram: int | None = None
    gpu: int | None = None
    disk: str | Path | None = None
    dtype: str | torch.dtype | None = None
    device: str = "auto"
    prompt_tokens: int | None = None
    context: int = DEFAULT_CONTEXT
    batch: int = 1
    engine: str | None = None
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    request_bytes: int = DEFAULT_REQUEST_BYTES
    hardware: Hardware | None = None
    seed: int | None = None
    overhead_bytes: int | None = None
    """Set aside for the model's Python objects and for slack; None: measured."""
    tokenizer_bytes: int = 0
    """What this process already holds for the caller and the budget has to cover."""

    def __post_init__(self) -> None:
        _check_device(self)


@dataclass(kw_only=True)
class Prepared:
    """A plan for a checkpoint, with everything ``open`` needs to carry it out."""

    meta: MetaModel
    options: Options
    cut: Cut
    recipes: Recipes
    plan: Plan
    request: PlanRequest
    footprint: Footprint
    baseline_rss: int
    head_rows: frozenset[int] | None
    notes: list[str] = field(default_factory=list)

    @property
    def minimum(self) -> Mapping[Tier, int]:
        """The smallest budgets in bytes that this model, context and cut can run in."""
        return minimum_budgets(self.request)

    def open(self, progress: Progress | None = None, wrap_store: Any = None) -> Any:
        """Load what is pinned and return the model, ready to run."""
        return _open(self, progress, wrap_store)


def prepare(path: str | Path, options: Options) -> Prepared:
    """Plan a checkpoint. Loads no weights.

    Raises:
        CheckpointError, UnsupportedModelError: see ``offload.models.meta.build``.
        PlanError: the budget is too small; says the smallest that works.
        OffloadError: options that contradict each other.
    """
    directory = resolve(path)
    config = read_config(directory)
    dtype = pick_dtype(options.dtype, config, CheckpointIndex.open(directory))
    _check_device(options)
    warm = warm_up(config, model_class(config), dtype)
    reset_peak_rss()
    return plan_model(directory, options, warm)


def plan_model(directory: Path, options: Options, warm: Warm) -> Prepared:
    """``prepare`` in a process that is warm already."""
    baseline = warm.baseline_rss - options.tokenizer_bytes
    device = _check_device(options)
    meta = build(directory, options.dtype)
    prompt = options.prompt_tokens or options.context
    footprint = measure(meta.model, prompt, options.batch)
    cache = footprint.cache_bytes * max(options.context, prompt) // max(prompt, 1)
    ram = options.ram if options.ram is not None else int(available_ram() * SAFE_SHARE)
    notes: list[str] = []
    if options.ram is None:
        notes.append(
            f"no --ram given: {SAFE_SHARE:.0%} of the {format_bytes(available_ram())} that are free"
        )
    modules = _fine_units(meta.model)
    phases, made = placed_and_made(parameters(meta.model).values(), meta.mapping)

    def cut_it(stream_head: bool) -> Cut:
        return cut(meta.model, stream_head=stream_head, modules=modules, keep=made, phases=phases)

    chosen = cut_it(False)
    drop_unloopable(chosen, notes)
    recipes = make_recipes(chosen, meta.mapping)
    overhead = options.overhead_bytes
    if overhead is None:
        gc.collect()
        grown = current_rss() - baseline - options.tokenizer_bytes
        overhead = max(0, grown) + min(MOST_SLACK, max(LEAST_SLACK, ram // SLACK_SHARE))
    budgets = {Tier.RAM: ram}
    if device == "sim":
        budgets[Tier.DEVICE] = options.gpu or ram
    top = max(budgets)

    def reserves_of(chosen: Cut) -> dict[Tier, dict[str, int]]:
        kept = sum(made.values())
        return _reserves(
            meta, chosen, options, footprint, cache, prompt, device, overhead, ram, kept
        )

    reserves = reserves_of(chosen)
    weights = sum(s.slot_nbytes for s in chosen.blocks.values())
    head_rows = None
    if weights + sum(reserves[top].values()) > budgets[top]:
        head_rows, slices = try_head(cut_it(True), notes)
        chosen = cut_it(slices)
        drop_unloopable(chosen, notes)
        recipes = make_recipes(chosen, meta.mapping)
        reserves = reserves_of(chosen)
    request = _request(meta, chosen, options, warm, budgets, reserves, top)
    try:
        plan = make_plan(request)
    except PlanError as error:
        raise PlanError(f"{directory.name}: {error}") from error
    if recipes.convert:
        total = recipes.convert_bytes(chosen.blocks)
        why = next(iter(recipes.reasons.values()))
        notes.append(
            f"{len(recipes.convert)} of {len(chosen.blocks)} blocks ({format_bytes(total)}) are "
            f"converted once into a private file in {spill_directory(options.disk)} ({why})"
        )
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    return Prepared(
        meta=meta,
        options=options,
        cut=chosen,
        recipes=recipes,
        plan=plan,
        request=request,
        footprint=footprint,
        baseline_rss=baseline,
        head_rows=head_rows,
        notes=notes + chosen.notes,
    )


def load(path: str | Path, options: Options, progress: Progress | None = None) -> Any:
    """Prepare and open in one step."""
    return prepare(path, options).open(progress)


def _fine_units(model: Any) -> list[tuple[str, Any]]:
    """The units to stream: layers, or the modules of large layers where that is shown safe."""
    layers = unit_modules(model)
    experts = {id(p.tensor) for g in expert_groups(model) for p in g.params}
    fine = split(layers, experts, STEP_BYTES)
    if len(fine) > len(layers) and is_closed(model, fine, experts):
        return fine
    return layers


# -- planning -----------------------------------------------------------------------------


def _check_device(options: Options) -> str:
    if options.device not in ("auto", "cpu", "sim", "cuda"):
        raise OffloadError(f"device {options.device!r} is not one of auto, cpu, sim")
    if options.device == "cuda":
        raise OffloadError("CUDA is not supported yet; use device='cpu' or device='sim'")
    if options.gpu is not None and options.device != "sim":
        raise OffloadError(
            "a GPU budget needs a card, and cards are not supported yet; drop it, or simulate an "
            "accelerator with device='sim'"
        )
    return "sim" if options.device == "sim" else "cpu"


def drop_unloopable(result: Cut, notes: list[str]) -> None:
    """Experts whose loop cannot take one expert at a time are streamed with their layer."""
    verdicts: dict[type, str | None] = {}
    bad = []
    for group in result.groups:
        kind = type(group.module)
        if kind not in verdicts:
            verdicts[kind] = check_expert_loop(group)
        if verdicts[kind] is not None:
            bad.append((group, verdicts[kind]))
    if not bad:
        return
    from offload.models.units import demote

    demote(result, [group for group, _ in bad])
    notes.append(f"experts are streamed by layer: {bad[0][1]}")


def try_head(trial: Cut, notes: list[str]) -> tuple[frozenset[int] | None, bool]:
    """Whether the LM head can be streamed in slices as in ``trial``, for how many rows at once."""
    if trial.head is None:
        return None, True
    vocabulary, width = trial.head.param.tensor.shape
    step = trial.head.rows[0][1]
    param = trial.head.param
    rows = verified_rows(
        vocabulary, width, param.tensor.dtype, step, torch.get_num_threads(), phase=param.phase
    )
    if 1 in rows:
        return rows, True
    notes.append("the LM head stays whole: in slices it is not bit-equal on this machine")
    return None, False


def staging_shape(options: Options, largest: int, ram: int) -> tuple[int, int]:
    """Chunks and their bytes: a request each, no larger than the largest block asks for, and
    together at most one part in 32 of a small budget."""
    share = ram // 32 // options.queue_depth // ALIGN * ALIGN
    chunk = min(options.request_bytes, align_up(largest + 2 * ALIGN), share)
    return options.queue_depth, max(4 * ALIGN, chunk)


def _rows_check(prepared: Prepared) -> Callable[[int], bool]:
    """Whether slices of the LM head are bit-equal for a number of input rows: the usual numbers
    were tried before the plan, any other (logits of a whole prompt) is tried when it comes."""
    rows, head = prepared.head_rows, prepared.cut.head
    if rows is None or head is None:
        return lambda _: True
    vocabulary, width = head.param.tensor.shape
    dtype, step = head.param.tensor.dtype, head.rows[0][1]
    known = {m: m in rows for m in ROWS_TRIED}

    def verified(m: int) -> bool:
        if m not in known:
            threads = torch.get_num_threads()
            phase = head.param.phase
            known[m] = m in verified_rows(vocabulary, width, dtype, step, threads, (m,), phase)
        return known[m]

    return verified


def _reserves(
    meta: MetaModel,
    chosen: Cut,
    options: Options,
    footprint: Footprint,
    cache: int,
    prompt: int,
    device: str,
    overhead: int,
    ram: int,
    kept: int,
) -> dict[Tier, dict[str, int]]:
    """What is not weights. The simulated device computes in RAM's address space but has a budget
    of its own: its activations and KV are charged to it."""
    n_layers = max(1, len(getattr(meta.model, "base_model", meta.model)._modules))
    largest = max((s.slot_nbytes for s in chosen.blocks.values()), default=0)
    table = chosen.embedding.block if chosen.embedding else None
    matrix = max(
        (t.nbytes for b, s in chosen.blocks.items() if b != table for t in s.tensors), default=0
    )
    chunks, chunk = staging_shape(options, largest, ram)
    shape = head_shape(meta.model)
    logits = 4 * 4 * options.batch * shape[0] if shape else 0
    rows = prompt * options.batch * (shape[1] * 4 if shape else 0)
    compute = {
        # Growing a cache copies one layer's keys and values while the old ones still exist.
        "KV cache": cache + cache // max(1, n_layers),
        "activations": footprint.activation_bytes,
        # BLAS may bring a whole matrix into a layout of its own before it multiplies.
        "matrix workspace": matrix,
        "logits": logits,
    }
    host = {
        "I/O staging": chunks * chunk,
        "embedding rows": rows,
        "model structure and slack": overhead,
        "tokenizer": options.tokenizer_bytes,
        "weights that no file holds": kept,
    }
    if device == "sim":
        return {Tier.RAM: host, Tier.DEVICE: compute}
    return {Tier.RAM: compute | host}


def _request(
    meta: MetaModel,
    chosen: Cut,
    options: Options,
    warm: Warm,
    budgets: dict[Tier, int],
    reserves: dict[Tier, dict[str, int]],
    top: Tier,
) -> PlanRequest:
    blocks, by_row = rows_of(chosen)
    top_k = expert_top_k(meta.model.config)
    costs = None
    if options.hardware is not None:
        costs = CostModel(
            hardware=options.hardware,
            queue_depth=options.queue_depth,
            staged=True,
            expert_overhead_s=warm.expert_s,
        )
    return PlanRequest(
        blocks=blocks,
        trace=Trace(trace_of(chosen)),
        experts={g.name: g.blocks for g in chosen.groups},
        top_k={g.name: min(top_k, g.n_experts) for g in chosen.groups},
        always=frozenset(chosen.resident),
        by_row=by_row,
        budgets=budgets,
        reserves=reserves,
        compute_tier=top,
        costs=costs,
        overhead_s=_overheads(chosen, warm),
    )


def trace_of(chosen: Cut) -> list[Step]:
    """The steps of one pass, in the order in which the modules are registered (the executor
    learns the real order if it is another)."""
    steps: list[Step] = []
    for unit in chosen.units:
        groups = [g.name for g in unit.groups]
        steps.append(Step(unit=unit.name, blocks=unit.blocks, group=groups[0] if groups else ""))
        steps += [Step(unit=f"{unit.name}+{g}", blocks=(), group=g) for g in groups[1:]]
    if chosen.head:
        steps += [
            Step(unit=f"{chosen.head.name}#{i}", blocks=(b,))
            for i, b in enumerate(chosen.head.blocks)
        ]
    return steps


def rows_of(chosen: Cut) -> tuple[dict[str, BlockSpec], frozenset[str]]:
    """The blocks to place, and which of them may be read by row.

    The rows of an embedding that is tied to a sliced head are the head's own bytes: they are
    never pinned a second time, only read.
    """
    blocks = dict(chosen.blocks)
    if chosen.embedding is None:
        return blocks, frozenset()
    if chosen.head is not None and chosen.head.param is chosen.embedding.param:
        del blocks[chosen.embedding.block]
        return blocks, frozenset()
    return blocks, frozenset({chosen.embedding.block})


def _overheads(chosen: Cut, warm: Warm) -> dict[str, float]:
    """Seconds that each step takes besides its weights: its share of its layer's Python time,
    and, on the last one, what ``generate`` does between two tokens."""
    layers: dict[str, list[str]] = {}
    for unit in chosen.units:
        # model.layers.3.mlp.up_proj belongs to model.layers.3
        found = re.match(r"(.*?\.\d+)(\..*)?$", unit.name)
        layers.setdefault(found.group(1) if found else unit.name, []).append(unit.name)
    out = {name: warm.layer_s / len(names) for names in layers.values() for name in names}
    if out:
        last = chosen.units[-1].name
        out[last] += warm.fixed_s
    return out


def expert_top_k(config: Any) -> int:
    """Experts per token, by whichever name the family uses."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in (
        "num_experts_per_tok",
        "moe_topk",
        "moe_k",
        "top_k_experts",
        "num_selected_experts",
    ):
        value = getattr(text, name, None)
        if isinstance(value, (list, tuple)):
            value = max(value)
        if isinstance(value, int) and value > 0:
            return value
    return 2


# -- opening ------------------------------------------------------------------------------


def make_device(options: Options, capacity: int | None) -> Device:
    """The device that the options name."""
    if options.device == "sim":
        from offload.runtime.sim_device import SimDevice

        # The device's budget covers activations too; its arena can be no larger.
        return SimDevice(capacity_bytes=capacity or 2**40, seed=options.seed or 0)
    return NullDevice()


def _open(prepared: Prepared, progress: Progress | None, wrap_store: Any) -> Any:
    options, meta, plan = prepared.options, prepared.meta, prepared.plan
    began = time.perf_counter()
    largest = max((s.slot_nbytes for s in prepared.cut.blocks.values()), default=0)
    staging = Staging(*staging_shape(options, largest, plan.budgets[Tier.RAM]))
    engine = (
        make_engine(options.engine, options.queue_depth)
        if options.engine
        else make_engine(queue_depth=options.queue_depth)
    )
    stores: list[Any] = []
    store: Any = None
    device: Device | None = None
    executor: Executor | None = None
    try:
        reader = TensorReader(meta.index, engine, staging)
        try:
            materialise_buffers(meta.model, meta.mapping, reader.read)
            if prepared.recipes.convert:
                stores.append(
                    convert_blocks(
                        prepared.recipes.convert,
                        prepared.cut,
                        meta.mapping,
                        reader,
                        spill_directory(options.disk),
                        engine,
                        staging,
                        (lambda d, t: progress("convert", d, t)) if progress else None,
                    )
                )
        finally:
            reader.close()
        files = [str(f) for f in meta.index.files]
        stores.append(RangeStore(files, prepared.recipes.direct, engine, staging))
        store = RoutedStore(stores, engine, staging)
        if wrap_store is not None:
            store = wrap_store(store)
        device = make_device(options, plan.budgets.get(Tier.DEVICE))
        executor = Executor(plan, store, device)
        executor.start((lambda d, t: progress("load", d, t)) if progress else None)
        attachment = Attachment(
            meta.model,
            prepared.cut,
            plan,
            executor,
            head_rows_verified=_rows_check(prepared),
        )
    except BaseException:
        if executor is not None:
            executor.close()
        elif store is not None:
            store.close()
        else:
            for part in stores:
                part.close()
            engine.close()
            staging.close()
        if device is not None:
            device.close()
        raise
    model = meta.model
    handle = OffloadHandle(
        plan=plan,
        executor=executor,
        attachment=attachment,
        load_s=time.perf_counter() - began,
        baseline_rss=prepared.baseline_rss,
        notes=tuple(prepared.notes),
    )
    finish_model(model, meta.directory)
    model.__dict__["offload"] = handle
    weakref.finalize(model, executor.close)
    gc.collect()
    return model


def finish_model(model: Any, directory: Path) -> None:
    """What ``from_pretrained`` does after loading: the checkpoint's generation settings."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return
    if not (directory / "generation_config.json").is_file():
        return
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise OffloadError(f"generation_config.json of {directory.name}: {error}") from error


def parse_options(
    *,
    ram: str | int | None = None,
    gpu: str | int | None = None,
    **others: Any,
) -> Options:
    """Options from sizes as people write them."""
    return Options(
        ram=None if ram is None else parse_bytes(ram),
        gpu=None if gpu is None else parse_bytes(gpu),
        **others,
    )
