"""Which examples share a row of a batch.

Packing is bounded-space best fit: each example goes into the fullest of at most ``OPEN_BINS`` open
bins that still takes it; if none does, a new bin opens and, above the limit, the fullest one
closes (Csirik and Johnson, "Bounded space on-line bin packing: best is better than first", SODA
1991). It needs one pass in the order of the source and a few kilobytes. Best fit decreasing would
pack a little tighter for a sort of the whole index; next fit wastes a quarter of the tokens on
short chats.

The bins of a run are the same in every epoch, only their order changes: examples in one bin do not
see each other, and steps per epoch stay constant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offload.train.data.spool import Spool
from offload.train.data.store import TokenStore

OPEN_BINS = 256


class Bins:
    """Groups of example numbers on disk: 8 bytes per example and 8 per bin."""

    def __init__(self, directory: Path) -> None:
        self._members, self._ends = Spool(directory), Spool(directory)
        self.examples = 0
        self.tokens = 0

    def add(self, members: list[int], tokens: int) -> None:
        self._members.append(np.array(members, dtype="<u8").tobytes())
        self._ends.append(np.array([self.examples + len(members)], dtype="<u8").tobytes())
        self.examples += len(members)
        self.tokens += tokens

    def seal(self) -> None:
        self._members.seal()
        self._ends.seal()

    def __len__(self) -> int:
        return self._ends.nbytes // 8

    def __getitem__(self, number: int) -> list[int]:
        """The example numbers of a bin, in the order of the source."""
        if number:
            begin, end = np.frombuffer(self._ends.read(8 * number - 8, 16), dtype="<u8").tolist()
        else:
            begin, end = 0, int.from_bytes(self._ends.read(0, 8), "little")
        raw = self._members.read(8 * begin, 8 * (end - begin))
        members: list[int] = np.frombuffer(raw, dtype="<u8").tolist()
        return members

    def close(self) -> None:
        self._members.close()
        self._ends.close()


def fill_bins(
    store: TokenStore,
    directory: Path,
    *,
    capacity: int | None,
    wanted: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]],
) -> Bins:
    """Pack the wanted examples.

    Args:
        capacity: tokens of a bin; None: every example has a bin of its own. No example is longer.
        wanted: which of these rows (ordinals) take part.

    Raises:
        StoreError: the disk is full or fails.
    """
    bins = Bins(directory)
    packer = None if capacity is None else _Packer(bins, capacity)
    for first, lengths, rows in store.lengths_and_rows():
        chosen = np.flatnonzero(wanted(rows))
        for offset, length in zip(chosen.tolist(), lengths[chosen].tolist(), strict=True):
            if packer is None:
                bins.add([first + offset], length)
            else:
                packer.add(first + offset, length)
    if packer is not None:
        packer.close_all()
    bins.seal()
    return bins


class _Packer:
    """Open bins, ordered by the room that is left and then by age."""

    def __init__(self, bins: Bins, capacity: int) -> None:
        self._bins = bins
        self._capacity = capacity
        self._open: list[tuple[int, int]] = []  # (tokens of room, serial)
        self._members: dict[int, list[int]] = {}
        self._opened = 0

    def add(self, example: int, length: int) -> None:
        at = bisect_left(self._open, (length, 0))
        if at < len(self._open):
            room, serial = self._open.pop(at)
        else:
            if len(self._open) == OPEN_BINS:
                self._close(*self._open.pop(0))
            room, serial = self._capacity, self._opened
            self._members[serial] = []
            self._opened += 1
        self._members[serial].append(example)
        if room == length:
            self._close(0, serial)
        else:
            insort(self._open, (room - length, serial))

    def close_all(self) -> None:
        for room, serial in sorted(self._open, key=lambda entry: entry[1]):
            self._close(room, serial)
        self._open.clear()

    def _close(self, room: int, serial: int) -> None:
        self._bins.add(self._members.pop(serial), self._capacity - room)
