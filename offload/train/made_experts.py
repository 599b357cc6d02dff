"""Experts of a unit that is timed before a run: made-up bytes, by the engine's own road.

A fused parameter that is indexed gets a gradient of all experts from each that is used: 64 times 64
experts' bytes in a layer, where the engine adds up 64. So a unit that is timed finds what the
engine's would: leaves of one expert each (``experts``), weights that are held and let go
(``weights``), packed ones unpacked at each use. What that costs a use, in Python and in memory,
is in what is measured, and needs no constant.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from offload.blocks import align_up
from offload.train.experts import ExpertEngine, ExpertRun
from offload.train.layout import Block, TrainLayout, TrainUnit
from offload.train.order import UseOrder
from offload.train.packed_base import PackedBase
from offload.train.packed_weights import PackedWeights
from offload.train.shared import Shared
from offload.train.steps import Clock
from offload.train.weights import Entry, Weights

BYTE = 0x3C
"""Of made-up weights: 0.01 in bfloat16 and in float32, a scale of 1 in float16. Not zeros, which
would be one page of memory for all of them."""


class MadeExperts:
    """The experts of one unit; ``close`` frees their memory."""

    def __init__(
        self, layout: TrainLayout, unit: TrainUnit, real: nn.Module, base: PackedBase | None
    ) -> None:
        """``real``: a copy of the unit's module, whose fused parameters are not looked at."""
        self._layout = layout
        self._weights = _weights(layout, unit, base)
        self._ends: list[Callable[[], Any]] = []
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}
        self._undo: list[Callable[[], Any]] = []
        copies = dict(zip(map(id, unit.module.modules()), real.modules(), strict=True))
        engine = cast(ExpertEngine, _Stand(self))
        for group in unit.groups:
            mine = replace(group, module=copies[id(group.module)])
            self._undo += ExpertRun(engine, unit, mine).attach()

    def end(self) -> None:
        """The unit is through."""
        for call in self._ends:
            call()
        self._gradients.clear()

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._weights.close()


class _Stand:
    """What experts ask of an engine whose units all run in RAM."""

    def __init__(self, of: MadeExperts) -> None:
        self._of = of
        self.layout = of._layout
        self.weights = of._weights
        self.homes = self
        self.clock = Clock()

    def hollow_device(self, block: int) -> torch.device:
        return torch.device("cpu")

    def acquire_expert(self, unit: int, block: int) -> Entry:
        return self.weights.acquire(block)

    def release_expert(self, unit: int, block: int) -> None:
        self.weights.release(block)

    def add_gradient(self, block: int, piece: int, gradient: torch.Tensor) -> None:
        self._of._gradients[block, piece] = gradient

    def last_in_round(self) -> bool:
        return True

    def unit_runs(self, unit: int) -> bool:
        return True

    def on_unit_end(self, unit: int, call: Callable[[], Any]) -> Callable[[], Any]:
        self._of._ends.append(call)
        return lambda: self._of._ends.remove(call)


class _MadeUp:
    """Reads that are over at once."""

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        torch.frombuffer(into, dtype=torch.uint8).fill_(BYTE)
        return []


def _weights(layout: TrainLayout, unit: TrainUnit, base: PackedBase | None) -> Weights:
    """All of the unit's experts, which stay."""
    mine = [b for ids in unit.experts.values() for b in ids]
    limit = sum(align_up(layout.blocks[b].nbytes) for b in mine)
    held = (layout, UseOrder(0), _MadeUp(), Shared(), limit, mine)
    made = Weights(*held) if base is None else PackedWeights(*held, base)
    made.pin_all()
    return made


__all__ = ["MadeExperts"]
