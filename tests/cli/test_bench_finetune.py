"""The arithmetic of ``benchmarks/finetune.py``: a wrong bound flatters whatever it judges."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("finetune_bound")


@pytest.fixture
def model(bound: ModuleType) -> Any:
    return bound.Model(
        linears={(8, 4): 3, (4, 8): 2}, head=(100, 4), attention=2 * 4, layers=2, parameters=560
    )


def test_flops_are_two_and_eight_per_parameter_and_token(bound: ModuleType, model: Any) -> None:
    assert model.products == 160
    work = bound.flops(model, 1)
    attention = 2 * 8
    assert sum(work["forward"].values()) == 2 * 160 + attention
    assert sum(work["backward"].values()) == 6 * 160 + 8 * 400 + 3.5 * attention
    twice = bound.flops(model, 2)
    # Products grow with the tokens, attention with their square.
    assert twice["forward"][bound.FORWARD] == 2 * 2 * 160 + 4 * attention
    assert twice["backward"][bound.WEIGHT] == 2 * work["backward"][bound.WEIGHT]


def test_traffic_goes_to_the_phase_of_its_updates(bound: ModuleType) -> None:
    homes = bound.Homes(states_read=120, states_written=140, spilled=10)
    on = bound.phase_traffic(homes, read=150, written=150, clipping=True)
    assert on == {"forward": bound.Traffic(130, 140), "backward": bound.Traffic(20, 10)}
    off = bound.phase_traffic(homes, read=150, written=150, clipping=False)
    assert off == {"forward": bound.Traffic(10, 0), "backward": bound.Traffic(140, 150)}
    for phases in (on, off):
        assert sum(t.total for t in phases.values()) == 300


def test_traffic_below_the_plan_stays_what_was_moved(bound: ModuleType) -> None:
    homes = bound.Homes(states_read=120, states_written=140, spilled=0)
    moved = bound.phase_traffic(homes, read=100, written=90, clipping=True)
    assert moved["forward"] == bound.Traffic(100, 90)
    assert moved["backward"].total == 0
    assert moved["backward"].read_share == 1.0


def test_rates_between_two_shares_add_up_in_time(bound: ModuleType) -> None:
    curve = {0.0: 1.0, 0.5: 2.0, 1.0: 4.0}
    assert bound.rate_at(curve, 0.5) == 2.0
    assert bound.rate_at(curve, 0.75) == pytest.approx(1 / (0.5 / 2 + 0.5 / 4))
    # A disk that does one direction after the other: the mix is exactly that.
    apart = {0.0: 1.0, 1.0: 4.0}
    assert 10 / bound.rate_at(apart, 0.4) == pytest.approx(6 / 1.0 + 4 / 4.0)
    assert bound.rate_at({0.4: 3.0, 0.6: 5.0}, 0.1) == 3.0
    assert bound.rate_at({0.4: 3.0, 0.6: 5.0}, 0.9) == 5.0


def rates(bound: ModuleType, **given: Any) -> Any:
    fast = dict.fromkeys((bound.FORWARD, bound.INPUT, bound.WEIGHT), 1e30)
    return bound.Rates(**{"products": fast, "dram": 1e30, "ssd": {0.0: 1e30, 1.0: 1e30}} | given)


def test_the_bound_is_the_busiest_lane_of_each_phase(bound: ModuleType, model: Any) -> None:
    traffic = {"forward": bound.Traffic(60, 40), "backward": bound.Traffic(30, 0)}

    def least(clipping: bool = True, **given: Any) -> float:
        found = rates(bound, **given)
        return bound.t_min(bound.lanes(model, 3, "fp32", traffic, found, clipping=clipping))

    disk = {"ssd": {0.0: 10.0, 1.0: 10.0}}
    assert least(**disk) == pytest.approx(10 + 3)
    assert least(dram=28.0) == pytest.approx(560)
    assert least(clipping=False, dram=28.0) == pytest.approx(560)
    # Only the larger of the two lanes of forward counts; backward has no update beside it.
    assert least(**disk, dram=28.0 * 560 / 7) == pytest.approx(10 + 3)
    assert least(**disk, dram=28.0 * 560 / 12) == pytest.approx(12 + 3)
    assert least(clipping=False, **disk, dram=28.0 * 560 / 12) == pytest.approx(10 + 12)
    slow = dict.fromkeys((bound.FORWARD, bound.INPUT, bound.WEIGHT), 2.0)
    total = sum(sum(phase.values()) for phase in bound.flops(model, 3).values())
    assert least(products=slow) == pytest.approx(total / 2)


def test_layers_are_counted_as_they_run_alone_and_the_head_by_its_products(
    bound: ModuleType, model: Any
) -> None:
    slow = dict.fromkeys((bound.FORWARD, bound.INPUT, bound.WEIGHT), 4.0)
    traffic = {phase: bound.Traffic(0, 0) for phase in bound.PHASES}
    layer = {"forward": 5e3, "both": 2e4}
    found = bound.Rates(products=slow, dram=1e30, ssd={0.0: 1e30, 1.0: 1e30}, layer=layer)
    busy = bound.lanes(model, 3, "fp32", traffic, found, clipping=True)
    head = 2 * 3 * model.head[0] * model.head[1]
    assert busy["forward"][bound.LAYERS] == pytest.approx(model.layers * 5e3)
    assert busy["backward"][bound.LAYERS] == pytest.approx(model.layers * 2e4 + 4 * head / 4.0)
    least = bound.t_min(bound.without_layers(busy))
    assert least == pytest.approx(sum(p[bound.PRODUCTS] for p in busy.values()))
    assert bound.t_min(busy) == pytest.approx(sum(p[bound.LAYERS] for p in busy.values()))


def test_layers_that_kept_what_they_computed_are_not_run_again(
    bound: ModuleType, model: Any
) -> None:
    slow = dict.fromkeys((bound.FORWARD, bound.INPUT, bound.WEIGHT), 4.0)
    traffic = {phase: bound.Traffic(0, 0) for phase in bound.PHASES}
    layer = {"forward": 5e3, "both": 2e4}
    found = bound.Rates(products=slow, dram=1e30, ssd={0.0: 1e30, 1.0: 1e30}, layer=layer)

    def busy(kept: int) -> Any:
        return bound.lanes(model, 3, "fp32", traffic, found, clipping=True, kept_layers=kept)

    none, all_of_them = busy(0), busy(model.layers)
    assert none["forward"] == all_of_them["forward"]
    for lane, less in (
        (bound.LAYERS, model.layers * 5e3), (bound.PRODUCTS, none["forward"][bound.PRODUCTS])
    ):  # fmt: skip
        assert none["backward"][lane] - all_of_them["backward"][lane] == pytest.approx(less)


def test_spilled_inputs_go_in_forward_and_come_in_backward(bound: ModuleType) -> None:
    homes = bound.Homes(states_read=120, states_written=140, spilled=10, inputs=7)
    for clipping in (True, False):
        plain = bound.phase_traffic(
            bound.Homes(states_read=120, states_written=140, spilled=10), 193, 150,
            clipping=clipping,
        )  # fmt: skip
        found = bound.phase_traffic(homes, 200, 157, clipping=clipping)
        assert found["forward"].written == plain["forward"].written + 7
        assert found["backward"].read == plain["backward"].read + 7
        assert found["forward"].read == plain["forward"].read
        assert found["backward"].written == plain["backward"].written


def test_mean_rates_are_those_of_the_mean_time(bound: ModuleType) -> None:
    found = bound.mean_rates([rates(bound, dram=1.0), rates(bound, dram=3.0)])
    assert found.dram == pytest.approx(2 / (1 / 1 + 1 / 3))


def step(n: int, seconds: float, norm: float | None = 2.0) -> dict[str, Any]:
    return {
        "event": "step", "step": n, "seconds": seconds, "tokens": 10, "grad_norm": norm,
        "phases": {"forward": seconds / 4, "backward": 3 * seconds / 4},
        "lanes": {"compute": seconds - 0.5, "ssd": seconds / 2, "update": 0.25},
        "read_bytes": 1600, "written_bytes": 1400,
    }  # fmt: skip


def test_the_first_steps_do_not_count(bound: ModuleType) -> None:
    events = [{"event": "start"}, step(1, 50), step(2, 40), step(3, 4), step(4, 8), step(5, 6)]
    found = bound.steady([*events, {"event": "end"}])
    assert (found.steps, found.seconds, found.forward_s, found.backward_s) == (3, 6, 1.5, 4.5)
    assert (found.waiting_s, found.ssd_busy_s, found.update_busy_s) == (0.5, 3, 0.25)
    with pytest.raises(ValueError, match="no more than 2 steps"):
        bound.steady(events[:3])


def test_clipping_is_claimed_only_if_every_step_was_clipped(bound: ModuleType) -> None:
    assert bound.always_clipped([step(1, 1, 2.0), step(2, 1, 1.5)], 1.0)
    assert not bound.always_clipped([step(1, 1, 2.0), step(2, 1, 0.5)], 1.0)
    assert not bound.always_clipped([step(1, 1, 2.0), step(2, 1, None)], 1.0)
    assert not bound.always_clipped([], 1.0)


def test_a_judged_run(bound: ModuleType, model: Any) -> None:
    homes = bound.Homes(states_read=1200, states_written=1400, spilled=0)
    events = [step(1, 9), step(2, 9), step(3, 8), step(4, 8), step(5, 8)]
    disk = rates(bound, ssd={0.0: 1000.0, 1.0: 1000.0})
    found = bound.judge(model, "fp32", homes, bound.steady(events), disk, clipping=True)
    assert found["t_min"] == pytest.approx(2.6 + 0.4)
    assert found["fraction"] == pytest.approx(3 / 8)
    assert found["busiest"] == {"forward": "ssd", "backward": "ssd"}
    assert found["read_per_parameter"] == pytest.approx(1600 / 560)
    assert found["ssd_busy_share"] == 0.5
    assert math.isclose(found["tok_s"], 10 / 8)


def test_exposed_seconds_of_the_optimizer(bound: ModuleType) -> None:
    def point(clipping: bool, **more: Any) -> dict[str, Any]:
        return {"ram_bytes": 1, "tokens_asked": 5, "states": "fp32", "clipping": clipping, **more}

    clipped = point(True, forward_s=3.0, backward_s=4.0, first_forward_s=1.0)
    plain = point(False, forward_s=1.0, backward_s=6.5, first_forward_s=1.0)
    other = plain | {"tokens_asked": 6}
    broken = point(True, error="exit 1")
    found = bound.exposed_optimizer([clipped, plain, other, broken])
    assert found == [2.0, 2.5, None, None]
