"""How much memory a product with a large matrix takes beside the matrix.

A BLAS may bring a whole matrix into a layout of its own before it multiplies, and whether it does
depends on the machine: with instructions for the dtype it packs a few cache lines at a time. So it
is measured. What a product leaves behind (code compiled for its shapes) is counted apart, because
it does not grow with the matrix.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from offload.blocks import TensorSpec
from offload.runtime.memory import HostMemory
from offload.runtime.rss import peak_rss, reset_peak_rss

logger = logging.getLogger(__name__)

MATRIX_BYTES = 16 * 2**20
ROWS = (1, 2, 8, 16, 64)
"""Rows of the other operand that are tried: decode, small batches, a prompt."""

WORTH_BYTES = 32 * 2**20
"""Matrices below this are not worth a measurement, which itself leaves some MiB of code behind."""

STEP = 16
"""Shares are rounded up to one part in so many, for a plan that is the same in each run."""

MOST = 1.25

KERNEL_BYTES = 768 * 2**10
"""oneDNN keeps the code it has compiled for a product: 0.5 to 1 MiB for each pair of shapes."""

PRODUCTS = 2
"""Of each matrix: with a prompt and with a token."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def workspace_bytes(matrices: Iterable[TensorSpec], share: float) -> int:
    """What has to be set aside for products with ``matrices``: ``share`` of the largest, and what
    products leave behind. Never more than if whole matrices were copied (``share`` 1.0)."""
    largest = 0
    shapes: set[tuple[int, ...]] = set()
    for matrix in matrices:
        largest = max(largest, matrix.nbytes)
        if len(matrix.shape) >= 2:
            shapes.add(matrix.shape[-2:])
    kept = len(shapes) * PRODUCTS * KERNEL_BYTES
    return min(math.ceil(share * largest) + kept, math.ceil(max(1.0, share) * largest))


def share_for(matrices: Iterable[TensorSpec]) -> float:
    """``matrix_share`` of the largest matrix's dtype, or 1.0 where all are small."""
    largest = max(matrices, key=lambda t: t.nbytes, default=None)
    if largest is None or largest.nbytes < WORTH_BYTES:
        return 1.0
    return matrix_share(getattr(torch, largest.dtype), torch.get_num_threads())


@functools.cache
def matrix_share(dtype: torch.dtype, threads: int) -> float:
    """The share of a matrix that a product with it takes beside it, measured once.

    In [1/16, 1.25], a multiple of 1/16; 1.0 where it cannot be measured. ``threads`` are torch's:
    each has buffers of its own. Takes about 25 ms (of a dtype that the machine has no instructions
    for, 70 ms) and starts the peak RSS anew.
    """
    if dtype not in _DTYPES:
        return 1.0
    share = measure(dtype)
    logger.info("a product takes %.0f %% of a %s matrix beside it", 100 * share, dtype)
    return share


def measure(dtype: torch.dtype, product: Product = F.linear) -> float:
    """``matrix_share`` of ``product(x, weight)``, without a memory of earlier answers."""
    if not reset_peak_rss():
        return 1.0
    columns = 4096
    # Not from torch's allocator: the C library would raise its thresholds for good and from then
    # on keep what the model frees.
    memory = HostMemory(MATRIX_BYTES, "matrix workspace")
    needs = []
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
            needs.append(peak_rss() - before - out.nbytes - KERNEL_BYTES)
            del out
        del weight
    reset_peak_rss()  # what a caller measures is its own
    return min(MOST, max(1, math.ceil(max(needs) / MATRIX_BYTES * STEP)) / STEP)


def _trim() -> None:
    """Give freed memory back, else a copy that fits into it would not show. glibc only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
