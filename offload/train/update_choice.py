"""Whether a device updates optimizer states beside the CPU, and how many.

It pays where computing a step of Adam is what a step waits for: with states in RAM and few cores.
With states on the disk that is the disk, which does not care who computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from offload.errors import OffloadError
from offload.train.layout import TrainLayout
from offload.train.options import TrainOptions
from offload.train.plan import TrainPlan
from offload.train.predicting import Prediction
from offload.train.tiles import SlotKind
from offload.train.update_place import EVERY, UpdatePlacement, place_updates

ALIKE = 1.01
"""Steps that differ by less take as long."""

WORTH = 0.98
"""A step that takes less than this share of one without is faster."""


def asked_every(options: TrainOptions) -> int | None:
    """The number that ``gpu_updates`` gives; None: it is "auto" or "off"."""
    return int(options.gpu_updates) if options.gpu_updates.isdecimal() else None


def update_places(
    options: TrainOptions, gpu: int | None, layout: TrainLayout, kinds: Mapping[str, SlotKind],
    grad_dtype: str | None, *, card: bool,
) -> list[UpdatePlacement | None]:  # fmt: skip
    """What is tried, first what is taken where nothing says which is faster.

    ``card``: the device is one: a simulated one's updates are the CPU's, and never pay.

    Raises:
        OffloadError: a number was asked for, and no block has so many tiles.
    """
    every = asked_every(options)
    if gpu is None or options.gpu_updates == "off" or (every is None and not card):
        return [None]
    if every is None:
        found = place_updates(layout, kinds, grad_dtype, EVERY[-1])
        return [None] if found is None else [None, found]
    found = place_updates(layout, kinds, grad_dtype, every)
    if found is None:
        most = max((len(b.tiles) for b in layout.trained), default=0)
        raise OffloadError(
            f"--gpu-updates {every}: no layer's states are {every} tiles, the most are {most}; "
            f"give a number up to that, or leave it out"
        )
    return [replace(found, why=f"--gpu-updates {every}")]


def with_every(plan: TrainPlan, every: int) -> TrainPlan:
    """``plan`` with so many tiles on the device; its room there does not change."""
    device = plan.placement.device
    assert device is not None
    assert device.updates is not None
    updates = replace(device.updates, every=every)
    return replace(plan, placement=replace(plan.placement, device=replace(device, updates=updates)))


def best_every(
    plan: TrainPlan, predict: Callable[[TrainPlan], Prediction]
) -> tuple[TrainPlan, Prediction]:
    """The fewest tiles with which a step is about as fast as it can be."""
    tried = [with_every(plan, every) for every in EVERY]
    found = [(p, predict(p)) for p in tried]
    least = min(seconds.seconds for _, seconds in found)
    return next(one for one in found if one[1].seconds <= ALIKE * least)


def faster(
    without: tuple[TrainPlan, Prediction], there: tuple[TrainPlan, Prediction]
) -> tuple[TrainPlan, Prediction]:
    """``there`` if it is worth it, with its reason."""
    (_, before), (plan, after) = without, there
    if after.seconds >= WORTH * before.seconds:
        return without
    device = plan.placement.device
    assert device is not None
    assert device.updates is not None
    why = f"a step takes {after.seconds:.3g} s, {before.seconds:.3g} s with all of them in RAM"
    device = replace(device, updates=replace(device.updates, why=why))
    return replace(plan, placement=replace(plan.placement, device=device)), after


__all__ = ["asked_every", "best_every", "faster", "update_places", "with_every"]
