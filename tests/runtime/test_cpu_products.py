"""Products with dense weights in RAM beside the device: right bytes at every interleaving, and
every order between the two is missed when it is gone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from executor_support import PARTS, UNITS, Toy, WrongBytesError
from fake_card import FakeCard
from test_sim_device import GatedMemory

from offload.blocks import Tier
from offload.errors import OffloadError, SchedulerError
from offload.io.wrappers import LatencyStore
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Region
from offload.runtime.executor import Executor
from offload.runtime.race import RaceError
from offload.runtime.sim_event import SimEvent
from offload.runtime.transfers import Transfers
from offload.scheduler.plan import SITE_ACTIVATIONS, DenseSites

WIDTH = 16


def toy() -> Toy:
    """The executor's toy with all weights in RAM, where the CPU has the second block of each
    unit."""
    plain = Toy.make("sim", ram=2**20)
    pinned = plain.plan.tiers[Tier.DEVICE].pinned
    stay = frozenset(f"u{u}/1" for u in range(UNITS)) - pinned.keys()
    assert len(stay) > 2
    reserves = {t: {SITE_ACTIVATIONS: 4096} for t in plain.plan.tiers}
    sites = DenseSites(blocks=stay, rows=4)
    return replace(plain, plan=replace(plain.plan, sites=sites, reserves=reserves))


def number(block: str) -> float:
    return float(sum(block.encode()) % 97)


def product(it: Toy, executor: Executor, block: str, x: torch.Tensor) -> torch.Tensor:
    """On the CPU: ``x`` times the block's number, after a look at its bytes."""

    def work(views: dict[str, torch.Tensor], below: torch.Tensor) -> torch.Tensor:
        it.check(block, views)
        return below * number(block)

    return executor.compute_below(block, [x], work, x.shape).clone()


def run_pass(it: Toy, executor: Executor, *, few: bool) -> torch.Tensor:
    """A chain through all units; every product depends on the one before."""
    assert it.plan.sites is not None
    x = torch.arange(WIDTH, dtype=torch.float32)
    for u in range(UNITS):
        streamed = it.streamed(u)
        above = [b for b in streamed if not (few and b in it.plan.sites.blocks)]
        ticket = executor.enter(f"u{u}", above)
        try:
            for p in range(PARTS):
                block = f"u{u}/{p}"
                if block in streamed and block not in above:
                    x = product(it, executor, block, x)
                else:
                    it.check(block, executor.views(block))
                    x = x * number(block)
                x = x % 1009
        finally:
            executor.leave(ticket, above)
    return x


def run_seeds(it: Toy, seeds: range, passes: int = 6) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        with it.open(LatencyStore(it.store(), seconds=0.0003), seed) as executor:
            want = None
            for _ in range(passes):
                found = run_pass(it, executor, few=rng.random() < 0.7)
                want = found if want is None else want
                if not torch.equal(found, want):
                    raise WrongBytesError(f"the chain gave {found}, not {want}")
            executor.settle()
            assert executor.held() == []
            executor.validate()
            assert executor.stats.cpu_products > 0
            assert executor.stats.cpu_experts == 0
        assert executor.live_leases() == 0
        assert executor.device.acquired_memory() == 0


def test_the_same_chain_whoever_multiplies() -> None:
    run_seeds(toy(), range(6))


def test_a_card_that_lags_and_the_cpu() -> None:
    """The card's own device on a stand-in whose streams come late."""
    it = toy()
    for seed in range(3):
        card = FakeCard(seed=seed, jitter_s=300e-6)
        device = CudaDevice(2**20, api=card, watchdog_s=30)
        executor = Executor(it.plan, it.store(), device, watchdog_s=30)
        try:
            executor.start()
            found = [run_pass(it, executor, few=few) for few in (False, True, True, False)]
            assert all(torch.equal(f, found[0]) for f in found)
            executor.settle()
            executor.validate()
        finally:
            executor.close()
        card.end()


@pytest.mark.parametrize(
    "edge",
    ["activations-written", "activations-in-ram", "expert-in-ram", "result-written",
     "result-on-device"],
)  # fmt: skip
def test_each_order_is_missed_when_it_is_gone(monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    order = Transfers.order

    def weak(self: Transfers, name: str, waiter: str, event: Any) -> None:
        if name != edge:
            order(self, name, waiter, event)

    monkeypatch.setattr(Transfers, "order", weak)
    with pytest.raises((RaceError, WrongBytesError)):
        run_seeds(toy(), range(8))


def test_the_wait_for_the_activations_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimEvent, "wait", lambda self, timeout=None: None)
    with pytest.raises((SchedulerError, WrongBytesError)):
        run_seeds(toy(), range(8))


def test_a_result_does_not_come_behind_weights_on_their_way() -> None:
    """A copy of weights that takes for ever holds no product up."""
    it = toy()
    assert it.plan.sites is not None
    block = min(it.plan.sites.blocks)
    x = torch.arange(WIDTH, dtype=torch.float32)
    with it.open() as executor:
        executor.settle()
        device = executor.device
        gated, slot = GatedMemory(4096), device.device_memory(4096, "a slot")
        device.copy(Region(slot, 0, 4096), Region(gated, 0, 4096), device.h2d)
        try:
            assert gated.reached.wait(30)
            assert torch.equal(product(it, executor, block, x), x * number(block))
        finally:
            gated.gate.set()
        slot.close()


def test_a_result_that_stays_where_it_came_up_is_overwritten() -> None:
    """What ``from_cpu`` gives lasts until the next input goes down: callers copy it."""
    it = toy()
    assert it.plan.sites is not None
    first, second = sorted(it.plan.sites.blocks)[:2]
    x = torch.arange(WIDTH, dtype=torch.float32)
    with it.open() as executor:
        kept = executor.compute_below(first, [x], lambda _, below: below + 1, x.shape)
        assert torch.equal(kept, x + 1)
        product(it, executor, second, x)
        assert not torch.equal(kept, x + 1)


def test_what_computing_raises_is_raised_and_the_next_product_runs() -> None:
    it = toy()
    assert it.plan.sites is not None
    block = min(it.plan.sites.blocks)
    x = torch.ones(WIDTH)

    def burst(*_: Any) -> torch.Tensor:
        raise ArithmeticError("on the CPU")

    with it.open() as executor:
        with pytest.raises(ArithmeticError, match="on the CPU"):
            executor.compute_below(block, [x], burst, x.shape)
        with pytest.raises(OffloadError, match=r"gave torch.float32 \[3\] on the CPU"):
            executor.compute_below(block, [x], lambda *_: x[:3], x.shape)
        run_pass(it, executor, few=True)
        executor.settle()
        executor.validate()
