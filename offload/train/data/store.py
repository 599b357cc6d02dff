"""Tokenised examples on disk: each token in 4 bytes with its label flag, each example in 32.

What is resident does not grow with the data: two write buffers while it is made, one example at a
time afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offload.train.data.spool import Spool

LABEL = np.uint32(1 << 31)
"""Set in a token's word if the token is to be predicted. Token ids are below 2**31."""

_ENTRY = np.dtype(
    [("start", "<u8"), ("line", "<u8"), ("row", "<u8"), ("length", "<u4"), ("file", "<u4")]
)
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an example lies and where it came from."""

    start: int
    """In tokens."""
    line: int
    """From 1, in its file."""
    row: int
    """Ordinal of its row; the pieces of one long text share it."""
    length: int
    """In tokens."""
    file: int


class TokenStore:
    """Examples in the order of the source.

    Args:
        directory: where the private files lie.
    """

    def __init__(self, directory: Path) -> None:
        self._words, self._index = Spool(directory), Spool(directory)
        self._digest = hashlib.blake2b(digest_size=16)
        self.tokens = 0
        self.label_tokens = 0
        self.rows = 0
        self._used_row = -1
        self.max_token = 0

    def add(self, words: npt.NDArray[np.uint32], *, file: int, line: int, row: int) -> None:
        """Append an example.

        Args:
            words: [tokens] token ids, those to be predicted with ``LABEL`` set.
            row: not smaller than the last one's.

        Raises:
            StoreError: the disk is full or fails.
        """
        entry = np.array((self.tokens, line, row, len(words), file), dtype=_ENTRY)
        self._index.append(entry.tobytes())
        data = words.astype("<u4", copy=False).tobytes()
        self._words.append(data)
        self._digest.update(np.array([row, len(words)], dtype="<u8").tobytes())
        self._digest.update(data)
        self.tokens += len(words)
        self.label_tokens += int(np.count_nonzero(words & LABEL))
        self.max_token = max(self.max_token, int((words & ~LABEL).max()))
        self.rows += row != self._used_row
        self._used_row = row

    def seal(self) -> None:
        """No more examples; they can be read from now on."""
        self._words.seal()
        self._index.seal()

    def __len__(self) -> int:
        return self._index.nbytes // _ENTRY.itemsize

    @property
    def fingerprint(self) -> str:
        """A hash of tokens, labels, boundaries of examples and of rows; 32 hex digits."""
        return self._digest.hexdigest()

    def entry(self, example: int) -> Entry:
        """The index entry of an example."""
        raw = self._index.read(example * _ENTRY.itemsize, _ENTRY.itemsize)
        return Entry(*np.frombuffer(raw, dtype=_ENTRY)[0].item())

    def words(self, entry: Entry) -> npt.NDArray[np.uint32]:
        """[tokens] of an example as they were added; read-only."""
        return np.frombuffer(self._words.read(4 * entry.start, 4 * entry.length), dtype="<u4")

    def lengths_and_rows(
        self,
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """All examples in order, some thousand at a time: the first one's number, the lengths in
        tokens, the ordinals of the rows."""
        for first in range(0, len(self), _CHUNK):
            count = min(_CHUNK, len(self) - first)
            raw = self._index.read(first * _ENTRY.itemsize, count * _ENTRY.itemsize)
            entries = np.frombuffer(raw, dtype=_ENTRY)
            yield first, entries["length"].astype(np.int64), entries["row"].astype(np.int64)

    def close(self) -> None:
        """Give the space back; reads raise ``ClosedError`` afterwards."""
        self._words.close()
        self._index.close()
