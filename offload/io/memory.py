"""Memory that O_DIRECT accepts: page-aligned buffers, plain copies, and the staging chunks.

Tensors in published files start at any byte, O_DIRECT reads whole pages into page-aligned memory.
So most reads go into a *chunk* of the staging first and from there, with one copy, to the place
the caller gave. The staging is allocated once; its size is part of the RAM budget.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import mmap
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from offload.blocks import ALIGN, align_up
from offload.errors import ClosedError


def address(buf: memoryview) -> int:
    """The address of the first byte of ``buf``; 0 for an empty one. Read-only buffers too."""
    if buf.nbytes == 0:
        return 0
    if not buf.readonly:  # a seventh of NumPy's time, and every transfer asks
        return ctypes.addressof(ctypes.c_char.from_buffer(buf))
    return int(np.frombuffer(buf, dtype=np.uint8).__array_interface__["data"][0])


def copy(dst: int, src: int, nbytes: int) -> None:
    """Copy between two addresses without the GIL.

    Not ``dst_view[a:b] = src_view[c:d]``: that holds the GIL for the whole copy, about 1 ms for
    4 MiB, and stalls every other Python thread. The caller keeps both buffers alive.
    """
    ctypes.memmove(dst, src, nbytes)


def byte_view(buf: memoryview) -> memoryview:
    """``buf`` as a flat view of unsigned bytes that keeps the memory alive on its own.

    Raises:
        ValueError: the buffer is not C-contiguous.
    """
    if not buf.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    return buf[:] if buf.format == "B" and buf.ndim == 1 else buf.cast("B")


def anonymous(nbytes: int, *, huge: bool = False) -> mmap.mmap:
    """Zeroed private memory at a page boundary; ``huge`` asks for transparent huge pages.

    A shared mapping (the default of ``mmap.mmap(-1, n)``) would live in shmem, which gets no
    transparent huge pages and is charged as such in a cgroup.
    """
    area = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):  # a kernel built without them: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    return area


def _unmap(area: mmap.mmap) -> None:
    """Free the memory now, or with the last slice of it that the traceback of an error holds."""
    with contextlib.suppress(BufferError):
        area.close()


class Chunk(NamedTuple):
    """A piece of staging memory: ``view`` is writable, ``address`` a multiple of 4096."""

    view: memoryview
    address: int


class Staging:
    """A fixed number of aligned chunks, lent one at a time. Thread-safe.

    Chunks are taken by the engine's workers for the time of one request, not by the caller of a
    store: requests queue in the engine, where a demand overtakes a prefetch, and a worker that
    waits for a chunk waits for other workers, which always finish. A worker holds at most one
    chunk, so there is no circular wait.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        if chunks < 1 or chunk_bytes < ALIGN or chunk_bytes % ALIGN:
            raise ValueError(
                f"staging of {chunks} chunks of {chunk_bytes} bytes: need at least one chunk, "
                f"a positive multiple of {ALIGN} long"
            )
        self.chunks = chunks
        self.chunk_bytes = chunk_bytes
        self._area = anonymous(chunks * chunk_bytes, huge=True)
        self._whole = memoryview(self._area)
        base = address(self._whole)
        self._free = [
            Chunk(self._whole[at : at + chunk_bytes], base + at)
            for at in range(0, chunks * chunk_bytes, chunk_bytes)
        ]
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._tickets = 0
        self._closed = False

    @property
    def total_bytes(self) -> int:
        """Bytes of memory the staging takes when all of it was used."""
        return self.chunks * self.chunk_bytes

    @contextlib.contextmanager
    def chunk(self, priority: int = 0) -> Iterator[Chunk]:
        """Borrow a chunk; blocks until one is free, lower ``priority`` numbers first.

        Raises:
            ClosedError: the staging is closed.
        """
        chunk = self._take(priority)
        try:
            yield chunk
        finally:
            with self._changed:
                self._free.append(chunk)
                self._changed.notify_all()

    def _take(self, priority: int) -> Chunk:
        with self._changed:
            ticket = (priority, self._tickets)
            self._tickets += 1
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(
                lambda: self._closed or (bool(self._free) and self._waiting[0] == ticket)
            )
            if self._closed:
                raise ClosedError("the staging memory is closed")
            heapq.heappop(self._waiting)
            # The next waiter may have been woken while it was not yet first in line.
            self._changed.notify_all()
            return self._free.pop()

    def close(self) -> None:
        """Wait until every chunk is back, then free the memory. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._free) == self.chunks)
            for chunk in self._free:
                chunk.view.release()
            self._whole.release()
            _unmap(self._area)


class AlignedBuffer:
    """Page-aligned scratch memory of its own, for tests, footers and measurements."""

    def __init__(self, nbytes: int) -> None:
        self._area = anonymous(align_up(max(nbytes, 1)))
        self._whole = memoryview(self._area)
        self.view = self._whole[:nbytes]

    def close(self) -> None:
        """Free the memory. Raises BufferError while a slice of ``view`` is still held."""
        self.view.release()
        self._whole.release()
        self._area.close()

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *_: object) -> None:
        self.view.release()
        self._whole.release()
        _unmap(self._area)
