"""What a toy's time is made of: pressed on by products whose time is not its own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, write

from offload.blocks import Tier
from offload.models import baseline, toy_times
from offload.models.experts import ExpertProxy
from offload.models.load import Options, plan_model, prepare
from offload.models.meta import model_class
from offload.models.toy import Warm
from offload.models.toy_times import Like, Pressure, measure, pressed
from offload.runtime.probe_compute import torch_threads
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate

LIKE = Like(torch.float32, 64, 2)
MINUTE_S = 60.0


@pytest.fixture(params=["qwen3_moe", "llama"])
def model(request: pytest.FixtureRequest, tmp_path: Path, cut_small: None) -> Any:
    write(request.param, tmp_path / "m")
    # Whatever the process weighs: there is no baseline here.
    found = prepare(tmp_path / "m", Options(ram=2**30, overhead_bytes=0)).open()
    yield found
    found.offload.close()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says one second more each time, and products that take a minute."""
    now = itertools.count()
    late = [0.0]

    class Clock:
        def perf_counter(self) -> float:
            return next(now) + late[0]

    class Slow(Pressure):
        def __call__(self, *args: Any) -> None:
            late[0] += MINUTE_S
            self.spent_s += MINUTE_S

    monkeypatch.setattr(toy_times, "time", Clock())
    monkeypatch.setattr(toy_times, "Pressure", Slow)


def test_what_presses_is_not_counted(model: Any, ticking: None) -> None:
    times = measure(model, LIKE)
    for seconds in (times.layer_s, times.expert_s, times.fixed_s, times.token_s):
        assert 0 <= seconds < MINUTE_S
    # Two looks at the clock per layer, and two per layer's experts.
    routed = model.config.model_type != "llama"
    assert times.layer_s == (2 if routed else 1)
    assert (times.expert_s > 0) == routed
    assert times.blocks == 0


def test_every_product_is_pressed_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed_on: list[int] = []
    monkeypatch.setattr(Pressure, "__call__", lambda *_: pressed_on.append(1))
    ids = torch.ones((1, 1), dtype=torch.int64)
    with torch.no_grad(), pressed(model, LIKE):
        model(ids)
    per_layer = 4 + (1 + 2 * 2 if model.config.model_type != "llama" else 3)
    assert len(pressed_on) == model.config.num_hidden_layers * per_layer + 1


def test_the_model_is_as_before(model: Any) -> None:
    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    def sources() -> list[Any]:
        return [
            v.source
            for m in model.modules()
            for v in vars(m).values()
            if isinstance(v, ExpertProxy)
        ]

    ids = torch.ones((1, 4), dtype=torch.int64)
    with torch.no_grad():
        before = hooks(), sources(), model(ids).logits
        measure(model, LIKE)
        after = hooks(), sources(), model(ids).logits
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_a_small_model_presses_with_small_matrices() -> None:
    config = tiny_config("llama")
    like = Like.of(config, torch.float32)
    assert (like.width, like.layers) == (config.hidden_size, config.num_hidden_layers)
    assert like.area_bytes < 2**20
    assert Like(torch.float32, 1024, 10**6).area_bytes == toy_times.AREA_BYTES
    config.hidden_size = 10**6
    assert Like.of(config, torch.bfloat16).width == toy_times.WIDEST


def test_a_warm_process_knows_its_times() -> None:
    config = tiny_config("qwen3_moe")
    warm = baseline.warm_up(config, model_class(config), torch.float32)
    assert warm.baseline_rss > 0
    assert min(warm.layer_s, warm.expert_s, warm.fixed_s) > 0
    assert warm.fetch_s >= 0
    assert warm.crowd_s > 0


def test_nobody_waits_for_times_without_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_times, "measure", lambda *_: pytest.fail("timed"))
    config = tiny_config("llama")
    warm = baseline.warm_up(config, model_class(config), torch.float32, False)
    assert warm.baseline_rss > 0
    assert warm.layer_s == warm.fixed_s == warm.fetch_s == warm.crowd_s == 0


@pytest.mark.parametrize(("threads", "crowded"), [(1, False), (2, True), (3, True)])
def test_threads_that_fetch_take_cores_from_those_that_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, crowded: bool
) -> None:
    write("qwen3_moe", tmp_path / "m")
    monkeypatch.setattr("offload.models.request.cores", lambda: 2)
    rate = Rate(median=1e9, low=1e9, high=1e9, n=1, unit=BYTES_PER_S)
    flops = replace(rate, unit=FLOP_PER_S)
    hardware = Hardware(
        ssd_read=rate, ssd_write=rate, ssd_mixed=rate, ram_read=rate, memcpy=rate,
        matmul={"float32": flops}, gemv={"float32": rate}, cores=2, ram_bytes=2**30, name="two",
    )  # fmt: skip
    options = Options(ram=2**30, context=32, overhead_bytes=0, hardware=hardware)
    options.ram = plan_model(tmp_path / "m", options, Warm(baseline_rss=0)).minimum[Tier.RAM]
    with torch_threads(threads):
        alone, beside = (
            plan_model(tmp_path / "m", options, Warm(baseline_rss=0, crowd_s=crowd_s)).plan
            for crowd_s in (0.0, 1.0)
        )
    assert alone.predicted_pass_s is not None
    assert beside.predicted_pass_s is not None
    more_s = beside.predicted_pass_s.mid - alone.predicted_pass_s.mid
    assert (more_s > 1.0) == crowded
    assert crowded or more_s == 0
