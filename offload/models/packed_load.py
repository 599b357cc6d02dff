"""From a packed model directory and budgets to a model that runs on packed weights.

The same road as ``load``: read the manifest, measure, plan, open. What differs: blocks are the
pack's own, linear layers and experts are replaced by ``packed_modules``, and everything that is
not packed (norms, routers, biases) is small, float32 and resident.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from offload.blocks import Tier
from offload.cpu_ops.block_layout import PART
from offload.cpu_ops.entries import Kernel
from offload.cpu_ops.kv_cache import KvType
from offload.cpu_ops.kv_quantised import quantised_layout
from offload.cpu_ops.prefill_kernels import accumulate_kernel
from offload.cpu_ops.warm import Report, compile_ahead, expert_kernels, matrix_kernels
from offload.errors import OffloadError
from offload.kv.coarse import rounded_bytes
from offload.models import card_attention, fast_check, host_products, kv_plan, kv_speed
from offload.models.baseline import warm_card, warm_up
from offload.models.expert_options import check_recordable, policy_of
from offload.models.footprint import Footprint, measure
from offload.models.hybrid import ROWS, check_shareable
from offload.models.lean_run import (
    LeanModel,
    detect_lean,
    find_lean,
    lean_kernels,
    prove_lean,
)
from offload.models.load import ram_budget
from offload.models.meta import MetaModel, instantiate, model_class, read_config
from offload.models.naming import model_name
from offload.models.options import (
    Options,
    Progress,
    beyond_free,
    check_device,
    safe_share,
)
from offload.models.pack_reader import PackedModel
from offload.models.packed_card import check_options, compile_for
from offload.models.packed_cut import cut_packed
from offload.models.packed_hybrid import split_bytes
from offload.models.packed_modules import expert_layout_of
from offload.models.packed_reserves import on_device, reserves
from offload.models.params import Param
from offload.models.pieces import learn_pieces
from offload.models.prepared import Prepared
from offload.models.prompt_plan import Rounded, plan_prompts
from offload.models.question import Question, compiled_for
from offload.models.recipes import Recipes
from offload.models.request import expert_top_k, grown_bytes, overhead_bytes, request_of
from offload.models.teams import TeamPlan, plan_team
from offload.models.toy import Warm
from offload.models.units import Cut, unit_modules
from offload.runtime import choice
from offload.runtime.cuda_stream import staging_reserve
from offload.runtime.heap import return_large_blocks
from offload.runtime.rss import reset_peak_rss
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import SITE_ACTIVATIONS, Plan
from offload.scheduler.planner import PlanRequest
from offload.scheduler.policy import DEFAULT, SCORED

logger = logging.getLogger(__name__)

IN_BLOCKS = "its keys and values are kept in blocks"
"""Why the decode kernels, which read a cache in one piece, do not run."""

ON_DEVICE = "its weights are on the device that computes"
"""Why they do not run there: they read the host's memory."""

DISPATCH_S = 3e-5
"""Python around a kernel's call for one layer's experts, per expert that is not there yet."""

