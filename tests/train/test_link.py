"""What a step copies to a device and back: predicted, and counted by the simulated device."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from families import tiny_config
from run_support import Log, options_for, planned_once, write_data, write_model

from offload.runtime.sim_device import SimDevice
from offload.scheduler.hardware_file import parse
from offload.train import head_weights, preparing
from offload.train import run as running
from offload.train.device_plan import DevicePlacement
from offload.train.engine import Engine
from offload.train.predicting import DOWN, UP, StepRates
from offload.train.preparing import prepare
from offload.train.rates import copy_rates
from offload.train.run import Run

STEPS = 4
FILE = Path(__file__).parents[2] / "offload" / "hardware" / "rtx4090-desktop.json"


def machine(place: Path, up: float, down: float) -> Path:
    """A file of a machine with a link of these rates, in bytes per second."""
    data = json.loads(FILE.read_text())
    for name, rate in (("h2d", up), ("d2h", down)):
        data[name] |= dict.fromkeys(("median", "low", "high"), rate)
    file = place / "machine.json"
    file.write_text(json.dumps(data))
    assert parse(data, str(file)).h2d.median == up
    return file


def made_up(_: Any, layout: Any, *__: Any) -> StepRates:
    """The rates of a machine with a fast disk and a millisecond for each half of a layer."""
    units = {u.index: (1e-3, 2e-3) for u in layout.units if "layers" in u.name or ".h." in u.name}
    return StepRates(units=units, disk_read=1e12, disk_write=1e12, update=1e12)


@dataclass
class Counted:
    """What a device has copied after each step, once nothing is under way."""

    steps: list[tuple[int, int]]

    @property
    def each(self) -> tuple[float, float]:
        """(up, down) of a step, without the first: that brings what stays."""
        first, last = self.steps[1], self.steps[-1]
        n = len(self.steps) - 2
        return (last[0] - first[0]) / n, (last[1] - first[1]) / n


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train, and count: (the planned run, what was copied)."""
    planned_once(monkeypatch)
    monkeypatch.setattr(preparing, "step_rates", made_up)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engines: list[Engine] = []
    opening = running.open_engine

    def opened(*given: Any) -> Engine:
        engines.append(opening(*given))
        return engines[-1]

    monkeypatch.setattr(running, "open_engine", opened)

    def train(options: Any) -> tuple[Run, Counted]:
        found = Counted([])

        def after(step: int) -> None:
            engine = engines[-1]
            engine.drain()
            tier = engine.homes.tier
            assert tier is not None
            assert isinstance(tier.device, SimDevice)
            head = tier.head
            assert head is None or head.up_bytes
            with engine.shared.changed:  # what is copied ahead is there
                engine.shared.wait_for(
                    lambda: not tier.weights.rising and not engine.weights._loading, "copies"
                )
            streams: Any = tier.device.h2d, tier.device.d2h
            found.steps.append((streams[0].copied_bytes, streams[1].copied_bytes))

        run = prepare(options)
        try:
            run.train(Log(after))
        finally:
            run.close()
        return run, found

    return train


def room_for(place: DevicePlacement, room: str) -> int:
    """The budget of a device with room for all layers, for two, or for one."""
    if room == "all":
        return place.budget
    n = 1 if room == "least" else 2
    head = place.head and replace(place.head, slots=2 * n)
    return replace(
        place, slots=n, expert_slots=min(3 * n - 2, place.expert_slots), gradients=n, head=head
    ).nbytes  # fmt: skip


CASES = {
    "full": ("llama", {}, 0.0),
    "unclipped": ("llama", {"max_grad_norm": 0.0}, 0.0),
    "one micro-batch after the other": ("llama", {"grad_accum": 2, "order": "usual"}, 0.0),
    "LoRA": ("llama", {"method": "lora", "grad_accum": 2}, 0.0),
    "QLoRA": ("llama", {"method": "lora", "quant": "q8"}, 0.0),
    "layers below the first adapter": (
        "gpt2", {"method": "lora", "lora_targets": (r"transformer\.h\.[23]\..*c_attn",)}, 0.0,
    ),
    "experts": ("qwen3_moe", {"grad_accum": 2}, 0.1),
    "adapters of experts": ("qwen3_moe", {"method": "lora", "quant": "q4"}, 0.05),
    "the head": ("llama", {"head": "gpu", "grad_accum": 3}, 0.0),
    "a tied head": ("gpt2", {"head": "gpu", "grad_accum": 2, "order": "usual"}, 0.0),
    "a head with a bias": ("phi", {"head": "gpu", "max_grad_norm": 0.0}, 0.0),
    "a frozen head": ("phi", {"head": "gpu", "method": "lora", "grad_accum": 2}, 0.0),
    "updated states": ("llama", {"gpu_updates": "1"}, 0.0),
    "updated 8-bit states": (
        "llama", {"gpu_updates": "1", "states": "8bit", "max_grad_norm": 0.0}, 0.0,
    ),
    "a packed head": ("llama", {"head": "gpu", "method": "lora", "quant": "q4"}, 0.0),
}  # fmt: skip
"""By name: family, options, and how far routers may be from even ones."""

ROOMS = ("all", "two", "least")
WITH_EACH_ROOM = ("full", "experts")


