"""Writes of tiles that have no slot yet.

While a commit is under way, all slots of a tile can be taken: those of the commits that are kept,
and the one that the new commit is about to own. A write of that tile waits for the commit's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.errors import StoreError
from offload.io.tile_manifest import VIRGIN
from offload.io.tile_map import TileMap
from offload.io.transfer import Transfer


@dataclass(slots=True, eq=False)
class Write:
    """A write under way, or waiting for a slot.

    Attributes:
        present: of each part, whether it is written.
        sums: checksums of the parts, as they become known.
        generation: of the slot it goes to; VIRGIN before it has one.
    """

    tile: int
    view: memoryview
    present: list[bool]
    sums: list[int]
    transfer: Transfer | None = None
    generation: int = VIRGIN


class WaitingWrites:
    """In the order in which they came. Not thread-safe: the store's lock guards it."""

    def __init__(self, slots: TileMap, path: Path) -> None:
        """``path``: of the store, for its errors."""
        self._map = slots
        self._path = path
        self._writes: list[Write] = []

    def add(self, write: Write) -> None:
        self._writes.append(write)

    def discard(self, write: Write) -> None:
        """Forget ``write`` if it is here."""
        if write in self._writes:
            self._writes.remove(write)

    def ready(self, failed: StoreError | None) -> list[tuple[Write, StoreError | None]]:
        """Take out those that need not wait: with a slot each, or with why they fail.

        ``failed``: why the store writes nothing any more.
        """
        ready: list[tuple[Write, StoreError | None]] = []
        still = []
        for write in self._writes:
            slot, error = self._map.slot_for(write.tile), failed
            if error is None and slot is None:
                if self._map.committing is not None:
                    still.append(write)
                    continue
                error = self._map.no_slot(self._path)
            write.generation = VIRGIN if slot is None else slot
            ready.append((write, error))
        self._writes = still
        return ready
