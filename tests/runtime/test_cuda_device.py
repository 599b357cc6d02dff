"""The device of a card, on a fake of the card: who waits for whom, and what if it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from executor_support import Toy
from fake_card import FakeCard

from offload.errors import ClosedError, DeviceError, PlanError, SchedulerError
from offload.io.wrappers import LatencyStore
from offload.runtime import cuda_stream
from offload.runtime.cuda_device import CudaDevice, pinning_refused
from offload.runtime.cuda_memory import check_budget
from offload.runtime.cuda_probe import on_card
from offload.runtime.cuda_stream import CopyStream
from offload.runtime.device import Event, Region
from offload.runtime.executor import Executor
from offload.scheduler.hardware import Hardware, Rate

MIB = 1 << 20
Make = Callable[..., CudaDevice]


@pytest.fixture
def make() -> Iterator[Make]:
    """``make(capacity, **of the fake card)``; checks at the end that no rule was broken."""
    made: list[CudaDevice] = []

    def device(
        capacity: int | None = 64 * MIB, watchdog_s: float = 30, **card: object
    ) -> CudaDevice:
        made.append(CudaDevice(capacity, api=FakeCard(**card), watchdog_s=watchdog_s))  # type: ignore[arg-type]
        return made[-1]

    yield device
    for each in made:
        each.close()
        card_of(each).end()


def card_of(device: CudaDevice) -> FakeCard:
    assert isinstance(device.api, FakeCard)
    return device.api


def filled(device: CudaDevice, nbytes: int, value: int) -> Region:
    memory = device.host_memory(nbytes, f"host {value}")
    memory.tensor().fill_(value)
    return Region(memory, 0, nbytes)


# -- order ------------------------------------------------------------------------------------


def test_streams_wait_on_the_card_and_the_host_does_not(make: Make) -> None:
    device = make(jitter_s=0.0)
    card = card_of(device)
    slot = Region(device.device_memory(MIB, "slot"), 0, MIB)
    source = filled(device, MIB, 1)
    card.hangs = True  # what is queued stays queued: nobody may wait for it
    used = device.compute.record()
    assert not used.done()
    device.h2d.wait(used)
    copied = device.copy(slot, source, device.h2d)
    device.d2h.wait(copied)
    assert not copied.done()
    waits = [c for c in card.calls if c.startswith("wait")]
    assert waits == ["wait:s1:default", "wait:s2:s1"]
    assert "block" not in card.calls
    card.hangs = False
    copied.wait()
    used.wait()
    card.calls.clear()
    device.compute.wait(copied)
    device.h2d.wait(used)
    # Both are known to be over: the card is not asked to wait for them again.
    assert not [c for c in card.calls if c.startswith("wait")]
    assert slot.memory.tensor().eq(1).all()


def through_one_slot(device: CudaDevice, rounds: int = 5) -> bool:
    """Send values up and down through one slot without waiting; whether each came back."""
    slot = Region(device.device_memory(MIB, "slot"), 0, MIB)
    sources = [filled(device, MIB, value + 1) for value in range(rounds)]
    back = [filled(device, MIB, 0) for _ in range(rounds)]
    left = device.d2h.record()
    for source, target in zip(sources, back, strict=True):
        device.h2d.wait(left)
        device.d2h.wait(device.copy(slot, source, device.h2d))
        left = device.copy(target, slot, device.d2h)
    left.wait()
    return all(t.memory.tensor().eq(i + 1).all() for i, t in enumerate(back))


@pytest.mark.parametrize("refuse", [None, "no"], ids=["pinned", "staged"])
def test_a_slot_is_used_by_one_at_a_time(make: Make, refuse: str | None) -> None:
    for seed in range(6):
        assert through_one_slot(make(seed=seed, jitter_s=500e-6, refuse=refuse))


@pytest.mark.parametrize("gone", ["h2d", "d2h"])
@pytest.mark.parametrize("refuse", [None, "no"], ids=["pinned", "staged"])
def test_each_wait_is_missed_when_it_is_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch, gone: str, refuse: str | None
) -> None:
    wait = CopyStream.wait

    def weak(self: CopyStream, event: Event) -> None:
        if self.name != gone:
            wait(self, event)

    monkeypatch.setattr(CopyStream, "wait", weak)
    found = [through_one_slot(make(seed=seed, jitter_s=500e-6, refuse=refuse)) for seed in range(8)]
    assert not all(found)


def test_the_stream_that_torch_computes_on_is_the_one_recorded(make: Make) -> None:
    device = make()
    card = card_of(device)
    first, mine = card.default, card.stream()
    device.compute.record()
    card.default = mine
    event = device.compute.record()
    device.h2d.wait(event)
    assert len(device._compute.last()) == 2  # what close() waits for
    for event in device._compute.last():
        event.wait()
    card.default = first


def test_memory_is_kept_for_the_streams_that_use_it(make: Make) -> None:
    device = make()
    device.device_memory(MIB, "slots")
    assert [c for c in card_of(device).calls if c.startswith("used_by")] == [
        "used_by:s1",
        "used_by:s2",
        "used_by:s3",
        "used_by:s4",
    ]


# -- memory -----------------------------------------------------------------------------------


def test_host_memory_is_pinned_once_and_unpinned_after_the_last_copy(make: Make) -> None:
    device = make(jitter_s=2e-3)
    slot = Region(device.device_memory(4 * MIB, "slot"), 0, 4 * MIB)
    source = filled(device, 4 * MIB, 3)
    copied = device.copy(slot, source, device.h2d)
    source.memory.close()  # waits; the fake says if it did not
    assert copied.done()
    assert slot.memory.tensor().eq(3).all()
    assert card_of(device).calls.count("pin") == 1
    assert card_of(device).calls.count("unpin") == 1


def test_the_arena_is_page_aligned_and_bounded(make: Make) -> None:
    device = make(8 * MIB)
    a = device.device_memory(5 * MIB, "a")
    assert a.tensor().data_ptr() % 4096 == 0
    with pytest.raises(SchedulerError, match="'a' cannot be addressed by the host"):
        a.view()
    with pytest.raises(PlanError, match=r"'b' needs 4\.0 MiB.*5\.0 MiB of 8\.0 MiB.*short by"):
        device.device_memory(4 * MIB, "b")
    a.close()
    with pytest.raises(ClosedError, match="'a' is closed"):
        a.tensor()
    assert device.acquired_memory() == 0


def test_a_full_card_is_an_error_of_the_plan_with_numbers(make: Make) -> None:
    device = make(None, nbytes=8 * MIB)
    with pytest.raises(PlanError, match=r"needs 9\.0 MiB, but a card of paper has 8\.0 MiB free"):
        device.device_memory(9 * MIB, "slots")
    device.device_memory(4 * MIB, "slots")  # smaller is possible afterwards


def test_budgets_that_a_card_cannot_give() -> None:
    card = FakeCard(8 * MIB)
    check_budget(8 * MIB, card)
    with pytest.raises(PlanError, match=r"9\.0 MiB cannot be had: a card of paper has 8\.0 MiB"):
        check_budget(9 * MIB, card)
    card.limit = 4 * MIB
    with pytest.raises(PlanError, match=r"this process may have 4\.0 MiB; lower it by.*1048576"):
        check_budget(5 * MIB, card)
    card.empty(3 * MIB)
    with pytest.raises(PlanError, match=r"of the 8\.0 MiB of a card of paper 1\.0 MiB are free"):
        check_budget(2 * MIB, card)
    card.end()


# -- memory that the system does not pin ---------------------------------------------------------


@pytest.mark.parametrize("buffers", [True, False], ids=["staged", "driver"])
def test_what_is_not_pinned_is_staged(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, buffers: bool
) -> None:
    monkeypatch.setattr(cuda_stream, "STAGING_BYTES", 4096)
    device = make(refuse="operation not permitted", refuse_buffers=not buffers)
    assert pinning_refused(device.api) == "operation not permitted"
    nbytes = 3 * 4096 + 100
    source, back = device.host_memory(nbytes, "in"), device.host_memory(nbytes, "out")
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    source.tensor().copy_(content)
    slot = Region(device.device_memory(nbytes, "slot"), 0, nbytes)
    up = device.copy(slot, Region(source, 0, nbytes), device.h2d)
    device.d2h.wait(up)
    device.copy(Region(back, 0, nbytes), slot, device.d2h).wait()
    assert torch.equal(back.tensor(), content)
    assert [n.startswith("the system does not pin") for n in device.notes] == [True]  # once
    assert "operation not permitted" in caplog.text


def test_staging_keeps_the_order_of_its_stream(make: Make) -> None:
    device = make(refuse="no", jitter_s=500e-6)
    slot, out = Region(device.device_memory(MIB, "slot"), 0, MIB), filled(device, MIB, 0)
    for value in range(1, 6):
        device.h2d.wait(device.d2h.record())
        device.copy(slot, filled(device, MIB, value), device.h2d)
        device.d2h.wait(device.h2d.record())
        device.copy(out, slot, device.d2h).wait()
        assert out.memory.tensor().eq(value).all()


# -- errors -----------------------------------------------------------------------------------


def test_only_the_card_side_is_copied(make: Make) -> None:
    device = make()
    a, b = filled(device, 100, 1), filled(device, 100, 2)
    with pytest.raises(SchedulerError, match="is on the card"):
        device.copy(a, b, device.h2d)
    slot = Region(device.device_memory(100, "slot"), 0, 100)
    with pytest.raises(SchedulerError, match="stream compute does not copy"):
        device.copy(slot, a, device.compute)


def test_a_card_that_fails_fails_every_copy_behind(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    device = make()
    slot = Region(device.device_memory(MIB, "slot"), 0, MIB)
    source = filled(device, MIB, 1)
    device.copy(slot, source, device.h2d).wait()
    card_of(device).broken = True
    heard: list[BaseException | None] = []
    for _ in range(3):
        event = device.copy(slot, source, device.h2d)
        assert event.done()
        event.then(heard.append)
        with pytest.raises(DeviceError, match="illegal memory access was encountered; start"):
            event.wait()
        with pytest.raises(DeviceError):
            device.compute.wait(event)
    assert [type(e) for e in heard] == [DeviceError] * 3
    used = device.compute.record()  # letting go of memory is possible still
    with pytest.raises(DeviceError):
        used.wait()
    with pytest.raises(DeviceError):
        device.check()
    assert "illegal memory access" in caplog.text


def test_a_hanging_card_is_waited_for_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    device = make(watchdog_s=0.1)
    card = card_of(device)
    slot, source = Region(device.device_memory(MIB, "slot"), 0, MIB), filled(device, MIB, 1)
    card.hangs = True
    device.copy(slot, source, device.h2d)
    device.close()
    assert "is not given back: the card may still be using it" in caplog.text
    assert card.pins  # kept, rather than freed under a copy
    assert source.memory.tensor().eq(1).all()
    card.hangs = False
    card.pins.clear()


# -- rates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("refuse", [None, "no"], ids=["pinned", "staged"])
def test_a_probe_puts_the_card_into_the_machine(make: Make, refuse: str | None) -> None:
    device = make(None, refuse=refuse, jitter_s=0.0)
    rate, flops = Rate.of([1e9], "B/s"), Rate.of([1e12], "FLOP/s")
    machine = Hardware(
        ssd_read=rate,
        ssd_write=rate,
        ssd_mixed=rate,
        ram_read=rate,
        memcpy=rate,
        matmul={"float32": flops},
        gemv={"float32": rate},
        cores=1,
        ram_bytes=2**30,
        name="a machine",
    )
    found = on_card(machine, device, link_bytes=MIB, memory_bytes=MIB, side=64)
    assert found.card is not None
    assert found.card.name == device.api.name
    assert found.card.memory_bytes == 2**31
    assert {*found.card.gemv} == {*found.card.matmul} == {"float32", "bfloat16"}
    assert found.card.launch_s > 0
    assert found.h2d is not None
    assert found.d2h is not None
    assert found.ssd_read == machine.ssd_read
    assert device.acquired_memory() == 0
    assert "release_cached" in card_of(device).calls


# -- the executor on a card ----------------------------------------------------------------------


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("refuse", [None, "no"], ids=["pinned", "staged"])
def test_compute_sees_the_blocks_own_bytes(experts: bool, refuse: str | None) -> None:
    toy = Toy.make("sim", experts=experts)
    for seed in range(4):
        card = FakeCard(seed=seed, refuse=refuse, jitter_s=300e-6)
        device = CudaDevice(2**20, api=card, watchdog_s=30)
        executor = Executor(
            toy.plan, LatencyStore(toy.store(), seconds=0.0005), device, watchdog_s=30
        )
        try:
            executor.start()
            toy.run(executor, seed=seed)
            executor.settle()
            executor.validate()
            assert executor.stats.h2d_bytes > 0
        finally:
            executor.close()
        assert device.acquired_memory() == 0
        card.end()


def test_a_card_that_fails_in_mid_step_ends_the_job_with_the_blocks_story(
    caplog: pytest.LogCaptureFixture,
) -> None:
    toy = Toy.make("sim")
    card = FakeCard()
    before = set(threading.enumerate())
    executor = Executor(toy.plan, toy.store(), CudaDevice(2**20, api=card, watchdog_s=5))
    try:
        executor.start()
        toy.run(executor, passes=1)
        card.break_after = 5
        with pytest.raises(DeviceError, match=r"illegal memory access.*"):
            toy.run(executor, passes=3)
        with pytest.raises(DeviceError, match=r"\(block u\d/\d; story of"):
            toy.run(executor, passes=3)
    finally:
        executor.close()
    card.end()
    assert set(threading.enumerate()) <= before
    assert "the card failed" in caplog.text
