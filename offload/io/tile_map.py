"""Which slot each tile is in, which slots belong to commits, and where the next write goes.

No I/O and no locks: ``TileStore`` calls it under its own. Every tile has a slot in each of
``keep + 1`` generations. ``keep`` commits hold at most ``keep`` of a tile's slots, so one is free
whenever no commit is under way; during one all may be held, and a write waits for its end. Each
commit that is *held* beyond the ``keep`` newest takes one generation more.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from offload.errors import StoreError
from offload.io.tile_file import DamagedError
from offload.io.tile_manifest import LOST, VIRGIN, Commit, Layout


class TileMap:
    """The state of a tile store.

    Attributes:
        retained: generations of each commit that can be opened, by its number.
        committing: generations of the commit under way, or None.
        newest: the highest number that any commit has had.
        meta: of the commit that the state goes back to, or None.
    """

    def __init__(self, layout: Layout, keep: int, slots: int) -> None:
        """``slots``: generations that there may be, at least ``keep + 1``; room for the later ones
        is made when they are written to."""
        self.layout = layout
        self.retained: dict[int, bytes] = {}
        self.committing: bytes | None = None
        self.newest = 0
        self.why_kept = ""
        """Why a superseded commit is still there."""
        self.meta: Mapping[str, Any] | None = None
        self._keep = keep
        self._slots = slots
        self._abandoned: list[int] = []
        self._generations = bytearray([VIRGIN]) * len(layout)
        self._present = bytearray(layout.parts)
        self._sums = array("Q", bytes(8 * layout.parts))

    # Tiles

    def generation(self, tile: int) -> int:
        """Where the tile is, or ``VIRGIN`` or ``LOST``."""
        return self._generations[tile]

    def has(self, tile: int, part: int) -> bool:
        there = self._generations[tile] not in (VIRGIN, LOST)
        return there and bool(self._present[self.layout.first[tile] + part])

    def sums(self, tile: int) -> array[int]:
        """Checksums of the tile's parts."""
        first = self.layout.first[tile]
        return self._sums[first : first + len(self.layout.shapes[tile])]

    def slot_for(self, tile: int) -> int | None:
        """The generation to write the tile to: its own, if no commit holds that. None: wait."""
        held = {g[tile] for g in self.retained.values()}
        if self.committing is not None:
            held.add(self.committing[tile])
        now = self._generations[tile]
        if now not in (VIRGIN, LOST) and now not in held:
            return now
        return next((g for g in range(self._slots) if g not in held), None)

    def spoil(self, tile: int, generation: int) -> None:
        """A write to that slot begins: if the tile is there, it is lost until ``place``."""
        if self._generations[tile] == generation:
            self._generations[tile] = LOST

    def place(
        self, tile: int, generation: int, present: Sequence[bool], sums: Sequence[int]
    ) -> None:
        """The tile is in that slot as a whole."""
        first, n = self.layout.first[tile], len(present)
        self._generations[tile] = generation
        self._present[first : first + n] = bytes(present)
        self._sums[first : first + n] = array("Q", sums)

    # Commits

    def stand_on(self, commit: Commit, retained: Mapping[int, bytes]) -> list[int]:
        """Start from ``commit``, one of ``retained``. Returns those that must be removed first.

        A kill between a commit and the removal of what it supersedes leaves one too many, and a
        write would find no slot. What ``commit`` holds goes last.
        """
        rest = sorted(retained.keys() - {commit.number}, key=lambda n: (n in commit.held, n))
        excess = rest[: max(0, len(retained) - (self._slots - 1))]
        self.retained = {n: g for n, g in retained.items() if n not in excess}
        self._abandoned = [n for n in self.retained if n > commit.number]
        self._generations[:] = commit.generations
        self._present[:] = commit.present
        self._sums = commit.sums[:]
        self.meta = commit.meta
        return excess

    def begin_commit(
        self, identity: Mapping[str, Any], meta: Mapping[str, Any], held: Collection[int] = ()
    ) -> Commit:
        """The state as of now; its slots are held until ``end_commit``.

        Raises:
            StoreError: a tile is lost.
        """
        lost = self._generations.find(LOST)
        if lost >= 0:
            raise self.lost(lost)
        self.committing = bytes(self._generations)
        return Commit(
            number=self.newest + 1,
            identity=identity,
            meta=meta,
            layout=self.layout,
            generations=self.committing,
            present=bytes(self._present),
            sums=self._sums[:],
            held=tuple(sorted(held)),
        )

    def abandoned(self) -> list[int]:
        """Commits newer than the one that the state was opened at."""
        return list(self._abandoned)

    def forget(self, numbers: Sequence[int]) -> None:
        """These commits were removed for certain; their slots are free."""
        self.retained = {n: g for n, g in self.retained.items() if n not in numbers}
        self._abandoned = [n for n in self._abandoned if n not in numbers]

    def kept_with(self, commit: Commit) -> set[int]:
        """The commits to be left once ``commit`` is made."""
        old = [n for n in sorted(self.retained) if n not in self._abandoned]
        return {*[*old, commit.number][-self._keep :], *commit.held}

    def made(self, commit: Commit) -> None:
        """It is durable. It stays under way until those that it supersedes are removed."""
        self.newest = commit.number
        self.retained[commit.number] = commit.generations
        self.meta = commit.meta

    def end_commit(self) -> None:
        """No commit is under way any more; what failed holds nothing."""
        self.committing = None

    # What to tell

    def lost(self, tile: int) -> StoreError:
        """The error of reading or committing a lost tile."""
        way = "there is no commit yet: start again"
        if self.retained:
            way = f"commit {max(self.retained)} is intact, --resume continues from it"
        return StoreError(f"tile {tile} was lost when a write of it failed; {way}")

    def damaged(self, tile: int, generation: int, what: str) -> DamagedError:
        """The error of a wrong checksum: what it means depends on whose bytes they are."""
        owners = sorted(n for n, g in self.retained.items() if g[tile] == generation)
        others = sorted(n for n in self.retained if n not in owners)
        owned = f"The bytes belong to commit {', '.join(map(str, owners))}"
        if not owners and others:
            way = f"Commit {others[-1]} is intact, --resume continues from it"
        elif not owners:
            way = "There is no commit yet: start again"
        elif others:
            way = f"{owned}; commit {others[-1]} has others of this tile"
            if newer := [n for n in owners if n > others[-1]]:
                files = ", ".join(f"commit-{n}.json" for n in newer)
                way += f": move {files} out of the directory, and --resume continues from there"
        else:
            way = (
                f"{owned}, and no other commit has a copy of this tile: start again from the "
                "checkpoint, on another disk"
            )
        return DamagedError(f"{what}. {way}")

    def no_slot(self, where: object) -> StoreError:
        """The error of a write that no end of a commit will find a slot for."""
        kept = ", ".join(map(str, sorted(self.retained)))
        return StoreError(
            f"no slot is free: commits {kept} are there, {self._keep} should be, "
            f"because superseded ones could not be removed from {where}"
            f"{f' ({self.why_kept})' if self.why_kept else ''}; see to its permissions and its disk"
        )
