"""What narrower optimizer states cost and save: bf16 and 8-bit against float32.

    python benchmarks/states.py --plot states.png --speed benchmarks/results/finetune.json
    python benchmarks/states.py --work /scratch/states --seconds 60   # again and again: goes on

Loss: ``offload finetune`` of ``examples/tiny_moe`` on real text that it has never seen (the sources
of this repository, see ``examples/finetune_tiny_moe.py``), once for each kind of states, the same
tokens in the same order. What counts is the drop of the held-out loss, over that of float32 states.

Speed: that model is too small to say anything, so it comes from results of ``finetune.py`` with
the same budget, tokens and clipping for several kinds of states: step times and bytes moved, each
over those of float32 states.

With ``--work`` what has been done is kept there, and with ``--seconds`` a call interrupts its run
after that time as Ctrl-C does; the next call resumes it. Losses are the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, facts, offload_command, record, settings

sys.path.insert(0, str(ROOT / "examples"))
import finetune_tiny_moe as tiny

KINDS = ("fp32", "bf16", "8bit")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=4, help=f"windows of {tiny.WINDOW} tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ram", default="160MiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--speed", type=Path, nargs="+", default=[], help="of finetune.py")
    parser.add_argument("--work", type=Path, help="keep runs here, and go on with them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop, for now")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    import torch
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.set_num_threads(args.threads)
    points = [p for file in args.speed for p in json.loads(file.read_text())["points"]]
    kinds = ["fp32", *(k for k in args.kinds if k != "fp32")]
    with work_directory(args.work) as work:
        train, held_out = corpus(work)
        before = known(work / "before.json", lambda: tiny.held_out_loss(tiny.MODEL, held_out, work))
        print(f"held-out loss before: {before:.4f}", flush=True)
        runs = {}
        end = time.monotonic() + args.seconds
        for kind in kinds:
            runs[kind] = run(args, kind, train, held_out, work, end)
            runs[kind]["drop_ratio"] = (before - runs[kind]["held_out"]) / (
                before - runs["fp32"]["held_out"]
            )
            print(
                f"{kind:>5}: held-out loss {runs[kind]['held_out']:.4f}, "
                f"{runs[kind]['drop_ratio']:.1%} of the drop with fp32",
                flush=True,
            )
    speed = speeds(points)
    for found in speed:
        print(
            f"{found['states']:>5} at {found['ram_bytes'] / 2**30:.1f} GiB, {found['tokens']} "
            f"tokens: {found['speed_up']:.2f} times as fast, float32 moves "
            f"{found['byte_ratio']:.2f} times the bytes"
        )
    result = {
        "benchmark": "states",
        "settings": settings(args),
        "facts": facts(),
        "held_out_before": before,
        "runs": runs,
        "speed": speed,
    }
    print(f"written to {record('states', result, args.output)}")
    if args.plot:
        plot(result, args.plot)


@contextmanager
def work_directory(wished: Path | None) -> Iterator[Path]:
    if wished is not None:
        wished.mkdir(parents=True, exist_ok=True)
        yield wished
        return
    with tempfile.TemporaryDirectory(prefix="states-") as name:
        yield Path(name)


def corpus(work: Path) -> tuple[Path, Path]:
    """The text, the same in every call though the sources have changed meanwhile."""
    train, held_out = work / "train.txt", work / "heldout.txt"
    return (train, held_out) if train.exists() else tiny.write_corpus(work)


def known(file: Path, compute: Callable[[], Any]) -> Any:
    """What ``compute`` returns, once: later calls find it in ``file``."""
    if not file.exists():
        file.write_text(json.dumps(compute()))
    return json.loads(file.read_text())


def run(
    args: argparse.Namespace, kind: str, train: Path, held_out: Path, work: Path, end: float
) -> dict[str, Any]:
    """Train with one kind of states, or go on with it.

    Raises:
        SystemExit: it failed, or it is ``end`` (by the monotonic clock) and it is not through.
    """
    output, metrics = work / kind, work / f"{kind}.jsonl"
    if not output.exists():
        train_until(args, kind, train, output, metrics, end)
    events = [json.loads(text) for text in metrics.read_text().splitlines()]
    steps = {e["step"]: e for e in events if e["event"] == "step"}
    return {
        "losses": [steps[k]["loss"] for k in sorted(steps)],
        "held_out": known(
            work / f"{kind}.json", lambda: tiny.held_out_loss(output, held_out, work)
        ),
        "step_s": statistics.median(steps[k]["seconds"] for k in sorted(steps)[2:]),
    }


def train_until(
    args: argparse.Namespace, kind: str, train: Path, output: Path, metrics: Path, end: float
) -> None:
    """``offload finetune``, interrupted at ``end``."""
    states = output.with_name(f"{kind}.states")
    wish = tiny.finetune_flags(
        train, output, steps=args.steps, batch=args.batch, lr=args.lr, seed=args.seed
    )
    command = offload_command(
        *wish, "--ram", args.ram, "--states", kind, "--threads", str(args.threads),
        "--disk", str(states), "--json", str(metrics),
        *["--resume"] * (states / "tiles.bin").exists(),
    )  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        left = end - time.monotonic()
        try:
            _, said = process.communicate(timeout=None if left == float("inf") else max(0, left))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
            if not output.exists():
                raise SystemExit(f"{kind} is not through yet: call again to go on") from None
    if process.returncode and not output.exists():
        raise SystemExit(f"{kind}: {said.strip()[-500:]}")


def speeds(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step times and bytes of all points that differ from one with fp32 states in nothing else."""
    whole = [p for p in points if "error" not in p]

    def key(point: dict[str, Any]) -> tuple[Any, ...]:
        return point["ram_bytes"], point["tokens_asked"], point["clipping"]

    base = {key(p): p for p in whole if p["states"] == "fp32"}
    out = []
    for point in whole:
        twin = base.get(key(point))
        moved = point["read"] + point["written"]
        if twin is None or twin is point or not moved:
            continue
        out.append(
            {
                "states": point["states"],
                "ram_bytes": point["ram_bytes"],
                "tokens": point["tokens_asked"],
                "clipping": point["clipping"],
                "speed_up": twin["seconds"] / point["seconds"],
                "byte_ratio": (twin["read"] + twin["written"]) / moved,
            }
        )
    return out


def plot(result: dict[str, Any], path: Path) -> None:
    """The training losses, each the mean of what is around it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for kind, found in result["runs"].items():
        losses = found["losses"]
        width = max(1, len(losses) // 20)
        smooth = [
            statistics.fmean(losses[max(0, i - width) : i + width + 1]) for i in range(len(losses))
        ]
        label = f"{kind}: held out {found['held_out']:.3f}"
        axes.plot(range(1, len(smooth) + 1), smooth, label=label)
    axes.set_title(f"tiny_moe on new text, held out {result['held_out_before']:.3f} before")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"plotted to {path}")


if __name__ == "__main__":
    main()
