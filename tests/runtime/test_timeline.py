"""Real lanes are recorded as they ran, and the simulator tells the same story of the same plan."""

from __future__ import annotations

import itertools
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executor_support import UNITS, BrokenStore, Toy

from offload.blocks import Tier
from offload.errors import OffloadError, StoreError
from offload.runtime import trace_file
from offload.runtime.timeline import Recorder, Story
from offload.scheduler.costs import CostModel
from offload.scheduler.draws import Draws
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate
from offload.scheduler.simulate import simulate
from offload.scheduler.timeline import (
    COMPUTE,
    EXPERTS,
    H2D,
    PASSES,
    READ,
    WAITS,
    Span,
    Timeline,
    arrange,
)

PASSES_RUN = 4


def rate(value: float, unit: str = BYTES_PER_S) -> Rate:
    return Rate(median=value, low=value, high=value, n=1, unit=unit)


MACHINE = Hardware(
    ssd_read=rate(1e9), ssd_write=rate(1e9), ssd_mixed=rate(1e9), ram_read=rate(1e10),
    memcpy=rate(1e10), matmul={"float32": rate(1e11, FLOP_PER_S)}, gemv={"float32": rate(1e10)},
    h2d=rate(5e9), d2h=rate(5e9), cores=1, ram_bytes=2**30, name="toy",
)  # fmt: skip


def run(toy: Toy, routing: Draws | None = None) -> tuple[Timeline, Any]:
    """A real run, with its experts from ``routing``."""
    recorder = Recorder(2**12)
    with toy.open(recorder=recorder) as executor:
        for number in range(PASSES_RUN):
            for u in range(UNITS):
                blocks = toy.streamed(u)
                ticket = executor.enter(f"u{u}", blocks)
                if routing is not None and f"g{u}" in toy.plan.groups:
                    chosen = routing(number, f"g{u}")
                    executor.route(f"g{u}", chosen)
                    for expert in chosen:
                        executor.acquire(expert)
                        executor.release(expert)
                    executor.end_route()
                executor.leave(ticket, blocks)
        executor.settle()
        stats = replace(executor.stats)
    return recorder.timeline(), stats


def simulated(toy: Toy, routing: Draws | None = None) -> tuple[Timeline, Any]:
    spans: list[Span] = []
    found = simulate(
        toy.plan,
        CostModel(hardware=MACHINE),
        passes=PASSES_RUN,
        skip=0,
        routing=routing,
        hot=(),
        record=lambda *span: spans.append(Span(*span)),
    )
    return arrange(spans), found


def moved(timeline: Timeline, lane: str, toy: Toy, experts: bool) -> list[tuple[str, int]]:
    """(block, bytes) in order, without what is loaded once."""
    still = {b for a in toy.plan.tiers.values() for b in a.pinned}
    return [
        (s.name, s.nbytes)
        for s in timeline.lanes.get(lane, ())
        if s.name not in still and ("#" in s.name) is experts
    ]


@pytest.mark.parametrize("device", ["null", "sim"])
def test_the_simulator_moves_the_same_blocks_in_the_same_order_as_a_real_run(device: str) -> None:
    toy = Toy.make(device, experts=True, extra=8 * 4096)
    experts = {g: [b for b in toy.blocks if b.startswith(f"{g}#")] for g in toy.plan.groups}
    real, stats = run(toy, Draws(experts, toy.plan.top_k, 1.0, repeat=0.3))
    told, found = simulated(toy, Draws(experts, toy.plan.top_k, 1.0, repeat=0.3))
    for lane in (READ, H2D) if device == "sim" else (READ,):
        a, b = (moved(t, lane, toy, False) for t in (real, told))
        # How far beyond the last pass they look ahead is a matter of time, and of nothing else.
        n = min(len(a), len(b))
        each = sum(len(toy.streamed(u)) for u in range(UNITS))
        assert n >= each * (PASSES_RUN - 1) > 0
        assert a[:n] == b[:n]
    assert (stats.hits, stats.misses) == (
        round(found.hits * PASSES_RUN),
        round(found.misses * PASSES_RUN),
    )
    a, b = (sorted(moved(t, READ, toy, True)) for t in (real, told))
    assert a == b
    assert a


