"""What tests of ``offload.wrap`` share."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from families import randomise, tiny_config
from left_threads import threads_left
from torch import nn

import offload
from offload.errors import OffloadError, PlanError


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*layers), (torch.randn(3, 64),)


def tight(model: nn.Module) -> int:
    """A budget of about half the model, above what is the least."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        offload.wrap(model, ram=1, disk=os.devnull)
    except (PlanError, OffloadError) as error:
        least = int(str(error).split("at least ")[1].split()[0])
    return least + total // 4


@contextmanager
def seeded_alone() -> Iterator[None]:
    """The same random numbers each time; afterwards no thread is left."""
    torch.manual_seed(0)
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert not (left := threads_left(before)), left


def streamed(model: Any, disk: Path) -> Any:
    """Wrapped with the least memory that it runs in, so that nearly all of it streams."""
    ram = 1
    while True:
        try:
            offload.wrap(model, ram=ram, disk=disk)
        except PlanError as error:  # staging grows with the budget
            least = int(str(error).split("at least ")[1].split()[0])
            assert least > ram
            ram = least
        else:
            assert model.offload.plan.streamed_bytes_per_pass > 0
            return model


def tiny(family: str, **overrides: Any) -> Any:
    """A resident model in float32, which transformers makes with weights that are trained."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    randomise(model)
    return model.eval()
