"""Norms of gradients in a fixed order, and what is done to gradients before a step.

A gradient tile is a 1-D range, float32 or the bits of bfloat16 in uint16. Its sum of squares is
made of one float64 per chunk of 4096 elements (in fixed lanes, see ``grad_bodies.squares``), and
``norm`` adds chunks exactly and rounds once. So the norm depends neither on threads nor on
instructions, nor on the order in which tiles arrive, nor on where tiles end as long as they end on
chunks. Sums in float32 would overflow for gradients of 2e19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops import threads
from offload.cpu_ops.grad_bodies import CHUNK, Grad
from offload.cpu_ops.kernels import Floats, address_of
from offload.cpu_ops.optimizer_entries import accumulate_entry, scale_entry, squares_entry
from offload.errors import OffloadError

__all__ = ["CHUNK", "accumulate", "chunks", "norm", "scale", "squares"]

Sums = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""float32, or bfloat16 as its bits."""


def kind_of(name: str, array: npt.NDArray[Any], count: int | None = None) -> str:
    """ "f32" or "bf16" of a 1-D tile.

    Raises:
        OffloadError: it is of another dtype, not contiguous, read-only or not ``count`` long.
    """
    kind = {"float32": "f32", "uint16": "bf16"}.get(array.dtype.name)
    if kind is None:
        raise OffloadError(
            f"{name} must be float32, or bfloat16 as its bits in uint16, not {array.dtype}"
        )
    check(name, array, array.dtype, array.size if count is None else count)
    return kind


def check(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, count: int) -> None:
    """Raise OffloadError unless writable, contiguous, of that dtype and ``[count]``."""
    right = array.dtype == np.dtype(dtype) and array.shape == (count,)
    if not right or not array.flags.c_contiguous:
        raise OffloadError(
            f"{name} must be contiguous {np.dtype(dtype).name} [{count}], got {array.dtype.name} "
            f"{list(array.shape)}{'' if array.flags.c_contiguous else ', not contiguous'}"
        )
    if not array.flags.writeable:
        raise OffloadError(f"{name} is read-only")


def chunks(count: int) -> int:
    """Sums of a tile of ``count`` elements."""
    return -(-count // CHUNK)


def squares(gradient: Numbers, out: Sums, *, workers: int | None = None) -> None:
    """``out`` [chunks(n)]: the sum of squares of each chunk of a gradient [n].

    ``workers``: threads, as many as other kernels by default. A chunk's sum is finite if and
    only if all its elements are: ``np.isfinite(out)`` finds what is not.

    Raises:
        OffloadError: a shape or dtype does not fit.
    """
    kind = kind_of("the gradient", gradient)
    check("the sums", out, np.float64, chunks(gradient.size))
    a = np.zeros(Grad.SIZE, np.int64)
    a[Grad.COUNT : Grad.OUT + 1] = gradient.size, address_of(gradient), address_of(out)
    entry = squares_entry(kind)
    threads.run(entry.call, entry.address, a, workers)


def norm(sums: Iterable[Sums]) -> float:
    """The Euclidean norm of gradients whose tiles' sums these are: the exact total of the sums
    (``math.fsum``), rounded, and its root. NaN or infinite if a gradient is."""
    return math.sqrt(math.fsum(s for tile in sums for s in tile.tolist()))


def accumulate(total: Floats, gradient: Numbers, *, workers: int | None = None) -> None:
    """``total`` [n] float32 += gradient [n].

    Raises as ``squares`` does.
    """
    kind = kind_of("the gradient", gradient, total.size)
    check("the accumulator", total, np.float32, total.size)
    a = np.zeros(Grad.SIZE, np.int64)
    a[Grad.COUNT : Grad.OUT + 1] = total.size, address_of(gradient), address_of(total)
    entry = accumulate_entry(kind)
    threads.run(entry.call, entry.address, a, workers)


def scale(gradient: Numbers, factor: float, *, workers: int | None = None) -> None:
    """gradient [n] *= factor, in float32, rounded to the gradient's dtype to nearest.

    To undo a loss scale or to divide by a number of tokens; clipping needs no pass of its own
    (``AdamStep.clip``). Raises as ``squares`` does.
    """
    kind = kind_of("the gradient", gradient)
    a = np.zeros(Grad.SIZE, np.int64)
    a[Grad.COUNT : Grad.GRADIENT + 1] = gradient.size, address_of(gradient)
    a.view(np.float32)[2 * Grad.FACTOR] = factor
    entry = scale_entry(kind)
    threads.run(entry.call, entry.address, a, workers)
