"""A stand-in for a card that torch itself takes for another device; see ``strict_card.cpp``.

Whatever a real card would refuse, because a tensor of its own meets one of the CPU's in an
operator, this one does, too; it has random numbers of its own, and autograd runs its part of a
backward pass on another thread. It is torch's for the whole process once it is opened: tests that
use it run in a process of theirs (``test_strict_card.py``).
"""

from __future__ import annotations

import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from built_once import once
from fake_card import FakeCard

SOURCE = Path(__file__).with_name("strict_card.cpp")
KERNELS = Path(__file__).parents[1] / "gpu_ops"


class StrictCard(FakeCard):
    """``FakeCard`` whose memory is of torch's device ``paper``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(device=device(), **kwargs)


@cache
def device() -> torch.device:
    """The device, made known to torch with the first call."""
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend("paper")
    ops = torch.ops.paper_card
    module: Any = types.ModuleType("torch.paper")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda index: None
    module.synchronize = lambda *_: None
    module.manual_seed = module.manual_seed_all = ops.seed
    module.get_rng_state = lambda device=None: ops.state()
    module.set_rng_state = lambda state, device=None: ops.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("paper", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("paper", 0)


def launcher(place: torch.device) -> Any:
    """Of the kernels for packed weights: their own source, run by the CPU."""
    sys.path.append(str(KERNELS))
    from cpu_card import CpuCard
    from cpu_card import built as built_kernels

    card = CpuCard(built_kernels())
    card.device = place
    card.give_everything()
    return card


def built() -> Path:
    """torch's part of the card, compiled: some ten seconds the first time."""

    def make(out: Path) -> Path:
        home = Path(torch.__file__).parent
        include = home / "include"
        subprocess.run(
            ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{include}",
             f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(out),
             f"-L{home}/lib", "-ltorch_cpu", "-lc10"],
            check=True,
        )  # fmt: skip
        return out

    return once("strict", [SOURCE], make)


__all__ = ["StrictCard", "device", "launcher"]
