"""Reading a checkpoint's files and multiplying its matrices: alone, and beside each other.

A machine that reads at 3 GB/s and multiplies at 20 GB/s does neither while it does both: the
disk's bytes arrive through the same memory, and the threads that fetch them run on the same cores.
On two cores each loses a fifth to a third. A plan that adds up the rates of each alone would
promise an overlap that does not happen, so each is measured alone, in short bursts in turns, and
then both for a while, on the very files that will be streamed.

Both for a while, because a virtual machine's processors are rationed, by tenths of a second, and
what its host spends on copying the disk's bytes is charged to the same ration: two threads that
multiply on two processors beside a disk at 3 GB/s ran undisturbed for 65 ms and then stood still
for 32. Bursts of 25 ms, and medians, never saw that.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from offload.blocks import DTYPE_BYTES
from offload.io.tune import Bursts, bursts
from offload.runtime.memory import HostMemory
from offload.runtime.probe_compute import torch_threads
from offload.runtime.rss import available_ram
from offload.scheduler.hardware import BYTES_PER_S, Hardware, Rate

SIZES = ((2048, 2048), (1024, 512))
"""Rows and columns of the two matrices whose times give a rate and a cost per product: a large
layer's and a small expert's."""

AREA_BYTES = 64 << 20
"""Matrices in turn, more than most caches hold of them."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""What Linux says of them, level by level."""

ROUNDS = 6

MOST_ROUNDS = 3 * ROUNDS
"""While half of the last ones were slower than the best by NEAR: something else was running."""
NEAR = 1.25

ENTER_S, BOTH_S = 0.2, 0.6
"""Of both at once, the first of it not looked at: threads that wake beside others may share a core
with them for a while, and a processor's ration lasts for some tenths of a second when it was not
used up before."""

SETTLE_S, WINDOW_S = 0.01, 0.02
"""Products that are run, and not looked at, after the disk was read, and then those that are timed.
Threads that slept while it was read, and those that read, take some milliseconds to find their
cores: 16 products of 0.1 ms each, timed at once, took 2.5 to 14 times as long as the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What was measured.

    Attributes:
        read: bytes per second from the files, alone.
        gemv: bytes of weights per second at one token, without what each product costs besides.
        product_s: seconds that a product takes besides its bytes, more than the smallest does.
        read_beside, gemv_beside: shares of those rates that are left while the other runs.
    """

    read: Rate
    gemv: Rate
    product_s: float
    read_beside: float
    gemv_beside: float

    def on(self, hardware: Hardware, dtype: str) -> Hardware:
        """``hardware`` as it is now, for weights of ``dtype``; other dtypes keep their rates."""
        return replace(
            hardware,
            ssd_read=self.read,
            gemv={**hardware.gemv, dtype: self.gemv},
            product_s=self.product_s,
            read_beside=self.read_beside,
            gemv_beside=self.gemv_beside,
        )


class Products(Protocol):
    """Matrix products at one token, over distinct matrices in turn; ``size``: 0 the large ones,
    1 the small ones."""

    nbytes: Sequence[int]
    """Of a matrix, by size."""

    def one(self, size: int) -> None:
        """The next product."""
        ...

    def seconds(self, size: int, count: int) -> float:
        """The mean time of one product."""
        ...

    def tiny_s(self) -> float:
        """The mean time of a product of next to nothing."""
        ...


def measure(
    paths: Sequence[str | os.PathLike[str]],
    dtype: str,
    products: Callable[[HostMemory], Products] | None = None,
) -> Together | None:
    """Measure in about a second, with as many threads as torch has now.

    Args:
        paths: files to read from, a checkpoint's.
        dtype: of the weights, by torch's name.
        products: with matrices in the memory it is given; None: torch's, of ``dtype``.

    Returns:
        None if the files are too short to say anything.

    Raises:
        StoreError: a file cannot be read.
    """
    with ExitStack() as stack:
        reads = stack.enter_context(bursts(paths))
        if reads is None:
            return None
        memory = HostMemory(area_bytes(paths), "weights of the probe")
        stack.callback(memory.close)
        return _measure(reads, products(memory) if products else TorchProducts(memory, dtype))


