"""Gradients on their way down: the host goes on while there is room, and each comes as it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from fake_card import FakeCard

from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.runtime.sim_device import SimDevice
from offload.train.device_plan import DevicePlacement
from offload.train.falling import FallingGradients

PAGE = 4096


class Kept:
    """Where gradients land, in order."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, torch.Tensor]] = []

    def add(self, block: int, piece: int, value: torch.Tensor, rows: Any = None) -> None:
        assert rows is None
        self.found.append((block, piece, value))


def placement(pages: int, largest: int) -> DevicePlacement:
    """Room for so many gradients of the largest size, in pages."""
    return DevicePlacement(
        budget=1 << 30, units=frozenset([0]), slots=1, slot_bytes=PAGE, up_bytes=PAGE,
        down_bytes=PAGE, work_bytes=0, gradients=pages // largest, gradient_bytes=largest * PAGE,
    )  # fmt: skip


@pytest.fixture(params=["sim", "card"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "sim":
        with SimDevice(1 << 24, seed=3, jitter_s=300e-6) as sim:
            yield sim
        return
    card = FakeCard(seed=3, jitter_s=300e-6)
    made = CudaDevice(1 << 24, api=card)
    yield made
    made.close()
    card.end()


def test_each_comes_as_it_was_and_in_order(device: Device) -> None:
    rng = random.Random(0)
    kept = Kept()
    falling = FallingGradients(device, placement(12, 3), cast(Any, kept), Counter())
    wanted = []
    done: list[int] = []
    for i in range(200):
        value = torch.full((rng.randint(1, 3 * PAGE // 4),), float(i))
        falling.add(i, i % 3, value)
        wanted.append((i, i % 3, value))
        if i % 7 == 0:
            falling.then(lambda i=i: done.append(i))  # type: ignore[misc]
            assert not done or done[-1] <= len(kept.found) - 1
    falling.land()
    assert done == list(range(0, 200, 7))
    assert [one[:2] for one in kept.found] == [one[:2] for one in wanted]
    for (_, _, got), (_, _, value) in zip(kept.found, wanted, strict=True):
        assert torch.equal(got, value)


def test_the_host_waits_for_a_card_only_where_there_is_no_room() -> None:
    """A card that does not move: all of two units' gradients can be queued, and no more."""
    card = FakeCard(jitter_s=0.0)
    device = CudaDevice(1 << 24, api=card, watchdog_s=0.2)
    kept = Kept()
    falling = FallingGradients(device, placement(8, 4), cast(Any, kept), Counter())
    card.hangs = True
    for i in range(8):  # a page each, though the largest takes four
        falling.add(0, i, torch.full((PAGE // 4,), float(i)))
    assert kept.found == []
    with pytest.raises(Exception, match=r"waited 0.2 s for the card"):
        falling.add(0, 8, torch.zeros(PAGE // 4))
    card.hangs = False
    falling.forget()
    device.close()
    card.end()


def test_what_has_landed_is_taken_in_passing() -> None:
    card = FakeCard(jitter_s=0.0)
    device = CudaDevice(1 << 24, api=card)
    kept, stalls = Kept(), Counter[str]()
    falling = FallingGradients(device, placement(8, 4), cast(Any, kept), stalls)
    falling.add(0, 0, torch.ones(8))
    falling._oldest().end.wait()
    falling.add(0, 1, torch.ones(8))
    assert [piece for _, piece, _ in kept.found] == [0]
    falling.land()
    device.close()
    card.end()
