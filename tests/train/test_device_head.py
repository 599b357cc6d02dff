"""The LM head and the loss on a device: bits of the run without one, copies as they were planned,
and a place that the plan gives reasons for."""

from __future__ import annotations

import contextlib
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from device_support import races_without
from fake_card import FakeCard
from run_support import (
    everything_else_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)
from test_link import machine, made_up

from offload.cli.machines import load
from offload.errors import OffloadError, PlanError
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.train import choosing, head_weights, preparing
from offload.train import run as running
from offload.train.device_head import DeviceHead, _There
from offload.train.outlook import outlook
from offload.train.preparing import prepare
from offload.train.weights import Weights

ROWS = 64
"""Of a slice: tiny heads have nine."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {"eval_every": 2, "eval_share": 0.2}),
    "inside backward": ("llama", {"max_grad_norm": 0.0}),
    "one micro-batch after the other": ("llama", {"grad_accum": 2, "order": "usual"}),
    "layer by layer": ("llama", {"grad_accum": 3}),
    "tied, capped logits": ("gemma2", {}),
    "tied, accumulated": ("gpt2", {"grad_accum": 2}),
    "a bias": ("phi", {}),
    "LoRA": ("llama", {"method": "lora", "eval_every": 2, "eval_share": 0.2}),
    "LoRA, a bias": ("phi", {"method": "lora", "grad_accum": 2}),
    "QLoRA, q8": ("llama", {"method": "lora", "quant": "q8"}),
    "QLoRA, q4, tied": ("gemma2", {"method": "lora", "quant": "q4", "grad_accum": 2}),
    "experts": ("qwen3_moe", {"grad_accum": 2}),
}
"""By name: family and options."""

ALIKE = ("inside backward", "tied, accumulated", "LoRA, a bias", "QLoRA, q8")
"""Of these, those that others are nearly like: before a release."""


@pytest.fixture(autouse=True)
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch)
    monkeypatch.setattr(head_weights, "HEAD_ROWS", ROWS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def least_room(options: Any) -> int:
    """The smallest budget of a device that the head fits into, too."""
    run = prepare(replace(options, gpu=1 << 30))
    run.close()
    place = run.plan.placement.device
    assert place.head is not None
    head = replace(place.head, slots=place.head.least_slots)
    return replace(
        place, slots=1, expert_slots=min(1, place.expert_slots), gradients=1, head=head,
        same_bytes=0, turn_bytes=0,
    ).nbytes  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.sweep] * (c in ALIKE)) for c in CASES]
)
def test_a_run_is_the_run_without(tmp_path: Path, case: str) -> None:
    """With two slots for nine slices, and with one for each."""
    family, more = CASES[case]
    model = write_model(tmp_path / "model", family, vocab_size=520)
    data = write_data(tmp_path / "data.jsonl")
    slots = []

    def run(name: str, **where: Any) -> Any:
        options = options_for(model, data, tmp_path / name, **more, **where)

        def change(run: Any) -> None:
            slots.append(run.plan.placement.device.head.slots)
            everything_else_on_disk(run)

        log = train(options, change=change if where else lambda _: None)
        return log.losses, log.norms, log.evals, weights_of(tmp_path / name / "out")

    there = {"device": "sim", "head": "gpu"}
    least = least_room(options_for(model, data, tmp_path, **more, **there))
    wanted = run("cpu")
    assert run("least", gpu=least, **there) == wanted
    assert run("all", gpu=1 << 30, **there) == wanted
    assert slots == [2, 9]


@pytest.mark.parametrize(
    ("who", "caller"),
    [
        ("h2d", "_lift"),  # weights in RAM are read from the disk, or updated
        ("h2d", "_order_slice"),  # the loss has used what was in the slot
        ("compute", "weight"),  # a slice has come
        ("guards", ""),  # a slot's last use counts, not only its copy
        ("copied", "_lift"),  # an update waits for the copy from the memory that it writes
    ],
)
def test_every_wait_is_needed(
    tmp_path: Path, who: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the detector finds a use that nothing orders. (``test_device`` has what the head
    shares with layers.)"""
    model = write_model(tmp_path / "model", vocab_size=520)
    options = options_for(
        model, write_data(tmp_path / "data.jsonl"), tmp_path, device="sim", head="gpu",
    )  # fmt: skip
    options = replace(options, gpu=least_room(options))

    def run(device: Device) -> None:
        monkeypatch.setattr(running, "make_device", lambda *_: device)
        train(options, change=everything_else_on_disk)

    if who == "guards":
        monkeypatch.setattr(_There, "guards", property(lambda there: (there.ready,)))
    assert races_without(who, caller, monkeypatch, run)


@pytest.mark.parametrize("refuse", [None, "not permitted"])
def test_what_drives_cards_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: str | None
) -> None:
    """The device of a card, on a card of paper whose streams lag."""
    model = write_model(tmp_path / "model", vocab_size=520)
    data = write_data(tmp_path / "data.jsonl")

    def run(name: str, **where: Any) -> Any:
        options = options_for(model, data, tmp_path / name, **where)
        if where:
            options = replace(options, gpu=least_room(options))
        log = train(options, change=everything_else_on_disk if where else lambda _: None)
        return log.losses, log.norms, weights_of(tmp_path / name / "out")

    wanted = run("cpu")
    card = FakeCard(seed=0, refuse=refuse)
    monkeypatch.setattr(
        running, "make_device", lambda *_: CudaDevice(1 << 30, api=card, watchdog_s=30)
    )
    assert run("card", device="sim", head="gpu") == wanted
    card.end()