def test_a_run_is_told_lane_by_lane() -> None:
    toy = Toy.make("null", experts=True, extra=8 * 4096)
    experts = {g: [b for b in toy.blocks if b.startswith(f"{g}#")] for g in toy.plan.groups}
    draws = Draws(experts, toy.plan.top_k)
    real, stats = run(toy, draws)
    assert len(real.lanes[PASSES]) == PASSES_RUN
    assert [s.name for s in real.lanes[PASSES]] == [f"pass {i + 1}" for i in range(PASSES_RUN)]
    assert {s.name for s in real.lanes[COMPUTE]} == {f"u{u}" for u in range(UNITS)}
    used = sum(toy.plan.top_k.values()) * PASSES_RUN
    assert len(real.lanes[EXPERTS]) == used == stats.hits + stats.misses
    assert real.nbytes(READ) == stats.payload_read_bytes
    # The computing thread does one thing at a time.
    own = sorted(
        (s.start_s, s.end_s) for lane in (COMPUTE, EXPERTS, WAITS) for s in real.lanes.get(lane, ())
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    assert real.start_s == 0.0


def test_the_ring_keeps_the_newest_spans() -> None:
    recorder = Recorder(4)
    for i in range(10):
        recorder.add(READ, f"b{i}", float(i), i + 0.5, i)
    found = recorder.timeline()
    assert [s.name for s in found.lanes[READ]] == ["b6", "b7", "b8", "b9"]
    assert found.dropped == 6
    assert recorder.ring_bytes < 2000
    with pytest.raises(ValueError, match="power of two"):
        Recorder(3)


def test_an_error_in_a_unit_leaves_a_story_that_goes_on() -> None:
    toy = Toy.make("null", extra=4096)
    block = toy.some_streamed()
    recorder = Recorder(2**10)
    broken = BrokenStore(toy.store(), block)
    with toy.open(broken, recorder=recorder) as executor:
        with pytest.raises(StoreError):
            toy.run(executor, 1)
        broken.broken.clear()
        toy.run(executor, 1)
    assert len(recorder.timeline().lanes[COMPUTE]) >= UNITS
    story = Story(recorder)
    story.ends()  # more often than begun: nothing happens
    story.finish()


def test_a_trace_file_is_a_chrome_trace(tmp_path: Path) -> None:
    timeline = arrange(
        [
            Span(READ, "x#1", 0.0, 0.002, 4096),
            Span(READ, "w", 0.001, 0.003, 100),
            Span(H2D, "x#1", 0.004, 0.005, 4096),
            Span(EXPERTS, "x#1", 0.005, 0.006),
            Span(WAITS, "x#1", 0.003, 0.005),
            Span(READ, "x#1", 0.010, 0.011, 4096),
        ]
    )
    path = tmp_path / "t.json"
    trace_file.write(path, timeline, "a run", {"model": "m"})
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    data = json.loads(path.read_text())
    events = data["traceEvents"]
    assert data["otherData"]["model"] == "m"
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["disk read", "RAM to device", "experts", "waits"]
    spans = [e for e in events if e["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= e.keys() for e in spans)
    first = next(e for e in spans if names[e["tid"]] == "disk read")
    assert (first["ts"], first["dur"], first["args"]["bytes"]) == (0.0, 2000.0, 4096)
    flow = [(e["ph"], names[e["tid"]]) for e in events if e["ph"] in "stf"]
    # One journey: the second read of the block goes nowhere any more.
    assert flow == [("s", "disk read"), ("t", "RAM to device"), ("f", "experts")]
    with pytest.raises(OffloadError, match="--trace .* cannot be written"):
        trace_file.write(tmp_path / "no" / "t.json", timeline, "", {})
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_the_toy_streams_on_both_tiers() -> None:
    """What the comparison above rests on."""
    plan = Toy.make("sim", experts=True, extra=8 * 4096).plan
    assert plan.tiers[Tier.DEVICE].ring_bytes
    assert plan.streamed_bytes_per_pass