def room_in_ci(case: str, room: str) -> bool:
    """Of most cases one room, in turns."""
    return case in WITH_EACH_ROOM or ROOMS[list(CASES).index(case) % 3] == room


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "room"),
    [
        pytest.param(case, room, marks=[pytest.mark.sweep] * (not room_in_ci(case, room)))
        for case in CASES
        for room in ROOMS
    ],
)
def test_the_device_counts_what_was_predicted(
    tmp_path: Path, counted: Any, case: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of copies are those bytes at the link's rates, which are another in each case."""
    monkeypatch.setattr(head_weights, "HEAD_ROWS", 64)  # nine slices
    family, more, uneven = CASES[case]
    up, down = 1e9 * (1 + len(case) % 3), 5e8 * (1 + len(room))
    model = write_model(tmp_path / "model", family, vocab_size=520)
    data = write_data(tmp_path / "data.jsonl", rows=300)
    options = options_for(
        model, data, tmp_path, device=f"sim:{machine(tmp_path, up, down)}", gpu=1 << 30,
        max_steps=STEPS, **more,
    )  # fmt: skip
    first = prepare(options)
    first.close()
    place = first.plan.placement.device
    assert place is not None
    run, found = counted(replace(options, gpu=room_for(place, room)))
    seconds = {
        lane: sum(lanes[lane] for lanes in run.prediction.lanes.values()) for lane in (UP, DOWN)
    }
    assert seconds[UP] == pytest.approx(found.each[0] / up, rel=uneven or 1e-9)
    assert seconds[DOWN] == pytest.approx(found.each[1] / down, rel=uneven or 1e-9)
    assert run.plan.up_bytes == pytest.approx(found.each[0], rel=uneven or 1e-9)


def test_the_plan_says_what_is_copied_and_which_lane_is_busiest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_once(monkeypatch)
    monkeypatch.setattr(preparing, "step_rates", made_up)
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data.jsonl")

    def planned(rate: float, **more: Any) -> Run:
        device = f"sim:{machine(tmp_path, rate, rate)}"
        options = options_for(model, data, tmp_path, device=device, gpu=1 << 30, **more)
        run = prepare(options)
        run.close()
        assert run.prediction is not None
        return run

    fast, slow = planned(1e12), planned(1e6)
    for run, lane in ((fast, "compute"), (slow, UP)):
        assert run.prediction.busiest == lane
        text = "\n".join(run.describe())
        assert f"the busiest lane is {lane}" in text
        assert ", copies " in text
        assert " to the device and " in text
    assert slow.plan.link == fast.plan.link
    assert slow.prediction.seconds > slow.plan.up_bytes / 1e6
    # One lane after the other, and no more: computing, both directions of the link.
    busy = [sum(s for s in lanes.values()) for lanes in slow.prediction.lanes.values()]
    assert slow.prediction.seconds <= sum(busy) * (1 + 1e-9)
    lora = planned(1e6, method="lora", lora_r=1, lora_targets=("q_proj",))
    assert lora.plan.up_bytes < slow.plan.up_bytes
    assert lora.prediction.seconds < slow.prediction.seconds


def test_what_stays_on_the_device_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen base, with a budget of RAM that has no room for it: on the device there is."""
    from run_support import everything_on_disk

    from offload.train.plan import Needs, traffic
    from offload.train.updates import Updater

    planned_once(monkeypatch)
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data.jsonl")
    how = {"method": "lora", "lora_r": 4, "device": "sim", "gpu": 1 << 30}
    run = prepare(options_for(model, data, tmp_path, **how))
    run.close()
    everything_on_disk(run)
    layout, place = run.layout, run.plan.placement
    needs = Needs(fixed={}, kinds=Updater.kinds(layout, "fp32"), grad_dtype=None)
    away = {b for u in layout.units if "layers" in u.name for b in u.blocks}
    copies = {b: (float(layout.blocks[b].trained), 0.0) for b in away}
    here, there = (
        traffic(layout, replace(needs, copies=c), place, clipping=True, backwards=1)
        for c in ({}, copies)
    )
    base = sum(layout.blocks[b].nbytes for b in away if not layout.blocks[b].trained)
    read = [sum(phase[0] for phase in phases.values()) for phases in (here, there)]
    assert read[0] - read[1] >= base


def test_a_link_is_measured_where_no_file_says_its_rates(tmp_path: Path) -> None:
    from offload.runtime.choice import choose

    assert all(rate > 1e6 for rate in copy_rates(choose("sim", 1 << 30)))
    assert copy_rates(choose(f"sim:{machine(tmp_path, 3e6, 2e6)}", 1 << 30)) == (3e6, 2e6)


def test_a_routers_sums_are_counted(tmp_path: Path, counted: Any) -> None:
    """Two sums of each layer's router down in forward; up, once for all layers, the experts' shares
    and a byte for each token, which may be padding."""
    model = write_model(tmp_path / "model", "qwen3_moe", vocab_size=520)
    data = write_data(tmp_path / "data.jsonl", rows=300)
    lora = {"method": "lora", "lora_r": 2, "lora_targets": ("q_proj",)}
    counts, plans = [], []
    for coefficient in (None, 0.01):
        options = options_for(
            model, data, tmp_path / str(coefficient), device="sim", gpu=1 << 30, max_steps=STEPS,
            router_aux_loss=coefficient, **lora,
        )  # fmt: skip
        run, found = counted(options)
        counts.append(found.each)
        plans.append((run.plan.up_bytes, run.plan.down_bytes))
    config = tiny_config("qwen3_moe")
    each = 4 * config.num_experts * config.num_hidden_layers
    assert plans[1][1] - plans[0][1] == counts[1][1] - counts[0][1] == 2 * each
    up = 4 * config.num_experts + options.batch_size * options.seq_len
    assert plans[1][0] - plans[0][0] == counts[1][0] - counts[0][0] == up
