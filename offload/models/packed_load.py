"""From a packed model directory and budgets to a model that runs on packed weights.

The same road as ``load``: read the manifest, measure, plan, open. What differs: blocks are the
pack's own, linear layers and experts are replaced by ``packed_modules``, and everything that is
not packed (norms, routers, biases) is small, float32 and resident.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.blocks import BlockSpec, Tier
from offload.cpu_ops import prefill
from offload.cpu_ops.activations import scratch_bytes
from offload.cpu_ops.entries import Kernel
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.prefill import crossover
from offload.cpu_ops.warm import Report, compile_ahead, expert_kernels, matrix_kernels
from offload.errors import CheckpointError, OffloadError, PlanError, UnsupportedModelError
from offload.io.pack_manifest import Kind, Layout
from offload.io.transfer import PLAN_BYTES, PLANS_KEPT
from offload.models import fast_check, kv_plan
from offload.models.absent import absent
from offload.models.expert_groups import ExpertGroup, expert_groups, find_gate
from offload.models.expert_options import check_recordable, listening_bytes, policy_of
from offload.models.footprint import Footprint, measure
from offload.models.kv_plan import KvPlan
from offload.models.lean_run import (
    LeanModel,
    detect_lean,
    find_lean,
    lean_kernels,
    prove_lean,
)
from offload.models.load import STAGED, Prepared, compiled_bytes, plan_within, ram_budget
from offload.models.meta import MetaModel, instantiate, model_class, read_config
from offload.models.naming import model_name
from offload.models.options import (
    LEAST_SLACK,
    MOST_SLACK,
    SAFE_SHARE,
    SLACK_SHARE,
    Options,
    Progress,
    check_device,
)
from offload.models.pack_reader import PackedModel
from offload.models.packed_card import SCRATCH, card_outputs, card_scratch, check_options
from offload.models.packed_modules import PackedLinear, expert_layout_of
from offload.models.params import Param, Place, parameters
from offload.models.prompt_plan import plan_prompts
from offload.models.recipes import Recipes
from offload.models.request import (
    activation_bytes,
    cache_reserves,
    expert_top_k,
    request_of,
    staging_shape,
)
from offload.models.toy import Warm, warm_up
from offload.models.units import Cut, RowEmbedding, Unit, unit_modules
from offload.models.workspace import CARD_BYTES
from offload.runtime import choice
from offload.runtime.cuda_stream import STAGING_BYTES
from offload.runtime.heap import return_large_blocks
from offload.runtime.rss import available_ram, current_rss, reset_peak_rss
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, minimum_budgets
from offload.scheduler.policy import SCORED
from offload.units import format_bytes

IN_BLOCKS = "its keys and values are kept in blocks"
"""Why the decode kernels, which read a cache in one piece, do not run."""

ON_DEVICE = "its weights are on the device that computes"
"""Why they do not run there: they read the host's memory."""

DISPATCH_S = 3e-5
"""Python around a kernel's call for one layer's experts, per expert that is not there yet."""

ROWS_BYTES = 2**20
"""Rows of an embedding are read and decoded so many bytes at a time: those of a tied one come
sixteen for each that is wanted, and a long prompt's would take more than all of its activations."""


@dataclass(kw_only=True)
class PackedPrepared(Prepared):
    """A plan for a packed model."""

    pack: PackedModel
    resident: dict[str, Param]
    """What is resident in float32, by its name in the pack."""
    lean: LeanModel

    def open(self, progress: Progress | None = None, wrap_store: Any = None) -> Any:
        """Load what is pinned and return the model, ready to run."""
        from offload.models.packed_opening import open_packed

        return open_packed(self, progress, wrap_store)

    def _aligned(self, plan: Plan) -> Plan:
        return plan  # bundles are as the kernels take them

    def check_kernels(self, model: Any) -> None:
        if fast_check.is_due(self.options, self.pack):
            self.kernel_error = model.offload.kernel_error = fast_check.measure(model, self)


