"""Fine-tuning beyond RAM: step time against its bound, the resident loop, and DeepSpeed.

    python benchmarks/finetune.py --config benchmarks/configs/dense-174m.json --work /scratch \\
        --ram 1GiB 2GiB 4GiB --deepspeed-python VENV/bin/python
    python benchmarks/finetune.py --config benchmarks/configs/dense-1b-v128k.json --work /scratch \\
        --cgroup 4GiB --tokens 512 2048 --clip on --name finetune-1b

Every point is ``offload finetune`` in a process and a cgroup of its own, on a random checkpoint and
random text. ``--ram`` are budgets (the cgroup has the bare process and 128 MiB more), ``--cgroup``
the size of the group itself. Around each point the machine is probed: a disk that reads and writes
at once with the run's requests, products at the model's shapes, a stream through memory. From
these and from the bytes that the run has moved comes ``T_min`` (``finetune_bound.py``). A step time
is the median of all steps after the second.

Clipping that is on is active in every step, or the point says that it is not. Peers: a plain loop
with everything in RAM (16 bytes per parameter and whole logits; left out where that does not fit),
and DeepSpeed's ZeRO-Infinity with states and parameters on the same disk, both without a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    drop_page_cache,
    facts,
    offload_command,
    record,
    run_limited,
    settings,
)
from finetune_bound import (
    Model,
    always_clipped,
    exposed_optimizer,
    judge,
    mean_rates,
    steady,
)

SLACK = 128 << 20
"""Of a cgroup above process and budget: what the kernel charges for tables and sockets."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configs = ROOT / "benchmarks" / "configs"
    parser.add_argument("--config", type=Path, default=configs / "dense-174m.json")
    parser.add_argument("--layers", type=int, help="keep only so many")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "finetune")
    parser.add_argument("--ram", nargs="*", default=[], help="budgets, e.g. 1GiB")
    parser.add_argument("--cgroup", nargs="*", default=[], help="sizes of the group, e.g. 4GiB")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="of a step")
    parser.add_argument("--states", nargs="+", default=["fp32"], choices=["fp32", "bf16", "8bit"])
    parser.add_argument("--clip", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument("--max-grad-norm", type=float, default=0.01, help="where clipping is on")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--request", type=int, default=4 << 20, help="bytes, of the disk's probe")
    parser.add_argument("--depth", type=int, default=4, help="requests at a time of the probe")
    parser.add_argument("--deepspeed-python", type=Path, help="an interpreter with deepspeed")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-cgroup", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--name", default="finetune", help="of the results' file")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: two come before the first that counts")

    import torch
    from finetune_inputs import checkpoint, shape

    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    model_dir = checkpoint(args.config, args.work, args.layers)
    model = shape(model_dir)
    asked = budgets(args, model_dir)
    points: list[dict[str, Any]] = []
    peers: dict[str, Any] = {}
    result = {
        "benchmark": "finetune",
        "settings": settings(args),
        "facts": facts(),
        "parameters": model.parameters,
        "peers": peers,
        "points": points,
    }
    for tokens in args.tokens:
        if not args.no_peers:
            peers[str(tokens)] = run_peers(args, model_dir, model, tokens)
            print(peer_line(tokens, peers[str(tokens)]), flush=True)
        for states, clip in product(args.states, args.clip):
            for budget in asked:
                point = measure(args, model_dir, model, budget, tokens, states, clip == "on")
                compare(point, peers.get(str(tokens), {}))
                points.append(point)
                for known, exposed in zip(points, exposed_optimizer(points), strict=True):
                    known["exposed_optimizer_s"] = exposed
                where = record(args.name, result, args.output)  # now: a sweep takes hours
                print(line(point), flush=True)
    print("\n" + table(points))
    print(f"written to {where}")
    if args.plot:
        plot(result, args.plot)


def budgets(args: argparse.Namespace, model: Path) -> list[int]:
    """Bytes of the budgets that are asked for, the smallest first."""
    from finetune_inputs import planned

    from offload.units import parse_bytes

    out = [parse_bytes(r) for r in args.ram]
    if args.cgroup:
        with run_options(args, model, args.tokens[0], args.states[0], clipping=True) as options:
            bare = planned(**options).baseline
        out += [parse_bytes(c) - bare - SLACK for c in args.cgroup]
    if not out:
        raise SystemExit("give budgets: --ram 1GiB 4GiB, or --cgroup 4GiB")
    return sorted(out)


@contextmanager
def run_options(
    args: argparse.Namespace, model: Path, tokens: int, states: str, *, clipping: bool
) -> Iterator[dict[str, Any]]:
    """A run's options, as ``TrainOptions`` has them, with directories that go afterwards."""
    from finetune_inputs import text, vocabulary

    with tempfile.TemporaryDirectory(prefix="finetune-", dir=args.work) as name:
        work = Path(name)
        data = text(work / "train.txt", vocabulary(model), tokens, args.steps)
        yield {
            "model": str(model),
            "data": str(data),
            "output": str(work / "out"),
            "disk": str(work / "states"),
            "states": states,
            "max_steps": args.steps,
            "seq_len": tokens,
            "schedule": "constant",
            "warmup": 0.0,
            "max_grad_norm": args.max_grad_norm if clipping else 0.0,
            "threads": args.threads,
        }


