"""A run's commits: what makes its steps durable, and from where a stopped run goes on.

A commit waits for the updates of its step and then becomes durable beside the next steps: one at a
time, asked for with ``begin``, told of by ``poll`` or ``end``.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.errors import OffloadError, StoreError
from offload.io.checksum import xxh3
from offload.io.private import nameless_file, reserve
from offload.io.tile_store import (
    TileStore,
    check_directory,
    has_commits,
    is_tile_store,
    manifest_space,
)
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.options import TrainOptions
from offload.train.reports import CommitReport, Listener

log = logging.getLogger(__name__)

_LARGE = 10**12
"""A number of steps with as many digits as any."""


def check_states(directory: Path, *, resume: bool) -> None:
    """Refuse to begin where another run's states are, or anything else, to resume where there are
    none, and to do either where another process trains. Before anything is planned.

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
    check_directory(directory, resume=resume)


def state_versions(options: TrainOptions, directory: Path, total: int) -> int:
    """How often each tile of states is on the disk: as the run changes it, and as each commit has
    it that is there meanwhile. The last commit is none of these: nothing is changed behind it.

    Args:
        directory: of the states; a run that resumes has commits there.
        total: steps of the whole run.
    """
    if has_commits(directory):
        return options.retained + 1
    asked = [options.save_every, options.eval_every if options.kept != "last" else None]
    # Every evaluation on the way may be the best so far, and is committed then.
    during = {step for every in asked if every is not None for step in range(every, total, every)}
    return min(len(during), options.retained) + 1


@dataclass(slots=True)
class Best:
    """The evaluation with the least loss so far, the first of several that are equal."""

    loss: float
    step: int
    commit: int | None = None
    """The number of the commit of that step; None if there is none (yet)."""