LEAN_S = 5e-5
"""Besides its weights, of a layer that runs on the decode kernels: the barriers between its parts,
Python where experts are fetched, and some hundred tokens of attention."""


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

    def aligned(self, plan: Plan) -> Plan:
        return plan  # bundles are as the kernels take them

    def kv_json(self) -> dict[str, Any] | None:
        if self.kv is not None or self.lean.kv is KvType.F32:
            return super().kv_json()
        tokens = max(self.options.context, self.options.prompt_tokens or 0)
        return {
            "kind": self.lean.kv.value,
            "budget_bytes": self.options.sequences * self.lean.kv_bytes(tokens),
            "blocks_on_disk": 0,
            "disk_bytes_per_token": 0,
            "attention": "decode kernels",
        }

    def _attended(self, plan: Plan) -> Plan:
        return attended(plan, self.lean, self.options, self.request.costs)

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
    if options.dtype not in (None, "auto", "float32", "fp32", torch.float32):
        raise OffloadError(
            f"dtype {options.dtype} cannot take effect: packed weights are computed in float32"
        )
    return_large_blocks(ram_budget(options))
    pack = PackedModel.open(directory)
    config = read_config(directory)
    shape = instantiate(config, torch.float32)[0]
    lean = kept_as(detect_lean(shape, pack), options)
    # Before the process is weighed: they are the program and not the model.
    if kind != "cpu":
        lean = LeanModel({}, ON_DEVICE)
    if kind != "cuda" or options.hybrid:
        more = [accumulate_kernel()] if options.hybrid and pack.experts else []
        compile_ahead([*pack_kernels(pack), *lean_kernels(lean), *more], compiling)
        if kind != "cuda" and options.sample is not None and options.hardware is not None:
            options.hardware, options.fewer = options.sample(options.hardware, pack)
    lean = prove_lean(shape, lean)
    family = model_class(config)
    warm_card(options.choice, config, family, torch.float32)
    if kind == "cuda":
        compile_for(torch.device(options.choice.name), pack)
    learn_pieces(options, family, config)
    warm = warm_up(config, family, torch.float32, options.hardware is not None)
    reset_peak_rss()
    return plan_packed(pack, config, options, warm, lean, compiling)


def kept_as(lean: LeanModel, options: Options) -> LeanModel:
    """The same layers with keys and values as ``--kv`` says, if theirs can be kept so: prompts too
    run on kernels that read them, nobody asks for blocks, there is one sequence at a time, and
    kernels take such heads."""
    if options.kv is None or options.attention is not None or not lean.runs_prompts:
        return lean
    blocks = options.kv_ram, options.kv_keep, options.kv_block_tokens
    if any(asked is not None for asked in blocks) or options.batch != 1:
        return lean
    found = replace(lean, kv=KvType(options.kv))
    try:
        found.kv_bytes(1)
    except OffloadError as why:
        logger.info("keys and values are not kept in %s by the decode kernels: %s", options.kv, why)
        return lean
    return found


def rounded_by(lean: LeanModel) -> Rounded | None:
    """How lean layers keep keys and values; None: as they are computed, or there are none."""
    if lean.kv is KvType.F32 or not lean.layers:
        return None
    each = None
    if lean.kv.quantised:
        first = lean.plans[0].attention
        each = rounded_bytes(quantised_layout(first.key_heads, first.dim, 1, lean.kv))
    return Rounded(lean.kv.value, PART, each)


def attended(plan: Plan, lean: LeanModel, options: Options, costs: CostModel | None) -> Plan:
    """The plan's speed at the end of the context, where lean layers keep keys and values."""
    context = max(options.context, options.prompt_tokens or 0)
    return kv_speed.attended(plan, lean.attended_bytes(context), costs)


def pack_kernels(pack: PackedModel) -> list[Kernel]:
    """What the matrices and experts of a pack are multiplied by."""
    return [*matrix_kernels(pack.matrix_formats()), *expert_kernels(pack.expert_formats())]