def prepare_packed(
    directory: Path, options: Options, compiling: Report | None = None
) -> PackedPrepared:
    """Plan a packed model. Loads no weights, but the kernels it will run on.

    Args:
        compiling: told how far it is if kernels have to be compiled; see ``compile_ahead``.

    Raises:
        StoreError: the pack is damaged or incomplete.
        CheckpointError, UnsupportedModelError: it does not fit its config, or has no kernels.
        PlanError: the budget is too small; says the smallest that works.
        OffloadError: options that contradict each other.
    """
    kind = check_device(options)
    if kind != "cpu":
        check_options(kind, options.kernels)
    if options.hybrid:
        raise OffloadError(
            "--hybrid shares the experts of a checkpoint; a pack's are all computed by the device: "
            "drop it"
        )
    if options.dtype not in (None, "auto", "float32", "fp32", torch.float32):
        raise OffloadError(
            f"dtype {options.dtype} cannot take effect: packed weights are computed in float32"
        )
    return_large_blocks()
    pack = PackedModel.open(directory)
    config = read_config(directory)
    shape = instantiate(config, torch.float32)[0]
    lean = detect_lean(shape, pack)
    # Before the process is weighed: they are the program and not the model.
    if kind != "cpu":
        lean = LeanModel({}, ON_DEVICE)
    if kind != "cuda":
        compile_ahead([*pack_kernels(pack), *lean_kernels(lean)], compiling)
    lean = prove_lean(shape, lean)
    choice.warm_up(options.choice)
    warm = warm_up(config, model_class(config), torch.float32)
    reset_peak_rss()
    return plan_packed(pack, config, options, warm, lean, compiling)


def pack_kernels(pack: PackedModel) -> list[Kernel]:
    """What the matrices and experts of a pack are multiplied by."""
    formats = {
        p.format for b in pack.manifest.blocks for p in b.parts
        if p.layout is Layout.PACKED and b.kind is not Kind.EXPERT
    }  # fmt: skip
    pairs = {
        (g.part("gate").format, g.part("down").format)
        for g in pack.experts.values()
        if {"gate", "down"} <= {p.name for p in g.parts}
    }
    return [*matrix_kernels(map(get_format, sorted(formats))), *expert_kernels(sorted(pairs))]


