"""Names of devices and budgets for them: what is meant, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_card import FakeCard

from offload.errors import OffloadError
from offload.runtime import choice, cuda_api
from offload.runtime.choice import choose, make_device
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.sim_device import SimDevice

GIB = 1 << 30


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeCard]:
    cards = {0: FakeCard(8 * GIB), 1: FakeCard(4 * GIB)}
    monkeypatch.setattr(cuda_api, "card_count", lambda: 2)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda index: cards[index])
    return cards


def test_a_budget_means_the_card(two_cards: dict[int, FakeCard]) -> None:
    assert choose("auto", None).kind == "cpu"
    assert choose("auto", GIB).kind == "cuda"
    assert choose("cuda:1", None).card == 1
    assert choose("sim", GIB).kind == "sim"
    assert choice.budget(choose("cpu", None), None, GIB) is None
    assert choice.budget(choose("sim", None), None, GIB) == GIB
    assert choice.budget(choose("cuda:1", 3 * GIB), 3 * GIB, GIB) == 3 * GIB
    assert choice.budget(choose("cuda:1", None), None, GIB) == int(0.9 * 4 * GIB)
    assert choice.staged_copies(choose("cuda", None)) is None
    two_cards[1].refuse = "not today"
    assert choice.staged_copies(choose("cuda:1", None)) == "not today"
    device = make_device(choose("cuda:1", GIB), GIB)
    assert isinstance(device, CudaDevice)
    assert device.api is two_cards[1]
    device.close()
    for card in two_cards.values():
        card.end()


@pytest.mark.parametrize(
    ("name", "gpu", "said"),
    [
        ("tpu", None, "device 'tpu' is not one of auto, cpu, sim"),
        ("cuda:x", None, "is not one of"),
        ("cpu", GIB, "1.0 GiB and device 'cpu' contradict"),
        ("auto", 6, "sizes without a unit are bytes"),
        ("cuda:2", None, "there is no card cuda:2: torch sees 2 here"),
    ],
)
def test_what_cannot_be(
    two_cards: dict[int, FakeCard], name: str, gpu: int | None, said: str
) -> None:
    with pytest.raises(OffloadError, match=said):
        choose(name, gpu)
    for card in two_cards.values():
        card.end()


def test_a_budget_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_api, "card_count", lambda: 0)
    with pytest.raises(OffloadError, match=r"no card .*drop the GPU budget.*device='sim'"):
        choose("auto", GIB)


RATE = {"median": 2e9, "low": 1e9, "high": 3e9, "n": 3, "unit": "B/s"}
FLOPS = {**RATE, "unit": "FLOP/s"}
MACHINE = {
    **dict.fromkeys(("ssd_read", "ssd_write", "ssd_mixed", "ram_read", "memcpy", "h2d"), RATE),
    "d2h": {**RATE, "median": 1.5e9},
    "matmul": {"float32": FLOPS},
    "gemv": {"float32": RATE},
    "cores": 2,
    "ram_bytes": GIB,
    "name": "a machine",
    "version": 1,
}  # fmt: skip


def test_the_simulated_link_is_that_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE))
    assert choice.link_rates(file) == (2e9, 1.5e9)
    device = make_device(choose(f"sim:{file}", None), GIB)
    assert isinstance(device, SimDevice)
    device.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "rates of a simulated device"),
        ("[]", "is no hardware file"),
        (json.dumps({**MACHINE, "h2d": None}), "of a machine without a card"),
    ],
)
def test_files_without_a_link(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(OffloadError, match=said):
        choice.link_rates(file)
    with pytest.raises(OffloadError, match="rates of a simulated device"):
        choice.link_rates(tmp_path / "nothing")
