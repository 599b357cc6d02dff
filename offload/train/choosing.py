"""What a run trains, and its plan: of all that fit, the one whose step is predicted fastest.

Nothing of a machine or of data is asked for here but by what the caller hands in, so that the same
choice is made for a machine that is not there (``outlook``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from offload.blocks import align_up
from offload.errors import PlanError
from offload.models.expert_groups import expert_groups
from offload.models.workspace import CARD_BYTES
from offload.train.device_plan import (
    FALLING_SHARE,
    DevicePlacement,
    HandOver,
    device_units,
    plan_device,
    visit_bytes,
)
from offload.train.footprint import Given, TrainFootprint, measure_training
from offload.train.head_choice import head_places, with_reason
from offload.train.head_find import HeadForm, find_head
from offload.train.head_place import HeadPlacement
from offload.train.head_weights import HEAD_ROWS
from offload.train.keeping import KeptGraphs, plans_keeping
from offload.train.layout import TrainLayout, lay_out
from offload.train.link import BACKWARD, FORWARD, Link, Visited, link_of
from offload.train.lora import Adapters, inject
from offload.train.needs import (
    OnMeta,
    graph_sizes,
    head_in_slices,
    loss_bytes,
    product_bytes,
    row_tables,
    rows_in_ram,
    sum_dtype,
    touched_shares,
)
from offload.train.options import TrainOptions
from offload.train.packed_base import PackedBase
from offload.train.plan import (
    FREED,
    LOSS,
    ORDERS,
    WORKING,
    Needs,
    TrainPlan,
    affordable,
    freed_bytes,
    make_plan,
)
from offload.train.predicting import PHASES, Prediction, StepRates, predict
from offload.train.reading import Routing
from offload.train.spilling import KEPT, KeptInputs, best, input_sizes, plans
from offload.train.update_choice import best_every, faster, update_places
from offload.train.update_place import UpdatePlacement, moved_bytes
from offload.train.updates import Updater


@dataclass(frozen=True, slots=True)
class Shape:
    """What is computed in a step, for whoever says how long that takes."""

    layout: TrainLayout
    modules: list[Any]
    """Units but for the head."""
    form: HeadForm | None
    tables: Sequence[torch.Tensor]
    """Parameters whose gradients from lookups leave by rows."""
    away: frozenset[int] = frozenset()
    """Units that run on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plan, and what it is of."""

    adapters: Adapters | None
    form: HeadForm | None
    layout: TrainLayout
    plan: TrainPlan
    prediction: Prediction | None
    grad_dtype: str | None


def choose(
    meta: OnMeta, options: TrainOptions, *, ram: int, versions: int, notes: list[str],
    process_bytes: Callable[[], int], rates_of: Callable[[Shape], StepRates | None],
    base: PackedBase | None = None, more: Mapping[str, int] = {}, gpu: int | None = None,
    card_flash: bool | None = None, keeps_freed: bool = False,
) -> Chosen:  # fmt: skip
    """Lay out ``meta.model`` and plan its training; adapters are added to it.

    Args:
        ram: the budget.
        versions: as of ``make_plan``.
        notes: gets what the user should know.
        process_bytes: of RAM, what the process itself takes of the budget; asked for once
            everything of the model is there.
        rates_of: what computing and the disk take; None: nobody knows, and the first plan that
            fits is taken.
        more: of RAM, by name.
        gpu: the budget of the device that layers run on; None: there is none.
        card_flash: the device is a card, and whether flash attention runs on it; None: it is
            simulated, and the CPU computes.
        keeps_freed: freed blocks may stay with the process (``heap.keeping_freed``).

    Raises:
        PlanError: it does not fit.
    """
    adapters = _choose_trained(meta, options)
    form, why = find_head(meta.model)
    if form is None:
        notes.append(f"the model's own loss is used, with whole logits: {why}")
    layout = lay_out(meta.model, packed=() if base is None else base.names)
    if base is not None:
        base.attach(layout)
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
    heads, why = head_places(
        meta, options, gpu, form, layout, base, grad_dtype, card=card_flash is not None
    )
    passes = 1 if vertical > 1 else options.grad_accum

    def tier_of(
        head: HeadPlacement | None, updates: UpdatePlacement | None
    ) -> tuple[_Tier, int]:  # fmt: skip
        device, working = _device_tier(
            meta, options, gpu, layout, modules, footprint, tables, row_tables(layout, rows), head,
            card_flash, updates, ram // FALLING_SHARE,
        )  # fmt: skip
        if device is None:
            return _Tier(None, None), working
        link = link_of(
            layout, device, _visits(layout, modules, footprint, *_router_copies(meta, options)),
            passes=passes, micro_batches=options.grad_accum,
            routed=touched_shares(meta, layout, options, micro_batches=1),
        )  # fmt: skip
        return _Tier(device, link), working

    inputs = KeptInputs(
        sizes=input_sizes(layout, modules, footprint), at_once=vertical,
        micro_batches=options.grad_accum,
    )  # fmt: skip
    graphs = KeptGraphs(
        sizes=graph_sizes(layout, modules, footprint, options), at_once=vertical
    )  # fmt: skip
    process = process_bytes()

    def fixed_of(tier: _Tier, working: int) -> dict[str, int]:
        device = tier.device
        loss = loss_bytes(meta, form, options, grad_dtype)
        if device is not None and device.head is not None:
            loss = device.head.host_bytes
        fixed = {
            WORKING: working,
            KEPT: footprint.boundary_bytes * vertical + footprint.shared_bytes * (vertical + 1),
            LOSS: loss,
            "compiled products": product_bytes(layout, options, ram),
        }
        if device is not None:
            fixed["copies to and from the device"] = device.host_bytes
        fixed.update(more)
        if base is not None:
            tokens = options.batch_size * options.seq_len * vertical
            on_device = frozenset[int]() if device is None else device.units
            fixed["unpacked weights"] = base.work_bytes(layout, on_device) + base.scratch_bytes
            fixed["rows of packed tables"] = base.table_bytes(
                layout, tokens, HEAD_ROWS, sliced=form is not None
            )
        fixed["Python, data, tokenizer"] = process
        return fixed

    fetched = max(
        (2 * layout.blocks[ids[0]].nbytes for u in layout.units for ids in u.experts.values()),
        default=0,
    )
    sliced = head_in_slices(layout, form, head, options)
    updated = touched_shares(meta, layout, options) if options.skip_untouched_experts else {}
    routing = Routing(
        shares=touched_shares(meta, layout, options, micro_batches=1),
        micro_batches=options.grad_accum,
    )
    always = frozenset[int]() if adapters is None else adapters.blocks(layout)

    def planned(place: HeadPlacement | None, updates: UpdatePlacement | None) -> _Planned:
        """Every plan with the head, and room for tiles, there.

        Raises:
            PlanError: none fits.
        """
        tier, working = tier_of(place, updates)
        device, link = tier.device, tier.link
        fixed = fixed_of(tier, working)
        needs = Needs(
            fixed=fixed, kinds=Updater.kinds(layout, options.states),
            grad_dtype=grad_dtype, fetched_bytes=fetched, rows=rows, sliced=sliced,
            updated=updated, routing=routing, copies={} if link is None else link.copies,
        )  # fmt: skip
        keeps_graphs = base is None and device is None

        def placed(needs: Needs) -> list[TrainPlan]:
            found: list[TrainPlan] = []
            for first in ORDERS:
                make = partial(
                    make_plan, layout, budget=ram, versions=versions, clipping=clipping,
                    backwards=passes, first=first, always=always,
                )  # fmt: skip
                found += plans(make, needs, inputs)
                if keeps_graphs:
                    buffers = found[-1].placement.buffers
                    found += plans_keeping(make, needs, graphs, buffers=buffers)
            return found

        found = placed(needs)
        freed = freed_bytes(working, fixed[LOSS]) if keeps_freed and device is None else 0
        if freed:
            with contextlib.suppress(PlanError):  # without room they leave
                keeping = placed(replace(needs, fixed={**fixed, FREED: freed}))
                found = keeping + found if affordable(freed, ram) else found + keeping
        if device is not None and link is not None:
            found = [replace(p, placement=replace(p.placement, device=device)) for p in found]
        return _Planned(tier, needs, found, layout, FORWARD if clipping else BACKWARD)

    aside = update_places(
        options, gpu, layout, Updater.kinds(layout, options.states), grad_dtype,
        card=card_flash is not None,
    )  # fmt: skip
    every: dict[bool, _Planned] = {}
    sending: dict[bool, _Planned] = {}
    refused: PlanError | None = None
    for place in heads:
        try:
            every[place is not None] = planned(place, aside[0])
        except PlanError as error:
            refused = error  # the last one needs least
            much = str(error).partition(": ")[0]
            why = f"{much} for them there" if place is not None else f"{much} for them in RAM"
            continue
        for updates in aside[1:]:
            with contextlib.suppress(PlanError):  # without room they stay in RAM
                sending[place is not None] = planned(place, updates)
    if not every:
        assert refused is not None
        if options.head == "gpu":
            raise PlanError(f"{refused}; or drop --head gpu")
        raise refused
    away = next(iter(every.values())).tier.device
    rates = rates_of(Shape(layout, modules, form, tables, away.units if away else frozenset()))
    if rates is not None and base is not None and card_flash is None:  # a card's cost nothing
        rates = rates.with_work(base.unpack_seconds(layout, options.grad_accum, passes))
    taken: dict[bool, tuple[TrainPlan, Prediction | None]] = {}
    for there, mine in every.items():
        taken[there] = mine.plans[0], None
        if rates is None:
            continue
        mine_rates = rates.with_head_away() if there else rates

        def seconds(p: TrainPlan, of: _Planned, rates: StepRates = mine_rates) -> Prediction:
            return predict(
                p, layout, of.needs, rates, clipping=clipping, backwards=passes, link=of.link(p)
            )  # fmt: skip

        def fastest(of: _Planned) -> tuple[TrainPlan, Prediction]:
            predictions = [seconds(p, of) for p in of.plans]
            i = best(of.plans, predictions)
            return of.plans[i], predictions[i]

        taken[there] = without = fastest(mine)
        if there in sending and rates.update_away is not None:
            plan, _ = fastest(sending[there])
            tried = best_every(plan, partial(seconds, of=sending[there]))
            taken[there] = faster(without, tried)
    (plan, prediction), why = with_reason(taken, why)
    device = plan.placement.device
    if device is not None:
        placed = replace(plan.placement, device=replace(device, head_why=why))
        there = device.head is not None
        # Room for tiles is another tier's, whose weights may go up more often.
        sends = device.updates is not None and there in sending
        link = (sending if sends else every)[there].link(plan)
        assert link is not None
        moved = {phase: link.bytes_of(i) for i, phase in enumerate(PHASES)}
        plan = replace(plan, placement=placed, link=moved)
    return Chosen(
        adapters=adapters, form=form, layout=layout, plan=plan, prediction=prediction,
        grad_dtype=grad_dtype,
    )  # fmt: skip


class _Tier(NamedTuple):
    """A device's tier, and what a step copies for it."""

    device: DevicePlacement | None
    link: Link | None


