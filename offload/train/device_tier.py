"""The device in training: where layers run, if there is one.

Weights go up before a unit's forward and again before its backward (``device_weights``), a unit's
arguments with it, its results and its gradients come down (``visits``); so with the head and the
loss where the plan has them there (``device_head``). Optimizer, states, clipping
and commits are in RAM as without a device, and so are the bits of a device that computes as the CPU
does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.runtime.device import Device
from offload.train.device_head import DeviceHead
from offload.train.device_plan import DevicePlacement
from offload.train.device_values import Copy, Recipe
from offload.train.device_weights import DeviceWeights
from offload.train.falling import FallingGradients
from offload.train.grads import Gradients
from offload.train.layout import TrainLayout
from offload.train.marks import Marks
from offload.train.order import UseOrder
from offload.train.visit import AT_HOME, Visit
from offload.train.visits import Visits
from offload.train.weights import Entry, Shared, Weights


class DeviceTier:
    """See the module. Owns its memories, not the device."""

    def __init__(
        self, device: Device, placement: DevicePlacement, layout: TrainLayout, order: UseOrder,
        weights: Weights, gradients: Gradients, shared: Shared, marks: Marks,
        recipes: Mapping[int, Recipe] = {},
    ) -> None:  # fmt: skip
        """``recipes``: by block, how what is packed is unpacked."""
        self.device = device
        self.placement = placement
        self.weights = DeviceWeights(
            device, layout, order, weights, shared, placement, marks, recipes
        )
        self.visits = Visits(device, placement)
        self.gradients = FallingGradients(device, placement, gradients, self.visits.stalls)
        self.head: DeviceHead | None = None
        if placement.head is not None:
            self.head = self.weights.head = DeviceHead(
                device, placement.head, weights, self.visits, shared, marks
            )
        self.blocks = frozenset(
            b
            for u in placement.units
            for unit in (layout.units[u],)
            for b in (*unit.blocks, *(e for ids in unit.experts.values() for e in ids))
        )
        """Whose gradients come from the device."""
        weights.above = self.weights
        for u in placement.units:
            for module in layout.units[u].module.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device.torch_device)

    def hollow_device(self, block: int) -> torch.device:
        """Where a block's parameters are while they have no memory."""
        return self.device.torch_device if block in self.blocks else torch.device("cpu")

    def close(self) -> None:
        """Wait for what is under way."""
        self.weights.close()
        self.visits.close()


class Homes:
    """Where each unit runs: in RAM, or on the device."""

    def __init__(self, weights: Weights, gradients: Gradients, tier: DeviceTier | None) -> None:
        self.tier = tier
        self._weights = weights
        self._gradients = gradients

    @property
    def head(self) -> DeviceHead | None:
        """The head on the device, if the loss is computed there."""
        return None if self.tier is None else self.tier.head

    def torch_device(self, unit: int) -> torch.device:
        """What the unit computes on, as torch names it."""
        tier = self.away(unit)
        return torch.device("cpu") if tier is None else tier.device.torch_device

    def away(self, unit: int) -> DeviceTier | None:
        """The device, if the unit runs there."""
        tier = self.tier
        return tier if tier is not None and unit in tier.placement.units else None

    def acquire(self, unit: int, blocks: list[int]) -> list[Entry] | list[Copy]:
        """A unit's weights where it runs, until ``release``."""
        tier = self.away(unit)
        if tier is not None:
            return tier.weights.acquire(unit)
        head = self.head
        if head is not None and unit == head.place.unit and head.stays:
            return []
        return self._weights.acquire_all(blocks)

    def release(self, unit: int, blocks: list[int]) -> None:
        tier = self.away(unit)
        if tier is not None:
            tier.weights.release(unit)
            return
        for block in blocks:
            self._weights.release(block)

    def acquire_expert(self, unit: int, block: int) -> Entry | Copy:
        tier = self.away(unit)
        return self._weights.acquire(block) if tier is None else tier.weights.acquire_expert(block)

    def release_expert(self, unit: int, block: int) -> None:
        tier = self.away(unit)
        if tier is None:
            self._weights.release(block)
        else:
            tier.weights.release_expert(block)

    def visiting(self, unit: int) -> contextlib.AbstractContextManager[Visit]:
        """What is inside runs where the unit does."""
        tier = self.away(unit)
        return contextlib.nullcontext(AT_HOME) if tier is None else tier.visits.visiting()

    def add_gradient(self, block: int, piece: int, gradient: torch.Tensor) -> None:
        """Add a gradient, from where it was made, to the block's."""
        if self.tier is not None and block in self.tier.blocks:
            self.tier.gradients.add(block, piece, gradient)
        else:
            self._gradients.add(block, piece, gradient)

    def add_rows(
        self, block: int, piece: int, gradient: torch.Tensor, rows: slice, *, once: bool = False
    ) -> None:
        """Add a gradient of some rows of the head's, from where the loss was computed. ``once``:
        they come once in a step."""
        if self.tier is not None and self.tier.head is not None:
            self.tier.gradients.add(block, piece, gradient, rows, once=once)
        elif once:
            self._gradients.add_slice(block, piece, gradient, rows)
        else:
            self._gradients.add(block, piece, gradient, rows)

    def begin_step(self) -> None:
        """Before a step's first forward, or an evaluation's."""
        if self.tier is not None:
            self.tier.visits.begin_step()

    def when_landed(self, unit: int, call: Callable[[], None]) -> None:
        """Call when all gradients that were added are in RAM: of a unit on the device while the
        next one runs, before any of that one's are; else now."""
        tier = self.away(unit)
        if tier is None:
            self.land()
            call()
        else:
            tier.gradients.then(call)

    def land(self) -> None:
        """All gradients that were added are in RAM."""
        if self.tier is not None:
            self.tier.gradients.land()

    def forget(self) -> None:
        """Drop gradients on their way: their step is not taken."""
        if self.tier is not None:
            self.tier.gradients.forget()

    def hollow_device(self, block: int | None) -> Any:
        """Where a parameter is while it has no memory."""
        if self.tier is None or block is None:
            return torch.device("cpu")
        return self.tier.hollow_device(block)


__all__ = ["DeviceTier", "Homes"]
