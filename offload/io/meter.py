"""Bytes moved, and the time in which something was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[float, float, int], None]


class Meter:
    """Counts requests that overlap: their busy time is the union of theirs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = self._under_way = 0
        self._since_s = self._busy_s = 0.0
        self.listener: Listener | None = None
        """Called with (begin, end, bytes) of each request that ended without an error, on the
        ``time.perf_counter`` clock, by the thread that made it."""

    @property
    def nbytes(self) -> int:
        """Of requests that ended without an error."""
        return self._nbytes

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was under way, up to now."""
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._under_way else 0.0
            return self._busy_s + running_s

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Around a request of ``nbytes``."""
        with self._lock:
            if not self._under_way:
                self._since_s = time.perf_counter()
            self._under_way += 1
        moved = 0
        began = time.perf_counter()
        try:
            yield
            moved = nbytes
            if self.listener is not None:
                self.listener(began, time.perf_counter(), nbytes)
        finally:
            with self._lock:
                self._nbytes += moved
                self._under_way -= 1
                if not self._under_way:
                    self._busy_s += time.perf_counter() - self._since_s
