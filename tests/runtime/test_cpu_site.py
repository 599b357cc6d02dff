"""The CPU beside the device: right bytes at every interleaving, both at work at once, and every
order between the two is missed when it is gone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from executor_support import EXPERTS, UNITS, BrokenStore, Toy, WrongBytesError
from fake_card import FakeCard

from offload.blocks import Tier
from offload.errors import OffloadError, SchedulerError, StoreError
from offload.io.wrappers import LatencyStore
from offload.runtime.cpu_site import CpuSite
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.executor import Executor
from offload.runtime.mirror import Mirror
from offload.runtime.race import RaceError
from offload.runtime.sim_device import SimDevice
from offload.runtime.transfers import Transfers
from offload.scheduler.hybrid import HybridRoutes
from offload.scheduler.plan import SITE_ACTIVATIONS
from offload.scheduler.split import SplitCosts

WIDTH = 16
EDGES = (
    "activations-written", "activations-in-ram", "expert-in-ram", "result-written",
    "result-on-device",
)  # fmt: skip


def toy(extra: int = 0) -> Toy:
    """The executor's toy with a CPU that shares in its experts."""
    plain = Toy.make("sim", experts=True, extra=extra)
    reserves = {t: {SITE_ACTIVATIONS: 4096} for t in plain.plan.tiers}
    # A disk so fast that who computes is never decided by it.
    costs = replace(SplitCosts.assumed(4000, 64), read_s=0.5)
    return replace(plain, plan=replace(plain.plan, split=costs, reserves=reserves))


def number(block: str) -> float:
    return float(sum(block.encode()) % 97)


def run_layer(
    it: Toy,
    executor: Executor,
    group: str,
    loads: Mapping[str, int],
    meet: Callable[[str], None] = lambda _: None,
) -> tuple[int, int]:
    """Route, compute on both sites, look at every byte. Returns how many each computed."""
    x = torch.arange(WIDTH, dtype=torch.float32) + len(loads)

    def work(block: str, views: dict[str, torch.Tensor], below: torch.Tensor) -> torch.Tensor:
        meet("cpu")
        it.check(block, views)
        return below * number(block)

    def on_device(block: str) -> None:
        views = executor.acquire(block)
        try:
            meet("device")
            it.check(block, views)
        finally:
            executor.release(block)

    try:
        schedule, below = executor.split_route(group, loads, lambda _: [x])
        if schedule is None:
            for block in loads:
                on_device(block)
            return len(loads), 0
        for block in schedule.cpu:
            executor.on_cpu(block, lambda v, b=block: work(b, v, below[0]), (WIDTH,), torch.float32)
        for block in schedule.device:
            on_device(block)
        for block in schedule.cpu:
            if not torch.equal(executor.from_cpu(block), x * number(block)):
                raise WrongBytesError(f"result of {block}")
        return len(schedule.device), len(schedule.cpu)
    finally:
        executor.abandon_cpu()
        executor.end_route()


def run(it: Toy, executor: Executor, seed: int, passes: int = 4) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    counts = []
    for _ in range(passes):
        for u in range(UNITS):
            blocks = it.streamed(u)
            ticket = executor.enter(f"u{u}", blocks)
            try:
                if f"g{u}" in it.plan.groups:
                    chosen = sorted(rng.sample(range(EXPERTS), rng.randint(1, 3)))
                    loads = {f"g{u}#{e}": rng.choice((1, 1, 200)) for e in chosen}
                    counts.append(run_layer(it, executor, f"g{u}", loads))
            finally:
                executor.leave(ticket, blocks)
    return counts


def run_seeds(it: Toy, seeds: range) -> list[tuple[int, int]]:
    counts = []
    for seed in seeds:
        with it.open(LatencyStore(it.store(), seconds=0.0003), seed) as executor:
            counts += run(it, executor, seed)
            executor.settle()
            assert executor.held() == []
            executor.validate()
        assert executor.live_leases() == 0
        assert executor.device.acquired_memory() == 0
    return counts