class Commits:
    """The tile store of a run, and the commits made of it. Used by the training thread alone.

    With ``keep_best`` the commit of the best evaluation stays beyond the ``keep`` newest: it is
    *held* (``TileStore.commit``), each newer commit says so in its manifest, and it goes when a
    better one is made. This writes nothing twice; it takes the disk space of one more version.

    Attributes:
        best: of this run and of those that it resumes; None before the first evaluation.
        durable: the step of the newest commit that is on the disk; None: there is none yet.
        keep_best: whether its weights stay.
    """

    def __init__(
        self, directory: Path, *, identity: Mapping[str, Any], keep: int, keep_best: bool,
        versions: int, resume: bool,
    ) -> None:  # fmt: skip
        """``keep``: newest commits to retain; ``identity``: what a resumed run must share;
        ``versions``: see ``state_versions``."""
        self._directory = directory
        self._identity = identity
        self._keep = keep
        self._versions = versions
        self._resume = resume
        self._store: TileStore | None = None
        self._under_way: tuple[int, float, Future[None]] | None = None
        self._manifest_bytes = 0
        self._room: int | None = None
        """A descriptor of the file that keeps it."""
        self.best: Best | None = None
        self.durable: int | None = None
        self.keep_best = keep_best

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
        shapes = [parts(i) for i in range(len(layout.tiles))]
        # As ``begin`` will have it; the names are most of what a commit says.
        names = {piece.param: _LARGE for b in layout.trained for piece in b.pieces}
        meta = {"step": _LARGE, "param_steps": names, "best": asdict(Best(-1 / 3, _LARGE, _LARGE))}
        hold = int(self.keep_best)
        self._manifest_bytes = manifest_space(shapes, self._identity, meta, hold)
        if not self._resume:
            self._keep_room()  # first: without it nothing is made
        make = TileStore.open if self._resume else TileStore.create
        self._store = make(  # type: ignore[operator]
            directory=self._directory, shapes=shapes, engine=io,
            identity=self._identity, keep=self._keep, hold=hold, checksum=xxh3,
            generations=1 if self._resume else self._versions,
        )  # fmt: skip
        return self._store

    def _keep_room(self) -> None:
        """Take the space of the next manifest, in a file without a name: a disk that is full by
        then must not refuse a run's only commit. A kill leaves nothing of it.

        Raises:
            StoreError: there is none.
        """
        if self._room is None:
            fd, _ = nameless_file(self._directory)
            try:
                reserve(fd, self._manifest_bytes, os.fspath(self._directory))
            except BaseException:
                os.close(fd)
                raise
            self._room = fd

    def _give_room(self) -> None:
        """Let the manifest have it."""
        if self._room is not None:
            os.close(self._room)
            self._room = None

    def close(self) -> None:
        """Give back what was kept free. Idempotent."""
        self._give_room()

    def restore(self, engine: Engine, total: int, listener: Listener) -> int:
        """Put ``engine`` where the store's commit is; returns how many steps of ``total`` it took.

        0 for a new run, and for one that was killed before its first commit. Best weights that are
        to be kept and are not there (that run did not keep them, or a damaged commit was passed
        over) are forgotten with their loss: no later result is compared with what cannot be had.

        Raises:
            StoreError: the disk has too little room for the versions of the steps that are left.
            OffloadError: it took more.
        """
        meta = self.store.commit_meta
        if meta is not None and (taken := int(meta["step"])) > total:
            raise OffloadError(
                f"--resume: that run has taken {taken} steps, and this one is to end after "
                f"{total}; give --max-steps {taken} or more"
            )
        if meta is None or int(meta["step"]) < total:
            self.store.reserve(self._versions)  # else nothing will be written
            self._keep_room()
        if meta is None:
            return 0
        engine.steps.update(meta["param_steps"])
        step = self.durable = int(meta["step"])
        if meta["best"] is not None:
            self.best = Best(**meta["best"])
            if self.keep_best and self.best.commit not in self.store.commits():
                listener.note(
                    f"the weights of the best evaluation (step {self.best.step}, loss "
                    f"{self.best.loss:.4f}) were not kept; the best is looked for after step {step}"
                )
                self.best = None
        return step

    def evaluated(self, step: int, loss: float) -> bool:
        """An evaluation of the weights after ``step``; returns whether it is the best so far."""
        if not math.isfinite(loss) or (self.best is not None and loss >= self.best.loss):
            return False
        self.best = Best(loss, step)
        return True

    def go_back_to_best(self, engine: Engine) -> None:
        """Have ``engine`` show the weights of the best evaluation, to be written. No step and no
        commit may follow."""
        if self.best is None or self.best.commit is None:
            raise OffloadError("the weights of the best evaluation were not kept")
        number = self.best.commit
        engine.go_back(lambda: self.store.go_back(number))

    def begin(self, engine: Engine, step: int, listener: Listener) -> None:
        """Make step ``step`` durable: wait for its updates, then let the disk work beside us.

        Raises:
            StoreError: an update or the commit before failed.
        """
        self.end(listener)
        began = time.perf_counter()
        engine.drain()
        engine.updater.write_resident()
        best = self.best
        held: list[int] = []
        if best is not None and best.commit is not None and self.keep_best:
            held.append(best.commit)
        elif best is not None and best.commit is None and best.step == step:
            best.commit = self.store.next_number
        meta = {
            "step": step,
            "param_steps": engine.steps,
            "best": None if best is None else asdict(best),
        }
        self._give_room()
        self._under_way = step, began, self.store.commit(meta, held)

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
        self.durable = step
        try:
            self._keep_room()
        except StoreError as error:  # this commit is there, and the next one may find some
            log.info("no room is kept for the next commit: %s", error)
        listener.committed(CommitReport(step=step, seconds=time.perf_counter() - began))

    def what_is_left(self) -> str:
        """To be said behind an error of the disk, and how the run goes on."""
        if self.durable is None:
            return (
                f"no step is committed in {self._directory} yet: once the disk is seen to, the "
                f"same command with --resume begins anew"
            )
        return (
            f"step {self.durable} is safe in {self._directory}: once the disk is seen to, the "
            f"same command with --resume goes on from there"
        )


__all__ = ["Best", "Commits", "check_states", "state_versions"]