def flags(options: dict[str, Any]) -> list[str]:
    """As the command line spells them."""
    out = []
    for name, value in options.items():
        out += ["--" + name.replace("_", "-"), str(value)]
    return out


def measure(
    args: argparse.Namespace, directory: Path, model: Model, ram: int, tokens: int, states: str,
    clipping: bool,
) -> dict[str, Any]:  # fmt: skip
    """One run between two probes."""
    from finetune_inputs import planned
    from finetune_probe import measure as probe

    def rates() -> Any:
        return probe(
            model, tokens, args.work, request_bytes=args.request, depth=args.depth,
            checkpoint=directory,
        )  # fmt: skip

    point: dict[str, Any] = {
        "ram_bytes": ram, "tokens_asked": tokens, "states": states, "clipping": clipping,
    }  # fmt: skip
    with run_options(args, directory, tokens, states, clipping=clipping) as options:
        options["ram"] = ram
        try:
            plan = planned(**options)
        except SystemExit as error:
            return point | {"error": str(error)}
        limit = None if args.no_cgroup else plan.baseline + ram + SLACK
        metrics = Path(options["data"]).with_name("metrics.jsonl")
        command = offload_command(
            "finetune", *flags(options), "--json", str(metrics), "--no-tensorboard"
        )
        before = rates()
        drop_page_cache()
        code, err, limited = run_limited(command, limit, args.timeout)
        if code:
            last = err.strip().splitlines()[-1:] or [""]
            return point | {"error": f"exit {code}: {last[0][-300:]}"}
        after = rates()
        events = [json.loads(text) for text in metrics.read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    end = events[-1]
    found = judge(
        model, states, plan.homes, steady(events), mean_rates([before, after]), clipping=clipping
    )
    return point | found | {
        "cgroup_bytes": limit if limited else None,
        "baseline_rss_bytes": plan.baseline,
        "plan": [text.replace(str(metrics.parent), "WORK") for text in plan.lines],
        "predicted_s": plan.predicted_s,
        "homes": asdict(plan.homes),
        "rates": [listed(before), listed(after)],
        "first_forward_s": steps[0]["phases"]["forward"],
        "steps_s": [e["seconds"] for e in steps],
        "losses": [e["loss"] for e in steps],
        "clipped_always": always_clipped(events, args.max_grad_norm) if clipping else None,
        "rss_of_budget": end["peak_rss_bytes"] / end["budget_bytes"],
        "peak_rss_bytes": end["peak_rss_bytes"],
    }  # fmt: skip


def listed(rates: Any) -> dict[str, Any]:
    """Rates as JSON has them: keys are text."""
    found = asdict(rates)
    return found | {"ssd": {f"{share:g}": rate for share, rate in found["ssd"].items()}}


def run_peers(
    args: argparse.Namespace, directory: Path, model: Model, tokens: int
) -> dict[str, Any]:
    """What others do with the same model and as many tokens."""
    import psutil

    clip = str(args.max_grad_norm if "on" in args.clip else 0.0)
    common = ["--tokens", str(tokens), "--steps", str(args.steps), "--max-grad-norm", clip]
    out: dict[str, Any] = {}
    needed = 18 * model.parameters + 12 * tokens * model.head[0] + (1 << 30)
    free = psutil.virtual_memory().available
    if needed > free:
        out["resident"] = {"did_not_run": f"needs {needed} bytes of RAM, {free} are free"}
    else:
        out["resident"] = peer(args, Path(sys.executable), "resident_train.py", directory, common)
    python = args.deepspeed_python or Path(sys.executable)
    found = subprocess.run(
        [python, "-c", "import deepspeed"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        out["deepspeed"] = {"did_not_run": found.stderr.strip().splitlines()[-1][-200:]}
        return out
    swap = args.work / "deepspeed-swap"
    out["deepspeed"] = peer(
        args, python, "deepspeed_train.py", directory, [*common, "--swap", str(swap)]
    )
    shutil.rmtree(swap, ignore_errors=True)
    return out


def peer(
    args: argparse.Namespace, python: Path, script: str, model: Path, more: list[str]
) -> dict[str, Any]:
    """One peer, in its own process, without a limit of memory."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peer.json"
        # DeepSpeed compiles on its first import, and anew with another ninja than that time.
        path = f"{python.absolute().parent}{os.pathsep}{os.environ['PATH']}"
        command = [
            "env", f"PATH={path}",
            str(python), str(ROOT / "benchmarks" / "peers" / script), "--model", str(model),
            "--threads", str(args.threads), "--json", str(result), *more,
        ]  # fmt: skip
        drop_page_cache()
        code, err, _ = run_limited(command, None, args.timeout)
        if code or not result.exists():
            last = err.strip().splitlines()[-1:] or [""]
            return {"did_not_run": f"exit {code}: {last[0][-200:]}"}
        found: dict[str, Any] = json.loads(result.read_text())
    return found | {"seconds": statistics.median(found["steps_s"][2:])}


def compare(point: dict[str, Any], peers: dict[str, Any]) -> None:
    """A peer's step time over ours; above 1 we are faster."""
    for name, found in peers.items():
        if "seconds" in found and "seconds" in point:
            point[f"{name}_ratio"] = found["seconds"] / point["seconds"]


def peer_line(tokens: int, peers: dict[str, Any]) -> str:
    return f"{tokens} tokens, peers: " + "; ".join(
        f"{name} {found['seconds']:.2f} s per step, peak RSS {found['peak_rss_bytes'] / 1e9:.1f} GB"
        if "seconds" in found
        else f"{name} did not run ({found['did_not_run']})"
        for name, found in peers.items()
    )


def head(point: dict[str, Any]) -> str:
    from offload.units import format_bytes

    clip = "clipped" if point["clipping"] else "no clip"
    return (
        f"{format_bytes(point['ram_bytes']):>10} {point['tokens_asked']:5d} tokens "
        f"{point['states']:>4} {clip}"
    )


def line(point: dict[str, Any]) -> str:
    """A point in words."""
    if "error" in point:
        return f"{head(point)}: {point['error']}"
    busy = ", ".join(
        f"{phase} {point[phase + '_s']:.2f} s (bound {max(lane.values()):.2f}, "
        f"{point['busiest'][phase]})"
        for phase, lane in point["bound_lanes"].items()
    )
    inactive = point["clipping"] and not point["clipped_always"]
    return (
        f"{head(point)}: {point['seconds']:.2f} s, {point['fraction']:.0%} of T_min "
        f"{point['t_min']:.2f} s ({point['fraction_products']:.0%} with products alone); "
        f"{busy}; RSS {point['rss_of_budget']:.0%} of the budget"
        + ("; NOT every step was clipped" if inactive else "")
    )


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("s/step", lambda p: f"{p['seconds']:.2f}"),
    ("T_min", lambda p: f"{p['t_min']:.2f}"),
    ("of it", lambda p: f"{p['fraction']:.0%}"),
    ("predicted", lambda p: "-" if p["predicted_s"] is None else f"{p['predicted_s']:.2f}"),
    ("exposed", lambda p: "-" if p["exposed_optimizer_s"] is None
     else f"{p['exposed_optimizer_s']:.2f}"),
    ("waiting", lambda p: f"{p['waiting_s']:.2f}"),
    ("SSD busy", lambda p: f"{p['ssd_busy_share']:.0%}"),
    ("R B/p", lambda p: f"{p['read_per_parameter']:.1f}"),
    ("W B/p", lambda p: f"{p['written_per_parameter']:.1f}"),
    ("RSS", lambda p: f"{p['rss_of_budget']:.0%}"),
    ("x resident", lambda p: f"{p['resident_ratio']:.2f}" if "resident_ratio" in p else "-"),
    ("x DeepSpeed", lambda p: f"{p['deepspeed_ratio']:.2f}" if "deepspeed_ratio" in p else "-"),
)  # fmt: skip


def table(points: list[dict[str, Any]]) -> str:
    """All points, a line each."""
    names = " ".join(f"{name:>11}" for name, _ in COLUMNS)
    rows = [f"{'':38s} {names}"]
    for point in points:
        if "error" in point:
            rows.append(f"{head(point):38s} {point['error']}")
            continue
        rows.append(f"{head(point):38s} " + " ".join(f"{get(point):>11}" for _, get in COLUMNS))
    return "\n".join(rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Step time over the budget, beside bounds and peers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points = [p for p in result["points"] if "error" not in p]
    counts = sorted({p["tokens_asked"] for p in points})
    figure, grid = plt.subplots(1, len(counts), figsize=(5 * len(counts), 4), squeeze=False)
    for axes, tokens in zip(grid[0], counts, strict=True):
        here = [p for p in points if p["tokens_asked"] == tokens]
        for key in sorted({(p["states"], p["clipping"]) for p in here}):
            curve = [p for p in here if (p["states"], p["clipping"]) == key]
            gib = [p["ram_bytes"] / 2**30 for p in curve]
            label = f"{key[0]}, {'clipped' if key[1] else 'no clipping'}"
            [drawn] = axes.plot(gib, [p["seconds"] for p in curve], "o-", label=label)
            axes.plot(gib, [p["t_min"] for p in curve], "--", color=drawn.get_color())
        for name, found in result["peers"].get(str(tokens), {}).items():
            if "seconds" in found:
                axes.axhline(found["seconds"], linestyle=":", color="grey")
                axes.annotate(name, (0.99, found["seconds"]), ha="right", va="bottom",
                              xycoords=("axes fraction", "data"))  # fmt: skip
        axes.set_title(f"{result['parameters'] / 1e6:,.0f}M parameters, {tokens} tokens a step")
        axes.set_xlabel("RAM budget, GiB")
        axes.set_ylabel("seconds per step (dashed: bound)")
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"plotted to {path}")


if __name__ == "__main__":
    main()