def plan_packed(
    pack: PackedModel,
    config: Any,
    options: Options,
    warm: Warm,
    lean: LeanModel | None = None,
    compiling: Report | None = None,
) -> PackedPrepared:
    """``prepare_packed`` in a process that is warm already."""
    baseline = warm.baseline_rss - options.tokenizer_bytes
    model, dtype = instantiate(config, torch.float32)
    model.tie_weights(missing_keys=set(), recompute_mapping=False)
    prompt = options.prompt_tokens or options.context
    due = fast_check.is_due(options, pack)
    read = max(prompt, fast_check.tokens_to_check(options)) if due else prompt
    footprint = measure(model, read, options.batch)
    cache = footprint.cache_bytes * max(options.context, read) // max(read, 1)
    ram = ram_budget(options)
    need = kv_plan.kv_need(model, footprint, options, read)
    kv = kv_plan.asked_for(need, options, model_name(pack.path))
    if kv is not None and kv.need.in_place:
        baseline += compiled_bytes(kv.need.kernels(), compiling)
    notes = [
        "weights are packed and activations float32: results differ from the unquantised model's"
    ]
    if options.ram is None:
        notes.append(
            f"no --ram given: {SAFE_SHARE:.0%} of the {format_bytes(available_ram())} that are free"
        )
    kind = check_device(options)
    if lean is None and kind != "cpu":
        lean = LeanModel({}, ON_DEVICE)
    decoder = lean or find_lean(model, pack)
    if options.record_routing is not None or options.expert_policy in SCORED:
        decoder = LeanModel({}, "its routing is listened to")
    if kv is not None:
        decoder = LeanModel({}, IN_BLOCKS)
    chosen, resident = cut_packed(model, pack)
    kept = sum(4 * p.tensor.numel() for p in resident.values())
    grown = 0
    if options.overhead_bytes is None:
        gc.collect()
        grown = max(0, current_rss() - baseline - options.tokenizer_bytes)
    meta = MetaModel(
        model,
        None,  # type: ignore[arg-type]  # no safetensors index: the pack is the checkpoint
        _names_of(pack),
        dtype,
        pack.path,
    )

    prompts = plan_prompts(options, meta, footprint, read)
    rows = read * options.batch
    budgets = {Tier.RAM: ram}
    if (on_device := choice.budget(options.choice, options.gpu, ram)) is not None:
        budgets[Tier.DEVICE] = on_device
    refused = choice.staged_copies(options.choice)
    if refused is not None:
        notes.append(STAGED.format(why=refused))

    def set_aside(ram: int) -> dict[Tier, dict[str, int]]:
        overhead = options.overhead_bytes
        if overhead is None:
            overhead = grown + min(PLANS_KEPT, len(chosen.blocks)) * PLAN_BYTES
            overhead += min(MOST_SLACK, max(LEAST_SLACK, ram // SLACK_SHARE))
        overhead += listening_bytes(options, chosen, prompt * options.batch)
        overhead += options.beside_bytes
        if due:
            overhead += fast_check.check_bytes(model.config.get_text_config().vocab_size)
        found = {
            Tier.RAM: _reserves(
                model, pack, chosen, options, footprint,
                cache=cache * options.sequences, prompt=read, ram=ram, kept=kept, overhead=overhead,
                lean_bytes=decoder.scratch_bytes(max(options.context, prompt)),
                kv=kv_plan.beside(kv, options),
            )
        }  # fmt: skip
        if kind != "cpu":
            found = _on_device(found[Tier.RAM], chosen, pack, model.config, rows, kind)
        if refused is not None:
            found[Tier.RAM]["copies to the device"] = 2 * STAGING_BYTES
        if prompts is not None:
            found[Tier.RAM] |= prompts.reserves
        return found

    policy = policy_of(options, chosen)
    check_recordable(options, chosen)
    fused = replace(warm, expert_s=DISPATCH_S)
    top = max(budgets)

    def ask(ram: int) -> PlanRequest:
        """The planner's question if staging and slack were those of a budget of ``ram``."""
        return request_of(meta, chosen, options, fused, budgets, set_aside(ram), top, False, policy)

    name = model_name(pack.path)
    try:
        plan = plan_within(ask, ram, name)
    except PlanError:
        if options.kv_ram is not None or need is None:
            raise
        # Then keys and values leave RAM, and what weights do not need at least is theirs.
        plain = minimum_budgets(ask(ram))[Tier.RAM]
        kv, options.kv_spill = kv_plan.least(need), True
        decoder = LeanModel({}, IN_BLOCKS)
        tiered = minimum_budgets(ask(ram))[Tier.RAM]
        if tiered >= plain:
            raise  # so little is cached that blocks take more
        kv = kv_plan.with_spare(need, kv, ram - tiered)
        if need.in_place:
            baseline += compiled_bytes(need.kernels(), compiling)
        plan = plan_within(ask, ram, name)
    together = kv_plan.beside(kv, options)
    if together is not None:
        plan = kv_plan.predicted(plan, together, ask(ram).costs)
        notes.append(together.note(options))
    if prompts is not None:
        notes.append(prompts.note)
    if not decoder.layers:
        notes.append(f"single tokens run through transformers' own layers: {decoder.why_not}")
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    return PackedPrepared(
        meta=meta,
        options=options,
        cut=chosen,
        recipes=Recipes({}, [], {}),
        plan=plan,
        request=ask(ram),
        ask=ask,
        footprint=footprint,
        baseline_rss=baseline,
        head_rows=None,
        notes=notes,
        kv=together,
        kv_alone=kv,
        prompts=prompts,
        pack=pack,
        resident=resident,
        lean=decoder,
    )


def _names_of(pack: PackedModel) -> Any:
    """As much of a ``CheckpointMap`` as making buffers needs: what the pack holds."""
    return SimpleNamespace(map=SimpleNamespace(sources=dict.fromkeys(pack.tensors)))


def cut_packed(model: Any, pack: PackedModel) -> tuple[Cut, dict[str, Param]]:
    """Replace what is packed by modules that compute on it; returns the blocks and where they go,
    and what stays resident.

    Raises:
        CheckpointError: a weight of the model is not in the pack, or has another shape there.
        UnsupportedModelError: experts that no kernel can compute.
    """
    units = {id(m): Unit(path, m) for path, m in unit_modules(model)}
    groups = {g.name: g for g in expert_groups(model)}
    params = parameters(model)
    in_group = {id(t) for g in groups.values() for t in g.module.parameters()}
    result = Cut([], {}, {}, [], [], None, None, [])
    outside: list[Unit] = []
    embedding = _embedding(model)
    for param in params.values():
        if id(param.tensor) in in_group:
            continue
        found = next((pack.tensors[n] for n in param.names if n in pack.tensors), None)
        if found is None:
            raise CheckpointError(
                f"{model_name(pack.path)}: {param.name} is not in the pack; pack the model again"
            )
        if found.part.shape != tuple(param.tensor.shape):
            raise CheckpointError(
                f"{model_name(pack.path)}: {param.name} is {list(found.part.shape)} in the "
                f"pack and {list(param.tensor.shape)} in config.json; pack the model again"
            )
        if found.part.layout is Layout.PLAIN:
            continue
        spec = found.block.spec()
        for place in param.places:
            if place.module is embedding:
                continue
            linear = place.module
            if not isinstance(linear, nn.Linear) or place.attr != "weight":
                raise UnsupportedModelError(
                    f"{param.name} is packed but used by a {type(linear).__name__}"
                )
            path = _path_of(model, linear)
            packed = PackedLinear(
                param.name, get_format(found.part.format), linear, found.part.nbytes
            )
            _put(model, path, packed)
            spot = Param(
                found.part.name, packed.packed, [Place(packed, "packed")], [f"{path}.packed"]
            )
            result.blocks[spec.id] = spec
            result.params.setdefault(spec.id, []).append(spot)
            owner = _owner(units, path)
            if owner is None:
                owner = Unit(path, packed)
                outside.append(owner)
            if spec.id not in owner.blocks:
                owner.blocks += (spec.id,)
    _cut_table(embedding, params, pack, result)
    _cut_experts(model, pack, groups, units, result)
    # Now: a linear layer's bias has moved to the module that took its place.
    resident = {}
    for param in parameters(model).values():
        found = next((pack.tensors[n] for n in param.names if n in pack.tensors), None)
        if found is not None and found.part.layout is Layout.PLAIN:
            resident[found.part.name] = param
    result.units = [u for u in (*units.values(), *outside) if u.blocks or u.groups]
    return result, resident


def _cut_table(embedding: Any, params: Mapping[int, Param], pack: PackedModel, result: Cut) -> None:
    """A table of rows gets a place in the plan: in memory if there is room left, else on disk."""
    param = params.get(id(getattr(embedding, "weight", None)))
    if param is None:
        return
    name = next(n for n in param.names if n in pack.tensors)
    found = pack.tensors[name]
    if found.part.layout is not Layout.ROWS or found.block.name in result.blocks:
        return  # small and plain, or tied to the head, whose block it is
    spec = found.block.spec()
    result.blocks[spec.id] = spec
    result.params[spec.id] = []
    path = name.rpartition(".")[0]
    result.embedding = RowEmbedding(path, embedding, param, spec.id)


def _cut_experts(
    model: Any,
    pack: PackedModel,
    groups: Mapping[str, ExpertGroup],
    units: Mapping[int, Unit],
    result: Cut,
) -> None:
    known = parameters(model)
    for name, group in groups.items():
        if name not in pack.experts:
            raise CheckpointError(
                f"{model_name(pack.path)}: the experts {name} are not in the pack"
            )
        packed = pack.experts[name]
        if len(packed.blocks) != group.n_experts:
            raise CheckpointError(
                f"{model_name(pack.path)}: {name} has {len(packed.blocks)} experts in the pack and "
                f"{group.n_experts} in config.json"
            )
        expert_layout_of(packed, group.module)
        owner = _owner(units, name)
        if owner is None:
            raise UnsupportedModelError(f"the experts {name} are outside of every layer")
        group.gate = find_gate(model, group, known)
        own = group.module._parameters
        for attr, tensor in list(own.items()):
            if tensor is not None:
                own[attr] = absent(f"{name}.{attr}", tensor, torch.device("cpu"))
        group.params = []
        group.blocks = packed.blocks
        owner.groups.append(group)
        result.groups.append(group)
    specs: dict[str, BlockSpec] = {b.name: b.spec() for b in pack.blocks(Kind.EXPERT)}
    for group in result.groups:
        for block in group.blocks:
            result.blocks[block] = specs[block]
            result.params[block] = []


def _reserves(
    model: Any,
    pack: PackedModel,
    chosen: Cut,
    options: Options,
    footprint: Footprint,
    *,
    cache: int,
    prompt: int,
    ram: int,
    kept: int,
    overhead: int,
    lean_bytes: int,
    kv: KvPlan | None,
) -> dict[str, int]:
    """What is not packed weights, in bytes."""
    n_layers = max(1, len(chosen.units))
    largest = max((s.slot_nbytes for s in chosen.blocks.values()), default=0)
    chunks, chunk = staging_shape(options, largest, ram, False)
    config = model.config.get_text_config()
    vocabulary, width = int(config.vocab_size), int(config.hidden_size)
    rows = prompt * options.batch
    return {
        **cache_reserves(cache, n_layers, kv),
        "activations": activation_bytes(footprint, kv, options, prompt),
        SCRATCH: _scratch(pack, rows) + lean_bytes,
        "logits": 4 * 4 * options.batch * options.sequences * vocabulary,
        "I/O staging": chunks * chunk,
        "embedding rows": max(rows, options.parked_rows(prompt)) * width * 8 + ROWS_BYTES,
        "model structure and slack": overhead,
        "tokenizer": options.tokenizer_bytes,
        "norms, routers, biases": kept,
    }


def _scratch(pack: PackedModel, rows: int) -> int:
    """What kernels and their callers need for ``rows`` tokens at once: inputs in float32 and
    quantised, outputs, and what is between an expert's matrices."""
    most = 0
    for located in pack.tensors.values():
        part = located.part
        if part.layout is Layout.PACKED:
            outputs, inputs = part.shape
            format = get_format(part.format)
            each = 4 * (inputs + outputs) + scratch_bytes(format, inputs)
            # The head sees only the last token of a prompt.
            seen = 1 if located.block.kind is Kind.HEAD else rows
            least = crossover(format)
            slab = 0
            if least is not None and seen >= least:
                slab = prefill.scratch_bytes(format, outputs, inputs, seen)
            most = max(most, each * seen + slab)
    for group in pack.experts.values():
        names = {p.name: p for p in group.parts}
        if {"gate", "down"} <= names.keys():
            inner, hidden = names["gate"].shape
            slot = 4 * inner + scratch_bytes(get_format(names["down"].format), inner) + 32
            each = 3 * 4 * hidden + scratch_bytes(get_format(names["gate"].format), hidden)
            most = max(most, rows * (each + MOST_TOGETHER * slot))
    return most


HOST = ("I/O staging", "embedding rows", "model structure and slack", "tokenizer")
"""What stays in the host's memory if a device computes."""


def _on_device(
    all_of_it: dict[str, int],
    chosen: Cut,
    pack: PackedModel,
    config: Any,
    rows: int,
    kind: str,
) -> dict[Tier, dict[str, int]]:
    """The reserves shared out between the host and the device that computes."""
    host = {name: n for name, n in all_of_it.items() if name in HOST}
    compute = {name: n for name, n in all_of_it.items() if name not in HOST}
    if kind == "cuda":
        layouts = [expert_layout_of(pack.experts[g.name], g.module) for g in chosen.groups]
        compute[SCRATCH] = card_scratch(pack, layouts, rows, expert_top_k(config))
        compute["products"] = card_outputs(pack, layouts, rows)
        compute["matrix workspace"] = CARD_BYTES
    return {Tier.RAM: host, Tier.DEVICE: compute}


MOST_TOGETHER = 8
"""Experts that a prompt computes in one call."""


def _embedding(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _path_of(model: nn.Module, module: nn.Module) -> str:
    return next(path for path, found in model.named_modules() if found is module)


def _owner(units: Mapping[int, Unit], path: str) -> Unit | None:
    return next(
        (u for u in units.values() if path == u.name or path.startswith(u.name + ".")), None
    )


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent) if parent else model
    owner._modules[leaf] = module


def plain_tensor(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A plain part's bytes as a float32 tensor (integers keep their dtype), a copy."""
    data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    found: torch.Tensor = data.view(getattr(torch, dtype)).view(shape)
    return found.float() if found.is_floating_point() else found
