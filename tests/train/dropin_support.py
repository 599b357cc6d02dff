"""Streamed models for foreign loops, their resident twins, and data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TILE, placements
from equivalence import reference
from families import write

from offload.models.meta import build
from offload.train.dropin import DropinOptions, choose_trained, lay_out, open_trainable

PLACES = ["disk", "half", "ram"]


@contextlib.contextmanager
def streamed(
    directory: Path, place: str = "disk", *, dtype: str | None = None, disk: Path | None = None,
    **options: Any,
) -> Iterator[Any]:  # fmt: skip
    asked = DropinOptions(**options)
    meta = build(directory, dtype)
    meta.model.train()
    choose_trained(meta.model, asked.train)
    layout = lay_out(meta.model, tile=TILE)
    model = open_trainable(meta, layout, placements(layout)[place], asked, disk)
    try:
        yield model
    finally:
        model.offload.close()


def resident(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return reference(directory, dtype).train()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Token sequences of one length, the same every time."""

    def __init__(self, rows: int = 24, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(3, 100, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i].clone()}


def batches(n: int, rows: int = 2, length: int = 12) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(n):
        yield torch.randint(3, 100, (rows, length), generator=generator)


def close(ours: Any, wanted: Any, tolerance: float = 1e-5) -> bool:
    """Whether all parameters are, in relative terms of their largest."""
    named = dict(wanted.named_parameters())
    return all(
        torch.allclose(p.detach().clone(), named[n], rtol=0, atol=tolerance)
        for n, p in ours.named_parameters()
    )


def groups_of(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def loop(model: Any, optimizer: Any, *, steps: int = 3, accumulate: int = 1, clip: float = 0.5,
         foreach: bool | None = None) -> list[float]:  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
    out, data = [], iter(batches(steps * accumulate))
    for _ in range(steps):
        for _ in range(accumulate):
            ids = next(data)
            torch.manual_seed(3)  # of dropout
            loss = model(input_ids=ids, labels=ids).loss
            (loss / accumulate).backward()
            out.append(float(loss.detach()))
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=foreach)
            out.append(float(norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return out


EPS = 1e-5
"""Large enough for gradients that are nothing but rounding (of a key's bias) to do nothing."""


def maker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A maker of tiny checkpoints, each made once."""
    made: dict[Any, Path] = {}

    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **how: Any) -> Path:
        key = (family, dtype, *sorted(how.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / family
            write(family, made[key], dtype, **how)
        return made[key]

    return make