@dataclass(kw_only=True)
class PackQuestion(Question):
    """What the planner is asked of a packed model.

    Attributes:
        cut: into which blocks.
        lean: the layers that single tokens go through without their modules; none once keys and
            values are in blocks.
        cache: bytes of transformers' keys and values of one sequence in one piece.
        prompt, read: tokens of a prompt, and those that a pass reads at most: what checks fast
            kernels reads, too, where that is ``checked``.
        kept: bytes of what is not packed.
        grown: bytes that the process has grown by, as of ``grown_bytes``.
        apart: dense layers that the host may compute beside a device.
    """

    meta: MetaModel
    pack: PackedModel
    warm: Warm
    footprint: Footprint
    kind: str
    cut: Cut
    lean: LeanModel
    cache: int
    prompt: int
    read: int
    checked: bool
    kept: int
    grown: int
    apart: frozenset[str]
    policy: tuple[str, tuple[str, ...]] = (DEFAULT, ())

    def __post_init__(self) -> None:
        super().__post_init__()
        layouts = [expert_layout_of(self.pack.experts[g.name], g.module) for g in self.cut.groups]
        self._split = split_bytes(layouts, expert_top_k(self.meta.model.config))
        self._whole = sum(spec.slot_nbytes for spec in self.cut.blocks.values())
        self._flops = self.pack.flops()

    def __call__(self, ram: int) -> PlanRequest:
        options, reserved = self.options, self._set_aside(ram)
        fused = replace(self.warm, expert_s=DISPATCH_S)
        if self.lean.layers:
            fits = self._whole + sum(reserved[self.top].values()) <= self.budgets[self.top]
            fused = replace(
                self.warm,
                expert_s=0.0 if fits else DISPATCH_S,
                layer_s=min(LEAN_S, self.warm.layer_s),
            )
        request = request_of(
            self.meta, self.cut, options, fused, self.budgets, reserved, self.top, False,
            self.policy, ROWS if options.hybrid and self.cut.groups else 0,
            apart=host_products.apart_blocks(self.cut, self.apart),
            apart_rows=host_products.ROWS if options.hybrid else 0,
        )  # fmt: skip
        if request.costs is None:
            return request
        # What several tokens cost: to the scheduler a pack's blocks are bytes.
        return replace(request, costs=replace(request.costs, flops=self._flops))

    def leave_ram(self) -> None:
        self.lean = LeanModel({}, IN_BLOCKS)
        self.plan_prompts()

    def plan_prompts(self) -> None:
        """The prompt cache, with keys and values kept as they are now."""
        keeps = rounded_by(self.lean) or kv_plan.rounded(self.kv, self.options)
        self.prompts = plan_prompts(self.options, self.meta, self.footprint, self.read, keeps)

    def attended(self, plan: Plan, costs: CostModel | None) -> Plan:
        return attended(plan, self.lean, self.options, costs)

    @property
    def _tokens(self) -> int:
        """That a sequence may get to."""
        return max(self.options.context, self.prompt)

    def _cached_bytes(self) -> int:
        """Of one sequence, if they are in one piece."""
        if self.lean.kv.quantised:
            return self.lean.kv_bytes(self._tokens)
        return self.cache // (2 if self.lean.kv is KvType.BF16 else 1)

    def _set_aside(self, ram: int) -> dict[Tier, dict[str, int]]:
        """What is no weight, in bytes by name."""
        options, lean, model = self.options, self.lean, self.meta.model
        overhead = overhead_bytes(options, self.cut, grown=self.grown, ram=ram, prompt=self.prompt)
        if self.checked:
            overhead += fast_check.check_bytes(model.config.get_text_config().vocab_size)
        found = {
            Tier.RAM: reserves(
                model, self.pack, self.cut, options, self.footprint,
                cache=options.sequences * self._cached_bytes(),
                prompt=self.read, ram=ram, kept=self.kept, overhead=overhead,
                lean_bytes=lean.scratch_bytes(self._tokens),
                prompt_bytes=lean.prompt_bytes(max(self.read, options.sequences), self._tokens),
                kv=self.together,
            )
        }  # fmt: skip
        if self.kind != "cpu":
            rows = self.read * options.batch
            found = on_device(found[Tier.RAM], self.cut, self.pack, model.config, rows, self.kind)
        if options.hybrid:
            nbytes = max(host_products.product_bytes(self.cut, self.apart), self._split)
            for reserved in found.values():
                reserved[SITE_ACTIVATIONS] = nbytes
        if self.staged_copies is not None:
            found[Tier.RAM]["copies to the device"] = staging_reserve(
                both_ways=bool(options.hybrid)
            )
        if self.prompts is not None:
            found[Tier.RAM] |= self.prompts.reserves
        return found


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
    kind = check_device(options)
    if kind == "cuda":
        card_attention.switch_on(model)
    flash = choice.flash(options.choice)
    footprint = measure(model, read, options.batch, card=kind == "cuda", flash=flash)
    need = kv_plan.kv_need(model, footprint, options, read)
    if lean is None and kind != "cpu":
        lean = LeanModel({}, ON_DEVICE)
    lean = lean or kept_as(find_lean(model, pack), options)
    if options.record_routing is not None or options.expert_policy in SCORED:
        lean = LeanModel({}, "its routing is listened to")
    kv = None
    if lean.kv is KvType.F32:
        kv = kv_plan.asked_for(need, options, model_name(pack.path))
    if kv is not None:
        lean = LeanModel({}, IN_BLOCKS)
    baseline += compiled_for(kv, compiling)
    # Before the cut: what takes the linear layers' place computes on bytes, and not on meta.
    apart = (
        host_products.apart_layers(model, unit_modules(model)) if options.hybrid else frozenset()
    )
    chosen, resident = cut_packed(model, pack)
    check_shareable(options, chosen, apart)
    meta = MetaModel(
        model,
        None,  # type: ignore[arg-type]  # no safetensors index: the pack is the checkpoint
        _names_of(pack),
        dtype,
        pack.path,
    )
    question = PackQuestion(
        options=options, name=model_name(pack.path), ram=ram_budget(options), baseline=baseline,
        need=need, kv=kv, prompts=None, compiling=compiling, meta=meta, pack=pack, warm=warm,
        footprint=footprint, kind=kind, cut=chosen, lean=lean,
        cache=footprint.cache_bytes * max(options.context, read) // max(read, 1),
        prompt=prompt, read=read, checked=due,
        kept=sum(4 * p.tensor.numel() for p in resident.values()),
        grown=grown_bytes(options, baseline), apart=apart,
    )  # fmt: skip
    question.plan_prompts()
    question.policy = policy_of(options, chosen)
    check_recordable(options, chosen)
    plan = question.answer()
    lean, together = question.lean, question.together
    team: TeamPlan | None = None
    said: list[str] = []
    if lean.layers:  # all of them our kernels, whose bits do not depend on threads
        plan, team, said = plan_team(plan, question(question.ram), options, None, question.finished)
    return PackedPrepared(
        meta=meta, options=options, cut=chosen, recipes=Recipes({}, [], {}), plan=plan,
        request=question(question.ram), ask=question, footprint=footprint,
        baseline_rss=question.baseline, head_rows=None, notes=_notes(question, plan, said),
        kv=together, kv_alone=question.kv, prompts=question.prompts, pack=pack, resident=resident,
        lean=lean, team=team,
    )  # fmt: skip


