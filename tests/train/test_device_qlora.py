"""Adapters on a packed base whose layers run on a device: every bit is that of the CPU's run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import ROOMS, races_without, simulated
from engine_support import batch, group_at
from fake_card import FakeCard
from lora_support import EXPERTS, adapted_oracle
from qlora_support import Packs, packed_engine
from run_support import (
    everything_else_on_disk,
    not_warmed,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)
from test_lora import train as train_both
from test_qlora import command

from offload.errors import OffloadError, PlanError
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.runtime.sim_device import SimDevice
from offload.train.device_values import DeviceValues
from offload.train.preparing import prepare


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return Packs(tmp_path_factory)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    ("family", "quant", "place", "clip"),
    [
        ("qwen3", "q4", "disk", 0.05),
        ("llama", "q8", "ram", 0.0),
        ("qwen3_moe", "q4", "disk", 0.0),
        ("gpt_oss", "q4", "half", 0.05),
    ],
)
def test_equals_resident_lora_on_the_unpacked_values(
    packs: Packs, family: str, quant: str, place: str, clip: float, room: str
) -> None:
    """gpt-oss has its experts transposed and interleaved: they are unpacked through scratch."""
    _, packed, values = packs(family, quant)
    how: dict[str, Any] = {"targets": EXPERTS} if "moe" in family or "oss" in family else {}
    with (
        simulated() as device,
        packed_engine(packed, None, place, device=device, room=room, dropout=0.1, **how) as (
            engine, adapters, base, _,
        ),
    ):  # fmt: skip
        tier = engine.homes.tier
        assert tier is not None
        assert tier.blocks & set(base.recipes)
        oracle = adapted_oracle(values, engine.layout, dropout=0.1, **how)
        train_both(engine, oracle, 1 if clip == 0.0 else 2, clip)
        assert adapters.unused() == []


def test_what_drives_cards_gives_the_same_bits(packs: Packs) -> None:
    """The device of a card, on a card of paper whose streams lag."""
    _, packed, values = packs("qwen3_moe", "q4")
    card = FakeCard(seed=1)

    def make(nbytes: int) -> Device:
        return CudaDevice(nbytes, api=card, watchdog_s=30)

    with (
        simulated(make) as device,
        packed_engine(packed, None, "disk", device=device, room="least", targets=EXPERTS) as (
            engine, *_,
        ),
    ):  # fmt: skip
        oracle = adapted_oracle(values, engine.layout, targets=EXPERTS)
        train_both(engine, oracle, 1, 0.05)
    card.end()


@pytest.mark.parametrize("clip", [0.05, 0.0])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_packed_bytes_cross_the_link_once(packs: Packs, family: str, clip: float) -> None:
    """Where there is room for the base it goes up once, as the pack has it, and is not read from
    the disk again; a step copies adapters."""
    _, packed, values = packs(family, "q8" if family == "llama" else "q4")
    with (
        simulated() as device,
        packed_engine(packed, None, "disk", device=device, targets=("q_proj", "v_proj")) as (
            engine, adapters, *_,
        ),
    ):  # fmt: skip
        tier, layout = engine.homes.tier, engine.layout
        assert tier is not None
        oracle = adapted_oracle(values, layout, targets=("q_proj", "v_proj"))
        train_both(engine, oracle, 1, clip)

        def size(blocks: Iterable[int]) -> int:
            return sum(layout.blocks[b].nbytes for b in blocks)

        mine, fused = size(adapters.blocks(layout)), size(layout.expert_blocks())
        frozen = size(tier.blocks) - mine - fused
        whole = sum(layout.blocks[b].value_bytes for b in tier.blocks) - mine
        assert frozen + fused < 0.7 * whole  # pages, too, of tiny layers
        # Adapters once more if those of a step that is not taken any more are copied ahead.
        assert frozen + 3 * mine <= tier.weights.up_bytes <= frozen + fused + 4 * mine
        before, read, ids = tier.weights.up_bytes, engine.checkpoint_bytes(), batch(3, 0)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        engine.end_backward()
        engine.step(group_at(3), clip)
        engine.drain()
        if not fused:  # experts that no token was routed to before come now
            assert tier.weights.up_bytes - before <= 2 * mine
            at_home = sum(b.nbytes for b in layout.blocks if b.index not in tier.blocks)
            assert engine.checkpoint_bytes() - read <= 2 * at_home


@pytest.mark.parametrize(
    ("who", "caller"),
    [
        ("h2d", "_copy"),  # packed bytes have come from the disk, adapters are updated
        ("h2d", "_order_slot"),  # compute has unpacked, and used, what was in the slot
        ("compute", "_acquire"),  # packed bytes have come
        ("guards", ""),  # a slot's last use counts, not only its copy
        ("copied", ""),  # reads and updates wait for the copy from the memory that they write
        ("d2h", "add"),  # a gradient is computed
        ("host", "_land_first"),  # and has come
    ],
)
def test_every_wait_is_needed(
    packs: Packs, who: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, packed, values = packs("qwen3", "q4")

    def run(device: Device) -> None:
        with packed_engine(packed, None, "disk", device=device, room="least") as (engine, *_):
            train_both(engine, adapted_oracle(values, engine.layout), 1, 0.05, steps=2)

    assert races_without(who, caller, monkeypatch, run)


@pytest.mark.parametrize(
    ("family", "targets", "more"),
    [
        ("llama", None, {"grad_accum": 3}),
        ("qwen3_moe", ("q_proj", "down_proj"), {"max_grad_norm": 0.0}),
        ("qwen3_moe", EXPERTS, {"grad_accum": 2, "order": "vertical"}),
    ],
)
def test_a_run_on_a_device_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, targets: Any,
    more: dict[str, Any],
) -> None:  # fmt: skip
    """Losses, norms and the bytes of the adapters; and the plan says what is packed where."""
    planned_once(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_data(tmp_path / "data.jsonl")
    model = write_model(tmp_path / "model", family, vocab_size=520)
    found, said = [], ""
    for where in ({}, {"gpu": 1 << 30, "device": "sim"}):
        how = {"method": "lora", "lora_r": 4, "lora_dropout": 0.1, "lora_targets": targets}
        place = tmp_path / str(len(found))
        options = options_for(model, data, place, quant="q4", **how, **more, **where)

        def change(run: Any) -> None:
            nonlocal said
            said = "\n".join(run.describe())
            everything_else_on_disk(run)

        log = train(options, change=change)
        found.append((log.losses, log.norms, weights_of(place / "out")))
    assert found[0] == found[1]
    assert set(found[0][2]) == {"adapter_model.safetensors"}
    assert "packed and unpacked there as it runs" in said
    assert "unpacked weights" in said


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the repository, packed as q4: the same adapters with a device and without."""
    monkeypatch.setattr("offload.train.preparing.warm_training", not_warmed)
    monkeypatch.setattr("offload.train.preparing.step_rates", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_data(tmp_path / "train.jsonl")
    targets = ("--lora-targets", "q_proj,gate_up_proj,down_proj")
    assert command(tmp_path / "one", data, *targets) == 0
    capsys.readouterr()
    where = ("--gpu", "64MiB", "--device", "sim")
    assert command(tmp_path / "two", data, *targets, *where) == 0
    assert "packed and unpacked there as it runs" in capsys.readouterr().err
    one, two = (
        hashlib.sha256((tmp_path / n / "out" / "adapter_model.safetensors").read_bytes())
        for n in ("one", "two")
    )
    assert one.hexdigest() == two.hexdigest()


def test_the_plan_has_room_for_what_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_once(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_data(tmp_path / "data.jsonl")
    model = write_model(tmp_path / "model", "qwen3_moe", vocab_size=520)
    options = options_for(
        model, data, tmp_path, method="lora", quant="q4", device="sim", gpu=1 << 30, head="cpu"
    )
    run = prepare(options)
    place, layout, base = run.plan.placement.device, run.layout, run.base
    in_ram = run.plan.ram["unpacked weights"]
    run.close()
    assert place is not None
    assert base is not None
    units = [layout.units[u] for u in place.units]
    sizes = [layout.blocks[b].value_bytes for u in units for b in u.blocks if b in base.recipes]
    assert place.unpacked_bytes >= max(sizes)
    assert place.unpacked_expert_bytes >= max(
        layout.blocks[b].value_bytes for b in layout.expert_blocks()
    )
    assert place.parts["unpacked weights"] == place.unpacked_bytes + place.unpacked_expert_bytes
    assert place.expert_bytes < place.unpacked_expert_bytes  # slots hold packed bytes
    assert in_ram == base.scratch_bytes  # no layer is unpacked in RAM
    least = replace(place, slots=1, expert_slots=1, gradients=1, same_bytes=0).nbytes
    prepare(replace(options, gpu=least)).close()
    with pytest.raises(PlanError, match=r"--gpu .* too small by .*unpacked weights"):
        prepare(replace(options, gpu=least - 1))


def test_values_are_poison_once_their_unit_is_through(packs: Packs) -> None:
    _, packed, _ = packs("qwen3", "q4")
    with (
        simulated() as device,
        packed_engine(packed, None, "ram", device=device) as (engine, _, base, _),
    ):
        tier = engine.homes.tier
        assert tier is not None
        unit = min(tier.placement.units)
        copies = tier.weights.acquire(unit)
        copy = next(c for c in copies if c.block.index in base.recipes)
        piece = copy.block.pieces[0]
        values = copy.tensor[piece.offset : piece.offset + piece.count]
        assert values.isfinite().all()
        tier.weights.release(unit)
        assert not values.isfinite().any()


def test_without_cupy_a_card_unpacks_nothing_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    class Elsewhere(SimDevice):
        def __init__(self) -> None:
            super().__init__(1 << 20)
            self.torch_device = torch.device("cuda")

    with (
        Elsewhere() as device,
        pytest.raises(OffloadError, match=r"CuPy is missing.*offload\[cuda.*drop --gpu"),
    ):
        DeviceValues(device, 4096, "unpacked weights", {})