@pytest.mark.parametrize("extra", [0, 40_000])
def test_both_sites_see_the_experts_own_bytes(extra: int) -> None:
    counts = run_seeds(toy(extra), range(6))
    assert sum(device for device, _ in counts) > 20
    assert sum(cpu for _, cpu in counts) > 20


def test_a_card_that_lags_and_the_cpu() -> None:
    """The card's own device on a stand-in whose streams come late: the same bytes."""
    it = toy()
    for seed in range(3):
        card = FakeCard(seed=seed, jitter_s=300e-6)
        device = CudaDevice(2**20, api=card, watchdog_s=30)
        store = LatencyStore(it.store(), seconds=0.0003)
        executor = Executor(it.plan, store, device, watchdog_s=30)
        try:
            executor.start()
            assert sum(cpu for _, cpu in run(it, executor, seed)) > 0
            executor.settle()
            executor.validate()
        finally:
            executor.close()
        assert device.acquired_memory() == 0
        card.end()


def test_who_computes_what_does_not_depend_on_the_delays() -> None:
    it = toy()
    found = []
    for seed in range(4):
        with it.open(LatencyStore(it.store(), seconds=0.0003), seed) as executor:
            found.append(run(it, executor, 5))
    assert all(f == found[0] for f in found)


def test_both_sites_are_at_work_at_once() -> None:
    """Each waits for the other inside an expert: one after the other, they would never meet."""
    it = toy(40_000)
    meeting = threading.Barrier(2)
    met: list[str] = []

    def meet(site: str) -> None:
        meeting.wait(timeout=60)
        met.append(site)

    with it.open() as executor:
        # A heavy one for the device, a light one for the CPU; the light one is in RAM by then.
        run_layer(it, executor, "g1", {"g1#0": 1})
        assert run_layer(it, executor, "g1", {"g1#0": 1, "g1#1": 400}, meet) == (1, 1)
    assert sorted(met) == ["cpu", "device"]


