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
    weights_.expect([2])
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


def test_what_is_needed_last_of_many(weights: tuple[Weights, Reads]) -> None:
    ram, _ = weights
    assert ram.uses.farthest([]) is None
    for agenda in ([], [2], [1, 0, 2, 1], [2, 1, 0]):
        ram.expect(agenda, instead=range(3))
        for some in ([0], [0, 1], [1, 0, 2], [2, 1]):
            assert ram.uses.farthest(some) == max((ram.uses.next_use(b), b) for b in some)


def test_what_is_there_counts_as_an_expert_that_comes_soon(weights: tuple[Weights, Reads]) -> None:
    ram, reads = weights
    ram.expect([1, 0, 2, 1])
    try:
        soon = list(ram.uses.experts_soon(3))
        assert [block for block, _ in soon] == [1, 0, 2]
        assert list(ram.uses.experts_soon(3, lambda block: block == 0)) == [soon[0], soon[2]]
        assert list(ram.uses.experts_soon(1, lambda block: block == 1)) == []
    finally:
        for block in list(reads.begun):
            reads.end(block)


def test_no_room_that_could_ever_come_is_said(weights: tuple[Weights, Reads]) -> None:
    weights_, reads = weights
    with ThreadPoolExecutor(1) as pool:
        three = pool.submit(weights_.acquire_all, [0, 1, 2])
        reads.end(0)
        reads.end(1)
        with pytest.raises(PlanError, match=r"no room for the weights of b2 \(4.0 KiB\): 8.0 KiB"):
            three.result(60)


class AtOnce:
    """A source whose reads are over at once."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        self.blocks.append(block.index)
        done: Future[Any] = Future()
        done.set_result(None)
        return [done]


def least_reads(uses: list[int], room: int) -> int:
    """Of blocks used in this order with room for so many at a time (Belady 1966)."""
    held: set[int] = set()
    reads = 0
    for i, block in enumerate(uses):
        if block in held:
            continue
        reads += 1
        if len(held) == room:
            rest = uses[i + 1 :]
            held.remove(max(held, key=lambda b: rest.index(b) if b in rest else len(uses)))
        held.add(block)
    return reads


@pytest.mark.parametrize("room", [2, 3, 5, 8, 12])
def test_routed_experts_are_read_no_more_often_than_they_must_be(room: int) -> None:
    """Two layers of eight experts and a head, forward and then backward, where every layer's
    experts come twice: what the running layer needs next stays, and what the next layer needs does
    not take its place."""
    experts = [list(range(8)), list(range(8, 16))]
    blocks = [
        Block(
            index=i, id=f"b{i}", dtype="float32", trained=False, pieces=(), count=PAGE // 4,
            tiles=(),
        )
        for i in range(16)
    ]  # fmt: skip
    units = [SimpleNamespace(blocks=[], experts={"e": ids}) for ids in experts]
    units.append(SimpleNamespace(blocks=[], experts={}))
    layout = SimpleNamespace(blocks=blocks, users=[[i // 8] for i in range(16)], units=units)
    order, source = UseOrder(3), AtOnce()
    weights_ = Weights(cast(TrainLayout, layout), order, source, Shared(), room * PAGE, pinned=())
    weights_.uses.expect_experts(4, 4)
    back = [ids + ids[::-1] for ids in experts]
    visits = [experts[0], experts[1], [], back[1], back[0]]
    steps = 4
    for _ in range(steps):
        for unit, mine in zip([0, 1, 2, 1, 0], visits, strict=True):
            weights_.enter(unit, backward=len(mine) == 16)
            weights_.acquire_all([])  # what it has besides experts; reads ahead
            weights_.expect(mine, experts[unit] if mine else ())
            for block in mine:
                weights_.reached(block)
                entry = weights_.acquire(block)
                assert entry.ready
                weights_.release(block)
            weights_.expect_nothing()
        order.end_step()
    uses = [block for visit in visits for block in visit] * steps
    # Of the room one block's is the expert's that computes.
    assert least_reads(uses, room) <= len(source.blocks) <= least_reads(uses, max(1, room - 1))
    weights_.close()