def _notes(question: PackQuestion, plan: Plan, of_team: list[str]) -> list[str]:
    """What a user should know of a packed model's plan."""
    options, lean = question.options, question.lean
    notes = [
        "weights are packed and activations float32: results differ from the unquantised model's",
        *question.pack.manifest.notes(),
        *safe_share(options.ram),
    ]
    if question.staged_copies is not None:
        notes.append(choice.STAGED.format(why=question.staged_copies))
    if question.together is not None:
        notes.append(question.together.note(options))
    notes += of_team
    if lean.kv is not KvType.F32:
        notes.append(f"keys and values are kept in {lean.kv.words}, which is lossy")
    if question.prompts is not None:
        notes.append(question.prompts.note)
    if not lean.layers:
        notes.append(f"single tokens run through transformers' own layers: {lean.why_not}")
    if not question.footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    if not options.elsewhere:
        notes += beyond_free(plan.resident_bytes(Tier.RAM))
    return notes


def _names_of(pack: PackedModel) -> Any:
    """As much of a ``CheckpointMap`` as making buffers needs: what the pack holds."""
    return SimpleNamespace(map=SimpleNamespace(sources=dict.fromkeys(pack.tensors)))


def plain_tensor(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A plain part's bytes as a float32 tensor (integers keep their dtype), a copy."""
    data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    found: torch.Tensor = data.view(getattr(torch, dtype)).view(shape)
    return found.float() if found.is_floating_point() else found
