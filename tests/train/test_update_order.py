"""Two updates of a tile follow each other, however late the disk is: events hold the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import engine_support
import pytest
import torch
from engine_support import assert_equal_weights, batch, engine_of, group_at, oracle_of
from families import write
from memory_tiles import MemoryTiles

from offload.train import updates
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.opening import Placement
from offload.train.updates import Job

PATIENCE_S = 120.0
BUFFERS = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "m"
    write("llama", path, torch.bfloat16)
    return path


class Held(MemoryTiles):
    """One transfer of one tile waits for ``release``: the tile is as before until then."""

    def __init__(self, parts: list[tuple[int, ...]]) -> None:
        super().__init__(parts)
        self.lock = threading.RLock()
        self.hold: tuple[str, int] | None = None
        """("read" or "write", tile): the next such transfer."""
        self.held: Callable[[], Any] | None = None
        self.tile = -1
        self.begun = threading.Event()
        self.next = threading.Event()
        """Somebody asks for the tile meanwhile, or waits as he should."""
        self.too_early: list[str] = []

    def _stop(self, what: str, tile: int, run: Callable[[], Any]) -> Future[Any] | None:
        with self.lock:
            if self.held is not None and tile == self.tile:
                self.too_early.append(what)
                self.next.set()
            if self.hold != (what, tile):
                return None
            done: Future[Any] = Future()

            def go_on() -> None:
                run()
                done.set_result(None)

            self.hold, self.held, self.tile = None, go_on, tile
            self.begun.set()
            return done

    def release(self) -> None:
        with self.lock:
            held, self.held = self.held, None
        if held is not None:
            held()

    def written(self, tile: int) -> bool:
        self._stop("written", tile, lambda: None)
        return super().written(tile)

    def read_into(
        self, tile: int, first: int, last: int, dst: memoryview, priority: int = 0
    ) -> Future[Any]:
        read = super().read_into
        held = self._stop("read", tile, lambda: read(tile, first, last, dst, priority))
        return held or read(tile, first, last, dst, priority)

    def write_from(self, tile: int, src: memoryview, parts: Any = None) -> Future[Any]:
        write = super().write_from
        held = self._stop("write", tile, lambda: write(tile, src, parts))
        return held or write(tile, src, parts)


def weights_in_ram(layout: TrainLayout) -> Placement:
    """Nobody reads weights from the disk, so nobody but updates waits for its writes."""
    every = frozenset(range(len(layout.blocks)))
    return Placement(
        weights_bytes=2 * sum(b.nbytes for b in layout.blocks), pinned=every, buffers=BUFFERS
    )


@pytest.fixture
def engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Held]]:
    made: list[Held] = []

    class Made(Held):
        def __init__(self, parts: list[tuple[int, ...]]) -> None:
            super().__init__(parts)
            made.append(self)

    monkeypatch.setattr(engine_support, "MemoryTiles", Made)
    with engine_of(llama, weights_in_ram) as (engine, _):
        tiles = made[0]
        wait_for = engine.shared.wait_for

        def noticed(ready: Callable[[], bool], what: str) -> None:
            if what == updates.EARLIER or (what == updates.BUFFER and tiles.held is not None):
                tiles.next.set()
            wait_for(ready, what)

        monkeypatch.setattr(engine.shared, "wait_for", noticed)
        try:
            yield engine, tiles
        finally:
            tiles.release()


def one_step(engine: Engine, oracle: Any, step: int) -> None:
    engine.begin_forward()
    ids = batch(step, 0)
    loss, wanted = (m(input_ids=ids, labels=ids).loss for m in (engine.model, oracle.model))
    assert torch.equal(loss, wanted), step
    loss.backward()
    wanted.backward()
    engine.end_backward()
    assert engine.step(group_at(step), 0.5).norm == oracle.step(group_at(step), 0.5)


def let_go(tiles: Held) -> None:
    assert tiles.next.wait(PATIENCE_S)
    assert tiles.begun.wait(PATIENCE_S)
    tiles.release()


def middle(layout: TrainLayout) -> int:
    """A tile in the middle of the model."""
    return layout.blocks[len(layout.blocks) // 2].tiles[0]


def test_an_update_waits_for_its_tiles_first_write(
    engine: tuple[Engine, Held], llama: Path
) -> None:
    """Until that has ended the store knows nothing of the tile: it would begin anew."""
    ours, tiles = engine
    oracle = oracle_of(llama, ours.layout)
    tiles.hold = "write", middle(ours.layout)
    one_step(ours, oracle, 0)
    assert tiles.begun.wait(PATIENCE_S)
    one_step(ours, oracle, 1)
    assert tiles.next.wait(PATIENCE_S)
    assert not tiles.too_early
    tiles.release()
    one_step(ours, oracle, 2)
    assert_equal_weights(ours, oracle)


def test_a_block_has_one_update_under_way(engine: tuple[Engine, Held], llama: Path) -> None:
    """As for an expert that no token goes to, whose last update nobody has waited for."""
    ours, tiles = engine
    oracle = oracle_of(llama, ours.layout)
    one_step(ours, oracle, 0)
    ours.drain()
    block = min(ours.layout.trained, key=lambda b: len(b.tiles))
    assert 2 * len(block.tiles) <= BUFFERS  # both updates could be under way
    tiles.hold = "read", block.tiles[0]
    release = threading.Thread(target=lambda: let_go(tiles))
    release.start()
    with ours.shared.changed:  # the lane sees the first only with the second behind it, if at all
        for number in (2, 3):  # no gradients: moments decay
            steps = {
                i: group_at(number)(piece).step(number, 1.0) for i, piece in enumerate(block.pieces)
            }
            ours.updater.schedule([Job(block.index, steps)])
    release.join()
    assert not tiles.too_early
    ours.drain()
    for number in (2, 3):
        for piece in block.pieces:
            oracle.add(piece.param, torch.zeros(piece.shape, dtype=torch.bfloat16))
        oracle.step(group_at(number))
    assert_equal_weights(ours, oracle)
