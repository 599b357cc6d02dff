"""A real card: that what is ordered is ordered there, that budgets hold, what happens when not.

Everything here needs the card itself; what can be said of its device without one is in
``tests/runtime``.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import budgets, options, prompt, reference
from families import write

import offload
from offload.errors import OffloadError, PlanError
from offload.models.load import prepare
from offload.runtime.cuda_api import TorchCard
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no card here"),
]

MIB = 1 << 20
SPIN = 200_000_000
"""Clock cycles that a kernel does nothing for: about a tenth of a second."""


@pytest.fixture
def card() -> Iterator[CudaDevice]:
    device = CudaDevice(512 * MIB, watchdog_s=60)
    yield device
    device.close()
    device.check()
    torch.cuda.empty_cache()


def filled(device: CudaDevice, nbytes: int, value: int) -> Region:
    memory = device.host_memory(nbytes, f"host {value}")
    memory.tensor().fill_(value)
    return Region(memory, 0, nbytes)


# -- order ------------------------------------------------------------------------------------


def test_host_memory_is_pinned(card: CudaDevice) -> None:
    memory = card.host_memory(300 * MIB, "arena")
    assert card.notes == []
    assert memory.tensor().is_pinned()
    assert memory.tensor()[17 * MIB :].is_pinned()


def test_a_copy_up_waits_for_the_last_use_of_its_slot(card: CudaDevice) -> None:
    slot = Region(card.device_memory(64 * MIB, "slot"), 0, 64 * MIB)
    old, new = filled(card, 64 * MIB, 1), filled(card, 64 * MIB, 2)
    card.compute.wait(card.copy(slot, old, card.h2d))
    out = torch.empty(64 * MIB, dtype=torch.uint8, device=card.torch_device)
    torch.cuda._sleep(SPIN)
    out.copy_(slot.memory.tensor())
    card.h2d.wait(card.compute.record())
    copied = card.copy(slot, new, card.h2d)
    assert not copied.done(), "the host has waited, or the copy has not"
    copied.wait()
    assert out.eq(1).all()
    assert slot.memory.tensor().eq(2).all()


def test_compute_waits_for_the_copy(card: CudaDevice) -> None:
    slot = Region(card.device_memory(256 * MIB, "slot"), 0, 256 * MIB)
    for value in range(1, 6):
        copied = card.copy(slot, filled(card, 256 * MIB, value), card.h2d)
        card.compute.wait(copied)
        assert slot.memory.tensor().eq(value).all()
        card.h2d.wait(card.compute.record())


def test_the_stream_of_the_user_is_the_one_that_computes(card: CudaDevice) -> None:
    slot = Region(card.device_memory(64 * MIB, "slot"), 0, 64 * MIB)
    out = torch.empty(64 * MIB, dtype=torch.uint8, device=card.torch_device)
    mine = torch.cuda.Stream(card.torch_device)
    with torch.cuda.stream(mine):
        card.compute.wait(card.copy(slot, filled(card, 64 * MIB, 1), card.h2d))
        torch.cuda._sleep(SPIN)
        out.copy_(slot.memory.tensor())
        card.h2d.wait(card.compute.record())
    card.copy(slot, filled(card, 64 * MIB, 2), card.h2d).wait()
    mine.synchronize()
    assert out.eq(1).all()


def test_copies_down_and_up_overlap_and_keep_their_bytes(card: CudaDevice) -> None:
    nbytes = 32 * MIB
    slot = card.device_memory(4 * nbytes, "slots")
    source = card.host_memory(4 * nbytes, "in")
    target = card.host_memory(4 * nbytes, "out")
    source.tensor().random_(0, 256)
    for i in range(4):
        part = Region(slot, i * nbytes, nbytes)
        up = card.copy(part, Region(source, i * nbytes, nbytes), card.h2d)
        card.d2h.wait(up)
        card.copy(Region(target, i * nbytes, nbytes), part, card.d2h)
    card.d2h.record().wait()
    assert torch.equal(source.tensor(), target.tensor())


def test_events_call_back_from_a_thread(card: CudaDevice) -> None:
    import threading

    heard = threading.Event()
    torch.cuda._sleep(SPIN)
    event = card.compute.record()
    event.then(lambda error: heard.set() if error is None else None)
    assert not heard.is_set()
    assert heard.wait(60)


# -- what the system or the card refuses ---------------------------------------------------------


def test_staged_copies_keep_their_bytes(
    card: CudaDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TorchCard, "pin", lambda self, address, nbytes: "not permitted")
    nbytes = 50 * MIB + 123
    source, target = card.host_memory(nbytes, "in"), card.host_memory(nbytes, "out")
    assert not source.tensor().is_pinned()
    source.tensor().random_(0, 256)
    slot = Region(card.device_memory(nbytes, "slot"), 0, nbytes)
    up = card.copy(slot, Region(source, 0, nbytes), card.h2d)
    card.d2h.wait(up)
    card.copy(Region(target, 0, nbytes), slot, card.d2h).wait()
    assert torch.equal(source.tensor(), target.tensor())
    assert "not permitted" in caplog.text


def test_a_refused_registration_is_not_blamed_on_the_next_kernel(card: CudaDevice) -> None:
    # Pinning the same page twice is refused by the runtime itself.
    memory = card.host_memory(MIB, "arena")
    refused = card.api.pin(memory.tensor().data_ptr(), 4096)
    assert refused is not None
    assert "error" in refused
    x = torch.ones(1000, device=card.torch_device)
    assert float(x.sum()) == 1000


def test_a_card_that_is_full_is_an_error_of_the_plan(card: CudaDevice) -> None:
    big = CudaDevice(None)
    with pytest.raises(PlanError, match=r"needs 1024\.0 GiB, but NVIDIA.* free of"):
        big.device_memory(1 << 40, "slots")
    big.device_memory(MIB, "slots")
    big.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("llama")
    write("llama", directory, torch.bfloat16)
    return directory


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"gpu": "1TiB"}, r"1024\.0 GiB cannot be had: .* has"),
        ({"gpu": "10"}, "sizes without a unit are bytes"),
        ({"gpu": "2MiB"}, "short|budget|smallest"),
        ({"device": "cuda:77"}, "there is no card cuda:77: torch sees"),
        ({"gpu": "1GiB", "device": "cpu"}, "contradict each other"),
    ],
)
def test_budgets_that_cannot_be(tiny: Path, words: dict[str, str], said: str) -> None:
    with pytest.raises(OffloadError, match=said):
        offload.load(tiny, ram="2GiB", **words)


# -- budgets and waits ----------------------------------------------------------------------------


def test_a_user_needs_three_lines(tiny: Path) -> None:
    model = offload.load(tiny, ram="2GiB", gpu="1GiB", context=64)
    out = model.generate(prompt(), max_new_tokens=4, do_sample=False)
    assert model.device.type == out.device.type == "cuda"
    want = reference(tiny, torch.bfloat16).to(model.device)
    expected = want.generate(prompt().to(model.device), max_new_tokens=4, do_sample=False)
    assert torch.equal(out, expected)
    model.offload.close()


def test_the_peak_is_within_the_cap(tiny: Path) -> None:
    """A hard cap of the process at the budget: torch itself would raise above it."""
    least = budgets(tiny, "cuda")["minimum"]
    total = torch.cuda.get_device_properties(0).total_memory
    gc.unfreeze()  # models that other tests have left
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    # The allocator takes whole segments of 2 and 20 MiB, and the cap counts those.
    room = torch.cuda.memory_reserved() + least["gpu"] + 64 * MIB
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with_cap = prepare(tiny, options("cuda", **least)).open()
        out = with_cap.generate(prompt(), max_new_tokens=8, do_sample=False)
        stats = with_cap.offload.stats()
        assert stats["device_peak_bytes"] <= before + least["gpu"]
        assert out.shape[1] == prompt().shape[1] + 8
        with_cap.offload.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _synchronisations(work: Callable[[], Any]) -> int:
    """How often torch blocks the host on the card while ``work`` runs."""
    work()  # what is done only once
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns that it is a prototype
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def test_streaming_adds_no_synchronisation(tiny: Path) -> None:
    """The host does not wait for the card in a dense model's pass, beyond what transformers does
    with the resident one."""
    resident = reference(tiny, torch.bfloat16).to("cuda")
    ids = prompt().to("cuda")
    with torch.no_grad():
        allowed = _synchronisations(lambda: resident(ids))
    least = budgets(tiny, "cuda")["half"]
    model = prepare(tiny, options("cuda", **least)).open()
    assert model.offload.executor.stats.h2d_bytes > 0
    with torch.no_grad():
        assert _synchronisations(lambda: model(ids)) == allowed
    model.offload.close()
