"""What the device's tier takes, and what the units that run there copy: measured on meta.

Nothing is chosen here: that is ``candidates``'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.blocks import align_up
from offload.models.expert_groups import expert_groups
from offload.models.workspace import CARD_BYTES
from offload.train.device_plan import (
    DevicePlacement,
    HandOver,
    device_units,
    plan_device,
    visit_bytes,
)
from offload.train.footprint import Given, TrainFootprint, measure_training
from offload.train.head_place import HeadPlacement
from offload.train.layout import TrainLayout
from offload.train.link import Visited
from offload.train.needs import OnMeta
from offload.train.options import TrainOptions
from offload.train.update_place import UpdatePlacement


def measured_tier(
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
    marks, sums = router_copies(meta, options)
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


def visits_of(
    layout: TrainLayout,
    modules: Sequence[Any],
    footprint: TrainFootprint,
    mask: int = 0,
    sums: int = 0,
) -> dict[int, Visited]:
    """What each unit moves when it runs on a device, but for its weights. By formula where it was
    not measured: an input, and a result of its size. ``mask``, ``sums``: of ``router_copies``."""
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


def router_copies(meta: OnMeta, options: TrainOptions) -> tuple[int, int]:
    """(bytes that say which tokens a router counts, bytes of a number for each expert: a layer's
    router sends two of these down, how often chosen and how likely, and gets the shares)."""
    if options.router_aux_loss is None:
        return 0, 0
    experts = max(group.n_experts for group in expert_groups(meta.model))
    return options.batch_size * options.seq_len, 4 * experts


__all__ = ["measured_tier", "router_copies", "visits_of"]