def test_ram_is_held_until_copies_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the loss fails in the middle, too: the next slice is on its way then."""
    model = write_model(tmp_path / "model", vocab_size=520)
    data = write_data(tmp_path / "data.jsonl")
    options = options_for(
        model, data, tmp_path, device=f"sim:{machine(tmp_path, 1e6, 1e9)}", gpu=1 << 30, head="gpu"
    )
    ends, weight = [], DeviceHead.weight

    @contextlib.contextmanager
    def fails(head: DeviceHead, i: int) -> Any:
        release = head._weights.release

        def released(block: int) -> None:
            if block in head.place.blocks:
                ends.append(head._copied is not None and head._copied.done())
            release(block)

        with weight(head, i):
            monkeypatch.setattr(head._weights, "release", released)
            raise OSError("in the middle")
        yield

    monkeypatch.setattr(DeviceHead, "weight", fails)
    with pytest.raises(OSError, match="in the middle"):
        train(options)
    assert ends
    assert all(ends)


def test_a_frozen_head_that_stays_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", vocab_size=520)
    data = write_data(tmp_path / "data.jsonl")
    loads, load = [], Weights._load
    monkeypatch.setattr(
        Weights,
        "_load",
        lambda w, block, *a, **k: (loads.append(block), load(w, block, *a, **k))[1],
    )
    counts = []
    for head in ("gpu", "cpu"):
        loads.clear()
        options = options_for(
            model, data, tmp_path / head, method="lora", device="sim", gpu=1 << 30, head=head
        )
        found = []

        def change(run: Any, found: list[int] = found) -> None:
            everything_else_on_disk(run)
            found += [b.index for b in run.layout.blocks if "lm_head" in b.id]

        train(options, change=change)
        counts.append(loads.count(found[0]))
    assert counts[0] == 1 < counts[1]


def planned_run(options: Any) -> Any:
    run = prepare(options)
    run.close()
    return run


def test_the_plan_has_the_heads_place_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", vocab_size=520)
    data = write_data(tmp_path / "data.jsonl")
    options = options_for(model, data, tmp_path, device="sim", gpu=1 << 30)

    def place_of(**more: Any) -> tuple[Any, str]:
        run = planned_run(replace(options, **more))
        text = next(line for line in run.describe() if line.startswith("device"))
        return run.plan, text

    plan, text = place_of()
    assert "head and loss there (it fits), all of 9 slices at a time; embeddings and" in text
    assert plan.placement.device.nbytes <= 1 << 30
    with pytest.raises(FrozenInstanceError):
        plan.placement.device.head = None
    least = least_room(options)
    tight, text = place_of(gpu=least)
    assert tight.placement.device.nbytes == least
    assert "(it fits), 2 of 9 slices" in text
    small, text = place_of(gpu=least - 1)
    assert small.placement.device.head is None
    assert "head, loss and updates in RAM (--gpu" in text
    assert "is too small by 1 B for them there)" in text
    assert small.ram["loss"] > tight.ram["loss"]
    with pytest.raises(PlanError, match=r"too small by 1 B: .* head.*drop --head gpu"):
        place_of(gpu=least - 1, head="gpu")
    here, text = place_of(head="cpu")
    assert here.placement.device.head is None
    assert "in RAM (--head cpu)" in text
    assert place_of(head="gpu")[0].placement.device.head is not None

    def rates(away: float) -> Any:
        return lambda *given: replace(made_up(*given), head=1.0, head_away=away)

    for away, said in ((0.5, "them in RAM"), (1.5, "them there")):
        monkeypatch.setattr(preparing, "step_rates", rates(away))
        plan, text = place_of()
        assert (plan.placement.device.head is not None) is (away < 1)
        assert f"with {said})" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"head": "gpu"}, r"--head gpu cannot take effect: .* --device sim"),
        ({"head": "ram", "device": "sim"}, "--head ram is none of auto, gpu, cpu"),
    ],
)
def test_a_place_that_cannot_be(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    model = write_model(tmp_path / "model", vocab_size=520)
    with pytest.raises(OffloadError, match=said):
        prepare(options_for(model, write_data(tmp_path / "data.jsonl"), tmp_path, **more))


def test_a_loss_of_the_models_own_stays_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "find_head", lambda _: (None, "made up"))
    model = write_model(tmp_path / "model", vocab_size=520)
    data = write_data(tmp_path / "data.jsonl")
    options = options_for(model, data, tmp_path, device="sim", gpu=1 << 30)
    run = planned_run(options)
    assert run.plan.placement.device.head is None
    assert "in RAM (the model's own loss is used" in "\n".join(run.describe())
    with pytest.raises(OffloadError, match="--head gpu: the head cannot be on the device"):
        prepare(replace(options, head="gpu"))


def test_a_card_that_is_not_here_takes_the_head(tmp_path: Path) -> None:
    """From the rates of a file: its products are faster by more than the copies take."""
    model = write_model(tmp_path / "model", vocab_size=520)
    hardware = load(str(machine(tmp_path, 25e9, 25e9)))
    options = options_for(model, tmp_path / "data", tmp_path, gpu=1 << 30, batch_size=64)
    found = outlook(options, hardware, 1 << 30)
    assert found.to_json()["device"]["head"] is True
    assert any("head and loss there (a step takes" in line for line in found.lines())
    slow = load(str(machine(tmp_path, 1e6, 1e6)))
    device = outlook(options, slow, 1 << 30).to_json()["device"]
    assert device["head"] is False
    assert "with them there" in device["head_why"]
