"""Tiles that the device updates: the bits of the CPU's, and no use is unordered."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import engine_on_device, on_device, races_without
from engine_support import engine_of, group_at, oracle_of, placements
from fake_card import FakeCard
from families import write
from memory_tiles import MemoryTiles
from test_engine import train

from offload.errors import DeviceError
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.runtime.sim_device import SimDevice
from offload.train.device_updates import HostSite
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.opening import Placement
from offload.train.update_place import place_updates
from offload.train.updates import Updater, update_workers

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "m"
    write("qwen3", directory, torch.bfloat16)
    return directory


def away(engine: Engine) -> Any:
    found = engine.updater.away
    assert found is not None
    return found


def run(engine: Engine, clip: float, steps: int = STEPS) -> None:
    """Steps of the engine alone."""
    for step in range(steps):
        ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(step))
        engine.begin_forward()
        if not clip:
            engine.in_backward = group_at(step)
        engine.model(input_ids=ids, labels=ids).loss.backward()
        engine.end_backward()
        engine.step(group_at(step), clip)
    engine.drain()


def parts_of(tiles: MemoryTiles) -> dict[tuple[int, int], bytes]:
    """By tile and part; between parts is whatever was there."""
    return {
        (tile, i): data[at : at + size]
        for tile, (data, _) in tiles.slots.items()
        for i, (at, size) in enumerate(
            zip(tiles._offsets(tile), tiles.parts[tile], strict=False)
        )
    }  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(("place", "clip"), [("disk", 0.5), ("half", 0.0), ("ram", 0.5)])
def test_a_step_is_the_oracles(model: Path, place: str, clip: float, every: int) -> None:
    with engine_on_device(model, place, "least", every=every) as (engine, _):
        train(engine, oracle_of(model, engine.layout), 2, clip, steps=STEPS)
        engine.drain()
        sent = sum(len(away(engine).place.sent(len(b.tiles))) for b in engine.layout.trained)
        assert away(engine).tiles == (STEPS - 1) * sent > 0


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_rounded_states_are_those_of_a_run_without(model: Path, states: str) -> None:
    with engine_of(model, "disk", states=states) as (engine, tiles):
        run(engine, 0.5)
        wanted = parts_of(tiles)
    with engine_on_device(model, "disk", "least", every=2, states=states) as (engine, _):
        run(engine, 0.5)
        assert away(engine).tiles
        found: Any = engine.updater._tiles
        assert parts_of(found) == wanted


@pytest.mark.parametrize("refuse", [None, "not permitted"])
def test_a_card_of_paper(model: Path, refuse: str | None) -> None:
    """With threads of the updater's own, as a card leaves cores for them."""
    card = FakeCard(seed=1, refuse=refuse)

    def make(nbytes: int) -> Device:
        return CudaDevice(nbytes, api=card, watchdog_s=30)

    how: dict[str, Any] = {"make": make, "every": 2, "update_workers": 2}
    with engine_on_device(model, "half", "least", **how) as (engine, _):
        train(engine, oracle_of(model, engine.layout), 1, 0.5, steps=STEPS)
        assert away(engine).tiles
    card.end()


def test_how_many_threads_update() -> None:
    assert update_workers(card=False) == update_workers(card=False, cores=16) == 1
    assert [update_workers(card=True, cores=n) for n in (1, 2, 4, 16)] == [1, 1, 2, 14]


@pytest.mark.parametrize(
    ("who", "caller"), [("h2d", "send"), ("update", "_begin"), ("d2h", "_begin")]
)
def test_each_wait_is_missed(
    model: Path, monkeypatch: pytest.MonkeyPatch, who: str, caller: str
) -> None:
    def go(device: Device) -> None:
        with engine_on_device(model, "disk", "least", make=lambda _: device, every=2) as (e, _):
            run(e, 0.5)

    assert races_without(who, caller, monkeypatch, go)


def test_what_comes_back_is_acquired(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimDevice(1 << 30, watchdog_s=20.0)
    acquire = device.acquire
    monkeypatch.setattr(
        device, "acquire",
        lambda actor, event: None if event in ends else acquire(actor, event),
    )  # fmt: skip
    ends: list[Any] = []
    copy = device.copy

    def noted(dst: Any, src: Any, stream: Any) -> Any:
        end = copy(dst, src, stream)
        if src.memory.name == "tiles to update":
            ends.append(end)
        return end

    monkeypatch.setattr(device, "copy", noted)
    with (
        pytest.raises(Exception, match="race"),
        engine_on_device(model, "disk", "least", make=lambda _: device, every=2) as (engine, _),
    ):
        run(engine, 0.5)
    assert ends


@pytest.mark.parametrize("where", ["site", "copy"])
def test_a_fault_on_the_device_ends_the_run_and_nothing_hangs(
    model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What failed is raised where the next step waits; the engine closes with tiles on their
    way."""
    tried = []

    def fails(*_: Any) -> None:
        tried.append(where)
        if len(tried) == 5:
            raise DeviceError("the card has fallen off the bus")

    device = SimDevice(1 << 30, watchdog_s=20.0)
    if where == "site":
        monkeypatch.setattr(HostSite, "update", fails)
    else:
        copy = device.copy

        def copied(dst: Any, src: Any, stream: Any) -> Any:
            if src.memory.name == "tiles to update":
                fails()
            return copy(dst, src, stream)

        monkeypatch.setattr(device, "copy", copied)
    with contextlib.closing(device):
        with (
            pytest.raises(DeviceError, match="off the bus"),
            engine_of(model, placed, device=device) as (engine, _),
        ):
            run(engine, 0.5)
        assert len(tried) == 5


def placed(layout: TrainLayout) -> Placement:
    updates = place_updates(layout, Updater.kinds(layout, "fp32"), None, 2)
    place = replace(on_device(layout, "least"), updates=updates)
    return replace(placements(layout)["disk"], device=place)
