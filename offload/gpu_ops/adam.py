"""Adam on tiles of parameters on a card: ``offload.cpu_ops.adam`` to the bit.

Wherever states, gradients and constants are finite; NaNs stay NaNs, with other payloads.

    n elements of a range of a tile
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np

from offload.cpu_ops.adam_step import AdamStep
from offload.cpu_ops.counter_rng import GROUP
from offload.cpu_ops.dynamic_map import BLOCK, device_lines
from offload.errors import OffloadError
from offload.gpu_ops.arguments import AdamArgs
from offload.gpu_ops.launch import Launcher
from offload.gpu_ops.source import MOST_THREADS, Kernel

TASK = 1024
"""Elements of a block of threads (``ADAM_TASK``, and four 8-bit blocks)."""

KERNELS = {"fp32": "adam_fp32", "bf16": "adam_bf16", "8bit": "adam_8bit"}
"""By the kind of states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where ``count`` elements lie on the card: addresses, 0 for what there is not."""

    count: int
    gradient: int
    """0: zeros."""
    gradient_dtype: str
    """"float32" or "bfloat16"."""
    p: int
    """Masters; with bfloat16 states what computes, too."""
    m: int
    v: int
    m_scales: int = 0
    v_scales: int = 0
    copy: int = 0
    copy_dtype: str = "bfloat16"


def kernel_of(states: str) -> Kernel:
    """The kernel for states of this kind."""
    return Kernel(KERNELS[states])


def adam(
    launcher: Launcher, states: str, step: AdamStep, where: Range, *, seed: int = 0, first: int = 0
) -> None:
    """Queue one step of a range, in place.

    ``seed`` and ``first``, the range's first element's global index, are for stochastic rounding.

    Raises:
        OffloadError: ``first`` is no multiple of GROUP, or the card's compiler or the card failed.
    """
    if where.count == 0:
        return
    if first < 0 or first % GROUP:
        raise OffloadError(f"a tile must begin at a multiple of {GROUP} elements, not at {first}")
    rule = step.rule
    arguments = AdamArgs(
        gradient=where.gradient, p=where.p, m=where.m, v=where.v, copy=where.copy,
        m_scales=where.m_scales, v_scales=where.v_scales,
        seed=seed & (1 << 64) - 1, step=step.step, first=first, count=where.count,
        constants=tuple(float(c) for c in step.constants()), lines=_lines(),
        wide_gradient=where.gradient_dtype == "float32", wide_copy=where.copy_dtype == "float32",
        l2=rule.startswith("l2"), from_gradient=rule.endswith("gradient"),
    )  # fmt: skip
    threads = 32 * TASK // BLOCK if states == "8bit" else MOST_THREADS
    launcher.launch(kernel_of(states), (-(-where.count // TASK), 1), threads, arguments)


@functools.cache
def _lines() -> ctypes.Array[ctypes.c_float]:
    """Of the 8-bit code, as ``AdamArgs.lines``."""
    values = np.asarray(device_lines(), np.float32).reshape(-1)
    return (ctypes.c_float * 80)(*map(float, values))


__all__ = ["KERNELS", "Range", "adam", "kernel_of"]
