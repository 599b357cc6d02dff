"""The part of a commit that takes time: what a worker does between its begin and its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from offload.errors import StoreError
from offload.io import tile_manifest
from offload.io.tile_directory import TileDirectory, TileSyscalls
from offload.io.tile_file import TileFile
from offload.io.tile_manifest import Commit
from offload.io.tile_map import TileMap

__all__ = ["Committing"]

log = logging.getLogger(__name__)


class Committing:
    """Makes commits of a tile store durable, one at a time."""

    def __init__(
        self, directory: TileDirectory, file: TileFile, tiles: TileMap, lock: threading.Condition,
        calls: TileSyscalls,
    ) -> None:  # fmt: skip
        """``lock``: the store's, which guards ``tiles``."""
        self._directory = directory
        self._file = file
        self._map = tiles
        self._lock = lock
        self._sys = calls

    def make_durable(self, commit: Commit) -> None:
        """Sync the data, publish the manifest, remove what it supersedes; blocks.

        Raises:
            UnsyncedError, DoubtfulError: nothing may be written any more.
            StoreError: it failed; the earlier commits are as they were.
        """
        with self._lock:
            abandoned, kept = self._map.abandoned(), self._map.kept_with(commit)
        # First: a kill after the commit must not leave them in the place of older ones.
        self.remove(abandoned)
        self._file.sync(self._sys.fsync)
        self._directory.publish(commit.number, tile_manifest.dump(commit))
        with self._lock:
            self._map.made(commit)
            old = set(self._map.retained)
        try:
            # What is damaged goes, too: a newer one is whole.
            self.remove(sorted({*old, *self._directory.numbers()} - kept))
        except (StoreError, OSError) as e:
            log.warning("commit %d is made, but: %s", commit.number, e)
            with self._lock:
                self._map.why_kept = str(e)

    def remove(self, commits: Sequence[int]) -> None:
        """Their slots are free once they are gone for certain. Raises StoreError."""
        self._directory.remove(commits)
        with self._lock:
            self._map.forget(commits)
