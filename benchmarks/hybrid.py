"""Whether the device and the CPU really compute a layer's experts at the same time.

    python benchmarks/hybrid.py

Each layer routes to four experts: two lie in slots of the simulated device, two in RAM, and every
one takes a known time wherever it is computed, as measured before. The ideal layer takes as long as
one site's two; one site after the other takes both. The same plan on the simulator's virtual clock
is the prediction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import facts, record, settings
from simulate import rate, timed, touched, work

from offload.blocks import BlockKind, Tier, layout
from offload.io.stores import MemoryStore
from offload.runtime.executor import Executor
from offload.runtime.sim_device import SimDevice
from offload.scheduler.costs import CostModel
from offload.scheduler.hardware import FLOP_PER_S, Hardware
from offload.scheduler.plan import SITE_ACTIVATIONS, Plan
from offload.scheduler.planner import PlanRequest, make_plan
from offload.scheduler.simulate import simulate
from offload.scheduler.trace import Step, Trace

MIB = 2**20
WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--expert-ms", type=float, default=10.0)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    expert_s = timed(args.expert_ms, 100) / 1e3  # sleeping for so long really takes here
    plan, costs = plan_of(args.layers, expert_s)

    def routing(number: int, group: str) -> list[str]:
        return [f"{group}#{e}" for e in range(4)]

    predicted = simulate(plan, costs, passes=args.passes, skip=2, routing=routing)
    times = run(plan, args.expert_ms / 1e3, args.passes)
    measured = statistics.median(times[2:])
    ideal = args.layers * 2 * expert_s
    result = {
        "benchmark": "hybrid",
        "facts": facts(),
        "settings": settings(args),
        "ideal_pass_s": ideal,
        "serial_pass_s": 2 * ideal,
        "predicted_pass_s": predicted.pass_s,
        "passes_s": times,
        "overlap": ideal / measured,
        "off": predicted.pass_s / measured - 1,
    }
    print(
        f"pass {measured:.3f} s, ideal {ideal:.3f} s, one site after the other {2 * ideal:.3f} s: "
        f"{ideal / measured:.1%} of the ideal overlap; predicted {predicted.pass_s:.3f} s "
        f"({result['off']:+.1%})"
    )
    print(f"written to {record('hybrid', result, args.output)}")


def plan_of(layers: int, expert_s: float) -> tuple[Plan, CostModel]:
    """All experts in RAM; slots for two of each layer's four; copies that never pay."""
    blocks, steps, experts = {}, [], {}
    for i in range(layers):
        group = f"g{i}"
        experts[group] = tuple(f"{group}#{e}" for e in range(4))
        for b in experts[group]:
            blocks[b] = layout(b, BlockKind.EXPERT, [("w", "uint8", (MIB,))], group)
        steps.append(Step(unit=f"l{i}", blocks=(), group=group))
    fast = rate(1e15)
    hardware = Hardware(
        ssd_read=fast, ssd_write=fast, ssd_mixed=fast, ram_read=fast, memcpy=fast,
        matmul={"float32": rate(1e18, FLOP_PER_S)}, gemv={"uint8": fast},
        h2d=rate(MIB / (8 * expert_s)), d2h=fast, cores=1, ram_bytes=2**34, name="known rates",
    )  # fmt: skip
    costs = CostModel(
        hardware=hardware, read_latency_s=0.0, copy_latency_s=0.0, expert_overhead_s=expert_s
    )
    activations = {SITE_ACTIVATIONS: 16 * 4 * WIDTH}
    room = sum(activations.values())
    request = PlanRequest(
        blocks=blocks,
        trace=Trace(steps),
        experts=experts,
        top_k=dict.fromkeys(experts, 4),
        budgets={Tier.RAM: 4 * layers * MIB + room + MIB, Tier.DEVICE: 2 * layers * MIB + room},
        reserves={Tier.RAM: activations, Tier.DEVICE: activations},
        compute_tier=Tier.DEVICE,
        costs=costs,
        expert_policy="lru",
        split_rows=8,
    )
    return make_plan(request), costs


def run(plan: Plan, expert_s: float, passes: int) -> list[float]:
    """Seconds of each pass on real threads."""
    contents = {b: bytes(s.nbytes) for b, s in plan.blocks.items()}
    store = MemoryStore(plan.blocks.values(), contents)
    device = touched(
        SimDevice(plan.budgets[Tier.DEVICE], seed=None, poison=False, check_races=False)
    )
    x = torch.zeros(WIDTH)

    def compute(views: Any) -> torch.Tensor:
        work(expert_s)
        return x

    executor = Executor(plan, store, device)
    times: list[float] = []
    try:
        executor.start()
        for group in plan.groups:  # two of each layer go up
            both = [f"{group}#{e}" for e in range(2)]
            executor.route(group, both)
            for b in both:
                executor.acquire(b)
                executor.release(b)
            executor.end_route()
        for _ in range(passes):
            began = time.perf_counter()
            for group in plan.groups:
                loads = {f"{group}#{e}": 1 for e in range(4)}
                schedule, _ = executor.split_route(group, loads, lambda _: [x])
                if schedule is None or len(schedule.cpu) != 2:
                    raise SystemExit(f"not two and two: {schedule}")
                for b in schedule.cpu:
                    executor.on_cpu(b, compute, (WIDTH,), torch.float32)
                for b in schedule.device:
                    executor.acquire(b)
                    work(expert_s)
                    executor.release(b)
                for b in schedule.cpu:
                    executor.from_cpu(b)
                executor.end_route()
            times.append(time.perf_counter() - began)
    finally:
        executor.close()
    return times


if __name__ == "__main__":
    main()
