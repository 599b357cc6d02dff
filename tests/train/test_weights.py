"""Weights in RAM: who waits for room, and when there will never be any."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offload.errors import PlanError
from offload.train.layout import Block, TrainLayout
from offload.train.order import UseOrder
from offload.train.shared import Shared
from offload.train.weights import Weights

PAGE = 4096


class Reads:
    """A source whose reads end when the test says so."""

    def __init__(self) -> None:
        self.begun: dict[int, Future[Any]] = {}
        self.changed = threading.Condition()

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        with self.changed:
            self.begun[block.index] = Future()
            self.changed.notify_all()
        return [self.begun[block.index]]

    def end(self, block: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: block in self.begun, 60)
        self.begun[block].set_result(None)


@pytest.fixture
def weights() -> Iterator[tuple[Weights, Reads]]:
    """Three blocks of a page each, and room for two."""
    blocks = [
        Block(
            index=i, id=f"b{i}", dtype="float32", trained=False, pieces=(), count=PAGE // 4,
            tiles=(),
        )
        for i in range(3)
    ]  # fmt: skip
    layout = SimpleNamespace(blocks=blocks, users=[[0], [0], [1]])
    order = SimpleNamespace(distance=lambda unit: unit, upcoming=lambda: ())
    reads = Reads()
    made = Weights(
        cast(TrainLayout, layout), cast(UseOrder, order), reads, Shared(), 2 * PAGE, pinned=()
    )
    yield made, reads
    made.close()


def test_room_that_comes_while_another_block_is_read(weights: tuple[Weights, Reads]) -> None:
    """The second block finds none at first, as one that is read ahead takes it; when the first is
    there that one can go, and nothing is under way that would say so."""
    weights_, reads = weights
    weights_.want([2])
    with ThreadPoolExecutor(1) as pool:
        both = pool.submit(weights_.acquire_all, [0, 1])
        with reads.changed:
            assert reads.changed.wait_for(lambda: 0 in reads.begun, 60)
        assert 1 not in reads.begun
        with weights_._shared.changed:  # both at once, for whoever waits
            reads.end(2)
            reads.end(0)
        reads.end(1)
        assert [entry.block.index for entry in both.result(60)] == [0, 1]


def test_no_room_that_could_ever_come_is_said(weights: tuple[Weights, Reads]) -> None:
    weights_, reads = weights
    with ThreadPoolExecutor(1) as pool:
        three = pool.submit(weights_.acquire_all, [0, 1, 2])
        reads.end(0)
        reads.end(1)
        with pytest.raises(PlanError, match=r"no room for the weights of b2 \(4.0 KiB\): 8.0 KiB"):
            three.result(60)
