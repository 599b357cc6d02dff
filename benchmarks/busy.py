"""Decoding while other programs keep cores busy, by how OpenMP's threads wait for each other.

    offload synth benchmarks/configs/moe-4g.json PACK --quant q4
    python benchmarks/busy.py --model PACK --neighbours 0 1 2

A thread that spins while its partner is preempted spends its own share of the core on nothing, and
is preempted itself when the partner is back. Each cell is a run of ``offload generate`` beside so
many processes that only count; waits take turns within a round, medians are over rounds. The bound
of a cell is the fastest quiet rate times the share of the cores that a fair scheduler leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, facts, offload_command, record, settings

WAITS: dict[str, dict[str, str]] = {
    "ours": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    # libgomp's own where nothing is said.
    "default": {"GOMP_SPINCOUNT": "300000"},
}
KEYS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ram", default="3GiB")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--waits", nargs="+", default=list(WAITS), help="or counts of spins")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cells: dict[str, list[float]] = {}
    prompts: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for count in args.neighbours:
            for name in args.waits:
                run = one(args, name, count)
                cells.setdefault(f"{count} {name}", []).append(run["decode_tok_s"])
                print(f"  {count} {name}: {run['decode_tok_s']:.2f} tok/s", flush=True)
                prompts.setdefault(f"{count} {name}", []).append(run["prefill_tok_s"])
    cores = os.cpu_count() or 1
    quiet = max(
        max(rates) for cell, rates in cells.items() if cell.startswith(f"{min(args.neighbours)} ")
    )
    points = []
    for cell, rates in cells.items():
        count, name = int(cell.split()[0]), cell.split()[1]
        # Each of our threads and each neighbour gets the same.
        share = min(1.0, cores / (args.threads + count))
        rate = statistics.median(rates)
        point = {
            "neighbours": count, "wait": name, "decode_tok_s": rates, "median": rate,
            "prefill_tok_s": prompts[cell], "of_bound": rate / (quiet * share),
        }  # fmt: skip
        points.append(point)
        print(
            f"{count} busy neighbours, {name:>8}: decode {rate:6.1f} tok/s "
            f"({100 * point['of_bound']:.0f} % of the fair share), "
            f"prompt {statistics.median(prompts[cell]):6.1f}"
        )
    result = {"facts": facts(), "settings": settings(args), "points": points}
    print(f"written to {record('busy', result, args.output)}")


def one(args: argparse.Namespace, wait: str, count: int) -> dict[str, Any]:
    """The figures of one run."""
    env = {k: v for k, v in os.environ.items() if k not in KEYS}
    env |= WAITS.get(wait, {"GOMP_SPINCOUNT": wait})
    with tempfile.NamedTemporaryFile(suffix=".json") as figures, busy(count):
        ids = ",".join(str(7 * i % 1000) for i in range(args.prompt))
        subprocess.run(
            offload_command(
                "generate", "-m", str(args.model), "--prompt-ids", ids, "-n", str(args.tokens),
                "--ignore-eos", "--ram", args.ram, "-t", str(args.threads), "--no-predict",
                "--json", figures.name,
            ),
            check=True, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(Path(figures.name).read_text())
        return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that want a core each."""
    code = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
