"""Adam on tiles with fewer bytes of state: bfloat16, or 8-bit moments. See ``adam.py``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.adam import arguments, run
from offload.cpu_ops.adam_bodies import Adam
from offload.cpu_ops.adam_step import AdamStep
from offload.cpu_ops.counter_rng import GROUP
from offload.cpu_ops.dynamic_map import BLOCK
from offload.cpu_ops.grad_norm import Numbers, check, kind_of
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import Floats, address_of
from offload.cpu_ops.optimizer_entries import bf16_entry, eight_bit_entry
from offload.errors import OffloadError

__all__ = ["BLOCK", "GROUP", "adam_8bit", "adam_bf16", "blocks"]

Bits = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]


def adam_bf16(
    step: AdamStep, gradient: Numbers, p: Bits, m: Bits, v: Bits,
    *, seed: int, first: int, workers: int | None = None,
) -> None:  # fmt: skip
    """One step of parameters and moments [n] in bfloat16, in place; ``p`` is also what computes.

    What is stored is one of the two neighbours of the float32 result, the farther one with a
    probability that makes the mean right; exact values stay. This holds for the moments, too:
    with beta2 = 0.999 a step moves ``v`` by less than half of its last place, so that rounded to
    nearest it would never move. ``seed``, the step's number and the element's global index
    (``first`` for the tile's first one) determine the random bits: see ``counter_rng.py``.

    Raises:
        OffloadError: a shape or dtype does not fit, or ``first`` is no multiple of GROUP.
    """
    n = p.size
    kind = kind_of("the gradient", gradient, n)
    for name, array in (("p", p), ("m", m), ("v", v)):
        check(name, array, np.uint16, n)
    if first < 0 or first % GROUP:
        raise OffloadError(f"a tile must begin at a multiple of {GROUP} elements, not at {first}")
    a = arguments(step, gradient)
    a[Adam.P : Adam.V + 1] = address_of(p), address_of(m), address_of(v)
    a[Adam.SEED] = (seed & 0x7FFFFFFFFFFFFFFF) - (seed & 1 << 63)  # 64 bits, as a signed number
    a[Adam.FIRST] = first
    run(bf16_entry(step.rule, kind), a, workers)


def blocks(count: int) -> int:
    """Scales of a tile of ``count`` elements."""
    return -(-count // BLOCK)


def adam_8bit(
    step: AdamStep, gradient: Numbers, p: Floats, m: Codes, v: Codes,
    m_scales: Floats, v_scales: Floats, copy: Numbers | None = None,
    *, isa: str | None = None, workers: int | None = None,
) -> None:  # fmt: skip
    """One step of float32 parameters [n] with 8-bit moments ``m`` and ``v`` [n], in place.

    Each block of 256 elements has two scales (``m_scales``, ``v_scales`` [blocks(n)]), its largest
    magnitudes; codes are ``dynamic_map``'s, rounded to nearest. Zeros are a valid start. Only a
    tile that ends its tensor may end inside of a block. One value that is not finite makes its
    block's moments NaN. ``copy`` as in ``adam_fp32``.

    Raises:
        OffloadError: a shape or dtype does not fit.
    """
    n = p.size
    kind = kind_of("the gradient", gradient, n)
    check("p", p, np.float32, n)
    for name, codes, scales in (("m", m, m_scales), ("v", v, v_scales)):
        check(name, codes, np.uint8, n)
        check(f"{name}'s scales", scales, np.float32, blocks(n))
    copied = "none" if copy is None else kind_of("the copy", copy, n)
    a = arguments(step, gradient)
    a[Adam.P : Adam.V + 1] = address_of(p), address_of(m), address_of(v)
    if copy is not None:
        a[Adam.COPY] = address_of(copy)
    a[Adam.M_SCALES : Adam.V_SCALES + 1] = address_of(m_scales), address_of(v_scales)
    run(eight_bit_entry(step.rule, kind, copied, choose(isa)), a, workers)
