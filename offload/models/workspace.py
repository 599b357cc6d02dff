"""How much memory a product with a large matrix takes beside the matrix.

A BLAS may bring a whole matrix into a layout of its own before it multiplies, and whether it does
depends on the machine: with instructions for the dtype it packs a few cache lines at a time. So it
is measured. What a product leaves behind (code compiled for its shapes, buffers) is counted apart:
it does not grow with the matrix, but there is some for each shape.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from offload.blocks import TensorSpec
from offload.runtime.memory import HostMemory
from offload.runtime.rss import current_rss, peak_rss, reset_peak_rss

logger = logging.getLogger(__name__)

MATRIX_BYTES = 16 * 2**20
ROWS = (1, 2, 8, 16, 64)
"""Rows of the other operand that are tried: decode, small batches, a prompt."""

WORTH_BYTES = 32 * 2**20
"""Matrices below this are not worth a measurement, which itself leaves some MiB of code behind."""

STEP = 16
"""Shares are rounded up to one part in so many, for a plan that is the same in each run."""

MOST = 1.25

NOISE_BYTES = 128 * 2**10
"""By so much two measurements differ."""

PRODUCTS = 2
"""Of each matrix: with a prompt and with a token."""

KERNELS = (8, 32)
"""Compiled products that oneDNN may keep, with little and with enough memory. By default it keeps
1024, and a prompt that sends other numbers of tokens to each expert compiles one for each: 20 MiB
and more over a budget. A model needs about eight for a token."""

BYTES_PER_KERNEL = 16 * 2**20
"""One of them for so much of a budget."""

TRAINED_KERNELS = 256
"""The same, where experts are trained: each number of tokens that an expert gets is a product of
its own, forward and backward, and comes again in every layer and step. 64 experts of 256 tokens
that choose 8 take a step of 1.6 s with 32 of them, of 1.17 s with 128 and of 1.04 s with all."""

BYTES_PER_TRAINED = 4 * 2**20
"""One of these for so much of what a budget has above ``TRAINED_FROM``: an expert's weights that
stay save less."""

TRAINED_FROM = 160 * 2**20

KERNEL_BYTES = 960 * 2**10
"""What one of them takes, where many are compiled; the first eight are in the baseline."""

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Workspace(NamedTuple):
    """What products need: ``share`` of the largest matrix while they run, in [1/16, 1.25], and
    ``kept_bytes`` for ever after each pair of shapes. oneDNN keeps the code it has compiled, 0.5 to
    1 MiB; MKL keeps buffers of 1.5 MiB and more for each thread."""

    share: float
    kept_bytes: int


WHOLE = Workspace(1.0, 0)
"""Where it is not known: a copy of the largest matrix."""

CARD_BYTES = 72 * 2**20
"""On a card, whatever the matrices: torch gives cuBLAS 32 MiB on Hopper and 8 MiB before, through
its own allocator, for each stream that multiplies, and what is freed is found again in blocks of
2 MiB and more."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def workspace_bytes(matrices: Iterable[TensorSpec], need: Workspace) -> int:
    """What has to be set aside for products with ``matrices``; no more than if whole matrices were
    copied."""
    largest = 0
    shapes: set[tuple[int, ...]] = set()
    for matrix in matrices:
        largest = max(largest, matrix.nbytes)
        if len(matrix.shape) >= 2:
            shapes.add(matrix.shape[-2:])
    kept = len(shapes) * PRODUCTS * need.kept_bytes
    return min(math.ceil(need.share * largest) + kept, math.ceil(max(1.0, need.share) * largest))


def limit_kernels(ram: int, *, trained: bool = False) -> None:
    """Let torch keep as many compiled products as a budget of ``ram`` bytes bears. ``trained``: a
    model is trained.

    Works before the process's first product; a later call changes nothing. Whoever has set the
    variables already knows better.
    """
    for name in _VARIABLES:
        os.environ.setdefault(name, str(_kernels_for(ram, trained)))


