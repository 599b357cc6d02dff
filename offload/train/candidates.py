"""Every plan of a run that fits: by where the head is, and whether the device updates tiles, too.

What all of them share (activations, keeping, tables) is measured once, on meta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from offload.errors import PlanError
from offload.train.device_measure import measured_tier, router_copies, visits_of
from offload.train.device_plan import FALLING_SHARE, DevicePlacement
from offload.train.footprint import measure_training
from offload.train.head_find import HeadForm
from offload.train.head_place import HeadPlacement
from offload.train.head_weights import HEAD_ROWS
from offload.train.keeping import KeptGraphs, plans_keeping
from offload.train.layout import TrainLayout
from offload.train.link import BACKWARD, FORWARD, Link, link_of
from offload.train.lora import Adapters
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
from offload.train.placing import make_plan
from offload.train.plan import (
    FREED,
    LOSS,
    ORDERS,
    WORKING,
    Needs,
    TrainPlan,
    affordable,
    freed_bytes,
)
from offload.train.predicting import Prediction, StepRates, predict
from offload.train.reading import Routing
from offload.train.spilling import KEPT, KeptInputs, best, input_sizes, plans
from offload.train.update_choice import best_every, faster, update_places
from offload.train.update_place import UpdatePlacement, moved_bytes
from offload.train.updates import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan has to fit, and what is known of where it runs.

    Attributes:
        ram: the budget.
        versions: as of ``make_plan``.
        process_bytes: of RAM, what the process itself takes of the budget; asked for once
            everything of the model is there.
        more: of RAM, by name.
        gpu: the budget of the device that layers run on; None: there is none.
        card_flash: the device is a card, and whether flash attention runs on it; None: it is
            simulated, and the CPU computes.
        keeps_freed: freed blocks may stay with the process (``heap.keeping_freed``).
    """

    ram: int
    versions: int
    process_bytes: Callable[[], int]
    more: Mapping[str, int]
    gpu: int | None
    card_flash: bool | None
    keeps_freed: bool

    @property
    def card(self) -> bool:
        return self.card_flash is not None


class Tier(NamedTuple):
    """A device's tier, and what a step copies for it."""

    device: DevicePlacement | None
    link: Link | None


class Planned(NamedTuple):
    """All plans with the head in one place."""

    tier: Tier
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


@dataclass(frozen=True, slots=True)
class Offers:
    """All that fit, by whether the head is on the device; at least one."""

    every: dict[bool, Planned] = field(default_factory=dict)
    sending: dict[bool, Planned] = field(default_factory=dict)
    """With room for tiles that the device updates, where there is any."""
    why: str = ""
    """Why there is only one place for the head."""

    @property
    def away(self) -> frozenset[int]:
        """Units that run on the device."""
        device = next(iter(self.every.values())).tier.device
        return device.units if device else frozenset()


