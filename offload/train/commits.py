"""A run's commits: what makes its steps durable, and from where a stopped run goes on.

A commit waits for the updates of its step and then becomes durable beside the next steps: one at a
time, asked for with ``begin``, told of by ``poll`` or ``end``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.io.checksum import xxh3
from offload.io.tile_store import TileStore, is_tile_store
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.reports import CommitReport, Listener


def check_states(directory: Path, *, resume: bool) -> None:
    """Refuse to begin where another run's states are, and to resume where there are none.

    Raises:
        OffloadError: with the flag to give or to drop.
    """
    if resume and not is_tile_store(directory):
        raise OffloadError(
            f"--resume: there is nothing to resume in {directory}; drop --resume, or give the "
            f"--output and --disk of the run that was interrupted"
        )
    if not resume and is_tile_store(directory):
        raise OffloadError(
            f"{directory} holds the states of another run; continue it with --resume, or delete "
            f"it, or give another --output or --disk"
        )


class Commits:
    """The tile store of a run, and the commits made of it. Used by the training thread alone.

    Attributes:
        best: the least loss of an evaluation so far, of this run and of those that it resumes.
    """

    def __init__(
        self, directory: Path, *, identity: Mapping[str, Any], keep: int, resume: bool
    ) -> None:
        """``keep``: commits to retain; ``identity``: what a resumed run must share."""
        self._directory = directory
        self._identity = identity
        self._keep = keep
        self._resume = resume
        self._store: TileStore | None = None
        self._under_way: tuple[int, float, Future[None]] | None = None
        self.best = math.inf

    @property
    def store(self) -> TileStore:
        if self._store is None:
            raise OffloadError("the run is not open")
        return self._store

    def open_store(
        self, layout: TrainLayout, parts: Callable[[int], tuple[int, ...]], io: Any
    ) -> TileStore:
        """The store that an engine opens its tiles with; ``parts``: bytes of a tile's.

        Raises:
            StoreError: as of ``TileStore.create`` and ``open``: no room, of another run, in use.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        make = TileStore.open if self._resume else TileStore.create
        self._store = make(  # type: ignore[operator]
            directory=self._directory, shapes=[parts(i) for i in range(len(layout.tiles))],
            engine=io, identity=self._identity, keep=self._keep, checksum=xxh3,
        )  # fmt: skip
        return self._store

    def restore(self, engine: Engine) -> int:
        """Put ``engine`` where the store's commit is; returns the steps taken by then.

        0 for a new run, and for one that was killed before its first commit.
        """
        meta = self.store.commit_meta
        if meta is None:
            return 0
        engine.steps.update(meta["param_steps"])
        self.best = meta["best"] if meta["best"] is not None else math.inf
        return int(meta["step"])

    def begin(self, engine: Engine, step: int, listener: Listener) -> None:
        """Make step ``step`` durable: wait for its updates, then let the disk work beside us.

        Raises:
            StoreError: an update or the commit before failed.
        """
        self.end(listener)
        began = time.perf_counter()
        engine.drain()
        engine.updater.write_resident()
        meta = {
            "step": step,
            "param_steps": engine.steps,
            "best": self.best if math.isfinite(self.best) else None,
        }
        self._under_way = step, began, self.store.commit(meta)

    def poll(self, listener: Listener) -> None:
        """Tell of the commit under way if it is durable by now."""
        if self._under_way is not None and self._under_way[2].done():
            self.end(listener)

    def end(self, listener: Listener) -> None:
        """Wait for the commit under way, if any, and tell of it.

        Raises:
            StoreError: it failed; those before it are as they were.
        """
        if self._under_way is None:
            return
        step, began, future = self._under_way
        self._under_way = None
        future.result()
        listener.committed(CommitReport(step=step, seconds=time.perf_counter() - began))


__all__ = ["Commits", "check_states"]
