"""What a decision of the scheduler costs, without any I/O: microseconds per miss and per hit.

    python benchmarks/scheduler.py --blocks 100000 --tier device --output results/

A layer of a mixture of experts is one round: ``route``, then each expert is acquired (a miss is
fetched, arrives, is acquired again) and released, then ``end_route``. Fetches arrive at once, so
that only the residency state machine is timed; the loop around it is timed with it. Three rounds:

* ``miss``: uniform random routing over all experts with few slots; nearly every use is a miss.
  Time per miss, all events of the miss and of the few hits included.
* ``hit``: every expert is there; one call each for the whole layer (``acquire_all``).
* ``hit_single``: the same with ``acquire`` and ``release`` for each expert.

and one for weights: ``stream``, microseconds per streamed block of a dense model whose ring holds
two layers, all events included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from offload.blocks import ALIGN, BlockKind, BlockSpec, Tier
from offload.scheduler.plan import Home, Plan, TierLayout
from offload.scheduler.residency import Fetch, Instruction, Residency
from offload.scheduler.trace import Step, Trace


def moe_plan(layers: int, experts: int, slots: int, top: Tier) -> Plan:
    """``layers`` x ``experts`` experts of one page each; the device has half of RAM's slots."""
    blocks = {
        f"{g}.{e}": BlockSpec(
            id=f"{g}.{e}", kind=BlockKind.EXPERT, tensors=(), nbytes=ALIGN, group=f"{g}"
        )
        for g in range(layers)
        for e in range(experts)
    }
    tiers = {Tier.RAM: TierLayout(slot_bytes=ALIGN, slots=slots)}
    if top == Tier.DEVICE:
        few = slots if slots == len(blocks) else max(1, slots // 2)
        tiers[Tier.DEVICE] = TierLayout(slot_bytes=ALIGN, slots=few)
    return make_plan(blocks, Trace([]), [str(g) for g in range(layers)], tiers, Home.CACHED)


def dense_plan(layers: int, parts: int, top: Tier) -> Plan:
    """``layers`` steps of ``parts`` blocks; rings hold two layers."""
    steps = [
        Step(unit=f"layer{i}", blocks=tuple(f"{i}.{p}" for p in range(parts)))
        for i in range(layers)
    ]
    blocks = {
        b: BlockSpec(id=b, kind=BlockKind.WEIGHT, tensors=(), nbytes=ALIGN)
        for s in steps
        for b in s.blocks
    }
    tiers = {t: TierLayout(ring_bytes=2 * parts * ALIGN) for t in (Tier.RAM, Tier.DEVICE)[:top]}
    return make_plan(blocks, Trace(steps), [], tiers, Home.STREAMED)


def make_plan(
    blocks: dict[str, BlockSpec],
    trace: Trace,
    groups: list[str],
    tiers: dict[Tier, TierLayout],
    home: Home,
) -> Plan:
    return Plan(
        blocks=blocks,
        trace=trace,
        groups=tuple(groups),
        compute_tier=max(tiers),
        tiers=tiers,
        homes=dict.fromkeys(blocks, home),
        budgets={t: tiers[t].nbytes for t in tiers},
        reserves={},
        weight_bytes=len(blocks) * ALIGN,
        streamed_bytes_per_pass=0,
        expected_hit_rate=None,
    )


def deliver(residency: Residency, out: list[Instruction]) -> None:
    """Every fetch arrives at once, and so does what its arrival starts."""
    while out:
        out = [
            more
            for what in out
            if type(what) is Fetch
            for more in residency.arrived(what.block, what.dst)
        ]


def use_single(residency: Residency, experts: list[str]) -> None:
    for expert in experts:
        there, out = residency.acquire(expert)
        if not there:
            deliver(residency, out)
            if not residency.acquire(expert)[0]:
                raise RuntimeError(f"{expert} never came")
        deliver(residency, residency.release(expert))


def use_all(residency: Residency, experts: list[str]) -> None:
    if residency.acquire_all(experts) is None:
        raise RuntimeError("not resident")
    deliver(residency, residency.release_all(experts))


def run_layers(
    residency: Residency,
    routes: list[tuple[str, list[str]]],
    use: Callable[[Residency, list[str]], None],
) -> float:
    """Seconds for a list of (layer, experts)."""
    start = time.perf_counter()
    for group, experts in routes:
        deliver(residency, residency.route(group, experts))
        use(residency, experts)
        residency.end_route()
    return time.perf_counter() - start


def routes_of(
    layers: int, experts: int, k: int, rounds: int, rng: random.Random
) -> list[tuple[str, list[str]]]:
    return [
        (str(i % layers), [f"{i % layers}.{e}" for e in rng.sample(range(experts), k)])
        for i in range(rounds)
    ]


def bench_moe(args: argparse.Namespace, top: Tier) -> dict[str, float]:
    layers = args.layers
    experts = args.blocks // layers
    rng = random.Random(args.seed)
    few = Residency(moe_plan(layers, experts, max(args.k, args.slots), top))
    run_layers(few, routes_of(layers, experts, args.k, 4 * layers, rng), use_single)  # fill slots
    samples = []
    hits = misses = 0
    for _ in range(args.repeat):
        hits, misses = few.hits, few.misses
        routes = routes_of(layers, experts, args.k, args.rounds, rng)
        seconds = run_layers(few, routes, use_single)
        samples.append(seconds / (few.misses - misses) * 1e6)
    few.validate()
    hot = 16  # experts of each layer that are used: the others are there as well
    full = Residency(moe_plan(layers, experts, layers * experts, top))
    routes = [
        (str(g), [f"{g}.{e}" for e in range(start, min(start + args.k, experts))])
        for start in range(0, max(hot, args.k), args.k)
        for g in range(layers)
    ]
    run_layers(full, routes, use_single)
    uses = sum(len(e) for _, e in routes)
    every = [run_layers(full, routes, use_all) / uses * 1e6 for _ in range(args.repeat)]
    single = [run_layers(full, routes, use_single) / uses * 1e6 for _ in range(args.repeat)]
    return {
        "miss_us": statistics.median(samples),
        "miss_share": (few.misses - misses) / (few.misses - misses + few.hits - hits),
        "hit_us": statistics.median(every),
        "hit_single_us": statistics.median(single),
    }


def bench_stream(args: argparse.Namespace, top: Tier) -> dict[str, float]:
    plan = dense_plan(args.layers, args.parts, top)
    residency = Residency(plan)
    deliver(residency, residency.start())
    samples = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        for step in plan.trace:
            ticket, out = residency.need(step.unit, step.blocks)
            deliver(residency, out)
            if residency.missing(ticket):
                raise RuntimeError(f"{step.unit} never became ready")
            deliver(residency, residency.done(ticket))
        samples.append((time.perf_counter() - start) / len(plan.blocks) * 1e6)
    return {"stream_us": statistics.median(samples)}


def machine() -> dict[str, str | int | None]:
    """What the numbers depend on."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        model = next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), "")
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": str(os.getloadavg()[0]),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100_000, help="experts of all layers")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--k", type=int, default=8, help="experts that a layer routes to")
    parser.add_argument("--slots", type=int, default=10_000, help="expert slots in RAM")
    parser.add_argument("--parts", type=int, default=4, help="blocks of a dense layer")
    parser.add_argument("--rounds", type=int, default=2000, help="layers run in one sample")
    parser.add_argument("--repeat", type=int, default=5, help="samples; the median is reported")
    parser.add_argument("--tier", choices=["ram", "device", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for scheduler.json")
    args = parser.parse_args()
    if args.blocks < args.layers * args.k:
        parser.error(f"--blocks must be at least layers x k = {args.layers * args.k}")
    wanted = {"ram": [Tier.RAM], "device": [Tier.DEVICE], "both": [Tier.RAM, Tier.DEVICE]}
    results = {}
    for top in wanted[args.tier]:
        results[top.name.lower()] = r = bench_moe(args, top) | bench_stream(args, top)
        print(
            f"{top.name.lower():>6}: miss {r['miss_us']:.1f} us ({r['miss_share']:.0%} of uses), "
            f"hit {r['hit_us']:.2f} us in one call, {r['hit_single_us']:.2f} us singly, "
            f"streamed block {r['stream_us']:.1f} us"
        )
    options = {k: v for k, v in vars(args).items() if k != "output"}
    report = {"benchmark": "scheduler", "options": options, "machine": machine()}
    text = json.dumps(report | {"results": results}, indent=2)
    print(text)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "scheduler.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
