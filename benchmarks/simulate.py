"""How far the simulator's prediction is from real runs on lanes of known rates.

    python benchmarks/simulate.py

A store of a fixed rate, the simulated accelerator with copies of a fixed rate, and computations of
a fixed time: everything that a hardware file says is known here, so what is left is the schedule.
Dense layers in two and in three tiers, where the disk, the copies or computing take longest, and
experts with a made-up routing. Real threads, locks and the real executor on one side, the virtual
clock on the other.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import facts, record, settings

from offload.blocks import BlockKind, Tier, layout
from offload.io.stores import MemoryStore
from offload.io.wrappers import LatencyStore
from offload.runtime.executor import Executor
from offload.runtime.null_device import NullDevice
from offload.runtime.sim_device import SimDevice
from offload.runtime.timeline import Recorder
from offload.scheduler.costs import CostModel
from offload.scheduler.draws import Draws
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate
from offload.scheduler.planner import PlanRequest, make_plan
from offload.scheduler.simulate import simulate
from offload.scheduler.timeline import PASSES
from offload.scheduler.trace import Step, Trace

MIB = 2**20
LATENCY_S = 1e-3
CASES: dict[str, dict[str, Any]] = {
    # Rates in MiB/s, times in ms, budgets in MiB.
    "dense, disk-bound": {"ssd": 200, "layer_ms": 12.0, "ram": 20},
    "dense, compute-bound": {"ssd": 200, "layer_ms": 40.0, "ram": 20},
    "dense, equal": {"ssd": 200, "layer_ms": 20.0, "ram": 20},
    "dense in three tiers, copies slow": {
        "ssd": 450, "h2d": 200, "layer_ms": 12.0, "ram": 24, "gpu": 20,
    },
    "experts in two tiers": {
        "ssd": 200, "layer_ms": 12.0, "ram": 112, "experts": 16, "top_k": 2, "expert_ms": 4.0,
    },
    "experts in three tiers": {
        "ssd": 200, "h2d": 400, "layer_ms": 12.0, "ram": 128, "gpu": 96, "experts": 16, "top_k": 2,
        "expert_ms": 4.0,
    },
}  # fmt: skip
LAYERS, BLOCKS, BLOCK_BYTES = 12, 4, MIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.case or CASES:
        found = compare(CASES[name], args.passes, args.skip, args.rounds)
        results.append({"case": name, **found})
        print(
            f"{name}: predicted {found['predicted_s'] * 1e3:.1f} ms, measured "
            f"{found['measured_s'] * 1e3:.1f} ms ({found['off']:+.1%}), hits "
            f"{found['predicted_hits']:.1%} and {found['measured_hits']:.1%}"
        )
    worst = max(abs(r["off"]) for r in results)
    cost = tracing_cost()
    print(f"worst {worst:.1%}; a recorded span costs {cost * 1e6:.2f} µs")
    result = {
        "benchmark": "simulate",
        "facts": facts(),
        "settings": settings(args),
        "cases": results,
        "worst": worst,
        "span_s": cost,
    }
    print(f"written to {record('simulate', result, args.output)}")


def compare(case: Mapping[str, Any], passes: int, skip: int, rounds: int) -> dict[str, float]:
    """One case, predicted and measured in turns: of so many rounds the median of each pass."""
    found = [one_round(case, passes, skip) for _ in range(rounds)]
    predicted, measured = (
        statistics.mean(statistics.median(each) for each in zip(*times, strict=True))
        for times in ([r["predicted"] for r in found], [r["measured"] for r in found])
    )
    first = found[0]
    return {
        "predicted_s": predicted,
        "measured_s": measured,
        "off": predicted / measured - 1,
        **{name: first[name] for name in ("predicted_hits", "measured_hits")},
        "bound_s": statistics.median(r["bound_s"] for r in found),
    }


def one_round(case: Mapping[str, Any], passes: int, skip: int) -> dict[str, Any]:
    """Seconds of each pass behind ``skip`` as predicted, at costs measured now, and as run."""
    stacked = "gpu" in case
    # What a wait for so long really takes here, as a probe would have found.
    real = {k: timed(case[k]) for k in ("layer_ms", "expert_ms") if k in case}
    request, costs, experts = question({**case, **real}, stacked)
    contents = {b: bytes(s.nbytes) for b, s in request.blocks.items()}
    store = LatencyStore(
        MemoryStore(request.blocks.values(), contents),
        seconds=LATENCY_S,
        bytes_per_s=case["ssd"] * MIB,
    )
    device = touched(simulated(case, case["gpu"]) if stacked else NullDevice())
    costs = latencies(case, costs, stacked)
    request = replace(request, costs=costs)
    plan = make_plan(request)

    def draws() -> Draws:
        return Draws(experts, plan.top_k, 0.8, repeat=0.3)

    expected: list[float] = []

    def note(lane: str, name: str, start_s: float, end_s: float, nbytes: int) -> None:
        if lane == PASSES:
            expected.append(end_s - start_s)

    routing = draws() if experts else None
    predicted = simulate(
        plan, costs, passes=passes, skip=skip, routing=routing, hot=(), record=note
    )  # fmt: skip
    executor = Executor(plan, store, device, recorder=Recorder(2**14))
    times: list[float] = []
    routing = draws() if experts else None
    kept = plan.tiers[plan.compute_tier].pinned
    try:
        executor.start()
        before = (0, 0)
        for number in range(passes):
            if number == skip:
                before = executor.stats.hits, executor.stats.misses
            began = time.perf_counter()
            for step in request.trace:
                needed = tuple(b for b in step.blocks if b not in kept)
                ticket = executor.enter(step.unit, needed)
                work(case["layer_ms"] / 1e3)
                if step.group and routing is not None:
                    chosen = routing(number, step.group)
                    executor.route(step.group, chosen)
                    for expert in chosen:
                        executor.acquire(expert)
                        work(case["expert_ms"] / 1e3)
                        executor.release(expert)
                    executor.end_route()
                executor.leave(ticket, needed)
            times.append(time.perf_counter() - began)
        hits, misses = executor.stats.hits - before[0], executor.stats.misses - before[1]
    finally:
        executor.close()
    uses = predicted.hits + predicted.misses
    return {
        "predicted": expected[skip:],
        "measured": times[skip:],
        "predicted_hits": predicted.hits / uses if uses else 0.0,
        "measured_hits": hits / (hits + misses) if hits + misses else 0.0,
        "bound_s": max(predicted.lane_s.values()),
    }


def question(
    case: Mapping[str, Any], stacked: bool
) -> tuple[PlanRequest, CostModel, dict[str, tuple[str, ...]]]:
    """The model, and the rates that it will really run at."""
    blocks, steps = {}, []
    experts: dict[str, tuple[str, ...]] = {}
    for i in range(LAYERS):
        ids = tuple(f"l{i}/{j}" for j in range(BLOCKS))
        group = f"g{i}" if "experts" in case else ""
        for b in ids:
            blocks[b] = layout(b, BlockKind.WEIGHT, [("w", "uint8", (BLOCK_BYTES,))])
        if group:
            experts[group] = tuple(f"{group}#{e:02}" for e in range(case["experts"]))
            for b in experts[group]:
                blocks[b] = layout(b, BlockKind.EXPERT, [("w", "uint8", (BLOCK_BYTES,))], group)
        steps.append(Step(unit=f"l{i}", blocks=ids, group=group))
    fast = rate(1e15)
    hardware = Hardware(
        ssd_read=rate(case["ssd"] * MIB), ssd_write=fast, ssd_mixed=fast, ram_read=fast,
        memcpy=fast, matmul={"float32": rate(1e18, FLOP_PER_S)}, gemv={"uint8": fast},
        h2d=rate(case.get("h2d", 1) * MIB) if stacked else None, d2h=fast if stacked else None,
        cores=1, ram_bytes=2**34, name="lanes of known rates",
    )  # fmt: skip
    costs = CostModel(
        hardware=hardware,
        read_latency_s=LATENCY_S,
        queue_depth=64,  # a store of one rate takes all that is asked
        expert_overhead_s=case.get("expert_ms", 0.0) / 1e3,
    )
    budgets = {Tier.RAM: case["ram"] * MIB}
    if stacked:
        budgets[Tier.DEVICE] = case["gpu"] * MIB
    request = PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        experts=experts,
        top_k={g: case["top_k"] for g in experts},
        budgets=budgets,
        compute_tier=max(budgets),
        costs=costs,
        overhead_s=case["layer_ms"] / 1e3,
    )
    return request, costs, experts


def latencies(case: Mapping[str, Any], costs: CostModel, stacked: bool) -> CostModel:
    """What one transfer takes besides its bytes, and one expert besides computing: measured on idle
    lanes through the executor, whose threads wake each other on the way. A bare store and a bare
    copy stream are faster by the half of it."""
    kept = road(case, costs, stacked, there=True)
    rows, up = kept["again"], kept["first"]
    if not stacked:
        read = road(case, costs, stacked, there=False)["first"]
        latency_s = read - rows - BLOCK_BYTES / (case["ssd"] * MIB)
        return replace(
            costs,
            read_latency_s=max(0.0, latency_s),
            expert_overhead_s=costs.expert_overhead_s + rows,
        )
    both = road(case, costs, stacked, there=False)["first"]
    return replace(
        costs,
        read_latency_s=max(0.0, both - up - BLOCK_BYTES / (case["ssd"] * MIB)),
        copy_latency_s=max(0.0, up - rows - BLOCK_BYTES / (case["h2d"] * MIB)),
        expert_overhead_s=costs.expert_overhead_s + rows,
    )


def road(
    case: Mapping[str, Any], costs: CostModel, stacked: bool, *, there: bool
) -> dict[str, float]:
    """Seconds from routing to release of one expert that is not where compute reads it (``first``:
    it is in RAM if ``there``, else on the disk), and of the same one again."""
    n = 8
    names = tuple(f"g#{e}" for e in range(n))
    blocks = {b: layout(b, BlockKind.EXPERT, [("w", "uint8", (BLOCK_BYTES,))], "g") for b in names}
    slots = 2 * BLOCK_BYTES
    budgets = {Tier.RAM: (n + 1) * BLOCK_BYTES if there else slots}
    if stacked:
        budgets[Tier.DEVICE] = slots
    plan = make_plan(
        PlanRequest(
            blocks=blocks,
            trace=Trace([Step(unit="l", blocks=(), group="g")]),
            experts={"g": names},
            top_k={"g": 1},
            budgets=budgets,
            compute_tier=max(budgets),
            expert_policy="lru",
        )
    )
    store = LatencyStore(
        MemoryStore(blocks.values(), {b: bytes(BLOCK_BYTES) for b in names}),
        seconds=LATENCY_S,
        bytes_per_s=case["ssd"] * MIB,
    )
    device = simulated(case, 4) if stacked else NullDevice()
    executor = Executor(plan, store, device)
    times: dict[str, list[float]] = {"first": [], "again": []}
    try:
        executor.start()
        for expert in names * 3:
            for times_of in times.values():
                work(2e-3)  # as between two layers: the threads are asleep
                began = time.perf_counter()
                executor.route("g", [expert])
                executor.acquire(expert)
                executor.release(expert)
                executor.end_route()
                times_of.append(time.perf_counter() - began)
    finally:
        executor.close()
    return {what: statistics.median(found[n:]) for what, found in times.items()}


def simulated(case: Mapping[str, Any], mib: int) -> SimDevice:
    return SimDevice(
        mib * MIB,
        h2d_bytes_per_s=case["h2d"] * MIB,
        seed=None,
        poison=False,
        check_races=False,
    )


def touched(device: Any) -> Any:
    """A device whose memory has all its pages before it is used: here the first touch of a MiB may
    take as long as reading it, where a run of minutes touches each once."""

    def whole(make: Any) -> Any:
        def memory(nbytes: int, name: str) -> Any:
            found = make(nbytes, name)
            found.tensor().zero_()
            return found

        return memory

    for name in ("host_memory", "device_memory"):
        setattr(device, name, whole(getattr(device, name)))
    return device


def rate(value: float, unit: str = BYTES_PER_S) -> Rate:
    return Rate(median=value, low=value, high=value, n=1, unit=unit)


def work(seconds: float) -> None:
    """Time that passes without the processor: the lanes' threads have it."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


def timed(ms: float, n: int = 10) -> float:
    """Milliseconds that ``work`` takes for ``ms``."""
    began = time.perf_counter()
    for _ in range(n):
        work(ms / 1e3)
    return (time.perf_counter() - began) / n * 1e3


def tracing_cost() -> float:
    """Seconds that recording one span takes."""
    recorder = Recorder(2**12)
    names = [str(random.random()) for _ in range(64)]
    n = 200_000
    began = time.perf_counter()
    for i in range(n):
        recorder.add("read", names[i & 63], 0.0, time.perf_counter(), 4096)
    return (time.perf_counter() - began) / n


if __name__ == "__main__":
    main()
