"""From a checkpoint and budgets to a streamed model: prepare, plan, open.

``prepare`` reads headers, measures what the process weighs and what the model needs besides its
weights, and makes the plan; nothing is loaded. ``Prepared.open`` loads what is pinned and
attaches the hooks. The command line prints the plan in between.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.blocks import Tier
from offload.errors import OffloadError, PlanError
from offload.io.pack_manifest import is_pack
from offload.io.safetensors import CheckpointIndex
from offload.models import host_products, kv_plan, kv_speed, prompt_plan
from offload.models.baseline import warm_card, warm_up
from offload.models.expert_options import check_recordable, policy_of
from offload.models.experts import check_expert_loop, other_than_loop
from offload.models.footprint import Footprint, measure
from offload.models.head_check import verified_rows
from offload.models.hybrid import activation_bytes, split_rows
from offload.models.kernel_error import KernelError
from offload.models.kv_plan import KvPlan
from offload.models.meta import (
    MetaModel,
    build,
    model_class,
    pick_dtype,
    read_config,
    resolve,
)
from offload.models.naming import model_name
from offload.models.opening import open_prepared
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
from offload.models.prompt_plan import PromptPlan, plan_prompts
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
from offload.models.teams import TeamPlan, plan_team
from offload.models.toy import Warm
from offload.models.units import Cut, cut
from offload.models.workspace import WHOLE, limit_kernels, workspace_for
from offload.runtime import choice
from offload.runtime.cuda_stream import staging_reserve
from offload.runtime.heap import keep_small_heap
from offload.runtime.rss import available_ram, current_rss, reset_peak_rss
from offload.runtime.slow_products import TWICE, slowness
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import SITE_ACTIVATIONS, Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.units import format_bytes

logger = logging.getLogger(__name__)

__all__ = ["DEFAULT_CONTEXT", "Options", "Prepared", "Progress", "load", "plan_model", "prepare"]


@dataclass(kw_only=True)
class Prepared:
    """A plan for a checkpoint, with everything ``open`` needs to carry it out."""

    meta: MetaModel
    options: Options
    cut: Cut
    recipes: Recipes
    plan: Plan
    request: PlanRequest
    ask: Callable[[int], PlanRequest]
    footprint: Footprint
    baseline_rss: int
    head_rows: frozenset[int] | None
    notes: list[str] = field(default_factory=list)
    kv: KvPlan | None = None
    """Where keys and values live, if they are kept in blocks."""
    kv_alone: KvPlan | None = None
    """The same of one sequence, where several run beside each other."""
    prompts: PromptPlan | None = None
    """The prompt cache, if there is one."""
    kernel_error: KernelError | None = None
    team: TeamPlan | None = None
    """Who computes a token, where that is not always all threads."""
    between_s: float = 0.0
    """What ``generate`` takes between the layers of two tokens; a part of the plan's overheads."""

    @property
    def minimum(self) -> Mapping[Tier, int]:
        """The smallest budgets in bytes that this model, context and cut can run in."""
        return least_budgets(self.ask)

    def replan(self) -> None:
        """Make the plan anew after ``options.sequences`` or ``pass_rows`` have changed.

        Raises:
            PlanError: it does not fit.
        """
        ram = self.plan.budgets[Tier.RAM]
        if self.kv_alone is None:
            self.kv_alone = self.kv
        before = None if self.kv is None else self.kv.note(self.options)
        plan = kv_plan.in_ram_or_spilled(
            self.options, lambda: plan_within(self.ask, ram, model_name(self.meta.directory))
        )
        kv = kv_plan.beside(self.kv_alone, self.options)
        self.request = self.ask(ram)
        if kv is not None:
            plan = kv_speed.predicted(plan, kv, self.request.costs)
            self.notes = [kv.note(self.options) if n == before else n for n in self.notes]
        else:
            plan = self._attended(plan)
        if self.team is not None:  # of a pass with one token of one sequence
            self.notes = [note for note in self.notes if note != self.team.note]
            self.team = None
        self.plan, self.kv = self.aligned(plan), kv

    def kv_json(self) -> dict[str, Any] | None:
        """Of keys and values that are kept otherwise than by transformers, sizes in bytes."""
        return None if self.kv is None else self.kv.to_json()

    def _attended(self, plan: Plan) -> Plan:
        """With what going over keys and values takes, where they are in one piece."""
        return plan

    def aligned(self, plan: Plan) -> Plan:
        """With what it pins laid where products read it best, see ``align_pins``."""
        return align_pins(plan, self.cut, self.recipes)

    def open(self, progress: Progress | None = None, wrap_store: Any = None) -> Any:
        """Load what is pinned and return the model, ready to run."""
        return open_prepared(self, progress, wrap_store)

    def check_kernels(self, model: Any) -> None:
        """Measure how far the opened model's kernels are from torch's, if fast ones were asked
        for: ``kernel_error``. These are torch's."""


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
    dtype = pick_dtype(options.dtype, config, CheckpointIndex.open(directory))
    check_device(options)
    kind = model_class(config)
    warm_card(options.choice, config, kind, dtype)
    import_programs(options)
    keep_small_heap(ram_budget(options))
    learn_pieces(options, kind, config)
    warm = warm_up(config, kind, dtype, options.hardware is not None)
    reset_peak_rss()
    return plan_model(directory, options, warm, compiling)


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


