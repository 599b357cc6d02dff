"""Engines and oracles of one tiny checkpoint with the same adapters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine_support import engine_of, placements
from equivalence import reference
from families import write
from memory_tiles import MemoryTiles

from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.lora import Adapters, inject
from offload.train.opening import Placement
from offload.train.oracle import Oracle

HOW: dict[str, Any] = {"r": 4, "alpha": 8.0, "seed": 5}

EXPERTS = ("q_proj", "v_proj", "gate_up_proj", "down_proj")


class Made:
    """Checkpoints by family and dtype, each written once."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory
        self._made: dict[Any, Path] = {}

    def __call__(self, family: str, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
        key = (family, dtype, *sorted(how.items()))
        if key not in self._made:
            directory = self._factory.mktemp("tiny") / family
            config = None
            if how:
                from families import tiny_config

                config = tiny_config(family, **how)
            self._made[key] = write(family, directory, dtype, config=config)
        return self._made[key]


def start_somewhere(adapters: Adapters) -> None:
    """First values of B that are not zero, so that the first gradients of A are not either."""
    for i, name in enumerate(adapters.initial):
        if name.endswith("_B"):
            shape = adapters.initial[name]().shape

            def make(shape: Any = shape, seed: int = 100 + i) -> torch.Tensor:
                generator = torch.Generator().manual_seed(seed)
                return 0.05 * torch.randn(shape, generator=generator)

            adapters.initial[name] = make


def pinned(name: str) -> Callable[[TrainLayout], Placement]:
    """A placement with adapters in RAM, weights and states: as a plan does it."""

    def place(layout: TrainLayout) -> Placement:
        mine = frozenset(b.index for b in layout.trained)  # nothing else is trained
        before = placements(layout)[name]
        return dataclasses.replace(
            before,
            weights_bytes=before.weights_bytes + sum(layout.blocks[b].nbytes for b in mine),
            pinned=before.pinned | mine,
            resident=before.resident | mine,
            spilled=before.spilled - mine,
        )

    return place


@contextlib.contextmanager
def adapted_engine(
    directory: Path, place: str | Callable[[TrainLayout], Placement], *,
    somewhere: bool = True, tiles: MemoryTiles | None = None,
    options: dict[str, Any] | None = None, **how: Any,
) -> Iterator[tuple[Engine, Adapters, MemoryTiles]]:  # fmt: skip
    made: list[Adapters] = []

    def prepare(model: Any) -> dict[str, Any]:
        made.append(inject(model, **{**HOW, **how}))
        if somewhere:
            start_somewhere(made[0])
        return {"initial": made[0].initial, **(options or {})}

    with engine_of(directory, place, prepare=prepare, tiles=tiles) as (engine, tiles):
        yield engine, made[0], tiles


def adapted_reference(
    directory: Path, dtype: torch.dtype = torch.bfloat16, *, somewhere: bool = True, **how: Any
) -> tuple[Any, Adapters]:
    model = reference(directory, dtype).train()
    adapters = inject(model, **{**HOW, **how})
    if somewhere:
        start_somewhere(adapters)
        values = adapters.resident_values()
        for name, make in adapters.initial.items():
            values[name].copy_(make())
    return model, adapters


def adapted_oracle(
    directory: Path, layout: TrainLayout, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> Oracle:
    return Oracle(adapted_reference(directory, dtype, **how)[0], layout)
