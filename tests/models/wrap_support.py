"""What tests of ``offload.wrap`` share."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