class _Planned(NamedTuple):
    """All plans with the head in one place."""

    tier: _Tier
    needs: Needs
    plans: list[TrainPlan]
    layout: TrainLayout
    updating: int
    """The phase that states are updated in."""

    def link(self, plan: TrainPlan) -> Link | None:
        """What a step of ``plan`` copies."""
        device, needs = plan.placement.device, self.needs
        if self.tier.link is None or device is None:
            return None
        moved = moved_bytes(
            self.layout, needs.kinds, needs.grad_dtype, device.updates, needs.updated
        )
        up, down = (sum(column) for column in zip((0.0, 0.0), *moved.values(), strict=True))
        return replace(self.tier.link, states=(up, down), updating=self.updating)


def _device_tier(
    meta: OnMeta, options: TrainOptions, gpu: int | None, layout: TrainLayout,
    modules: Sequence[Any], whole: TrainFootprint, tables: Sequence[torch.Tensor],
    by_rows: frozenset[str], head: HeadPlacement | None, card_flash: bool | None,
    updates: UpdatePlacement | None, falling: int,
) -> tuple[DevicePlacement | None, int]:  # fmt: skip
    """The device's tier, with ``head`` there, and bytes of activations of a unit in RAM, where
    ``whole`` is what all units take."""
    if gpu is None:
        return None, whole.unit_bytes
    units = device_units(layout, by_rows)
    away = {id(layout.units[u].module) for u in units}

    def working(there: bool) -> int:
        mine = [m for m in modules if (id(m) in away) is there]
        shape = options.batch_size, options.seq_len
        if not mine:
            return 0
        flash = card_flash if there else None
        return measure_training(meta.model, mine, *shape, tables, flash).unit_bytes

    beside, probabilities = _router_bytes(meta, options)
    up, down = visit_bytes(
        max(whole.inputs, default=0) or -(-whole.boundary_bytes // len(modules)),
        whole.shared_bytes + beside,
    )
    work = working(True) + probabilities
    given = [
        g for m, some in zip(modules, whole.given, strict=False) if id(m) in away for g in some[1:]
    ]
    alike = {g.number: g.nbytes for g in given if sum(g.number == o.number for o in given) > 1}
    results = max(whole.results, default=down // 2)
    marks, sums = _router_copies(meta, options)
    hand_over = HandOver(
        result=align_up(max(results, max(whole.inputs, default=0))) + 2 * align_up(sums),
        same=sum(map(align_up, (*alike.values(), marks, sums))),
        turns=options.grad_accum if options.order == "vertical" else 1,
    )
    kernels = 0 if card_flash is None else CARD_BYTES
    placed = plan_device(
        layout, gpu, units, up=up, down=down, work=work, head=head, kernels=kernels,
        updates=updates, hand_over=hand_over, falling=falling,
    )  # fmt: skip
    return placed, working(False)


def _visits(
    layout: TrainLayout,
    modules: Sequence[Any],
    footprint: TrainFootprint,
    mask: int = 0,
    sums: int = 0,
) -> dict[int, Visited]:
    """What each unit moves when it runs on a device, but for its weights. By formula where it was
    not measured: an input, and a result of its size. ``mask``, ``sums``: of ``_router_copies``."""
    like = footprint.boundary_bytes // max(1, len(modules))
    sizes: list[Sequence[int]] = [footprint.arguments, footprint.results, footprint.inputs]
    given: Sequence[Sequence[Given]] = footprint.given
    if not all(sizes):
        sizes = [[n] * len(modules) for n in (like + footprint.shared_bytes, like, like)]
        alike = Given(-1, footprint.shared_bytes, -1)
        given = [(Given(i, like, i - 1), alike) for i in range(len(modules))]
    index = {id(unit.module): unit.index for unit in layout.units}
    visits = {}
    for module, arguments, results, inputs, mine in zip(modules, *sizes, given, strict=True):
        unit = layout.units[index[id(module)]]
        marks, each = (mask, sums) if unit.experts else (0, 0)
        own = mine[0] if mine else Given(-1, 0, -1)
        visits[unit.index] = Visited(
            arguments=arguments, results=results, inputs=inputs,
            handed=own.nbytes if own.maker >= 0 else 0,
            maker=index[id(modules[own.maker])] if own.maker >= 0 else None,
            same=tuple((g.number, g.nbytes) for g in mine[1:] if g.maker < 0),
            router_mask=marks, router_down=2 * each, router_up=each,
        )  # fmt: skip
    return visits


def _router_bytes(meta: OnMeta, options: TrainOptions) -> tuple[int, int]:
    """(bytes that a layer is given for its load-balancing loss: which tokens count, the experts'
    shares; bytes that it makes of its router's logits), zeros without such a loss."""
    if options.router_aux_loss is None:
        return 0, 0
    experts = max(group.n_experts for group in expert_groups(meta.model))
    tokens = options.batch_size * options.seq_len
    # Logits without padding, probabilities in the model's dtype and in float32, and gradients.
    return align_up(tokens) + align_up(4 * experts), 6 * 4 * tokens * experts


def _router_copies(meta: OnMeta, options: TrainOptions) -> tuple[int, int]:
    """(bytes that say which tokens a router counts, bytes of a number for each expert: a layer's
    router sends two of these down, how often chosen and how likely, and gets the shares)."""
    if options.router_aux_loss is None:
        return 0, 0
    experts = max(group.n_experts for group in expert_groups(meta.model))
    return options.batch_size * options.seq_len, 4 * experts


def _choose_trained(meta: OnMeta, options: TrainOptions) -> Adapters | None:
    """Everything that its class does not keep as it is (tables of sines, biases that a router only
    counts with), or nothing but the adapters that are added here."""
    if options.method == "full":
        return None
    adapters = inject(
        meta.model, r=options.lora_r, alpha=options.lora_alpha, dropout=options.lora_dropout,
        targets=options.lora_targets, seed=options.seed,
    )  # fmt: skip
    if options.merge:
        adapters.check_mergeable()
    return adapters


__all__ = ["Chosen", "Shape", "choose"]
