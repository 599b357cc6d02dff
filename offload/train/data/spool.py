"""A private file that only grows: written once, then read anywhere.

Not memory-mapped: pages of a mapping count as resident memory of the process, which a budget
bounds, while what ``pread`` touches stays the kernel's to drop.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from offload.errors import ClosedError, StoreError
from offload.io.private import nameless_file

_BUFFER_BYTES = 1 << 20


class Spool:
    """An append-only file without a name in ``directory``; it vanishes with the process.

    Writes come first, reads after ``seal``. Reads may come from several threads.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd, _ = nameless_file(directory)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._pending = bytearray()
        self.nbytes = 0

    def append(self, data: bytes | memoryview) -> None:
        """Add ``data``.

        Raises:
            StoreError: the disk is full or fails.
        """
        self._pending += data
        self.nbytes += len(data)
        if len(self._pending) >= _BUFFER_BYTES:
            self._flush()

    def seal(self) -> None:
        """Everything appended can be read from now on.

        Raises:
            StoreError: the disk is full or fails.
        """
        self._flush()

    def _flush(self) -> None:
        rest = memoryview(self._pending)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as e:
            raise StoreError(
                f"cannot write the tokens ({self.nbytes} bytes so far) to {self._directory}: "
                f"{e.strerror}; free some space or choose another directory"
            ) from e
        finally:
            rest.release()
        self._pending = bytearray()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``.

        Raises:
            StoreError: the disk fails, or the file is shorter.
            ClosedError: after ``close``.
        """
        if not self._close.alive:
            raise ClosedError("the training data was closed")
        parts: list[bytes] = []
        end = offset + nbytes
        while offset < end:
            try:
                part = os.pread(self._fd, end - offset, offset)
            except OSError as e:
                raise StoreError(
                    f"cannot read the tokens back from {self._directory}: {e.strerror}"
                ) from e
            if not part:
                raise StoreError(
                    f"the tokens in {self._directory} end at byte {offset}, wanted {end}"
                )
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the space back; a second call does nothing."""
        self._close()
