"""From a checkpoint and budgets to a streamed model: prepare, plan, open.

``prepare`` reads headers, measures what the process weighs and what the model needs besides its
weights, and makes the plan; nothing is loaded. ``Prepared.open`` loads what is pinned and
attaches the hooks. The command line prints the plan in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.blocks import Tier
from offload.errors import OffloadError
from offload.io.pack_manifest import is_pack
from offload.io.safetensors import CheckpointIndex
from offload.models import host_products, kv_plan, prompt_plan, single_rows
from offload.models.baseline import warm_card, warm_up
from offload.models.expert_options import check_recordable, policy_of
from offload.models.experts import check_expert_loop, other_than_loop
from offload.models.footprint import Footprint, measure
from offload.models.head_check import verified_rows
from offload.models.hybrid import activation_bytes, split_rows
from offload.models.meta import (
    MetaModel,
    build,
    model_class,
    pick_dtype,
    read_config,
    resolve,
)
from offload.models.options import (
    DEFAULT_CONTEXT,
    SAFE_SHARE,
    Options,
    Progress,
    beyond_free,
    check_device,
    safe_share,
)
from offload.models.params import parameters
from offload.models.pieces import learn_pieces
from offload.models.prepared import Prepared
from offload.models.prompt_plan import plan_prompts
from offload.models.question import Question, compiled_for
from offload.models.recipes import (
    Recipes,
    align_pins,
    make_recipes,
    placed_and_made,
    spill_directory,
)
from offload.models.request import (
    expert_top_k,
    grown_bytes,
    matrices,
    overhead_bytes,
    request_of,
    reserves_of,
)
from offload.models.split import fine_units
from offload.models.team_check import products_of
from offload.models.teams import plan_team
from offload.models.toy import Warm
from offload.models.units import Cut, cut
from offload.models.workspace import WHOLE, Workspace, limit_kernels, workspace_for
from offload.runtime import choice
from offload.runtime.cuda_stream import staging_reserve
from offload.runtime.heap import keep_small_heap
from offload.runtime.rss import available_ram, reset_peak_rss
from offload.runtime.slow_products import TWICE, slowness
from offload.scheduler.plan import SITE_ACTIVATIONS
from offload.scheduler.planner import PlanRequest
from offload.scheduler.policy import DEFAULT
from offload.units import format_bytes

logger = logging.getLogger(__name__)

__all__ = ["DEFAULT_CONTEXT", "Options", "Prepared", "Progress", "load", "plan_model", "prepare"]


def prepare(
    path: str | Path, options: Options, compiling: Callable[[Any], None] | None = None
) -> Prepared:
    """Plan a checkpoint. Loads no weights.

    Args:
        compiling: called with ``offload.cpu_ops.warm.Compiling`` while kernels
            are compiled that this machine does not have yet. None: a line in the log.

    Raises:
        CheckpointError, UnsupportedModelError: see ``offload.models.meta.build``.
        PlanError: the budget is too small; says the smallest that works.
        OffloadError: options that contradict each other.
    """
    limit_kernels(ram_budget(options))
    directory = resolve(path)
    if is_pack(directory):
        from offload.models.packed_load import prepare_packed

        return prepare_packed(directory, options, compiling)
    if options.kernels == "fast":
        raise OffloadError(
            f"{directory.name} is not packed, and fast kernels run on packed weights only; "
            f"offload.load(kernels='fast') and 'offload pack --quant none' pack it"
        )
    config = read_config(directory)
    index = CheckpointIndex.open(directory)
    dtype = pick_dtype(options.dtype, config, index)
    check_device(options)
    kind = model_class(config)
    warm_card(options.choice, config, kind, dtype)
    if single := single_rows.worth(index.total_bytes, dtype, options.choice.kind):
        single_rows.prepare(compiling)
    import_programs(options)
    keep_small_heap(ram_budget(options))
    learn_pieces(options, kind, config)
    warm = warm_up(config, kind, dtype, options.hardware is not None, single)
    reset_peak_rss()
    prepared = plan_model(directory, options, warm, compiling)
    prepared.single_rows = single_rows.SingleRows() if single else None
    return prepared


def import_programs(options: Options) -> None:
    """Import what these options call on, before the bare process is weighed: Numba alone is 50 MiB,
    of the program and of no budget."""
    if options.sequences > 1:
        from offload.cpu_ops import row_products  # whose products are joined asks it, on a card too

        if options.choice.kind != "cuda":
            row_products.prepare()
    if kv_plan.attends_in_place(options):
        from offload.cpu_ops import block_attention, block_quantise, isa, warm  # noqa: F401

        isa.features()
    if options.prompt_cache is not None:
        from offload.models import pack_checkpoint  # noqa: F401

        prompt_plan.machine()


def ram_budget(options: Options) -> int:
    """Bytes asked for, or a safe share of what is free."""
    return options.ram if options.ram is not None else int(available_ram() * SAFE_SHARE)


@dataclass(kw_only=True)
class CheckpointQuestion(Question):
    """What the planner is asked of a checkpoint that is streamed as it is.

    Attributes:
        cut, recipes: into which blocks, and how each is read. Both change when the head is
            streamed in slices.
        cache: bytes of keys and values of one sequence in one piece.
        prompt: tokens that a pass reads at most.
        kept: bytes of what is made when the model is loaded and stays.
        grown: bytes that the process has grown by, as of ``grown_bytes``.
        workspace: bytes that torch's products take.
        apart: dense layers that the host may compute beside a device.
        rows: tokens of a pass whose experts both sites share, at most.
        policy: which experts leave, see ``policy_of``.
    """

    meta: MetaModel
    warm: Warm
    footprint: Footprint
    device: str
    cut: Cut
    recipes: Recipes
    cache: int
    prompt: int
    kept: int
    grown: int
    workspace: Workspace
    apart: frozenset[str]
    rows: int
    policy: tuple[str, tuple[str, ...]] = (DEFAULT, ())

    def __call__(self, ram: int) -> PlanRequest:
        return request_of(
            self.meta, self.cut, self.options, self.warm, self.budgets, self._set_aside(ram),
            self.top, self.recipes.staged, self.policy, split_rows=self.rows,
            apart=host_products.apart_blocks(self.cut, self.apart),
            apart_rows=host_products.ROWS if self.options.hybrid else 0,
        )  # fmt: skip

    def fits(self) -> bool:
        """Whether all weights can stay where they are multiplied with."""
        weights = sum(s.slot_nbytes for s in self.cut.blocks.values())
        aside = self._set_aside(self.ram)[self.top]
        return weights + sum(aside.values()) <= self.budgets[self.top]

    def _set_aside(self, ram: int) -> dict[Tier, dict[str, int]]:
        """What is no weight, in bytes by name."""
        options, prompt = self.options, self.prompt
        staging = staging_reserve(both_ways=bool(options.hybrid)) if self.staged_copies else 0
        found = reserves_of(
            self.meta, self.cut, options, footprint=self.footprint,
            cache=self.cache * options.sequences, prompt=prompt, device=self.device,
            overhead=overhead_bytes(options, self.cut, grown=self.grown, ram=ram, prompt=prompt),
            ram=ram, kept=self.kept, workspace=self.workspace, staged=self.recipes.staged,
            kv=self.together, copies=staging,
        )  # fmt: skip
        if self.prompts is not None:
            found[Tier.RAM] |= self.prompts.reserves
        if options.hybrid:
            nbytes = host_products.product_bytes(self.cut, self.apart)
            if self.cut.groups:
                top_k = expert_top_k(self.meta.model.config)
                experts = activation_bytes(self.cut.groups, top_k, self.meta.dtype.itemsize)
                nbytes = max(nbytes, experts)
            for tier in (Tier.RAM, Tier.DEVICE):
                found[tier][SITE_ACTIVATIONS] = nbytes
        return found


def plan_model(
    directory: Path,
    options: Options,
    warm: Warm,
    compiling: Callable[[Any], None] | None = None,
) -> Prepared:
    """``prepare`` in a process that is warm already."""
    baseline = warm.baseline_rss - options.tokenizer_bytes
    device = check_device(options)
    on_card = device == "cuda"
    meta = build(directory, options.dtype)
    prompt = options.prompt_tokens or options.context
    flash = choice.flash(options.choice)
    footprint = measure(meta.model, prompt, options.batch, card=on_card, flash=flash)
    need = kv_plan.kv_need(meta.model, footprint, options, prompt)
    kv = kv_plan.asked_for(need, options, directory.name)
    baseline += compiled_for(kv, compiling)
    prompts = plan_prompts(options, meta, footprint, prompt, kv_plan.rounded(kv, options))
    notes = safe_share(options.ram)
    modules = fine_units(meta.model)
    if not on_card and not options.elsewhere and (slow := slowness(meta.dtype)):
        notes.append(f"{slow}: prompts are several times slower than with --dtype float32, {TWICE}")
    apart = host_products.apart_layers(meta.model, modules if options.hybrid else ())
    phases, made = placed_and_made(parameters(meta.model).values(), meta.mapping)
    if on_card:
        phases = {}  # a card's tensors each start where its allocator puts them

    def cut_it(stream_head: bool) -> tuple[Cut, Recipes]:
        found = cut(meta.model, stream_head=stream_head, modules=modules, keep=made, phases=phases)
        drop_unloopable(found, notes)
        return found, make_recipes(found, meta.mapping, card=on_card)

    chosen, recipes = cut_it(False)
    # Before what the process has grown by is read. A card's is CARD_BYTES.
    workspace = WHOLE if on_card else workspace_for(matrices(chosen))
    question = CheckpointQuestion(
        options=options, name=directory.name, ram=ram_budget(options), baseline=baseline,
        need=need, kv=kv, prompts=prompts, compiling=compiling, meta=meta, warm=warm,
        footprint=footprint, device=device, cut=chosen, recipes=recipes,
        cache=footprint.cache_bytes * max(options.context, prompt) // max(prompt, 1),
        prompt=prompt, kept=sum(made.values()), grown=grown_bytes(options, baseline),
        workspace=workspace, apart=apart, rows=split_rows(options, chosen, apart),
    )  # fmt: skip
    if question.staged_copies is not None:
        notes.append(choice.STAGED.format(why=question.staged_copies))
    head_rows = None
    if not question.fits():
        trial = cut(meta.model, stream_head=True, modules=modules, keep=made, phases=phases)
        head_rows, slices = try_head(trial, notes, options.choice.name)
        chosen, recipes = question.cut, question.recipes = cut_it(slices)
    question.policy = policy_of(options, chosen)
    check_recordable(options, chosen)
    plan = question.answer()
    if question.together is not None:
        notes.append(question.together.note(options))
    if prompts is not None:
        notes.append(prompts.note)
    products = partial(products_of, meta.model, chosen, options.context)
    plan, team, said = plan_team(plan, question(question.ram), options, products, question.finished)
    plan = align_pins(plan, chosen, recipes)
    notes += said + _said_of(recipes, chosen, footprint, options)
    if not options.elsewhere:
        notes += beyond_free(plan.resident_bytes(Tier.RAM))
    return Prepared(
        meta=meta, options=options, cut=chosen, recipes=recipes, plan=plan,
        request=question(question.ram), ask=question, footprint=footprint,
        baseline_rss=question.baseline, head_rows=head_rows, notes=notes + chosen.notes,
        kv=question.together, kv_alone=question.kv, prompts=question.prompts, team=team,
        between_s=warm.fixed_s,
    )  # fmt: skip


def _said_of(recipes: Recipes, chosen: Cut, footprint: Footprint, options: Options) -> list[str]:
    """What a user should know of how blocks are read and activations counted."""
    notes = []
    if recipes.convert:
        total = recipes.convert_bytes(chosen.blocks)
        why = next(iter(recipes.reasons.values()))
        notes.append(
            f"{len(recipes.convert)} of {len(chosen.blocks)} blocks ({format_bytes(total)}) are "
            f"converted once into a private file in {spill_directory(options.disk)} ({why})"
        )
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    return notes


def load(path: str | Path, options: Options, progress: Progress | None = None) -> Any:
    """Prepare and open in one step; with fast kernels, measure their error."""
    prepared = prepare(path, options)
    model = prepared.open(progress)
    try:
        prepared.check_kernels(model)
    except BaseException:
        model.offload.close()
        raise
    return model


def drop_unloopable(result: Cut, notes: list[str]) -> None:
    """Experts whose loop cannot take one expert at a time are streamed with their layer."""
    verdicts: dict[type, str | None] = {}
    bad = []
    for group in result.groups:
        kind = type(group.module)
        why = other_than_loop(group)
        if why is None:
            if kind not in verdicts:
                verdicts[kind] = check_expert_loop(group)
            why = verdicts[kind]
        if why is not None:
            bad.append((group, why))
    if not bad:
        return
    from offload.models.units import demote

    demote(result, [group for group, _ in bad])
    note = f"experts are streamed by layer: {bad[0][1]}"
    if note not in notes:
        notes.append(note)


def try_head(
    trial: Cut, notes: list[str], device: str = "cpu"
) -> tuple[frozenset[int] | None, bool]:
    """Whether the LM head can be streamed in slices as in ``trial``, for how many rows at once,
    when ``device`` (by torch's name) computes."""
    if trial.head is None:
        return None, True
    vocabulary, width = trial.head.param.tensor.shape
    step = trial.head.rows[0][1]
    param = trial.head.param
    rows = verified_rows(
        vocabulary,
        width,
        param.tensor.dtype,
        step,
        torch.get_num_threads(),
        phase=param.phase,
        device=device,
    )
    if 1 in rows:
        return rows, True
    notes.append("the LM head stays whole: in slices it is not bit-equal on this machine")
    return None, False