def compiled_bytes(kernels: list[Any], compiling: Callable[[Any], None] | None = None) -> int:
    """Compile what is missing and load all; returns by how much the process has grown, which is
    the program and not the model."""
    from offload.cpu_ops.warm import compile_ahead

    before = current_rss()
    compile_ahead(kernels, compiling)
    gc.collect()
    grown = max(0, current_rss() - before)
    reset_peak_rss()
    return grown


def ram_budget(options: Options) -> int:
    """Bytes asked for, or a safe share of what is free."""
    return options.ram if options.ram is not None else int(available_ram() * SAFE_SHARE)


def plan_model(
    directory: Path,
    options: Options,
    warm: Warm,
    compiling: Callable[[Any], None] | None = None,
) -> Prepared:
    """``prepare`` in a process that is warm already."""
    baseline = warm.baseline_rss - options.tokenizer_bytes
    device = check_device(options)
    meta = build(directory, options.dtype)
    prompt = options.prompt_tokens or options.context
    flash = choice.flash(options.choice)
    footprint = measure(meta.model, prompt, options.batch, card=device == "cuda", flash=flash)
    cache = footprint.cache_bytes * max(options.context, prompt) // max(prompt, 1)
    ram = ram_budget(options)
    need = kv_plan.kv_need(meta.model, footprint, options, prompt)
    kv = kv_plan.asked_for(need, options, directory.name)
    if kv is not None and kv.need.in_place:
        baseline += compiled_bytes(kv.need.kernels(), compiling)
    prompts = plan_prompts(options, meta, footprint, prompt, kv_plan.rounded(kv, options))
    notes = safe_share(options.ram)
    modules = fine_units(meta.model)
    if device != "cuda" and not options.elsewhere and (slow := slowness(meta.dtype)):
        notes.append(f"{slow}: prompts are several times slower than with --dtype float32, {TWICE}")
    apart = host_products.apart_layers(meta.model, modules if options.hybrid else ())
    phases, made = placed_and_made(parameters(meta.model).values(), meta.mapping)
    if device == "cuda":
        phases = {}  # a card's tensors each start where its allocator puts them

    def cut_it(stream_head: bool) -> Cut:
        return cut(meta.model, stream_head=stream_head, modules=modules, keep=made, phases=phases)

    chosen = cut_it(False)
    drop_unloopable(chosen, notes)
    recipes = make_recipes(chosen, meta.mapping, card=device == "cuda")
    # Before what the process has grown by is read. A card's is CARD_BYTES.
    workspace = WHOLE if device == "cuda" else workspace_for(matrices(chosen))
    grown = grown_bytes(options, baseline)
    budgets = {Tier.RAM: ram}
    if (on_device := choice.budget(options.choice, options.gpu, ram)) is not None:
        budgets[Tier.DEVICE] = on_device
    top = max(budgets)
    on_card = device == "cuda"
    refused = choice.staged_copies(options.choice)
    if refused is not None:
        notes.append(choice.STAGED.format(why=refused))

    def set_aside(chosen: Cut, ram: int, staged: bool) -> dict[Tier, dict[str, int]]:
        overhead = overhead_bytes(options, chosen, grown=grown, ram=ram, prompt=prompt)
        found = reserves_of(
            meta,
            chosen,
            options,
            footprint=footprint,
            cache=cache * options.sequences,
            prompt=prompt,
            device=device,
            overhead=overhead,
            ram=ram,
            kept=sum(made.values()),
            workspace=workspace,
            staged=staged,
            kv=kv_plan.beside(kv, options),
            copies=0 if refused is None else staging_reserve(both_ways=bool(options.hybrid)),
        )
        if prompts is not None:
            found[Tier.RAM] |= prompts.reserves
        if options.hybrid:
            nbytes = host_products.product_bytes(chosen, apart)
            if chosen.groups:
                top_k = expert_top_k(meta.model.config)
                experts = activation_bytes(chosen.groups, top_k, meta.dtype.itemsize)
                nbytes = max(nbytes, experts)
            for tier in (Tier.RAM, Tier.DEVICE):
                found[tier][SITE_ACTIVATIONS] = nbytes
        return found

    rows = split_rows(options, chosen, apart)
    reserves = set_aside(chosen, ram, recipes.staged)
    weights = sum(s.slot_nbytes for s in chosen.blocks.values())
    head_rows = None
    if weights + sum(reserves[top].values()) > budgets[top]:
        head_rows, slices = try_head(cut_it(True), notes, options.choice.name)
        chosen = cut_it(slices)
        drop_unloopable(chosen, notes)
        recipes = make_recipes(chosen, meta.mapping, card=on_card)

    staged = recipes.staged
    policy = policy_of(options, chosen)
    check_recordable(options, chosen)

    def ask(ram: int) -> PlanRequest:
        """The planner's question if staging and slack were those of a budget of ``ram``."""
        aside = set_aside(chosen, ram, staged)
        return request_of(
            meta, chosen, options, warm, budgets, aside, top, staged, policy, split_rows=rows,
            apart=host_products.apart_blocks(chosen, apart),
            apart_rows=host_products.ROWS if options.hybrid else 0,
        )  # fmt: skip

    try:
        plan = plan_within(ask, ram, directory.name)
    except PlanError:
        if options.kv_ram is not None or need is None:
            raise
        # Then keys and values leave RAM, and what weights do not need at least is theirs.
        plain = minimum_budgets(ask(ram))[Tier.RAM]
        kv, options.kv_spill = kv_plan.least(need), True
        tiered = minimum_budgets(ask(ram))[Tier.RAM]
        if tiered >= plain:
            raise  # so little is cached that blocks take more
        kv = kv_plan.with_spare(need, kv, ram - tiered)
        if need.in_place:
            baseline += compiled_bytes(need.kernels(), compiling)
        plan = plan_within(ask, ram, directory.name)
    together = kv_plan.beside(kv, options)
    if together is not None:
        plan = kv_speed.predicted(plan, together, ask(ram).costs)
        notes.append(together.note(options))
    if prompts is not None:
        notes.append(prompts.note)

    def finished(plan: Plan, costs: CostModel | None) -> Plan:
        return plan if together is None else kv_speed.predicted(plan, together, costs)

    products = partial(products_of, meta.model, chosen, options.context)
    plan, team, said = plan_team(plan, ask(ram), options, products, finished)
    notes += said
    plan = align_pins(plan, chosen, recipes)
    if recipes.convert:
        total = recipes.convert_bytes(chosen.blocks)
        why = next(iter(recipes.reasons.values()))
        notes.append(
            f"{len(recipes.convert)} of {len(chosen.blocks)} blocks ({format_bytes(total)}) are "
            f"converted once into a private file in {spill_directory(options.disk)} ({why})"
        )
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    if not options.elsewhere:
        notes += beyond_free(plan.resident_bytes(Tier.RAM))
    return Prepared(
        meta=meta,
        options=options,
        cut=chosen,
        recipes=recipes,
        plan=plan,
        request=ask(ram),
        ask=ask,
        footprint=footprint,
        baseline_rss=baseline,
        head_rows=head_rows,
        notes=notes + chosen.notes,
        kv=together,
        kv_alone=kv,
        prompts=prompts,
        team=team,
        between_s=warm.fixed_s,
    )


def plan_within(ask: Callable[[int], PlanRequest], ram: int, name: str) -> Plan:
    """The plan for a budget. Raises PlanError: nothing fits; says the least that works, which has
    less staging and slack than what was asked for."""
    try:
        return make_plan(ask(ram))
    except PlanError:
        try:
            return make_plan(ask(least_budgets(ask)[Tier.RAM]))
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error


def least_budgets(ask: Callable[[int], PlanRequest]) -> Mapping[Tier, int]:
    """The smallest budgets that work. Staging and slack grow with the budget, by far less than
    it does, so asking again with the answer settles at once."""
    found: Mapping[Tier, int] = {Tier.RAM: 0}
    while True:
        ram = found[Tier.RAM]
        found = minimum_budgets(ask(ram))
        if found[Tier.RAM] <= ram:
            return found


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
