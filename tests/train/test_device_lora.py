"""Adapters of layers that run on a device: every bit is that of the CPU's run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import ROOMS, adapters_on_device, races_without
from engine_support import batch, group_at
from fake_card import FakeCard
from lora_support import EXPERTS, Made, adapted_oracle
from run_support import (
    everything_else_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)
from test_lora import seed_units
from test_lora import train as train_both

from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.train.preparing import prepare


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("place", "clip"), [("disk", 0.05), ("half", 0.0), ("ram", 0.05)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_linear_layers(tiny: Made, family: str, place: str, room: str, clip: float) -> None:
    directory = tiny(family)
    with adapters_on_device(directory, place, room, dropout=0.1) as (engine, adapters):
        before = adapters.values(engine)
        train_both(engine, adapted_oracle(directory, engine.layout, dropout=0.1), 1, clip)
        for name, value in adapters.values(engine).items():
            assert not torch.equal(value, before[name]), name
        tier = engine.homes.tier
        assert tier is not None
        assert tier.weights.up_bytes
        assert tier.gradients.down_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("clip", [0.05, 0.0])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_single_experts(tiny: Made, family: str, room: str, clip: float) -> None:
    directory = tiny(family)
    with adapters_on_device(directory, "disk", room, targets=EXPERTS) as (engine, adapters):
        assert any(t.experts for t in adapters.targets)
        train_both(engine, adapted_oracle(directory, engine.layout, targets=EXPERTS), 2, clip)
        assert adapters.unused() == []


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    ("family", "targets"), [("gpt_oss", EXPERTS), ("gpt2", r"transformer\.h\.[23]\..*c_attn")]
)
def test_dropout_and_layers_below_the_first_adapter(
    tiny: Made, family: str, targets: Any, room: str
) -> None:
    directory = tiny(family)
    how = {"dropout": 0.3, "targets": targets}
    with adapters_on_device(directory, "half", room, **how) as (engine, _):
        oracle = adapted_oracle(directory, engine.layout, **how)
        seed_units(engine, oracle)
        train_both(engine, oracle, 2, 0.05, seeded=True)


@pytest.mark.parametrize("room", ROOMS)
def test_evaluation_between_steps(tiny: Made, room: str) -> None:
    directory = tiny("qwen3_moe")
    with adapters_on_device(directory, "disk", room, targets=EXPERTS) as (engine, _):
        oracle = adapted_oracle(directory, engine.layout, targets=EXPERTS)
        for step in range(2):
            train_both(engine, oracle, 1, 0.05, steps=step + 1)
            engine.begin_forward()
            with torch.no_grad():
                ids = batch(99, step)
                wanted = oracle.model(input_ids=ids).logits
                assert torch.equal(engine.model(input_ids=ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_of_the_base(tiny: Made, dtype: torch.dtype) -> None:
    directory = tiny("llama", dtype)
    with adapters_on_device(directory, "disk", "some") as (engine, _):
        train_both(engine, adapted_oracle(directory, engine.layout, dtype), 1, 0.05)


@pytest.mark.parametrize("room", ["all", "least"])
@pytest.mark.parametrize("refuse", [None, "not permitted"])
def test_what_drives_cards_gives_the_same_bits(tiny: Made, room: str, refuse: str | None) -> None:
    """The device of a card, on a card of paper whose streams lag."""
    directory = tiny("qwen3_moe")
    card = FakeCard(seed=1, refuse=refuse)

    def make(nbytes: int) -> Device:
        return CudaDevice(nbytes, api=card, watchdog_s=30)

    with adapters_on_device(directory, "disk", room, make=make, targets=EXPERTS) as (engine, _):
        train_both(engine, adapted_oracle(directory, engine.layout, targets=EXPERTS), 1, 0.05)
    card.end()


@pytest.mark.parametrize(("family", "targets"), [("llama", None), ("qwen3_moe", EXPERTS)])
@pytest.mark.parametrize("more", [{"grad_accum": 3}, {"max_grad_norm": 0.0}])
def test_a_run_on_a_device_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, targets: Any,
    more: dict[str, Any],
) -> None:  # fmt: skip
    """Losses, norms and the bytes of the adapters."""
    planned_once(monkeypatch)
    data = write_data(tmp_path / "data.jsonl")
    model = write_model(tmp_path / "model", family)
    found = []
    for where in ({}, {"gpu": 1 << 30, "device": "sim"}):
        how = {"method": "lora", "lora_r": 4, "lora_dropout": 0.1, "lora_targets": targets}
        place = tmp_path / str(len(found))
        options = options_for(model, data, place, **how, **more, **where)
        log = train(options, change=everything_else_on_disk)
        found.append((log.losses, log.norms, weights_of(place / "out")))
    assert found[0] == found[1]
    assert set(found[0][2]) == {"adapter_model.safetensors"}


@pytest.mark.parametrize("clip", [0.05, 0.0])
@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ("q_proj", "v_proj")), ("qwen3_moe", ("q_proj", "down_proj"))]
)
def test_the_base_stays_where_there_is_room(
    tiny: Made, family: str, targets: Any, clip: float
) -> None:
    """It goes up once, is not read from the disk again, and what a step copies are adapters."""
    directory = tiny(family)
    with adapters_on_device(directory, "disk", "all", targets=targets) as (engine, adapters):
        oracle = adapted_oracle(directory, engine.layout, targets=targets)
        tier, layout = engine.homes.tier, engine.layout
        assert tier is not None
        train_both(engine, oracle, 1, clip, steps=3)

        def size(blocks: Iterable[int]) -> int:
            return sum(layout.blocks[b].value_bytes for b in blocks)

        mine, fused = size(adapters.blocks(layout)), size(layout.expert_blocks())
        base = size(tier.blocks) - mine - fused
        assert mine < 2 * base
        # Adapters once more if those of a step that is not taken any more are copied ahead.
        assert base + 3 * mine <= tier.weights.up_bytes <= base + fused + 4 * mine
        if fused:
            return
        read, ids = engine.checkpoint_bytes(), batch(3, 0)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        engine.end_backward()
        engine.step(group_at(3), clip)
        engine.drain()
        at_home = sum(b.nbytes for b in layout.blocks if b.index not in tier.blocks)
        assert engine.checkpoint_bytes() - read <= 2 * at_home


@pytest.mark.parametrize(
    ("who", "caller"),
    [
        ("h2d", "_copy"),  # adapters in RAM are updated
        ("h2d", "_order_slot"),  # compute has used the adapters of the step before
        ("compute", "_acquire"),  # the new ones have come
        ("guards", ""),  # ... and their use counts
        ("copied", ""),  # an update waits for the copy of the adapters that it changes
        ("d2h", "add"),  # their gradients are computed
        ("host", "_land_first"),  # and have come
    ],
)
def test_every_wait_is_needed(
    tiny: Made, who: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is evicted: a copy into a slot is one of adapters whose base stays there."""
    directory = tiny("llama")

    def run(device: Device) -> None:
        with adapters_on_device(directory, "ram", "all", make=lambda _: device) as (engine, _):
            train_both(engine, adapted_oracle(directory, engine.layout), 1, 0.05, steps=2)

    assert races_without(who, caller, monkeypatch, run)


def test_the_plan_says_what_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch)
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data.jsonl")
    how = {"method": "lora", "lora_r": 4, "device": "sim", "gpu": 1 << 30}
    run = prepare(options_for(model, data, tmp_path, **how))
    run.close()
    place = run.plan.placement.device
    assert place is not None
    assert 0 < place.adapter_bytes < place.slot_bytes
    assert "of a layer are adapters, which alone are copied again" in "\n".join(run.describe())
    full = prepare(options_for(model, data, tmp_path, device="sim", gpu=1 << 30))
    full.close()
    assert full.plan.placement.device.adapter_bytes == 0
