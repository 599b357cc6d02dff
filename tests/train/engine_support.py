"""Engines and oracles of the same tiny checkpoint, and one step of either."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import reference
from memory_tiles import MemoryTiles

from offload.models.meta import build
from offload.train.engine import Engine, Group
from offload.train.layout import Block, Piece, TrainLayout, lay_out
from offload.train.opening import EngineOptions, InputSpill, Placement, open_engine
from offload.train.oracle import Oracle
from offload.train.row_grads import lookup_tables

TILE = 3 * 4096
"""Elements: tiny layers have several."""


def every_pair(*choices: Sequence[Any]) -> list[Any]:
    """The product of three or more choices, of at least two values each: half of it, in which every
    two values of two choices meet, and the other half in the sweep."""
    assert len(choices) > 2
    assert all(len(values) > 1 for values in choices)
    return [
        pytest.param(
            *(value for _, value in case), marks=[pytest.mark.sweep] * (sum(i for i, _ in case) % 2)
        )
        for case in itertools.product(*map(enumerate, choices))
    ]


def group_at(step: int) -> Callable[[Piece], Group]:
    """A changing rate, and decay for matrices only."""

    def of(piece: Piece) -> Group:
        decay = 0.1 if len(piece.shape) > 1 else 0.0
        return Group(lr=1e-3 * (step + 1) / 3, weight_decay=decay)

    return of


def two_blocks(layout: TrainLayout) -> int:
    """The bytes of the largest unit beside the largest block: the least that works."""
    pinned = sum(layout.blocks[b].nbytes for b in layout.rest)
    dense = max(sum(layout.blocks[b].nbytes for b in u.blocks) for u in layout.units)
    return pinned + dense + 2 * max(b.nbytes for b in layout.blocks)


def all_inputs(layout: TrainLayout) -> InputSpill:
    """Every unit's input on the disk."""
    units = frozenset(u.index for u in layout.units)
    return InputSpill(units=units, largest=64 << 10, file_bytes=len(units) * (64 << 10))


def placements(layout: TrainLayout) -> dict[str, Placement]:
    """From everything on the disk to everything in RAM."""
    every = frozenset(range(len(layout.blocks)))
    trained = frozenset(b.index for b in layout.trained)
    rest = frozenset(layout.rest)
    total = sum(b.nbytes for b in layout.blocks)
    half = rest | frozenset(list(every)[::2])
    least = two_blocks(layout)
    return {
        "disk": Placement(
            weights_bytes=least, pinned=rest, spilled=trained - rest, buffers=2,
            inputs=all_inputs(layout),
        ),
        "least": Placement(weights_bytes=least, pinned=rest, buffers=2),
        "half": Placement(
            weights_bytes=least + total, pinned=half, resident=half & trained,
            spilled=frozenset(list(trained)[::3]), buffers=3,
        ),
        "ram": Placement(weights_bytes=2 * total, pinned=every, resident=trained),
    }  # fmt: skip


@contextlib.contextmanager
def engine_of(
    directory: Path, placement: str | Callable[[TrainLayout], Placement], *,
    dtype: str | None = None, freeze: Callable[[str], bool] = lambda _: False,
    prepare: Callable[[Any], dict[str, Any]] = lambda _: {},
    tiles: MemoryTiles | None = None, **options: Any,
) -> Iterator[tuple[Engine, MemoryTiles]]:  # fmt: skip
    """``prepare(model)`` changes the model before it is laid out, and gives more options.
    ``tiles``: of an engine before, to go on from."""
    meta = build(directory, dtype)
    meta.model.train()
    for name, parameter in meta.model.named_parameters():
        parameter.requires_grad_(not freeze(name))
    options |= prepare(meta.model)
    layout = lay_out(meta.model, tile=TILE)
    options.setdefault("row_tables", frozenset(lookup_tables(layout)))
    made: list[MemoryTiles] = []

    def make_tiles(layout: TrainLayout, parts: Any, io: Any) -> MemoryTiles:
        every = [parts(i) for i in range(len(layout.tiles))]
        assert tiles is None or tiles.parts == every
        made.append(tiles or MemoryTiles(every))
        return made[0]

    where = placements(layout)[placement] if isinstance(placement, str) else placement(layout)
    engine = open_engine(meta, layout, where, EngineOptions(**options), make_tiles)
    try:
        yield engine, made[0]
    finally:
        engine.close()


def oracle_of(
    directory: Path, layout: TrainLayout, *, dtype: torch.dtype = torch.bfloat16,
    freeze: Callable[[str], bool] = lambda _: False, **options: Any,
) -> Oracle:  # fmt: skip
    model = reference(directory, dtype).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze(name))
    return Oracle(model, layout, **options)


def batch(step: int, micro: int, length: int = 12, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(3, 100, (rows, length), generator=generator)


def values(engine: Engine, block: Block) -> dict[tuple[str, int | None], torch.Tensor]:
    whole = engine.block_values(block)
    return {
        (p.param, p.expert): whole[p.offset : p.offset + p.count].view(p.shape)
        for p in block.pieces
    }


def assert_equal_weights(engine: Engine, oracle: Oracle) -> None:
    for block in engine.layout.blocks:
        for (name, expert), value in values(engine, block).items():
            wanted = oracle.named[name].detach()
            wanted = wanted if expert is None else wanted[expert]
            assert torch.equal(value, wanted), (name, expert)
