"""What every device promises, on those that need no card."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fake_card import FakeCard

from offload.errors import PlanError
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device, Region
from offload.runtime.null_device import NullDevice
from offload.runtime.sim_device import SimDevice

MIB = 1 << 20


@pytest.fixture(params=["null", "sim", "cuda", "staged"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """``cuda``: the device of a card, on a fake of the card; ``staged``: that does not pin."""
    card = FakeCard(refuse="not permitted" if request.param == "staged" else None)
    made: Device
    if request.param == "null":
        made = NullDevice()
    elif request.param == "sim":
        made = SimDevice(8 * MIB)
    else:
        made = CudaDevice(8 * MIB, api=card, watchdog_s=30)
    yield made
    made.close()
    made.close()
    card.end()


def test_kind_and_tier(device: Device) -> None:
    assert device.kind in ("null", "sim", "cuda")
    assert device.torch_device.type == "cpu"
    streams = (device.compute, device.h2d, device.d2h, device.up, device.update)
    assert [s.name for s in streams] == ["compute", "h2d", "d2h", "up", "update"]
    assert device.acquired_memory() == 0


def test_copies_move_exactly_the_region(device: Device) -> None:
    a, b = device.host_memory(3 * MIB, "a"), device.host_memory(2 * MIB, "b")
    a.tensor().copy_(a.tensor().new_tensor(range(256)).repeat(3 * MIB // 256))
    b.tensor().fill_(7)
    for memory in (a, b):
        device.touch("host", Region(memory, 0, memory.nbytes), "w")
    device.h2d.wait(device.compute.record())
    source = Region(a, 3, 2001)
    if device.kind != "null":  # up and down again
        slot = Region(device.device_memory(MIB, "slot"), 4096, 2001)
        device.copy(slot, source, device.h2d)
        device.d2h.wait(device.h2d.record())
        device.d2h.wait(device.compute.record())
        device.copy(Region(b, 100, 4000), slot, device.d2h).wait(30)
    else:
        device.copy(Region(b, 100, 4000), source, device.h2d).wait(30)
    got = b.tensor().tolist()
    assert got[100:2101] == [i % 256 for i in range(3, 2004)]
    assert set(got[:100] + got[2101:]) == {7}
    device.check()


def test_another_thread_computes_beside(device: Device) -> None:
    """What it waits for is there, and what it has made is copied down behind it."""
    if device.kind == "null":
        pytest.skip("without a tier of its own there is nothing to wait for")
    host, there = device.host_memory(MIB, "host"), device.device_memory(MIB, "tile")
    here, away = Region(host, 0, MIB), Region(there, 0, MIB)

    def update() -> None:
        host.tensor().fill_(3)
        device.touch("update", here, "w")
        device.h2d.wait(device.signal("update"))
        device.update.wait(device.copy(away, here, device.h2d))
        with device.updating():
            device.touch("update", away, "r")
            there.tensor().add_(4)
            device.touch("update", away, "w")
        device.d2h.wait(device.update.record())
        device.copy(here, away, device.d2h).then(lambda error: ended.set())

    ended = threading.Event()
    thread = threading.Thread(target=update)
    thread.start()
    thread.join(30)
    assert ended.wait(30)
    device.check()
    assert host.tensor().unique().tolist() == [7]


def test_copies_that_do_not_fit_raise_at_once(device: Device) -> None:
    a, b = device.host_memory(100, "a"), device.host_memory(50, "b")
    with pytest.raises(ValueError, match="cannot copy 51 bytes of 'a'"):
        device.copy(Region(b, 0, 50), Region(a, 0, 51), device.h2d)
    with pytest.raises(ValueError, match="outside memory 'a'"):
        device.copy(Region(b, 0, 50), Region(a, 60, 41), device.h2d)


def test_events_call_back_once_and_keep_what_callbacks_raise(device: Device) -> None:
    called: list[BaseException | None] = []
    arrived = threading.Event()

    def callback(error: BaseException | None) -> None:
        called.append(error)
        arrived.set()

    for stream in (device.compute, device.h2d, device.d2h, device.up):
        arrived.clear()
        event = stream.record()
        event.then(callback)
        assert arrived.wait(30)
        event.wait(30)
        assert event.done()
        event.then(callback)  # done: at once
    device.signal("read").then(callback)
    assert called == [None] * 9

    def broken(_: BaseException | None) -> None:
        raise KeyError("in a callback")

    device.check()
    device.compute.record().then(broken)
    arrived.clear()
    device.compute.record().then(callback)  # called after the other
    assert arrived.wait(30)
    with pytest.raises(KeyError, match="in a callback"):
        device.check()


def test_signals_are_done_and_acquired(device: Device) -> None:
    event = device.signal("read/3")
    assert event.done()
    device.acquire("write", event)
    device.compute.wait(event)
    device.h2d.wait(event)
    device.h2d.record().wait(30)


def test_memory_of_the_device_tier_is_bounded(device: Device) -> None:
    if device.kind == "null":
        with pytest.raises(PlanError, match=r"2\.0 MiB of device memory, but the CPU"):
            device.device_memory(2 * MIB, "slots")
        return
    a = device.device_memory(5 * MIB, "a")
    b = device.device_memory(3 * MIB, "b")
    assert device.acquired_memory() == 8 * MIB
    with pytest.raises(PlanError, match=r"'c' needs 1 B.*short by 1 B"):
        device.device_memory(1, "c")
    b.close()
    b.close()
    assert device.acquired_memory() == 5 * MIB
    device.device_memory(3 * MIB, "c")
    a.close()
