"""What the C library does with large blocks of memory that are given back."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator

from offload.runtime.rss import current_rss

logger = logging.getLogger(__name__)

LARGE_BYTES = 4 * 2**20

KEPT_BYTES = 16 * 2**20

SMALL_BUDGET = 256 * 2**20
"""Below this, a few MiB that come and go at the heap's end matter: a 64th of a budget is slack."""

LARGE_SHARE, LEAST_LARGE_BYTES = 64, 128 * 2**10
"""Of a small budget a block is large from one part in 64 on (all of the slack there is), but not
below what is large to glibc itself."""

_M_MMAP_THRESHOLD = -3  # malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8

_MMAPS = 65536  # M_MMAP_MAX where nobody has set it
_NEVER = 2**31 - 1


def large_bytes(budget: int | None) -> int:
    """From which size on a block is given back when it is freed, with a ``budget`` (bytes) of RAM;
    None: no small one."""
    if budget is None:
        return LARGE_BYTES
    return min(LARGE_BYTES, max(LEAST_LARGE_BYTES, budget // LARGE_SHARE))


def return_large_blocks(budget: int | None = None) -> bool:
    """Have glibc give blocks of ``large_bytes(budget)`` and more back to the system when they are
    freed; whether it will. Process-wide, and harmless if called again.

    By default glibc puts ever larger blocks, up to 32 MiB, on its heap once it has seen some freed,
    and a heap shrinks only from its end. The activations of a prompt of 512 tokens (4 to 16 MiB
    each, of many sizes) left 217 MB of free blocks behind where 115 MB were in use at most, and a
    budget was exceeded by a seventh. A block of its own costs its pages at each use, about
    0.25 ms per MiB; blocks below 4 MiB are what a few tokens at once need, and stay on the heap.
    Of a small budget that is too much: a prompt of 600 tokens, of blocks of 1.2 to 3.4 MiB, left
    15 MiB behind, and took 40 of 35.
    """
    # Setting either ends the dynamic adjustment of both.
    return _set(_M_MMAP_THRESHOLD, large_bytes(budget)) and _set(_M_TRIM_THRESHOLD, LARGE_BYTES)


_keeping = 0
_keeping_lock = threading.Lock()


def can_keep_freed() -> bool:
    """Whether ``keeping_freed`` does anything here."""
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt and library.malloc_trim)
    except (OSError, AttributeError):
        return False


@contextlib.contextmanager
def keeping_freed() -> Iterator[None]:
    """Inside, glibc keeps blocks of every size on its heap when they are freed, for whoever asks
    next; behind it their pages are given back, and the heap grows by no large block any more
    (``return_large_blocks``); those that find a gap in what it has grown to keep its pages when
    they are freed. Process-wide. Nests, also over threads.

    For work that asks for the same blocks again and again and has a budget for those in between
    (``GiveBack``): a layer of a billion-parameter model, forward and backward of 2,048 tokens, took
    2.1 to 2.4 s with large blocks given back at once, 0.4 of 1.9 million page faults and 2.0 s with
    this. A threshold of 32 MiB, the largest that glibc takes, leaves out blocks of longer inputs.
    """
    global _keeping
    with _keeping_lock:
        _keeping += 1
        _set(_M_MMAP_MAX, 0)
        _set(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        with _keeping_lock:
            _keeping -= 1
            if not _keeping:
                _set(_M_MMAP_MAX, _MMAPS)
                return_large_blocks()
                give_back()


def give_back() -> None:
    """Give the pages of all free blocks back to the system, those amid the heap, too."""
    with contextlib.suppress(OSError, AttributeError):  # there is no such heap
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = [ctypes.c_size_t]
        trim(0)


class GiveBack:
    """What ``keeping_freed`` must not exceed: ``give_back`` where little of a budget is left."""

    def __init__(self, limit: int, ahead: int) -> None:
        """``limit``: resident bytes of this process. ``ahead``: bytes that may be needed until the
        next call."""
        self.limit, self.ahead = limit, ahead
        self.times = 0
        """How often it was necessary."""

    def __call__(self) -> None:
        """To be called at the beginning of a piece of work."""
        if current_rss() + self.ahead > self.limit:
            give_back()
            self.times += 1


def keep_small_heap(budget: int) -> bool:
    """For a ``budget`` (bytes) below ``SMALL_BUDGET`` have glibc keep up to ``KEPT_BYTES`` that are
    free at the end of its heap, and one heap for all threads that start from now on; whether it
    will. Process-wide, and harmless if called again. To be called before the process is weighed.
    Large blocks, by ``large_bytes``, are given back: what is large was adjusted by what has been
    freed in this process so far.

    By default it gives them back once they pass a threshold, and whether that is just before a
    weighing or behind it is chance. oneDNN's code for products of another number of rows (two
    blocks of 256 KiB, soon replaced and freed) moves the end of the heap by 2 to 4 MiB. What was in
    use differed by 70 KiB between runs, the process weighed before it by 2.3 MiB: a budget of
    6.6 MiB was exceeded by 0.8 MiB of free memory that had been given back before the weighing.
    Likewise with the heaps that threads of the streamed toy leave behind: those that read for the
    model find them again or not, which is 1 to 2 MiB.
    """
    return (
        budget < SMALL_BUDGET
        and _set(_M_MMAP_THRESHOLD, large_bytes(budget))
        and _set(_M_TRIM_THRESHOLD, KEPT_BYTES)
        and share_one_heap()
    )


def share_one_heap() -> bool:
    """Have glibc give threads that start from now on the heaps there are, and none of their own;
    whether it will. Process-wide, and harmless if called again.

    By default each thread gets a heap, and keeps what was freed on it. Four micro-batches that run
    in turns on threads of their own took 247 MiB where 168 do with one heap. What it costs is a
    lock that hardly anybody else wants at the same time.
    """
    return _set(_M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("this C library has no mallopt")
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    return bool(mallopt(parameter, value))


__all__ = [
    "KEPT_BYTES", "LARGE_BYTES", "SMALL_BUDGET", "GiveBack", "can_keep_freed", "give_back",
    "keep_small_heap", "keeping_freed", "return_large_blocks", "share_one_heap",
]  # fmt: skip
