"""The tile store against a dict: any order of writes, failures, commits, kills and rollbacks."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tile_support import (
    SHAPES,
    State,
    commit,
    create,
    parts_of,
    read_tile,
    reopen,
    state_of,
    write,
)

from offload.errors import StoreError
from offload.io.engines import make_engine
from offload.io.memory import AlignedBuffer
from offload.io.tile_directory import TileSyscalls

TILES = st.sampled_from(range(len(SHAPES)))
SEEDS = st.integers(0, 99)
STEPS = st.sampled_from(["write", "rename"])
REAL = TileSyscalls()


class TileMachine(RuleBasedStateMachine):
    """``state`` is what is there now, ``kept`` the states of the commits."""

    @initialize(name=st.sampled_from(["aiofiles", "threads"]), keep=st.integers(1, 3))
    def start(self, name: str, keep: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="offload-tiles-"))
        self.engine = make_engine(name, 2)
        self.keep = keep
        self.fails: set[str] = set()
        self.calls = TileSyscalls(
            pwritev=self._failing("pwritev"),
            write=self._failing("write"),
            rename=self._failing("rename"),
        )
        self.state: State = {}
        self.lost: set[int] = set()
        self.kept: dict[int, State] = {}
        self.stands_on: int | None = None
        self.newest = 0
        self.shared: dict[int, set[int]] = {t: set() for t in range(len(SHAPES))}
        self.store = create(self.folder / "s", self.engine, keep=keep, syscalls=self.calls)

    def _failing(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name in self.fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return getattr(REAL, name)(*args)

        return call

    @rule(tile=TILES, seed=SEEDS, data=st.data())
    def write(self, tile: int, seed: int, data: st.DataObject) -> None:
        n = len(SHAPES[tile])
        parts = parts_of(tile, seed, data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        write(self.store, tile, parts)
        self.state[tile] = parts
        self.lost.discard(tile)
        self.shared[tile] = set()

    @rule(tile=TILES, seed=SEEDS)
    def fail_to_write(self, tile: int, seed: int) -> None:
        """The old tile stays if a commit has it, and is lost if it was being overwritten."""
        self.fails.add("pwritev")
        with pytest.raises(StoreError, match=r"cannot write"):
            write(self.store, tile, parts_of(tile, seed))
        self.fails.clear()
        in_place = tile in self.state and not self.shared[tile] & set(self.kept)
        if in_place:
            del self.state[tile]
            self.lost.add(tile)

    @rule(tile=TILES)
    def read(self, tile: int) -> None:
        if tile in self.state:
            assert read_tile(self.store, tile) == self.state[tile]
            return
        with AlignedBuffer(65536) as buf:
            if tile in self.lost:
                with pytest.raises(StoreError, match="was lost"):
                    self.store.read_into(tile, 0, 0, buf).result(timeout=30)
            else:
                with pytest.raises(ValueError, match="never written"):
                    self.store.read_into(tile, 0, 0, buf)

    @rule()
    def commit(self) -> None:
        if self.lost:
            with pytest.raises(StoreError, match="was lost"):
                commit(self.store)
            return
        self.newest += 1
        commit(self.store, n=self.newest)
        older = [n for n in sorted(self.kept) if self.stands_on is None or n <= self.stands_on]
        self.kept[self.newest] = dict(self.state)
        left = [*older, self.newest][-self.keep :]
        self.kept = {n: s for n, s in self.kept.items() if n in left}
        self.stands_on = self.newest
        for tile in self.state:
            self.shared[tile].add(self.newest)

    @precondition(lambda self: not self.lost)
    @rule(step=STEPS)
    def fail_to_commit(self, step: str) -> None:
        self.fails.add(step)
        with pytest.raises(StoreError, match=r"cannot write .*free some space"):
            commit(self.store, n=-1)
        self.fails.clear()
        # What a rollback gave up is removed before the new commit is written.
        self.kept = {n: s for n, s in self.kept.items() if n <= (self.stands_on or 0)}

    @rule(data=st.data(), back=st.booleans(), keep=st.integers(0, 2))
    def kill_and_resume(self, data: st.DataObject, back: bool, keep: int) -> None:
        """Whatever was not committed is forgotten, and nothing else."""
        self.store.close()
        number = data.draw(st.sampled_from(sorted(self.kept))) if back and self.kept else None
        self.keep = max(self.keep, keep)
        self.store = reopen(
            self.folder / "s", self.engine, keep=self.keep, commit=number, syscalls=self.calls
        )
        self.stands_on = number or max(self.kept, default=None)
        self.newest = max(self.kept, default=0)  # one that a rollback has removed is given again
        self.state = dict(self.kept[self.stands_on]) if self.stands_on else {}
        self.lost = set()
        self.shared = {
            t: {n for n, s in self.kept.items() if t in s} if t in self.state else set()
            for t in range(len(SHAPES))
        }
        for tile in self.state:
            mine = self.store._map.generation(tile)
            self.shared[tile] = {n for n, g in self.store._map.retained.items() if g[tile] == mine}

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "store"):
            assert self.store.commits() == sorted(self.kept)
            want = None if self.stands_on is None else {"n": self.stands_on}
            assert self.store.commit_meta == want
            for tile in range(len(SHAPES)):
                assert self.store.written(tile) == (tile in self.state or tile in self.lost)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            if not self.lost:
                assert state_of(self.store) == self.state
            self.store.close()
            for number, state in self.kept.items():
                with reopen(self.folder / "s", self.engine, keep=3, commit=number) as store:
                    assert state_of(store) == state
            self.engine.close()
            shutil.rmtree(self.folder)


TestTileMachine = TileMachine.TestCase
TestTileMachine.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