def _kernels_for(ram: int, trained: bool) -> int:
    least, most = KERNELS
    if not trained or ram <= TRAINED_FROM:
        return min(most, max(least, ram // BYTES_PER_KERNEL))
    first = TRAINED_FROM // BYTES_PER_KERNEL
    return min(TRAINED_KERNELS, first + (ram - TRAINED_FROM) // BYTES_PER_TRAINED)


def growth(ram: int, larger: int, *, trained: bool = False) -> int:
    """Bytes of the products that torch keeps more of under a budget of ``larger`` bytes than under
    one of ``ram``. ``trained``: as of ``limit_kernels``, of a model with experts."""
    more = _kernels_for(larger, trained) - _kernels_for(ram, trained)
    return max(0, more) * KERNEL_BYTES


def kernel_bytes(
    experts: Iterable[TensorSpec], prompt_tokens: int, ram: int, *, trained: bool = False
) -> int:
    """What the compiled products of a prompt with ``experts`` take in a process with a budget of
    ``ram`` bytes: one for each matrix and number of tokens that an expert gets. ``trained``: as of
    ``limit_kernels``."""
    value = os.environ.get(_VARIABLES[0], "")
    kept = min(int(value) if value.isdecimal() else KERNELS[1], _kernels_for(ram, trained))
    compiled = len({t.shape for t in experts}) * prompt_tokens
    return max(0, min(kept, compiled) - KERNELS[0]) * KERNEL_BYTES


def workspace_for(matrices: Iterable[TensorSpec]) -> Workspace:
    """``measured`` for the largest matrix's dtype, or ``WHOLE`` where all are small."""
    largest = max(matrices, key=lambda t: t.nbytes, default=None)
    if largest is None or largest.nbytes < WORTH_BYTES:
        return WHOLE
    return measured(getattr(torch, largest.dtype), torch.get_num_threads())


@functools.cache
def measured(dtype: torch.dtype, threads: int) -> Workspace:
    """``measure``, once for each dtype and number of torch's threads (each has its own buffers).

    Takes about 25 ms (of a dtype that the machine has no instructions for, 70 ms) and starts the
    peak RSS anew.
    """
    if dtype not in _DTYPES:
        return WHOLE
    need = measure(dtype)
    logger.info("products with %s matrices on %d threads need %s", dtype, threads, need)
    return need


def measure(dtype: torch.dtype, product: Product = F.linear) -> Workspace:
    """What ``product(x, weight)`` takes beside a matrix of 16 MiB and its output."""
    if not reset_peak_rss():
        return WHOLE
    columns = 4096
    # Not from torch's allocator: the C library would raise its thresholds for good and from then
    # on keep what the model frees.
    memory = HostMemory(MATRIX_BYTES, "matrix workspace")
    passing, kept = [0], [0]
    with contextlib.closing(memory), torch.inference_mode():
        weight = memory.tensor().view(dtype).view(-1, columns).fill_(2**-8)
        tiny = torch.ones((64, 64), dtype=dtype)
        for rows in ROWS:
            x = torch.ones((rows, columns), dtype=dtype)
            product(x[:, :64].contiguous(), tiny)  # loads the library's code
            _trim()
            reset_peak_rss()
            before = peak_rss()
            out = product(x, weight)
            most = peak_rss() - before - out.nbytes
            del out
            _trim()
            left = max(0, current_rss() - before)
            passing.append(most - left)
            kept.append(left)
        del weight
    reset_peak_rss()  # what a caller measures is its own
    steps = max(1, math.ceil(max(passing) / MATRIX_BYTES * STEP))
    mib = max(1, math.ceil((max(kept) - NOISE_BYTES) / 2**20))
    return Workspace(min(MOST, steps / STEP), mib * 2**20)


def _trim() -> None:
    """Give freed memory back, else a copy that fits into it would not show. glibc only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
