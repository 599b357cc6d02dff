"""How much of the ideal overlap the pipeline reaches when I/O and compute take equal time.

    python benchmarks/overlap.py --layers 32 --device sim

A store of a fixed rate and a computation of a fixed time per layer: the ideal pass is the longer
of the two (plus the first layer's fill), the worst their sum. Two tiers, or three with the
simulated accelerator, whose copies run at the same rate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from common import facts, record, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=4, help="per layer")
    parser.add_argument("--block-mib", type=float, default=1.0)
    parser.add_argument("--layer-ms", type=float, default=20.0)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "sim"], default="cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    from offload.blocks import BlockKind, Tier, layout
    from offload.io.stores import MemoryStore
    from offload.io.wrappers import LatencyStore
    from offload.runtime.executor import Executor
    from offload.runtime.null_device import NullDevice
    from offload.runtime.sim_device import SimDevice
    from offload.scheduler.planner import PlanRequest, make_plan
    from offload.scheduler.trace import Step, Trace

    size = int(args.block_mib * 2**20) // 4096 * 4096
    layer_s = args.layer_ms / 1e3
    rate = args.blocks * size / layer_s
    steps, blocks = [], {}
    for i in range(args.layers):
        ids = []
        for j in range(args.blocks):
            spec = layout(f"l{i}/{j}", BlockKind.WEIGHT, [("w", "uint8", (size,))])
            blocks[spec.id] = spec
            ids.append(spec.id)
        steps.append(Step(unit=f"l{i}", blocks=tuple(ids)))
    ring = 3 * args.blocks * size
    top = Tier.DEVICE if args.device == "sim" else Tier.RAM
    budgets = {t: ring for t in ((Tier.RAM, Tier.DEVICE) if top is Tier.DEVICE else (Tier.RAM,))}
    plan = make_plan(
        PlanRequest(blocks=blocks, trace=Trace(steps), budgets=budgets, compute_tier=top)
    )
    contents = {b: bytes(s.nbytes) for b, s in blocks.items()}
    store = LatencyStore(MemoryStore(blocks.values(), contents), bytes_per_s=rate)
    device = (
        SimDevice(ring, h2d_bytes_per_s=rate, seed=None, poison=False, check_races=False)
        if args.device == "sim"
        else NullDevice()
    )
    executor = Executor(plan, store, device)
    times = []
    streamed = sum(s.slot_nbytes for b, s in blocks.items() if b not in plan.tiers[top].pinned)
    try:
        executor.start()
        for _ in range(args.passes + 1):
            began = time.perf_counter()
            for step in steps:
                needed = tuple(b for b in step.blocks if b not in plan.tiers[top].pinned)
                ticket = executor.enter(step.unit, needed)
                end = time.perf_counter() + layer_s
                while (left := end - time.perf_counter()) > 0:
                    time.sleep(left)
                executor.leave(ticket, needed)
            times.append(time.perf_counter() - began)
    finally:
        executor.close()
    ideal = max(args.layers * layer_s, streamed / rate)
    measured = statistics.median(times[1:])
    result = {
        "benchmark": "overlap",
        "facts": facts(),
        "settings": settings(args),
        "ideal_pass_s": ideal,
        "serial_pass_s": args.layers * layer_s + streamed / rate,
        "passes_s": times,
        "overlap": ideal / measured,
    }
    print(
        f"{args.device}: pass {measured:.3f} s, ideal {ideal:.3f} s, serial "
        f"{result['serial_pass_s']:.3f} s: {ideal / measured:.1%} of the ideal overlap"
    )
    print(f"written to {record(f'overlap-{args.device}', result, args.output)}")


if __name__ == "__main__":
    main()
