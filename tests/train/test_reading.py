"""What is predicted to be read of experts: against an engine's own weights, and by hand."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offload.train.layout import Block, TrainLayout
from offload.train.opening import Placement
from offload.train.order import UseOrder
from offload.train.reading import Routing, unit_reads
from offload.train.shared import Shared
from offload.train.weights import Weights

PAGE = 4096
LAYERS, EXPERTS = 4, 12


class AtOnce:
    """A source whose reads are over at once."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, block: Block, into: memoryview, priority: int) -> list[Future[Any]]:
        self.reads += 1
        return []


def model() -> tuple[TrainLayout, list[list[int]]]:
    """Layers of nothing but experts, a page each, and a head without any."""
    experts = [list(range(u * EXPERTS, (u + 1) * EXPERTS)) for u in range(LAYERS)]
    blocks = [
        Block(
            index=i, id=f"b{i}", dtype="float32", trained=False, pieces=(), count=PAGE // 4,
            tiles=(),
        )
        for i in range(LAYERS * EXPERTS)
    ]  # fmt: skip
    units = [SimpleNamespace(blocks=[], experts={"e": ids}) for ids in experts]
    units.append(SimpleNamespace(blocks=[], experts={}))
    users = [[i // EXPERTS] for i in range(len(blocks))]
    layout = SimpleNamespace(blocks=blocks, users=users, units=units)
    return cast(TrainLayout, layout), experts


def reads_of_a_step(room: int, pinned: frozenset[int], micro_batches: int) -> int:
    """Counted in a step among others like it, every expert being reached."""
    layout, experts = model()
    source, order = AtOnce(), UseOrder(LAYERS + 1)
    limit = (room + len(pinned)) * PAGE
    weights = Weights(layout, order, source, Shared(), limit, pinned=pinned)
    weights.pin_all()
    weights.uses.expect_experts(4, 4)

    def visit(unit: int, backward: bool) -> None:
        weights.enter(unit, backward=backward)
        for i in range(micro_batches if unit < LAYERS else 0):
            mine = experts[unit]
            uses = [*mine, *mine[::-1]] if backward else mine
            last = i + 1 == micro_batches
            weights.expect(uses if last else [*uses, *mine], mine)
            for block in uses:
                weights.reached(block)
                weights.acquire(block)
                weights.release(block)
        weights.expect_nothing()

    for _ in range(3):
        before = source.reads
        for unit in range(LAYERS + 1):
            visit(unit, False)
        for unit in reversed(range(LAYERS)):
            visit(unit, True)
        order.end_step()
    weights.close()
    return source.reads - before


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kept", [0, 24])
@pytest.mark.parametrize("room", [6, 9, 14])
def test_predicted_reads_are_those_of_an_engine(room: int, kept: int, micro_batches: int) -> None:
    layout, _ = model()
    pinned = frozenset(range(0, 2 * kept, 2))
    place = Placement(weights_bytes=(room + len(pinned)) * PAGE, pinned=pinned)
    routing = Routing(
        shares=dict.fromkeys(range(LAYERS * EXPERTS), 1.0), micro_batches=micro_batches
    )
    found = unit_reads(layout, place, routing, {}, clipping=True, backwards=1)
    counted = reads_of_a_step(room, pinned, micro_batches)
    assert sum(found.sums()) / PAGE == pytest.approx(counted, rel=0.08, abs=1)


def test_experts_that_few_tokens_reach_are_read_less_often() -> None:
    layout, _ = model()
    place = Placement(weights_bytes=2 * PAGE, pinned=frozenset())
    shares = dict.fromkeys(range(LAYERS * EXPERTS), 0.5)

    def read(share: float) -> tuple[float, float]:
        routing = Routing(shares=dict.fromkeys(shares, share))
        return unit_reads(layout, place, routing, {}, clipping=True, backwards=1).sums()

    half, whole = read(0.5), read(1.0)
    assert whole[0] == pytest.approx(2 * half[0], abs=2 * PAGE)
    assert whole[1] > 1.9 * half[1]
    # Each comes again for the gradients, but for what the ring has at the turn.
    assert whole[1] > 1.8 * whole[0]


def test_dense_weights_are_read_once_in_each_direction() -> None:
    layout, _ = model()
    place = Placement(weights_bytes=4 * PAGE, pinned=frozenset([1, 2]))
    found = unit_reads(layout, place, Routing(), {}, clipping=True, backwards=1)
    blocks = LAYERS * EXPERTS - 2
    assert found.sums() == ((blocks - 1) * PAGE, (blocks - 1) * PAGE)  # half of the ring each
    assert not any(found.experts)