def without(monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    order = Transfers.order

    def weak(self: Transfers, name: str, waiter: str, event: Any) -> None:
        if name != edge:
            order(self, name, waiter, event)

    monkeypatch.setattr(Transfers, "order", weak)


@pytest.mark.parametrize("edge", EDGES)
def test_each_order_is_missed_when_it_is_gone(monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    without(monkeypatch, edge)
    with pytest.raises((RaceError, WrongBytesError)):
        run_seeds(toy(), range(8))


@pytest.mark.parametrize("edge", ["activations-sent", "activations-read"])
def test_each_order_after_a_break_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    without(monkeypatch, edge)
    with pytest.raises(RaceError):
        break_off(toy())


def test_the_wait_for_the_activations_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = CpuSite.send

    def hasty(self: CpuSite, tensors: Any) -> Any:
        below = send(self, tensors)
        self._here = True
        return below

    monkeypatch.setattr(CpuSite, "send", hasty)
    with pytest.raises((SchedulerError, WrongBytesError)):
        run_seeds(toy(), range(8))


def test_the_cpus_use_of_a_slot_is_missed_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read into the slot has to come after it."""
    used = Transfers.used

    def forgetful(self: Transfers, tier: Tier, block: str, actor: str, event: Any) -> None:
        if actor != "cpu":
            used(self, tier, block, actor, event)

    monkeypatch.setattr(Transfers, "used", forgetful)
    with pytest.raises((RaceError, WrongBytesError)):
        run_seeds(toy(), range(8))


def test_the_wait_for_the_weights_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(self: HybridRoutes, expert: str) -> bool:
        entry = self._ram.entries.get(expert)
        if entry is None:
            return False
        entry.holds += 1
        self._unqueue(expert)
        return True

    monkeypatch.setattr(HybridRoutes, "hold_below", hasty)
    with pytest.raises((SchedulerError, WrongBytesError)):
        run_seeds(toy(), range(100))


def test_an_expert_that_cannot_be_read_is_an_error_where_it_is_waited_for() -> None:
    it = toy()
    store = BrokenStore(it.store(), "g1#2")
    with it.open(store) as executor:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"bad sector.*g1#2; story of"):
                run_layer(it, executor, "g1", {"g1#2": 1})
        store.broken = set()
        assert run_layer(it, executor, "g1", {"g1#2": 1}) == (0, 1)
        executor.settle()
        assert executor.held() == []
        executor.validate()


def test_what_computing_raises_is_raised_where_it_is_waited_for() -> None:
    it = toy()

    def burst(site: str) -> None:
        raise ArithmeticError(f"on the {site}")

    with it.open() as executor:
        with pytest.raises(ArithmeticError, match="on the cpu"):
            run_layer(it, executor, "g1", {"g1#0": 1}, burst)
        run(it, executor, 1)
        executor.settle()
        assert executor.held() == []
        executor.validate()


def test_the_threads_own_error_is_raised_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = Transfers.used

    def broken(self: Transfers, tier: Tier, block: str, actor: str, event: Any) -> None:
        if actor == "cpu":
            raise ArithmeticError("in the books")
        used(self, tier, block, actor, event)

    monkeypatch.setattr(Transfers, "used", broken)
    it = toy()
    with it.open() as executor:
        assert run_layer(it, executor, "g1", {"g1#0": 1}) == (0, 1)  # its result was there before
        with pytest.raises(OffloadError, match=r"has ended: ArithmeticError.*without --hybrid"):
            run_layer(it, executor, "g1", {"g1#1": 1})


def test_tasks_change_under_the_lock_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's thread goes through them for its next one while others are taken."""
    it = toy()
    with it.open() as executor:
        site = executor._cpu
        assert site is not None

        class Watched(dict[str, Any]):
            def pop(self, *args: Any) -> Any:
                assert executor._changed._is_owned()  # type: ignore[attr-defined]
                return super().pop(*args)

            def __setitem__(self, key: str, value: Any) -> None:
                assert executor._changed._is_owned()  # type: ignore[attr-defined]
                super().__setitem__(key, value)

        monkeypatch.setattr(site, "_tasks", Watched())
        assert sum(cpu for _, cpu in run(it, executor, 1)) > 0


def break_off(it: Toy) -> None:
    """Layers whose results nobody takes, some before the CPU has begun and some behind an error;
    then whole passes."""
    x = torch.ones(WIDTH)

    def burst(site: str) -> None:
        if site == "cpu":
            raise ArithmeticError("on the CPU")

    for seed in range(4):
        with it.open(LatencyStore(it.store(), seconds=0.0005), seed) as executor:
            for u in (1, 3, 5):
                loads = {f"g{u}#{e}": 1 for e in range(2)}
                schedule, below = executor.split_route(f"g{u}", loads, lambda _: [x])
                assert schedule is not None
                for block in schedule.cpu:
                    executor.on_cpu(block, lambda _, b=below: b[0] + 1, (WIDTH,), torch.float32)
                executor.abandon_cpu()
                executor.end_route()
                with pytest.raises(ArithmeticError, match="on the CPU"):
                    run_layer(it, executor, f"g{u}", loads, burst)
            run(it, executor, seed)
            executor.settle()
            assert executor.held() == []
            executor.validate()


def test_a_layer_that_is_broken_off_is_no_trouble_to_the_next() -> None:
    break_off(toy())


def test_a_result_of_another_shape_is_refused() -> None:
    it = toy()
    x = torch.ones(WIDTH)
    with it.open() as executor:
        executor.split_route("g1", {"g1#0": 1}, lambda _: [x])
        executor.on_cpu("g1#0", lambda _: x[:3], (WIDTH,), torch.float32)
        with pytest.raises(OffloadError, match=r"gave torch.float32 \[3\] on the CPU"):
            executor.from_cpu("g1#0")
        executor.end_route()


def test_activations_beyond_what_is_set_aside_are_refused() -> None:
    with SimDevice(2**16) as device:
        mirror = Mirror(device, 4096)
        assert mirror.place(100) == 0
        assert mirror.place(100) == 128
        with pytest.raises(SchedulerError, match="4000 bytes of activations at 256 exceed"):
            mirror.place(4000)
        mirror.close()
