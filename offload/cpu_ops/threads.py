"""Running a kernel on several threads: in torch's own OpenMP pool.

A region is one call of ``GOMP_parallel`` of the OpenMP runtime that torch is linked to: about 3 us
with its barrier, and in turn with torch's own regions no more than the two take apart
(``benchmarks/kernels.py`` measures both). Numba's threading layers are not used: each brings a
second pool whose idle threads wait for work on the same cores, ``workqueue`` is not even safe to
call from two threads, and ``parallel=True`` compiles several times longer. A barrier inside a
region also costs less than leaving it and starting the next.

Regions must be started from the thread that calls torch: an OpenMP runtime keeps a pool per
calling thread. With as many threads as torch has, too: libgomp ends and restarts threads when
consecutive regions differ in their number.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import OffloadError

log = logging.getLogger(__name__)

BARRIER = 0
"""Where a kernel's arguments hold the address of the barrier function; 0: one thread."""

Arguments = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OpenMP:
    """Entry points of an OpenMP runtime."""

    parallel: Callable[[int, int, int, int], None]
    """(function, its argument, threads, flags): run it on every thread; back when all are done."""
    barrier: int
    """Address of ``void barrier(void)``."""


@functools.cache
def openmp() -> OpenMP | None:
    """torch's OpenMP runtime; None if it has none that speaks libgomp's interface."""
    import torch

    names = ("libtorch_cpu.so", "libtorch_cpu.dylib")
    for path in (Path(torch.__file__).parent / "lib" / name for name in names):
        if not path.exists():
            continue
        # Looked up through torch's library, so found in the very runtime torch resolved.
        library: Any = ctypes.CDLL(str(path))
        try:
            parallel, barrier = library.GOMP_parallel, library.GOMP_barrier
        except AttributeError:
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return OpenMP(parallel, ctypes.cast(barrier, ctypes.c_void_p).value or 0)
    return None


_threads: int | None = None


def setup(threads: int | None = None) -> int:
    """Use ``threads`` from now on (None: as many as torch); returns how many it will be.

    It is 1 where torch has no OpenMP runtime that can be shared; a warning is logged.

    Raises:
        OffloadError: ``threads`` is not positive.
    """
    import torch

    global _threads
    wanted = torch.get_num_threads() if threads is None else threads
    if wanted < 1:
        raise OffloadError(f"kernels need at least 1 thread, not {wanted}")
    if wanted > 1 and openmp() is None:
        log.warning(
            "torch has no OpenMP runtime to share (GOMP_parallel not found): kernels run on 1 "
            "thread instead of %d",
            wanted,
        )
        wanted = 1
    if wanted > 1 and wanted != torch.get_num_threads():
        log.warning(
            "kernels use %d threads, torch %d: OpenMP restarts threads between the two; "
            "set both to the same number",
            wanted,
            torch.get_num_threads(),
        )
    _threads = wanted
    return wanted


def count() -> int:
    """Threads of the next region; as many as torch has if ``setup`` was never called."""
    return setup() if _threads is None else _threads


def barrier() -> int:
    """Address of what the threads of the next region wait for each other with; 0: there is one."""
    shared = openmp() if count() > 1 else None
    return 0 if shared is None else shared.barrier


def run(
    body: Callable[[int], None], address: int, arguments: Arguments, workers: int | None = None
) -> None:
    """Run a kernel's ``body`` (at ``address``) with its arguments on ``count()`` threads.

    ``workers`` asks for another number; with 1 nothing of OpenMP is touched, so that any thread
    may do it.
    """
    threads = count() if workers is None else workers
    pointer = arguments.__array_interface__["data"][0]
    shared = openmp() if threads > 1 else None
    if shared is None:
        arguments[BARRIER] = 0
        body(pointer)
    else:
        arguments[BARRIER] = shared.barrier
        shared.parallel(address, pointer, threads, 0)