def area_bytes(paths: Sequence[str | os.PathLike[str]]) -> int:
    """Bytes of the matrices in turn: twice the largest cache, but no more than the weights in the
    files ``paths``, which a cache may hold as well then, or than a quarter of the RAM that is
    available; AREA_BYTES at least.

    In 64 MiB of a server's 260 MiB of L3, products of a pack ran at 35 GB/s and its model, which
    reads 546 MB for a token, at 26: a prediction of 62 tok/s, and 38.
    """
    weights = sum(os.path.getsize(path) for path in paths)
    return max(AREA_BYTES, min(2 * _largest_cache(), weights, available_ram() // 4))


def _largest_cache() -> int:
    """Bytes; 0 where nobody says."""
    found = [0]
    for file in CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            said = file.read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(said[-1:], 1)
            found.append(int(said.rstrip("KMG")) * unit)
    return max(found)


def measure_fewer(
    paths: Sequence[str | os.PathLike[str]],
    dtype: str,
    products: Callable[[HostMemory], Products] | None = None,
    also: Callable[[int], object] = lambda _: None,
) -> Together | None:
    """``measure`` with one thread fewer than torch has; None if it has one. ``also``: who else is
    told how many there are.

    Raises:
        StoreError: a file cannot be read.
    """
    threads = torch.get_num_threads()
    if threads < 2:
        return None
    with torch_threads(threads - 1):
        also(threads - 1)
        try:
            return measure(paths, dtype, products)
        finally:
            torch.set_num_threads(threads)
            also(threads)


class TorchProducts:
    """Those of layers as transformers has them."""

    def __init__(
        self,
        memory: HostMemory,
        dtype: str,
        linear: Callable[..., torch.Tensor] = F.linear,
        tiny: Callable[..., torch.Tensor] = F.linear,
    ) -> None:
        """``linear`` computes all but the products of next to nothing, ``tiny`` those."""
        self._linear, self._of_toys = linear, tiny
        self._dtype: torch.dtype = getattr(torch, dtype)
        numbers = memory.tensor().view(self._dtype)
        # As a GEMV's time does not depend on values other than denormals, any will do.
        numbers.fill_(1 / 64)
        size = DTYPE_BYTES[dtype]
        self.nbytes: Sequence[int] = [rows * columns * size for rows, columns in SIZES]
        self._sets = [
            list(numbers[: numbers.numel() // (r * c) * r * c].view(-1, r, c)) for r, c in SIZES
        ]
        self._x = [torch.ones(1, c, dtype=self._dtype) for _, c in SIZES]
        self._tiny = torch.ones(32, 32, dtype=self._dtype)
        self._turns = [self._in_turn(size) for size in range(len(SIZES))]

    def _in_turn(self, size: int) -> Iterator[torch.Tensor]:
        while True:
            yield from self._sets[size]

    def one(self, size: int) -> None:
        self._linear(self._x[size], next(self._turns[size]))

    def seconds(self, size: int, count: int) -> float:
        """The mean time of one product."""
        began = time.perf_counter()
        for _ in range(count):
            self.one(size)
        return (time.perf_counter() - began) / count

    def tiny_s(self, count: int = 100) -> float:
        """The mean time of a product of next to nothing: Python and dispatch."""
        x = self._tiny[:1]
        began = time.perf_counter()
        for _ in range(count):
            self._of_toys(x, self._tiny)
        return (time.perf_counter() - began) / count


def _measure(reads: Bursts, products: Products) -> Together:
    read: list[float] = []
    times: list[list[float]] = [[] for _ in SIZES]
    with torch.inference_mode():
        products.tiny_s()
        reads.finish(reads.begin())  # touches the memory, starts the threads
        for size in range(len(SIZES)):
            products.seconds(size, len(SIZES))
        rounds = 0
        while rounds < ROUNDS or (rounds < MOST_ROUNDS and _unsettled(times[0])):
            rounds += 1
            read.append(reads.rate())
            for size, out in enumerate(times):
                out.append(_settled_s(products, size))
        read_both, both_s = _both(reads, products)
        tiny_s = products.tiny_s()
    times = [t[-ROUNDS:] for t in times]
    mid = [statistics.median(t) for t in times]
    rate = _slope(products.nbytes, mid)
    extra_s = max(0.0, mid[0] - products.nbytes[0] / rate - tiny_s)
    scale = rate * mid[0] / products.nbytes[0]
    return Together(
        read=Rate.of(read, BYTES_PER_S),
        gemv=Rate.of([scale * products.nbytes[0] / t for t in times[0]], BYTES_PER_S),
        product_s=extra_s,
        read_beside=min(1.0, read_both / statistics.median(read)),
        gemv_beside=min(1.0, (mid[0] + _small_ones(products) * mid[1]) / both_s),
    )


def _both(reads: Bursts, products: Products) -> tuple[float, float]:
    """Bytes per second from the disk, and seconds of products of a large matrix and of as many
    bytes of small ones: the means of ``BOTH_S`` in which the disk is read without a pause and such
    products follow each other, after ``ENTER_S`` of the same.

    Means, as a run is as long as the sum of its parts. Small ones too: threads that read take turns
    with Python, which a product of 0.1 ms feels more (0.88 of its rate alone) than one of a
    millisecond (0.95).
    """
    some = _small_ones(products)
    burst, count, counted_s = reads.begin(), 0, 0.0
    rates: list[float] = []
    began = last = time.perf_counter()
    while last < began + ENTER_S + BOTH_S or not rates:
        for size in (0, *[1] * some):
            products.one(size)
            if burst.done():
                rate = reads.finish(burst)
                burst = reads.begin()
                if last >= began + ENTER_S:
                    rates.append(rate)
        now = time.perf_counter()
        if last >= began + ENTER_S:
            counted_s += now - last
            count += 1
        last = now
    reads.finish(burst)
    return statistics.harmonic_mean(rates), counted_s / count


def _small_ones(products: Products) -> int:
    """How many small matrices are as long as a large one."""
    return max(1, round(products.nbytes[0] / products.nbytes[1]))


def _settled_s(products: Products, size: int) -> float:
    """The mean time of one product, when threads and caches are as they are in a long run."""
    each_s, until = 0.0, time.perf_counter() + SETTLE_S
    while not each_s or time.perf_counter() < until:
        each_s = products.seconds(size, 4)
    return products.seconds(size, max(4, math.ceil(WINDOW_S / each_s)))


def _unsettled(seconds: Sequence[float]) -> bool:
    last = seconds[-ROUNDS:]
    return statistics.median(last) > NEAR * min(last)


def _slope(nbytes: Sequence[int], seconds: Sequence[float]) -> float:
    """Bytes per second of what the larger product has more than the smaller one; bounded where
    noise hides the difference."""
    large, small = nbytes
    more_s = seconds[0] - seconds[1]
    whole = large / seconds[0]
    return min((large - small) / more_s, 2 * whole) if more_s > 0 else whole
