"""Which engine, queue depth and request size this disk likes, by measurement.

Rates of a shared disk drift by tens of percent within seconds, so candidates take turns: every
round measures each of them once, and what is compared are medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from offload.blocks import ALIGN
from offload.errors import StoreError
from offload.io.engines import DEFAULT_ENGINE, Engine, make_engine
from offload.io.files import DirectFile
from offload.io.memory import Staging
from offload.units import format_bytes

SLACK = 0.05
"""The default engine is kept unless it is slower by more than this share."""

GOOD_ENOUGH = 0.97
"""Of all settings that reach this share of the best rate, the one with the least memory wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one setting measured: bytes per second, median and range over ``rounds``."""

    engine: str
    queue_depth: int
    request_bytes: int
    bytes_per_s: float
    low_bytes_per_s: float
    high_bytes_per_s: float
    rounds: int

    @property
    def spread(self) -> float:
        """(high - low) / median."""
        return (self.high_bytes_per_s - self.low_bytes_per_s) / self.bytes_per_s

    @property
    def buffer_bytes(self) -> int:
        """Memory the requests in flight need."""
        return self.queue_depth * self.request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both engines at one setting, and which one to use."""

    default: Rate
    other: Rate
    mode: str
    """``"direct"``, or ``"buffered"`` where the filesystem refuses O_DIRECT."""

    @property
    def ratio(self) -> float:
        """The default engine's rate over the other's."""
        return self.default.bytes_per_s / self.other.bytes_per_s

    @property
    def choice(self) -> str:
        """The default engine, unless it is more than 5 % slower."""
        return self.default.engine if self.ratio >= 1 - SLACK else self.other.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All settings that were measured, and the cheapest good one."""

    best: Rate
    rates: tuple[Rate, ...]
    mode: str


Setting = tuple[str, int, int]
"""Engine, queue depth, request bytes."""


def compare_engines(
    path: str | os.PathLike[str],
    *,
    queue_depth: int = 4,
    request_bytes: int = 4 << 20,
    rounds: int = 5,
    bytes_per_round: int = 256 << 20,
) -> Comparison:
    """Measure both engines in turns on the file ``path``, which is only read.

    Raises:
        StoreError: the file cannot be read or is shorter than a request.
    """
    other = "threads" if DEFAULT_ENGINE == "aiofiles" else "aiofiles"
    settings = [(name, queue_depth, request_bytes) for name in (DEFAULT_ENGINE, other)]
    (first, second), mode = _measure(path, settings, rounds, bytes_per_round)
    return Comparison(default=first, other=second, mode=mode)


def tune(
    path: str | os.PathLike[str],
    *,
    engines: Sequence[str] = ("aiofiles", "threads"),
    queue_depths: Sequence[int] = (1, 2, 4, 8),
    request_sizes: Sequence[int] = (1 << 20, 4 << 20, 8 << 20),
    rounds: int = 3,
    bytes_per_round: int = 128 << 20,
) -> Tuning:
    """Measure all combinations in turns on the file ``path``, which is only read.

    Raises:
        StoreError: the file cannot be read or is shorter than a request.
    """
    settings = [(e, d, r) for e in engines for d in queue_depths for r in request_sizes]
    if not settings:
        raise ValueError("nothing to measure")
    rates, mode = _measure(path, settings, rounds, bytes_per_round)
    top = max(r.bytes_per_s for r in rates)
    good = [r for r in rates if r.bytes_per_s >= GOOD_ENOUGH * top]
    best = min(good, key=lambda r: (r.buffer_bytes, r.engine != DEFAULT_ENGINE, -r.bytes_per_s))
    return Tuning(best=best, rates=tuple(rates), mode=mode)


def _measure(
    path: str | os.PathLike[str],
    settings: Sequence[Setting],
    rounds: int,
    bytes_per_round: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Rate], str]:
    if rounds < 1:
        raise ValueError(f"at least one round is needed, got {rounds}")
    samples: list[list[float]] = [[] for _ in settings]
    with DirectFile.open(path) as file:
        longest = max(r for _, _, r in settings)
        if file.size < longest:
            raise StoreError(
                f"{file.path} has {format_bytes(file.size)}, the longest request "
                f"{format_bytes(longest)}; measure on a longer file"
            )
        at = 0
        for _ in range(rounds):
            for (name, depth, request_bytes), out in zip(settings, samples, strict=True):
                # Each goes on where the one before stopped: none profits from what a cache
                # below us (of the drive, of a virtual machine's host) still holds.
                engine = make_engine(name, depth)
                staging = Staging(depth, request_bytes)
                try:
                    start_s = clock()
                    moved, at = _stream(engine, staging, file, at, bytes_per_round)
                    out.append(moved / max(clock() - start_s, 1e-9))
                finally:
                    engine.close()
                    staging.close()
        mode = file.mode
    return [_rate(s, o) for s, o in zip(settings, samples, strict=True)], mode


def _rate(setting: Setting, samples: list[float]) -> Rate:
    name, depth, request_bytes = setting
    return Rate(
        engine=name,
        queue_depth=depth,
        request_bytes=request_bytes,
        bytes_per_s=statistics.median(samples),
        low_bytes_per_s=min(samples),
        high_bytes_per_s=max(samples),
        rounds=len(samples),
    )


def _stream(
    engine: Engine, staging: Staging, file: DirectFile, at: int, nbytes: int
) -> tuple[int, int]:
    """Read at least ``nbytes`` from ``at`` on, wrapping; returns bytes read and where it ended."""
    request_bytes = staging.chunk_bytes

    def fetch(offset: int) -> int:
        with staging.chunk() as chunk:
            return file.read(offset, chunk.view)

    futures: list[Future[int]] = []
    for _ in range(max(1, -(-nbytes // request_bytes))):
        if at + request_bytes > file.size:
            at = 0
        futures.append(engine.submit(partial(fetch, at)))
        at += request_bytes // ALIGN * ALIGN
    return sum(f.result() for f in futures), at


PER_WORKER = 4
"""Requests of a burst."""


class Bursts:
    """Short bursts of reads at places spread over ``files``, into as much memory as will take them
    (``16 * request_bytes`` for a queue of 4): into a few buffers that never leave the processor's
    cache a virtual disk is 10 % faster."""

    def __init__(
        self, files: Sequence[DirectFile], queue_depth: int, request_bytes: int, engine: Engine
    ) -> None:
        self._files = files
        self._request_bytes = request_bytes
        self._per_burst = PER_WORKER * queue_depth
        self._engine = engine
        self._area = Staging(self._per_burst, request_bytes)
        self._n = 0

    def begin(self) -> Burst:
        """Ask for the next burst: four requests per worker. One at a time."""
        file, offsets = self._place()
        chunks = ExitStack()
        views = [chunks.enter_context(self._area.chunk()).view for _ in offsets]
        began = time.perf_counter()
        jobs = [
            self._engine.submit(partial(file.read, offset, view))
            for offset, view in zip(offsets, views, strict=True)
        ]
        return Burst(began, jobs, chunks)

    def finish(self, burst: Burst) -> float:
        """Wait for it; returns its bytes per second, from when each worker has done one request:
        the first ones begin with threads that wake and a disk that has slept."""
        with burst.chunks:
            ends = burst.ends()  # before an error is raised: nobody writes into the chunks any more
            nbytes = sum(job.result() for job in burst.jobs)
            first = len(burst.jobs) // PER_WORKER
            spent = ends[-1] - ends[first - 1]
            if spent <= 0.0:  # they have all ended at once
                return nbytes / (ends[-1] - burst.began)
            return nbytes * (1 - first / len(ends)) / spent

    def rate(self) -> float:
        """One burst, alone."""
        return self.finish(self.begin())

    def close(self) -> None:
        """Free the memory."""
        self._area.close()

    def _place(self) -> tuple[DirectFile, list[int]]:
        """Places follow the golden ratio, which spreads any number of them evenly."""
        at = int(sum(f.size for f in self._files) * ((self._n * 0.6180339887) % 1.0))
        self._n += 1
        file = self._files[-1]
        for candidate in self._files:
            if at < candidate.size:
                file = candidate
                break
            at -= candidate.size
        whole = file.size // ALIGN * ALIGN
        room = max(0, whole - self._per_burst * self._request_bytes)
        start = min(at // ALIGN * ALIGN, room)
        last = whole - self._request_bytes
        return file, [min(start + i * self._request_bytes, last) for i in range(self._per_burst)]


class Burst:
    """Requests under way."""

    def __init__(self, began: float, jobs: list[Future[int]], chunks: ExitStack) -> None:
        self.began = began
        self.jobs = jobs
        self.chunks = chunks
        self._ended: list[float] = []
        self._all = threading.Event()
        for job in jobs:
            job.add_done_callback(self._end)

    def _end(self, _: Future[int]) -> None:
        self._ended.append(time.perf_counter())
        if len(self._ended) == len(self.jobs):
            self._all.set()

    def done(self) -> bool:
        """Whether all requests have ended."""
        return self._all.is_set()

    def ends(self) -> list[float]:
        """When they ended, in order; waits for the last one."""
        self._all.wait()
        return sorted(max(t, self.began + 1e-9) for t in self._ended)


@contextmanager
def bursts(
    paths: Sequence[str | os.PathLike[str]], *, queue_depth: int = 4, request_bytes: int = 4 << 20
) -> Iterator[Bursts | None]:
    """Bursts over the files ``paths``; None if they are too short to say anything.

    Raises:
        StoreError: a file cannot be read.
    """
    with ExitStack() as stack:
        files = []
        for path in paths:
            files.append(DirectFile.open(path))
            stack.callback(files[-1].close)
        long = [f for f in files if f.size >= 4 * request_bytes]
        if sum(f.size for f in long) < 64 * request_bytes:
            yield None
            return
        engine = make_engine(queue_depth=queue_depth)
        stack.callback(engine.close)
        found = Bursts(long, queue_depth, request_bytes, engine)
        stack.callback(found.close)
        yield found


def sample(paths: Sequence[str | os.PathLike[str]], *, seconds: float = 0.6) -> list[float]:
    """Bytes per second of several short bursts at places spread over ``paths``, which are read.

    A probe on a file of its own measures a part of the disk that was just written, and on a
    virtual disk whatever the host has cached of it; this measures the very bytes that will be
    streamed. Empty if the files are too short to say anything.

    Raises:
        StoreError: a file cannot be read.
    """
    with bursts(paths) as reads:
        if reads is None:
            return []
        reads.rate()  # pays for touching the memory
        rates: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rates) < 3:
            rates.append(reads.rate())
        return rates
