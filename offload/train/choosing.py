"""What a run trains, and its plan: of all that fit, the one whose step is predicted fastest.

Nothing of a machine or of data is asked for here but by what the caller hands in, so that the same
choice is made for a machine that is not there (``outlook``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.train.candidates import Candidates, Limits, Offers
from offload.train.head_choice import head_places, with_reason
from offload.train.head_find import HeadForm, find_head
from offload.train.layout import TrainLayout, lay_out
from offload.train.lora import Adapters, inject
from offload.train.needs import OnMeta
from offload.train.options import TrainOptions
from offload.train.packed_base import PackedBase
from offload.train.plan import TrainPlan
from offload.train.predicting import PHASES, Prediction, StepRates


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
    limits = Limits(
        ram=ram, versions=versions, process_bytes=process_bytes, more=more, gpu=gpu,
        card_flash=card_flash, keeps_freed=keeps_freed,
    )  # fmt: skip
    candidates = Candidates(
        meta, options, layout, form, base=base, adapters=adapters, limits=limits
    )
    if not candidates.footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    grad_dtype = candidates.grad_dtype
    places = head_places(meta, options, gpu, form, layout, base, grad_dtype, card=limits.card)
    offers = candidates.offers(*places)
    rates = rates_of(Shape(layout, candidates.modules, form, candidates.tables, offers.away))
    if rates is not None and base is not None and not limits.card:  # a card's cost nothing
        passes = candidates.passes
        rates = rates.with_work(base.unpack_seconds(layout, options.grad_accum, passes))
    (plan, prediction), why = with_reason(candidates.taken(offers, rates), offers.why)
    return Chosen(
        adapters=adapters, form=form, layout=layout, plan=_with_copies(plan, offers, why),
        prediction=prediction, grad_dtype=grad_dtype,
    )  # fmt: skip


def _with_copies(plan: TrainPlan, offers: Offers, why: str) -> TrainPlan:
    """A plan with what it copies to and from its device, and ``why`` the head is where it is."""
    device = plan.placement.device
    if device is None:
        return plan
    there = device.head is not None
    # Room for tiles is another tier's, whose weights may go up more often.
    sends = device.updates is not None and there in offers.sending
    link = (offers.sending if sends else offers.every)[there].link(plan)
    assert link is not None
    moved = {phase: link.bytes_of(i) for i, phase in enumerate(PHASES)}
    placed = replace(plan.placement, device=replace(device, head_why=why))
    return replace(plan, placement=placed, link=moved)


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
