"""New tokens per second against the number of prompts at once, with weights that stream.

    python benchmarks/batch.py --model DIR --ram 2GiB --sizes 1,2,4,8,16,32

For each number a model is opened under the budget and as many prompts as run at once are answered;
what is timed are the passes in which all of them decode. The bound of a number of sequences comes
from the same run: a pass cannot take less than its reads at the disk's rate (its own files, read as
they are when streaming), nor less than its sequences' computing (a token of a model that is
resident, where --resident-ram has room for it, else what a pass of one took beside waiting). The
peer is the loop over single prompts: one at a time, the same model, budget and code.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

from common import facts, record, settings


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random ids, the same in every run."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (count, tokens), generator=draw).tolist()


def measure(args: argparse.Namespace, size: int, ram: str, hardware: Any) -> dict[str, Any]:
    """One number of sequences."""
    import offload
    from offload.batch.conductor import Conductor
    from offload.batch.generation import generate

    context = args.prompt + args.new
    model = offload.load(
        args.model, ram=ram, disk=args.disk, prompt_tokens=args.prompt, context=context,
        sequences=size, pass_rows=size * args.prompt, hardware=hardware,
    )  # fmt: skip
    try:
        ids = prompts(size, args.prompt, model.config.get_text_config().vocab_size)
        with Conductor(model, most_rows=size * args.prompt) as conductor:
            running = [
                conductor.start(
                    lambda i=i: generate(model, i, max_new_tokens=args.new, ignore_eos=True)
                )
                for i in ids
            ]
            marks: list[tuple[int, float, dict[str, Any]]] = []
            while conductor.step():
                done = conductor.counters.passes
                if not marks or done > marks[-1][0]:
                    marks.append((done, time.perf_counter(), model.offload.stats()))
        for sequence in running:
            if sequence.error is not None:
                raise sequence.error
        # The first pass reads the prompts; the second finds what it has left behind.
        (first, began, before), (last, ended, after) = marks[2], marks[-1]
        passes = last - first
        seconds = (ended - began) / passes
        return {
            "sequences": size,
            "passes": passes,
            "pass_s": seconds,
            "tok_s": size / seconds,
            "read_bytes_per_pass": (after["disk_read_bytes"] - before["disk_read_bytes"]) / passes,
            "stall_s_per_pass": (after["stall_s"] - before["stall_s"]) / passes,
            "tokens": [s.result.tokens for s in running],
            "peak_rss_bytes": after["peak_rss_bytes"] - after["baseline_rss_bytes"],
        }
    finally:
        model.offload.close()
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ram", default="2GiB")
    parser.add_argument("--resident-ram", help="with room for all weights; for the bound")
    parser.add_argument("--sizes", default="1,2,4,8,16,32")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import torch

    from offload.runtime.probe_together import measure as measure_files

    if args.threads:
        torch.set_num_threads(args.threads)
    packed = sorted(args.model.glob("bundle-*.bin"))
    found = measure_files(packed or sorted(args.model.glob("*.safetensors")), "bfloat16")
    if found is None:
        raise SystemExit("the model's files are too small to measure the disk with")
    sizes = [int(n) for n in args.sizes.split(",")]
    rows = [measure(args, size, args.ram, None) for size in sizes]
    alone = next((r for r in rows if r["sequences"] == 1), None)
    if alone is None:
        raise SystemExit("--sizes needs 1: the peer is the loop over single prompts")
    if args.resident_ram:
        token_s = measure(args, 1, args.resident_ram, None)["pass_s"]
    else:
        token_s = alone["pass_s"] - alone["stall_s_per_pass"]
    read_rate = found.read.median
    for row in rows:
        read_s = row["read_bytes_per_pass"] / read_rate
        bound_s = max(read_s, row["sequences"] * token_s)
        row["bound"] = "read" if read_s > row["sequences"] * token_s else "compute"
        row["bound_tok_s"] = row["sequences"] / bound_s
        row["of_bound"] = row["tok_s"] / row["bound_tok_s"]
        row["of_peer"] = row["tok_s"] / alone["tok_s"]
        row["as_alone"] = row["tokens"][0] == alone["tokens"][0]
        print(
            f"{row['sequences']:4d} at once: {row['tok_s']:8.2f} tok/s, {row['of_bound']:.0%} of "
            f"the bound ({row['bound']}), {row['of_peer']:.1f} x one by one, "
            f"{row['read_bytes_per_pass'] / 2**20:.0f} MiB a pass"
        )
    for row in rows:
        del row["tokens"]
    result = {
        "settings": settings(args),
        "facts": facts(),
        "model": args.model.name,
        "threads": torch.get_num_threads(),
        "read_bytes_per_s": read_rate,
        "token_s": token_s,
        "rows": rows,
    }
    print(record("batch", result, args.output))


if __name__ == "__main__":
    main()
