"""Training with layers on a device: every bit is that of the CPU's run, and no use is unordered."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import device_support
import pytest
import torch
from device_support import ROOMS, engine_on_device, races_without
from engine_support import batch, every_pair, oracle_of
from fake_card import FakeCard
from families import write
from run_support import (
    options_for,
    planned_once,
    write_data,
    write_model,
)
from test_engine import train

from offload.errors import OffloadError, PlanError
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.runtime.sim_device import SimDevice
from offload.train.checks import check_device
from offload.train.device_plan import DevicePlacement
from offload.train.device_weights import DeviceWeights
from offload.train.preparing import prepare
from offload.train.visits import Visits


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Path] = {}

    def make(family: str, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
        key = (family, dtype, *sorted(how.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / family
            write(family, made[key], dtype, **how)
        return made[key]

    return make


@pytest.mark.sampled(2)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("place", "clip"), [("disk", 0.5), ("half", 0.0), ("ram", 0.5)])
def test_a_dense_model(tiny: Any, place: str, room: str, clip: float) -> None:
    directory = tiny("qwen3")
    with engine_on_device(directory, place, room) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 1, clip)
        tier = engine.homes.tier
        assert tier is not None
        assert tier.weights.up_bytes
        assert tier.gradients.down_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(tiny: Any, family: str, room: str) -> None:
    directory = tiny(family)
    with engine_on_device(directory, "disk", room) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 2, 0.5, steps=3)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_accumulation_and_tied_embeddings(tiny: Any, family: str, room: str) -> None:
    directory = tiny(family, tie_word_embeddings=True)
    with engine_on_device(directory, "disk", room, grad_dtype="float32") as (engine, _):
        oracle = oracle_of(directory, engine.layout, grad_dtype="float32")
        train(engine, oracle, 3, 0.5, steps=3)


@pytest.mark.parametrize("room", ROOMS)
def test_frozen_parameters_in_float32(tiny: Any, room: str) -> None:
    def freeze(name: str) -> bool:
        return "embed" in name or "layers.0" in name or name.endswith("k_proj.weight")

    directory = tiny("llama", torch.float32)
    with engine_on_device(directory, "least", room, freeze=freeze) as (engine, _):
        oracle = oracle_of(directory, engine.layout, freeze=freeze, dtype=torch.float32)
        train(engine, oracle, 1, 0.0)


@pytest.mark.parametrize("room", ROOMS)
def test_evaluation_between_steps(tiny: Any, room: str) -> None:
    directory = tiny("qwen3_moe")
    with engine_on_device(directory, "disk", room) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        for step in range(3):
            train(engine, oracle, 1, 0.5, steps=step + 1)
            engine.begin_forward()
            with torch.no_grad():
                ids = batch(99, 0)
                wanted = oracle.model(input_ids=ids).logits
                assert torch.equal(engine.model(input_ids=ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize(
    ("room", "seed", "refuse"), every_pair(["some", "least"], range(2), [None, "not permitted"])
)
def test_what_drives_cards_gives_the_same_bits(
    tiny: Any, room: str, seed: int, refuse: str | None
) -> None:
    """The device of a card, on a card of paper whose streams lag."""
    directory = tiny("qwen3_moe")
    card = FakeCard(seed=seed, refuse=refuse)

    def make(nbytes: int) -> Device:
        return CudaDevice(nbytes, api=card, watchdog_s=30)

    with engine_on_device(directory, "disk", room, make=make) as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 1, 0.5, steps=3)
    card.end()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("more", [{"grad_accum": 3, "gpu_updates": "1"}, {"max_grad_norm": 0.0}])
def test_a_run_on_a_device_is_the_run_without(
    tmp_path: Path, run_of: Any, family: str, more: dict[str, Any]
) -> None:
    """From batches of packed rows to the written model, the head's loss by slices among it."""
    model = write_model(tmp_path / "model", family)
    wanted = run_of(model, "cpu", **{k: v for k, v in more.items() if k != "gpu_updates"})
    assert run_of(model, "device", gpu=1 << 30, device="sim", **more) == wanted


