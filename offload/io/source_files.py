"""Files that are read once and from any thread, without pushing other files out of memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from offload.errors import CheckpointError

DROP_BYTES = 512 * 2**20
"""After so many bytes read, their pages are given back: a checkpoint is read once, and whatever
else is in the page cache should survive it."""


class SourceFiles:
    """The files of a checkpoint, open for reading through the page cache.

    Ranges of any offset and length come with one call, where O_DIRECT would read whole pages
    around each of thousands of small tensors.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open ``paths``. Raises CheckpointError, naming the one that cannot be."""
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._unforgotten_bytes = 0
        self._files: list[int] = []
        for path in self._paths:
            try:
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as e:
                self.close()
                raise CheckpointError(f"cannot open {path}: {e.strerror}") from e

    def read_into(self, number: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset`` of file ``number``.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        done = 0
        while done < len(out):
            try:
                n = os.preadv(self._files[number], [out[done:]], offset + done)
            except OSError as e:
                raise CheckpointError(f"cannot read {self._paths[number]}: {e.strerror}") from e
            if n == 0:
                raise CheckpointError(
                    f"{self._paths[number]} ends at {offset + done}, {len(out) - done} more bytes "
                    "were wanted; it was cut while in use"
                )
            done += n
        self._forget(done)

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self._unforgotten_bytes += nbytes
            if self._unforgotten_bytes < DROP_BYTES:
                return
            self._unforgotten_bytes = 0
        for fd in self._files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            os.close(self._files.pop())