class Candidates:
    """The plans of one laid-out model under one budget."""

    def __init__(
        self, meta: OnMeta, options: TrainOptions, layout: TrainLayout, form: HeadForm | None, *,
        base: PackedBase | None, adapters: Adapters | None, limits: Limits,
    ) -> None:  # fmt: skip
        self._meta, self._options, self._layout, self._form = meta, options, layout, form
        self._base, self._limits = base, limits
        self._vertical = options.grad_accum if options.order == "vertical" else 1
        self.passes = 1 if self._vertical > 1 else options.grad_accum
        """Backward passes of a step."""
        self.clipping = options.max_grad_norm > 0
        self.grad_dtype = sum_dtype(options)
        # The head runs in slices if the form of the loss is known.
        head = None if form is None else meta.model.get_submodule(form.head)
        self.modules: list[Any] = [u.module for u in layout.units if u.module is not head]
        """Units but for the head."""
        self._rows = rows_in_ram(layout, options, self.grad_dtype)
        self._by_rows = row_tables(layout, self._rows)
        self.tables: Sequence[torch.Tensor] = [layout.params[n].tensor for n in self._by_rows]
        """Parameters whose gradients from lookups leave by rows."""
        self.footprint = measure_training(
            meta.model, self.modules, options.batch_size, options.seq_len, self.tables
        )
        self._inputs = KeptInputs(
            sizes=input_sizes(layout, self.modules, self.footprint), at_once=self._vertical,
            micro_batches=options.grad_accum,
        )  # fmt: skip
        self._graphs = KeptGraphs(
            sizes=graph_sizes(layout, self.modules, self.footprint, options),
            at_once=self._vertical,
        )  # fmt: skip
        self._process = limits.process_bytes()
        self._fetched = max(
            (2 * layout.blocks[ids[0]].nbytes for u in layout.units for ids in u.experts.values()),
            default=0,
        )
        self._sliced = head_in_slices(layout, form, head, options)
        self._updated = (
            touched_shares(meta, layout, options) if options.skip_untouched_experts else {}
        )
        self._shares = touched_shares(meta, layout, options, micro_batches=1)
        self._always = frozenset[int]() if adapters is None else adapters.blocks(layout)

    def offers(self, heads: Sequence[HeadPlacement | None], why: str) -> Offers:
        """What fits with the head in each of these places.

        Args:
            why: there is only one of them, if that is so.

        Raises:
            PlanError: nothing fits.
        """
        kinds = Updater.kinds(self._layout, self._options.states)
        aside = update_places(
            self._options, self._limits.gpu, self._layout, kinds, self.grad_dtype,
            card=self._limits.card,
        )  # fmt: skip
        found = Offers()
        refused: PlanError | None = None
        for place in heads:
            there = place is not None
            try:
                found.every[there] = self._planned(place, aside[0])
            except PlanError as error:
                refused = error  # the last one needs least
                much = str(error).partition(": ")[0]
                why = f"{much} for them there" if there else f"{much} for them in RAM"
                continue
            for updates in aside[1:]:
                with contextlib.suppress(PlanError):  # without room they stay in RAM
                    found.sending[there] = self._planned(place, updates)
        if not found.every:
            assert refused is not None
            if self._options.head == "gpu":
                raise PlanError(f"{refused}; or drop --head gpu")
            raise refused
        return replace(found, why=why)

    def taken(
        self, offers: Offers, rates: StepRates | None
    ) -> dict[bool, tuple[TrainPlan, Prediction | None]]:
        """The fastest plan for each place of the head; without rates the first one."""
        if rates is None:
            return {there: (mine.plans[0], None) for there, mine in offers.every.items()}
        taken: dict[bool, tuple[TrainPlan, Prediction | None]] = {}
        for there, mine in offers.every.items():
            its_rates = rates.with_head_away() if there else rates
            taken[there] = without = self._fastest(mine, its_rates)
            if there in offers.sending and rates.update_away is not None:
                sending = offers.sending[there]
                plan, _ = self._fastest(sending, its_rates)
                tried = best_every(plan, partial(self._seconds, of=sending, rates=its_rates))
                taken[there] = faster(without, tried)
        return taken

    def _seconds(self, plan: TrainPlan, of: Planned, rates: StepRates) -> Prediction:
        return predict(
            plan, self._layout, of.needs, rates, clipping=self.clipping, backwards=self.passes,
            link=of.link(plan),
        )  # fmt: skip

    def _fastest(self, of: Planned, rates: StepRates) -> tuple[TrainPlan, Prediction]:
        predictions = [self._seconds(plan, of, rates) for plan in of.plans]
        i = best(of.plans, predictions)
        return of.plans[i], predictions[i]

    def _planned(self, place: HeadPlacement | None, updates: UpdatePlacement | None) -> Planned:
        """Every plan with the head, and room for tiles, there.

        Raises:
            PlanError: none fits.
        """
        tier, working = self._tier_of(place, updates)
        device, link = tier.device, tier.link
        fixed = self._fixed(device, working)
        needs = Needs(
            fixed=fixed, kinds=Updater.kinds(self._layout, self._options.states),
            grad_dtype=self.grad_dtype, fetched_bytes=self._fetched, rows=self._rows,
            sliced=self._sliced, updated=self._updated,
            routing=Routing(shares=self._shares, micro_batches=self._options.grad_accum),
            copies={} if link is None else link.copies,
        )  # fmt: skip
        keeps_graphs = self._base is None and device is None
        found = self._placed(needs, keeps_graphs)
        freed = 0
        if self._limits.keeps_freed and device is None:
            freed = freed_bytes(working, fixed[LOSS])
        if freed:
            with contextlib.suppress(PlanError):  # without room they leave
                keeping = self._placed(replace(needs, fixed={**fixed, FREED: freed}), keeps_graphs)
                first = affordable(freed, self._limits.ram)
                found = keeping + found if first else found + keeping
        if device is not None and link is not None:
            found = [replace(p, placement=replace(p.placement, device=device)) for p in found]
        updating = FORWARD if self.clipping else BACKWARD
        return Planned(tier, needs, found, self._layout, updating)

    def _placed(self, needs: Needs, keeps_graphs: bool) -> list[TrainPlan]:
        """One for each order in which blocks get their places, and each way to keep inputs."""
        found: list[TrainPlan] = []
        for first in ORDERS:
            make = partial(
                make_plan, self._layout, budget=self._limits.ram, versions=self._limits.versions,
                clipping=self.clipping, backwards=self.passes, first=first, always=self._always,
            )  # fmt: skip
            found += plans(make, needs, self._inputs)
            if keeps_graphs:
                buffers = found[-1].placement.buffers
                found += plans_keeping(make, needs, self._graphs, buffers=buffers)
        return found

    def _tier_of(
        self, head: HeadPlacement | None, updates: UpdatePlacement | None
    ) -> tuple[Tier, int]:
        """The device's tier, and bytes of activations of a unit in RAM."""
        limits, options, layout = self._limits, self._options, self._layout
        device, working = measured_tier(
            self._meta, options, limits.gpu, layout, self.modules, self.footprint, self.tables,
            self._by_rows, head, limits.card_flash, updates, limits.ram // FALLING_SHARE,
        )  # fmt: skip
        if device is None:
            return Tier(None, None), working
        visits = visits_of(
            layout, self.modules, self.footprint, *router_copies(self._meta, options)
        )
        link = link_of(
            layout, device, visits, passes=self.passes, micro_batches=options.grad_accum,
            routed=self._shares,
        )  # fmt: skip
        return Tier(device, link), working

    def _fixed(self, device: DevicePlacement | None, working: int) -> dict[str, int]:
        """What a step takes of RAM besides its blocks, in bytes by name."""
        layout, options, vertical = self._layout, self._options, self._vertical
        loss = loss_bytes(self._meta, self._form, options, self.grad_dtype)
        if device is not None and device.head is not None:
            loss = device.head.host_bytes
        kept, shared = self.footprint.boundary_bytes, self.footprint.shared_bytes
        fixed = {
            WORKING: working,
            KEPT: kept * vertical + shared * (vertical + 1),
            LOSS: loss,
            "compiled products": product_bytes(layout, options, self._limits.ram),
        }
        if device is not None:
            fixed["copies to and from the device"] = device.host_bytes
        fixed.update(self._limits.more)
        if (base := self._base) is not None:
            tokens = options.batch_size * options.seq_len * vertical
            on_device = frozenset[int]() if device is None else device.units
            fixed["unpacked weights"] = base.work_bytes(layout, on_device) + base.scratch_bytes
            fixed["rows of packed tables"] = base.table_bytes(
                layout, tokens, HEAD_ROWS, sliced=self._form is not None
            )
        fixed["Python, data, tokenizer"] = self._process
        return fixed


__all__ = ["Candidates", "Limits", "Offers", "Planned", "Tier"]
