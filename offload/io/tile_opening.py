"""Making a tile store's directory and file, and finding what is in one that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import StoreError
from offload.io.pack_format import normal_meta
from offload.io.tile_directory import TileDirectory, TileSyscalls, is_tile_store
from offload.io.tile_file import Checksum, TileFile, check_request
from offload.io.tile_manifest import VIRGIN, Commit, Layout, check_keep

__all__ = ["Found", "Given", "make_store", "open_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a store is made or opened with, checked."""

    layout: Layout
    identity: Mapping[str, Any]
    keep: int
    hold: int
    generations: int
    """That there is room for at least."""
    checksum: Checksum
    request_bytes: int
    calls: TileSyscalls

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], identity: Mapping[str, Any], keep: int,
        hold: int, generations: int | None, checksum: Checksum, request_bytes: int,
        syscalls: TileSyscalls | None,
    ) -> Given:  # fmt: skip
        """Raises ValueError: sizes, ``keep`` or ``hold`` out of range, or an identity that is no
        JSON."""
        most = check_keep(keep, hold) + 1
        if generations is not None and not 1 <= generations <= most:
            more = " + hold" if hold else ""
            raise ValueError(
                f"generations must be from 1 to keep{more} + 1 = {most}, not {generations}"
            )
        return cls(
            layout=Layout(shapes), identity=normal_meta(identity), keep=keep, hold=hold,
            generations=most if generations is None else generations,
            checksum=checksum, request_bytes=check_request(request_bytes),
            calls=syscalls or TileSyscalls(),
        )  # fmt: skip

    @property
    def most(self) -> int:
        """Generations that will ever be needed."""
        return self.keep + self.hold + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A store that was there."""

    directory: TileDirectory
    file: TileFile
    chosen: Commit | None
    """What it goes back to; None if there is no commit."""
    valid: Mapping[int, bytes]
    """The generations of each commit that can be opened."""
    newest: int
    """The highest number of any commit, a damaged one included."""


def make_store(path: Path, given: Given) -> tuple[TileDirectory, TileFile]:
    """A new directory and file. Raises StoreError; see ``TileStore.create``."""
    folder = TileDirectory.make(path, given.calls)
    try:
        data = folder.make_data(given.generations * given.layout.nbytes)
        return folder, TileFile(data, given.layout, given.checksum, given.request_bytes)
    except BaseException:
        folder.close()
        raise


def open_store(path: Path, given: Given, commit: int | None) -> Found:
    """What is there. Raises StoreError; see ``TileStore.open``."""
    if path.is_dir() and not is_tile_store(path):
        raise StoreError(f"{path} holds no training states; start without --resume")
    folder, layout = TileDirectory.lock(path, given.calls), given.layout
    try:
        folder.clean()
        chosen, valid = folder.choose(layout, given.identity, commit)
        used = {g for gs in valid.values() for g in gs} - {VIRGIN}
        needed = (max(used) + 1) * layout.nbytes if used else 0
        data = folder.open_data(needed, given.generations * layout.nbytes)
        return Found(
            directory=folder,
            file=TileFile(data, layout, given.checksum, given.request_bytes),
            chosen=chosen,
            valid=valid,
            newest=max(folder.numbers(), default=0),
        )
    except BaseException:
        folder.close()
        raise
