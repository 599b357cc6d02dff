"""How many threads a command computes with."""

from __future__ import annotations

import math
import os

import torch

from offload.cli import console
from offload.runtime.cgroups import cpu_quota


def use_threads(asked: int | None) -> None:
    """``asked`` ones; None: as many as torch takes by itself, less where a quota of processor time
    does not pay for them. Says so then."""
    if asked is not None:
        torch.set_num_threads(asked)
        return
    quota = cpu_quota()
    if quota is None or "OMP_NUM_THREADS" in os.environ:
        return
    paid, usual = math.ceil(quota), torch.get_num_threads()
    if paid < usual:
        torch.set_num_threads(paid)
        console.note(
            f"{paid} of {usual} threads: this process has a CPU quota of {quota:.3g} (cgroup), and "
            f"when it is used up all threads stand still (-t overrides)"
        )


__all__ = ["use_threads"]
