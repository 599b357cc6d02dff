"""The simulated accelerator apart from races: time, errors, the watchdog, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from offload.errors import ClosedError, SchedulerError, WatchdogError
from offload.runtime.device import Region
from offload.runtime.memory import POISON, HostMemory
from offload.runtime.null_device import NullDevice
from offload.runtime.sim_device import SimDevice

MIB = 1 << 20


class VirtualClock:
    """Time that passes only by waiting for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def wait_until(self, deadline: float) -> None:
        with self._lock:
            self._now_s = max(self._now_s, deadline)


class GatedMemory(HostMemory):
    """Memory a copy cannot reach before the gate opens, or at all."""

    def __init__(self, nbytes: int, error: Exception | None = None) -> None:
        super().__init__(nbytes, "gated")
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.error = error

    def tensor(self) -> torch.Tensor:
        self.reached.set()
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return super().tensor()


def test_copies_take_the_time_of_their_bytes_plus_latency() -> None:
    clock = VirtualClock()
    with SimDevice(
        8 * MIB, 4 * MIB, 1 * MIB, latency_s=0.5, seed=None, check_races=False, clock=clock
    ) as device:
        host, dev = device.host_memory(8 * MIB, "host"), device.device_memory(8 * MIB, "dev")
        device.copy(Region(dev, 0, 8 * MIB), Region(host, 0, 8 * MIB), device.h2d).wait(30)
        assert clock.now() == pytest.approx(2.5)
        device.copy(Region(host, 0, 2 * MIB), Region(dev, 0, 2 * MIB), device.d2h).wait(30)
        assert clock.now() == pytest.approx(5.0)
        # Three in a row: the line of the stream, not the wake-ups of its thread, adds up.
        for _ in range(3):
            end = device.copy(Region(dev, 0, MIB), Region(host, 0, MIB), device.h2d)
        end.wait(30)
        assert clock.now() == pytest.approx(5.0 + 3 * 0.75)


def test_a_copy_starts_after_the_event_its_stream_waits_for() -> None:
    clock = VirtualClock()
    with SimDevice(MIB, MIB, MIB, seed=None, check_races=False, clock=clock) as device:
        host, dev = device.host_memory(MIB, "host"), device.device_memory(MIB, "dev")
        region, slot = Region(host, 0, MIB), Region(dev, 0, MIB)
        device.d2h.wait(device.copy(slot, region, device.h2d))
        device.copy(region, slot, device.d2h).wait(30)
        assert clock.now() == pytest.approx(2.0)


def test_what_is_over_is_not_waited_for() -> None:
    """It keeps no stream's thread busy; what failed is, for it breaks what comes behind it."""
    with SimDevice(1 << 20, seed=None) as device:
        h2d: Any = device.h2d
        before = device.signal("host")
        submitted: list[Any] = []
        submit = h2d._submit
        h2d._submit = lambda op: (submitted.append(op), submit(op))
        h2d.wait(before)
        assert not submitted
        before.error = OSError("made up")
        h2d.wait(before)
        assert submitted
        before.error = None


def test_memory_is_poisoned_until_written() -> None:
    with SimDevice(MIB) as device:
        for memory in (device.host_memory(MIB, "host"), device.device_memory(MIB, "dev")):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                assert memory.tensor().view(dtype).isnan().all()
            assert int(memory.tensor()[-1]) == POISON
    with SimDevice(MIB, poison=False) as device:
        assert int(device.device_memory(MIB, "dev").tensor().max()) == 0


def test_poison_is_in_place_before_anyone_can_see_the_last_use_done() -> None:
    with SimDevice(MIB) as device:
        gated, dev = GatedMemory(MIB), device.device_memory(MIB, "dev")
        slot = Region(dev, 0, 100)
        earlier = device.d2h.record()
        earlier.wait(30)
        copied = device.copy(slot, Region(gated, 0, 100), device.h2d)
        found: list[list[int]] = []
        copied.then(lambda _: found.append(dev.tensor()[:100].tolist()))  # asked first
        device.discard(slot, [copied, earlier])
        gated.gate.set()
        device.h2d.record().wait(30)
        assert found == [[POISON] * 100]


def test_the_host_cannot_address_device_memory() -> None:
    with SimDevice(MIB) as device, pytest.raises(SchedulerError, match="'dev' cannot be addressed"):
        device.device_memory(MIB, "dev").view()


def test_the_watchdog_names_the_stream_and_its_work() -> None:
    with SimDevice(MIB) as device:
        gated, dev = GatedMemory(3 * MIB), device.device_memory(MIB, "dev")
        first = device.copy(Region(dev, 0, MIB), Region(gated, MIB, MIB), device.h2d)
        assert gated.reached.wait(30)
        with pytest.raises(WatchdogError, match=r"h2d is copying 1.0 MiB from 'gated'\+1048576"):
            first.wait(0.01)
        device.d2h.wait(first)
        behind = device.d2h.record()
        with pytest.raises(WatchdogError, match="stream d2h is"):
            behind.wait(0.01)
        gated.gate.set()
        behind.wait(30)


