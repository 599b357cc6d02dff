"""How fast the CPU streams memory and multiplies matrices, with torch's own kernels."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch

from offload.blocks import DTYPE_BYTES
from offload.runtime.memory import HostMemory
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Rate

GEMV_SIDE = 2048
"""Rows and columns of the matrices of the GEMV: a layer's size, 8 MiB in bfloat16."""

SLOWEST_S = 1.0
"""The longest a single matrix product of the probe may take, about."""


@contextlib.contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Let torch compute with ``n`` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample(
    work: Callable[[], object], amount: float, unit: str, *, samples: int, sample_s: float
) -> Rate:
    """The rate of ``work``, which does ``amount``; repeated so that a sample takes ``sample_s``."""
    work()  # page faults, kernels chosen and packed
    once_s = _seconds(work, 1)
    repeats = max(1, round(sample_s / once_s))
    found = [repeats * amount / _seconds(work, repeats) for _ in range(samples)]
    return Rate.of(found, unit)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    return max(time.perf_counter() - begin, 1e-9)


def ram_read(memory: HostMemory, *, samples: int, sample_s: float) -> Rate:
    """A read-only stream over all of ``memory``, which should be much larger than the caches.

    An int64 sum: torch vectorises it (its int32 sum widens one element at a time, 30 times
    slower), the additions hide behind the loads, and no value makes it slow. A dot product is no
    read stream of one array, and a copy also writes.
    """
    words = memory.tensor()[: memory.nbytes // 8 * 8].view(torch.int64)
    words.fill_(1)
    nbytes = words.numel() * 8
    return sample(words.sum, nbytes, BYTES_PER_S, samples=samples, sample_s=sample_s)


def memcpy(memory: HostMemory, *, samples: int, sample_s: float) -> Rate:
    """Copy one half of ``memory`` to the other."""
    half = memory.nbytes // 2
    dst, src = memory.tensor()[:half], memory.tensor()[half : 2 * half]
    return sample(lambda: dst.copy_(src), half, BYTES_PER_S, samples=samples, sample_s=sample_s)


def gemv(memory: HostMemory, dtype_name: str, *, samples: int, sample_s: float) -> Rate:
    """``F.linear`` at one token over as many distinct matrices as ``memory`` holds, in turn.

    One matrix again and again would be served by the cache, which decoding never is.
    """
    dtype: torch.dtype = getattr(torch, dtype_name)
    itemsize = DTYPE_BYTES[dtype_name]
    side = GEMV_SIDE
    while side > 64 and side * side * itemsize * 8 > memory.nbytes:
        side //= 2
    count = memory.nbytes // (side * side * itemsize)
    numbers = memory.tensor()[: count * side * side * itemsize].view(dtype)
    numbers.fill_(1 / 64)
    weights_NOI = numbers.view(count, side, side)
    x_1I = torch.ones(1, side, dtype=dtype)

    def all_of_them() -> None:
        for w_OI in weights_NOI:
            torch.nn.functional.linear(x_1I, w_OI)

    with torch.inference_mode():
        nbytes = numbers.numel() * itemsize
        return sample(all_of_them, nbytes, BYTES_PER_S, samples=samples, sample_s=sample_s)


def matmul(dtype_name: str, side: int, *, samples: int, sample_s: float) -> Rate:
    """Square matrices of ``side``, or smaller if a product would take about a second.

    The size is found by doubling, not from the rate at a small one: there, waking the threads
    dominates, and on a busy machine it may be fifty times slower than the rate of large products.
    """
    dtype: torch.dtype = getattr(torch, dtype_name)
    with torch.inference_mode():
        limit, side = side, min(side, 256)
        while side < limit:
            a = torch.full((side, side), 1 / 64, dtype=dtype)
            if (
                8 * min(_seconds(functools.partial(torch.mm, a, a), 1) for _ in range(3))
                > SLOWEST_S
            ):
                break
            side = min(2 * side, limit)
        a = torch.full((side, side), 1 / 64, dtype=dtype)
        out = torch.empty_like(a)
        return sample(
            lambda: torch.mm(a, a, out=out),
            2 * side**3,
            FLOP_PER_S,
            samples=samples,
            sample_s=sample_s,
        )
