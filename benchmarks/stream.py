"""Streaming a checkpoint that does not fit: fraction of the SSD bound, ratio to accelerate.

    python benchmarks/stream.py --kind dense --work /scratch --tokens 12

For each RAM budget (a share of the weights) the command line generates in a process of its own,
inside a memory cgroup of baseline + budget + 128 MiB; the disk is probed before and after. Bounds:

* dense: every token reads what the budget cannot hold, ``B_ssd / (weights - usable)``, where
  ``usable`` is the budget less KV cache, activations and logits;
* MoE: ``B_ssd / (bytes of missed experts and of streamed dense weights)`` at the hit rate that was
  measured, to be read beside the share of experts that the cache can hold. An expert that was read
  on a right guess is a miss; what wrong guesses read is not in the bound.

``B_ssd`` reads into a few buffers that stay in the processor's cache, which is the most a disk can
do. The prediction is made from what ``offload generate`` measures before it plans
(``runtime.probe_together``), measured again around the run, and is printed beside the one that the
run itself has made before it began.

Each budget runs ``--repeats`` times, with a probe before, between and after: a shared machine's
memory and disk change by a third within seconds. The medians of speed, bound and prediction count;
all runs are recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
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
    ssd_rate,
)

PEERS = ("disk_offload", "device_map")
SLACK = 128 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=["dense", "moe"], default="dense")
    parser.add_argument("--model", help="a checkpoint; default: a synthetic one of >= 4 GB")
    parser.add_argument(
        "--work", default=tempfile.gettempdir(), help="directory on the disk to test"
    )
    parser.add_argument("--shares", type=int, nargs="*", default=[10, 25, 50, 75, 100])
    parser.add_argument("--ram", nargs="+", default=[], help="further budgets, e.g. 1GiB")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--peer-tokens", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-cgroup", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    model = checkpoint(args)
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    budgets = [weights * s // 100 + (SLACK if s >= 100 else 0) for s in args.shares]
    from offload.units import format_bytes, parse_bytes

    budgets += [parse_bytes(r) for r in args.ram]
    folders = {} if args.no_peers else prepare_peers(args, model)
    points = []
    baseline = None
    for budget in sorted(budgets):
        runs = []
        for _ in range(args.repeats):
            runs.append(measure(args, model, weights, budget, baseline))
            baseline = runs[-1].get("baseline_rss_bytes", baseline)
            if "error" in runs[-1]:
                break
        point = typical(runs)
        if "error" not in point:
            point["peers"] = run_peers(args, model, folders, budget, baseline)
            rates = [p["decode_tok_s"] for p in point["peers"].values() if p.get("decode_tok_s")]
            point["ratio_to_best_peer"] = point["decode_tok_s"] / max(rates) if rates else None
        points.append(point)
        print(line(point, format_bytes), flush=True)
    result = {
        "benchmark": "stream",
        "kind": args.kind,
        "settings": settings(args),
        "facts": facts(),
        "weights_bytes": weights,
        "points": points,
        "median_prediction_error": prediction_error(points),
    }
    where = record(f"stream-{args.kind}", result, args.output)
    print(f"median |predicted - measured| = {result['median_prediction_error']}")
    print(f"written to {where}")
    if args.plot:
        plot(result, args.plot)


def checkpoint(args: argparse.Namespace) -> Path:
    """The given model, or a synthetic one, made once."""
    if args.model:
        return Path(args.model)
    target = Path(args.work) / f"offload-{args.kind}-4g"
    if not target.exists():
        from offload.models.synth import synth

        synth(ROOT / "benchmarks" / "configs" / f"{args.kind}-4g.json", target)
    return target


def measure(
    args: argparse.Namespace,
    model: Path,
    weights: int,
    budget: int,
    baseline: int | None,
) -> dict[str, Any]:
    """One budget: probe, generate, probe."""
    before = ssd_rate(model)
    machine = [conditions(args, model)]
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "result.json"
        ids = ",".join(str(5 + i) for i in range(args.prompt_tokens))
        command = offload_command(
            "generate", "-m", str(model), "--prompt-ids", ids, "-n", str(args.tokens),
            "--ignore-eos", "--temp", "1", "--seed", "0", "-t", str(args.threads),
            "--ram", str(budget), "--json", str(out),
        )  # fmt: skip
        if baseline is None and not args.no_cgroup:
            # The first run measures the baseline that the limit is made of.
            code, err, _ = run_limited(command, None, args.timeout)
            if code == 0:
                baseline = json.loads(out.read_text())["baseline_rss_bytes"]
        limit = None if args.no_cgroup or baseline is None else baseline + budget + SLACK
        drop_page_cache()
        code, err, limited = run_limited(command, limit, args.timeout)
        if code != 0 or not out.exists():
            return {"ram_budget_bytes": budget, "error": f"exit {code}: {err.strip()[-300:]}"}
        run = json.loads(out.read_text())
    machine.append(conditions(args, model))
    after = ssd_rate(model)
    rate = statistics.fmean([before, after])
    rates = [predict(args, model, budget, m) for m in machine if m is not None]
    predicted = harmonic_mean(rates)
    reserves = run.get("plan", {}).get("reserves", {})
    apart = sum(reserves.get(k, 0) for k in ("KV cache", "activations", "logits"))
    streamed = max(0, weights - (budget - apart))
    steps = max(1, run["new_tokens"] - 1)
    decode_bytes = run["decode_disk_read_bytes"] / steps
    homes, tier = run["plan"]["homes"], run["plan"]["tiers"]["ram"]
    experts = sum(v["blocks"] for k, v in homes.items() if k.startswith("experts"))
    missed = run["decode_misses"] * tier["slot_bytes"] / steps
    dense = homes.get("weights streamed", {}).get("bytes", 0)
    bound_bytes = streamed if args.kind == "dense" else missed + dense
    bound = rate / bound_bytes if bound_bytes else None
    return {
        **{k: v for k, v in run.items() if k not in ("token_ids", "plan", "text")},
        "share": budget / weights,
        # With the disk as it was around the run, which no prediction made before it can know.
        "predicted_decode_tok_s": predicted,
        "predicted_before_tok_s": run["predicted_decode_tok_s"],
        "in_cgroup": limited,
        "ssd_before_bytes_per_s": before,
        "ssd_after_bytes_per_s": after,
        "machine": [m and [together(one) for one in m] for m in machine],
        "disk_bytes_per_token": decode_bytes,
        "bound_bytes_per_token": bound_bytes,
        "cache_share": tier["slots"] / experts if experts and tier["slots"] else None,
        "bound_tok_s": bound,
        "fraction_of_bound": run["decode_tok_s"] / bound if bound else None,
        "rss_over_budget": (run["peak_rss_bytes"] - run["baseline_rss_bytes"]) / budget,
    }


MEDIANS = (
    "decode_tok_s", "predicted_decode_tok_s", "predicted_before_tok_s", "bound_tok_s",
    "fraction_of_bound", "ttft_s", "load_s",
)  # fmt: skip


def typical(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One budget's runs as one: medians of times and rates, the most memory; a failure is one."""
    for run in runs:
        if "error" in run:
            return run
    speeds = sorted(runs, key=lambda run: float(run["decode_tok_s"]))
    point = dict(speeds[len(speeds) // 2])
    for name in MEDIANS:
        known = [run[name] for run in runs if run.get(name) is not None]
        point[name] = statistics.median(known) if known else None
    point["rss_over_budget"] = max(run["rss_over_budget"] for run in runs)
    keep = (*MEDIANS, "ssd_before_bytes_per_s", "ssd_after_bytes_per_s", "machine")
    point["runs"] = [{name: run[name] for name in keep} for run in runs]
    return point


def harmonic_mean(rates: list[float | None]) -> float | None:
    """The mean of the times, as a rate; None if one is missing."""
    known = [r for r in rates if r]
    return len(known) / sum(1 / r for r in known) if known and len(known) == len(rates) else None


def together(hardware: dict[str, Any] | None) -> dict[str, Any] | None:
    """What of the machine's rates is measured anew before each run."""
    names = ("ssd_read", "gemv", "product_s", "read_beside", "gemv_beside")
    return None if hardware is None else {name: hardware[name] for name in names}


def conditions(args: argparse.Namespace, model: Path) -> list[dict[str, Any] | None] | None:
    """The machine now, and with one thread fewer, as ``offload generate`` measures it first."""
    code = """
import json, sys, torch
from pathlib import Path
model, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
from offload.cli.planning import find_hardware, on_these_files
found = on_these_files(find_hardware(Path(model)), Path(model))
print(json.dumps([None if one is None else one.to_json() for one in found]))
"""
    found: list[dict[str, Any] | None] | None = in_process(code, [str(model), args.threads])
    return found


def predict(
    args: argparse.Namespace, model: Path, budget: int, machine: list[dict[str, Any] | None]
) -> float | None:
    """Tokens per second that the plan predicts on a machine of ``conditions``."""
    code = """
import json, sys, torch
from pathlib import Path
model, budget, machine, prompt, tokens, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
from offload.models.load import Options, prepare
from offload.runtime.guess_cache import recall
from offload.scheduler.hardware import Hardware
now, fewer = (None if one is None else Hardware.from_json(one) for one in machine)
plan = prepare(Path(model), Options(ram=budget, hardware=now, fewer=fewer,
                                    guess_precision=recall(model),
                                    prompt_tokens=prompt, context=prompt + tokens)).plan
print(1 / plan.predicted_pass_s.mid)
"""
    job = [str(model), budget, machine, args.prompt_tokens, args.tokens, args.threads]
    found: float | None = in_process(code, job)
    return found


def in_process(code: str, job: list[Any]) -> Any:
    """What ``code`` prints as JSON in a process of its own; None if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        print(done.stderr[-500:])
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def prepare_peers(args: argparse.Namespace, model: Path) -> dict[str, Path]:
    """Make the peers' folders, outside of any limit."""
    folders = {}
    for form in PEERS:
        folder = Path(args.work) / f"peer-{form}-{model.name}"
        if form == "disk_offload" and not (folder / "index.json").exists():
            code, err, _ = run_limited(
                peer_command(args, "prepare", form, model, folder), None, 1800
            )
            if code:
                print(f"peer {form} could not be prepared: {err.strip()[-200:]}")
                continue
        folders[form] = folder
    return folders


def peer_command(
    args: argparse.Namespace, step: str, form: str, model: Path, folder: Path, *more: str
) -> list[str]:
    script = str(ROOT / "benchmarks" / "peers" / "accelerate_disk.py")
    common = ["--model", str(model), "--folder", str(folder), "--threads", str(args.threads)]
    return [sys.executable, script, step, form, *common, *more]


def run_peers(
    args: argparse.Namespace,
    model: Path,
    folders: dict[str, Path],
    budget: int,
    baseline: int | None,
) -> dict[str, Any]:
    """Each peer in the same memory as we had."""
    out: dict[str, Any] = {}
    for form, folder in folders.items():
        with tempfile.TemporaryDirectory() as tmp:
            result = Path(tmp) / "peer.json"
            command = peer_command(
                args, "run", form, model, folder,
                "--ram-bytes", str(budget), "--tokens", str(args.peer_tokens),
                "--json", str(result),
            )  # fmt: skip
            limit = None if args.no_cgroup or baseline is None else baseline + budget + SLACK
            drop_page_cache()
            code, err, _ = run_limited(command, limit, args.timeout)
            if code or not result.exists():
                last = err.strip().splitlines()[-1:] or [""]
                out[form] = {"did_not_run": f"exit {code}: {last[0][:200]}"}
            else:
                out[form] = json.loads(result.read_text())
    return out


def prediction_error(points: list[dict[str, Any]]) -> float | None:
    """Median of |predicted - measured| / measured over the budgets."""
    errors = [
        abs(p["predicted_decode_tok_s"] - p["decode_tok_s"]) / p["decode_tok_s"]
        for p in points
        if p.get("predicted_decode_tok_s") and p.get("decode_tok_s")
    ]
    return statistics.median(errors) if errors else None


def line(point: dict[str, Any], size: Any) -> str:
    """One budget in words."""
    head = f"RAM {size(point['ram_budget_bytes']):>10}"
    if "error" in point:
        return f"{head}: {point['error']}"
    bound = point["fraction_of_bound"]
    hit, share = point["decode_hit_rate"], point["cache_share"]
    peers = ", ".join(
        f"{name} {p['decode_tok_s']:.3f}" if p.get("decode_tok_s") else f"{name}: did not run"
        for name, p in point.get("peers", {}).items()
    )
    ratio = point.get("ratio_to_best_peer")
    return (
        f"{head}: {point['decode_tok_s']:.3f} tok/s"
        + (f", {bound:.0%} of the bound" if bound else ", resident")
        + (f", hit {hit:.1%}" if hit is not None else "")
        + (f" of a share {share:.1%}" if share is not None else "")
        + f", RSS {point['rss_over_budget']:.0%} of the budget"
        + (
            f", predicted {point['predicted_decode_tok_s']:.3f}"
            if point["predicted_decode_tok_s"]
            else ""
        )
        + (f" | {peers}" if peers else "")
        + (f" | {ratio:.1f}x the best peer" if ratio else "")
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Speed and bound over the budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points = [p for p in result["points"] if "error" not in p]
    shares = [100 * p["share"] for p in points]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(shares, [p["decode_tok_s"] for p in points], "o-", label="offload")
    bounded = [
        (s, p["bound_tok_s"]) for s, p in zip(shares, points, strict=True) if p["bound_tok_s"]
    ]
    if bounded:
        axes.plot(*zip(*bounded, strict=True), "k--", label="SSD bound")
    for form in PEERS:
        peer = [
            (s, p["peers"][form]["decode_tok_s"])
            for s, p in zip(shares, points, strict=True)
            if p.get("peers", {}).get(form, {}).get("decode_tok_s")
        ]
        if peer:
            axes.plot(*zip(*peer, strict=True), "s:", label=f"accelerate {form}")
    axes.set_xlabel("RAM budget, % of the weights")
    axes.set_ylabel("decode tok/s")
    axes.set_yscale("log")
    axes.set_title(f"{result['kind']}, {result['weights_bytes'] / 1e9:.1f} GB of weights")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"plotted to {path}")


if __name__ == "__main__":
    main()