def test_the_plan_has_both_tiers_and_a_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_once(monkeypatch)
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data.jsonl")
    options = options_for(model, data, tmp_path, device="sim", gpu=1 << 30, head="cpu")
    run = prepare(options)
    place = run.plan.placement.device
    text = "\n".join(run.describe())
    run.close()
    assert place is not None
    assert place.slots == len(place.units)
    for said in ("device  simulated", "RAM  ", "of 1.0 GiB"):
        assert said in text
    assert run.plan.ram["copies to and from the device"] == place.host_bytes
    assert not run.plan.placement.kept
    least = replace(place, slots=1, gradients=1, same_bytes=0).nbytes
    tight = prepare(replace(options, gpu=least))
    tight.close()
    assert tight.plan.placement.device.slots == 1
    with pytest.raises(PlanError, match=r"--gpu .* too small by 1\.?0? B.* needs .*raise it to"):
        prepare(replace(options, gpu=least - 1))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gpu": 0}, "is no budget"),
        ({"device": "cpu"}, "contradict"),
        ({"device": "tpu"}, "not one of"),
    ],
)
def test_what_is_not_done_on_a_device(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    given = {"gpu": 1 << 30, "device": "sim", **more}
    with pytest.raises(OffloadError, match=said):
        check_device(options_for(tmp_path, tmp_path / "data.jsonl", tmp_path, **given))


@pytest.mark.parametrize(
    ("who", "caller"),
    [
        ("h2d", "_copy"),  # weights in RAM are read from the disk, or updated
        ("h2d", "_order_slot"),  # compute has used what was in the slot
        ("compute", "_acquire"),  # weights have come
        ("h2d", "_send"),  # arguments are where copies read them
        ("compute", "_send"),  # arguments have come
        ("compute", "_give_way"),  # results have come down before others take their place
        ("d2h", "_after_the_host"),  # it has read what copies down overwrite
        ("host", "_land_until"),  # results have come
        ("d2h", "add"),  # a gradient is computed
        ("host", "_land_first"),  # a gradient has come
        ("guards", ""),  # a slot's last use counts, not only its copy
        ("copied", ""),  # an update waits for the copy from the memory that it writes
    ],
)
def test_every_wait_is_needed(
    tiny: Any, who: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the detector finds a use that nothing orders."""
    directory = tiny("qwen3")
    monkeypatch.setattr(device_support, "LEAST_RESULTS", 8 << 10)  # two layers'

    def run(device: Device) -> None:
        with engine_on_device(directory, "disk", "least", make=lambda _: device) as (engine, _):
            train(engine, oracle_of(directory, engine.layout), 1, 0.5, steps=2)

    assert races_without(who, caller, monkeypatch, run)


@pytest.mark.parametrize(
    ("who", "caller"),
    [
        ("h2d", "_copy"),  # an expert in RAM is read from the disk, or updated
        ("h2d", "_order_slot"),  # compute has used the expert that was in the slot
        ("compute", "_acquire"),  # an expert that is copied ahead has come
        ("guards", ""),  # a slot's last use counts, not only its copy
    ],
)
def test_experts_that_go_up_ahead_wait_too(
    tiny: Any, who: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny("qwen3_moe")

    def run(device: Device) -> None:
        with engine_on_device(directory, "disk", "some", make=lambda _: device) as (engine, _):
            train(engine, oracle_of(directory, engine.layout), 1, 0.5, steps=2)

    found = races_without(who, caller, monkeypatch, run, "experts")
    assert any("'experts'" in race for race in found), found


@pytest.mark.parametrize("room", ["all", "some", "least"])
def test_experts_go_up_before_they_are_used(
    tiny: Any, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another one is used, as far as there are slots."""
    directory = tiny("qwen3_moe")
    begun: Counter[str] = Counter()
    begin = DeviceWeights._raise

    def counted(weights: Any, pool: Any, *given: Any, **how: Any) -> Any:
        found = begin(weights, pool, *given, **how)
        if pool is weights._experts:
            begun["when asked for" if how.get("users") else "ahead"] += 1
            begun["beside another"] += len(pool.cargos) > 1
        return found

    monkeypatch.setattr(DeviceWeights, "_raise", counted)
    with engine_on_device(directory, "ram", room) as (engine, _):
        train(engine, oracle_of(directory, engine.layout), 1, 0.5, steps=2)
    assert begun["ahead"] > begun["when asked for"]
    assert bool(begun["beside another"]) == (room != "least")


def visits_on(device: Device, **more: int) -> Visits:
    """With room for 8 KiB of arguments, and of results."""
    given = {"up_bytes": 8192, "down_bytes": 8192} | more
    place = DevicePlacement(
        budget=1 << 20, units=frozenset([0]), slots=1, slot_bytes=4096, gradient_bytes=4096,
        work_bytes=0, **given,
    )  # fmt: skip
    return Visits(device, place)


def waits_of(stream: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events that a stream waits for from now on."""
    waited: list[Any] = []
    wait = stream.wait
    monkeypatch.setattr(stream, "wait", lambda event: (waited.append(event), wait(event)))
    return waited


def test_arguments_come_after_the_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host computes, what the host has done implies it; on a card it does not."""
    with SimDevice(1 << 20) as device:
        visits, waited = visits_on(device), waits_of(device.h2d, monkeypatch)
        values = torch.arange(12.0).view(3, 4)
        with visits.visiting() as visit:
            there = visit.up([values, None])
            back = visit.down([None, there[0].mul(2)])
        assert back[0] is None
        assert torch.equal(back[1], values * 2)
        first = visits._arguments.parts[0].left
        with visits.visiting() as visit:
            visit.up([values])  # beside the last visit's
            assert first not in waited
        with visits.visiting() as visit:
            visit.up([values])
            assert first in waited
            with pytest.raises(PlanError, match=r"take 12\.0 KiB, the plan has 8\.0 KiB"):
                visit.up([torch.zeros(2048)])


def test_what_a_card_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host computes these are done, or implied by what it has done; on a card the host
    puts no arguments where a copy still reads, and copies read no results that are not made."""

    class Copied:
        waited = False

        def wait(self) -> None:
            self.waited = True

    with SimDevice(1 << 20) as device:
        visits, down = visits_on(device, up_bytes=4096), waits_of(device.d2h, monkeypatch)
        spy: Any = Copied()
        for _ in range(2):
            with visits.visiting() as visit:
                there = visit.up([torch.ones(5)])
                left = visit.leave([there[0] * 3], wanted=False)
            argument = visits._arguments.parts[-1]
            argument.copied, first = spy, argument.copied
            first.wait()
        assert spy.waited
        made = left[0].home.place.made
        assert made not in down
        assert torch.equal(left[0], torch.full((5,), 3.0))
        assert made in down