def test_without_a_timeout_the_devices_watchdog_applies() -> None:
    device = SimDevice(MIB, watchdog_s=0.01)
    gated, dev = GatedMemory(MIB), device.device_memory(MIB, "dev")
    event = device.copy(Region(dev, 0, MIB), Region(gated, 0, MIB), device.h2d)
    assert gated.reached.wait(30)
    with pytest.raises(WatchdogError, match=r"waited 0.01 s for event 0 of h2d"):
        device.compute.wait(event)
    with pytest.raises(WatchdogError, match="for the end; stream h2d is copying"):
        device.close()
    gated.gate.set()
    event.wait(30)
    device.close()


def test_a_failed_copy_fails_everything_after_it_with_the_cause() -> None:
    device = SimDevice(MIB)
    cause = OSError("the bus fell off")
    gated, dev = GatedMemory(MIB, cause), device.device_memory(MIB, "dev")
    good = device.h2d.record()
    failed = device.copy(Region(dev, 0, MIB), Region(gated, 0, MIB), device.h2d)
    later = device.h2d.record()
    device.d2h.wait(later)
    other = device.d2h.record()
    told: list[BaseException | None] = []
    other.then(told.append)
    gated.gate.set()
    for event in (failed, later, other):
        with pytest.raises(OSError, match="the bus fell off") as e:
            event.wait(30)
        assert e.value is cause
        assert event.done()
    with pytest.raises(OSError):
        device.compute.wait(failed)
    with pytest.raises(OSError):
        device.acquire("write", failed)
    with pytest.raises(OSError):
        device.check()
    device.close()
    assert told == [cause]
    assert good.done()


def test_what_a_callback_raises_on_a_stream_is_kept() -> None:
    device = SimDevice(MIB)
    gated, dev = GatedMemory(MIB), device.device_memory(MIB, "dev")
    event = device.copy(Region(dev, 0, MIB), Region(gated, 0, MIB), device.h2d)

    def broken(_: BaseException | None) -> None:
        raise KeyError("late")

    event.then(broken)
    gated.gate.set()
    device.close()
    with pytest.raises(KeyError, match="late"):
        device.check()


def test_close_drains_joins_and_refuses_more() -> None:
    before = set(threading.enumerate())
    device = SimDevice(MIB)
    dev = device.device_memory(MIB, "dev")
    host = device.host_memory(MIB, "host")
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    device.touch("host", Region(host, 0, MIB), "w")
    device.h2d.wait(device.signal("host"))
    events = [device.copy(Region(dev, i, 1), Region(host, i, 1), device.h2d) for i in range(0, 100)]
    device.close()
    device.close()
    assert all(e.done() for e in events)
    assert not any(t.is_alive() for t in started)
    assert device.acquired_memory() == 0
    for submit in (device.h2d.record, lambda: device.d2h.wait(events[0])):
        with pytest.raises(ClosedError, match="is closed"):
            submit()


def test_misuse_is_refused() -> None:
    with SimDevice(MIB) as device:
        gated, dev = GatedMemory(MIB), device.device_memory(MIB, "dev")
        with pytest.raises(SchedulerError, match="compute does not copy"):
            device.copy(Region(dev, 0, 1), Region(gated, 0, 1), device.compute)
        pending = device.copy(Region(dev, 0, 1), Region(gated, 0, 1), device.h2d)
        with pytest.raises(SchedulerError, match=r"before event .* of h2d is done"):
            device.acquire("write", pending)
        gated.gate.set()
        with pytest.raises(TypeError, match="not an event"):
            device.h2d.wait(NullDevice().compute.record())


@pytest.mark.parametrize("seed", range(5))
def test_chains_over_both_streams_copy_correctly(seed: int) -> None:
    with SimDevice(4 * MIB, seed=seed) as device:
        host, back = device.host_memory(MIB, "host"), device.host_memory(MIB, "back")
        dev = device.device_memory(MIB, "dev")
        gen = torch.Generator().manual_seed(seed)
        for _ in range(10):
            data = torch.randint(0, 256, (MIB,), generator=gen, dtype=torch.uint8)
            host.tensor().copy_(data)
            device.touch("host", Region(host, 0, MIB), "w")
            device.h2d.wait(device.compute.record())
            device.d2h.wait(device.copy(Region(dev, 0, MIB), Region(host, 0, MIB), device.h2d))
            down = device.copy(Region(back, 0, MIB), Region(dev, 0, MIB), device.d2h)
            device.h2d.wait(down)
            device.compute.wait(down)
            device.touch("compute", Region(back, 0, MIB), "r")
            assert torch.equal(back.tensor(), data)


def test_impossible_parameters() -> None:
    for rate in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            SimDevice(MIB, rate)
    with pytest.raises(ValueError, match="negative"):
        SimDevice(MIB, latency_s=-1)
