"""Adam on tiles of parameters, with float32 states.

A tile is a 1-D range of n parameters. bfloat16 arrays are their bits in uint16. A call reads and
writes every array once, with the GIL released, on ``workers`` threads: by default as many as the
other kernels, 1 to run beside them on a thread of its own (see ``threads.py``). Results depend on
neither threads, nor instruction sets, nor how parameters are cut into tiles.
"""

from __future__ import annotations

import numpy as np

from offload.cpu_ops import threads
from offload.cpu_ops.adam_bodies import Adam
from offload.cpu_ops.adam_step import AdamStep
from offload.cpu_ops.entries import Entry
from offload.cpu_ops.grad_norm import Numbers, check, kind_of
from offload.cpu_ops.kernels import Floats, address_of
from offload.cpu_ops.optimizer_entries import fp32_entry

__all__ = ["AdamStep", "adam_fp32"]


def arguments(step: AdamStep, gradient: Numbers) -> threads.Arguments:
    """A kernel's, with all that comes from the step and the gradient."""
    a = np.zeros(Adam.SIZE, np.int64)
    a[Adam.COUNT : Adam.GRADIENT + 1] = gradient.size, address_of(gradient)
    a[Adam.STEP] = step.step
    constants = step.constants()
    a.view(np.float32)[2 * Adam.CONSTANTS :][: constants.size] = constants
    return a


def run(entry: Entry, a: threads.Arguments, workers: int | None) -> None:
    """Run a kernel unless the tile is empty."""
    if a[Adam.COUNT]:
        threads.run(entry.call, entry.address, a, workers)


def adam_fp32(
    step: AdamStep, gradient: Numbers, p: Floats, m: Floats, v: Floats,
    copy: Numbers | None = None, *, workers: int | None = None,
) -> None:  # fmt: skip
    """One step of parameters ``p`` [n] and moments ``m``, ``v`` [n], all float32, in place.

    ``gradient`` [n] is float32 or bfloat16. ``copy`` [n] gets the new parameters, in float32 or
    rounded to bfloat16 (to nearest, ties to even). From the same state
    the moments were those of ``torch.optim.AdamW`` (or ``Adam``) with ``foreach=False`` to the bit
    wherever compared; ``p`` is within 2 ulp: torch's square root need not be correctly rounded.

    Raises:
        OffloadError: a shape or dtype does not fit.
    """
    n = p.size
    kind = kind_of("the gradient", gradient, n)
    for name, array in (("p", p), ("m", m), ("v", v)):
        check(name, array, np.float32, n)
    copied = "none" if copy is None else kind_of("the copy", copy, n)
    a = arguments(step, gradient)
    a[Adam.P : Adam.V + 1] = address_of(p), address_of(m), address_of(v)
    if copy is not None:
        a[Adam.COPY] = address_of(copy)
    run(fp32_entry(step.rule, kind, copied), a, workers)
