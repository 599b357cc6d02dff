"""What choosing a token costs: from logits to a drawn token, beside the model.

    python benchmarks/sampling.py --threads 2 --llama-python VENV/bin/python

Each chain of settings runs in turn by ``offload.generation`` and by transformers' processors and
torch's draw, from the same random numbers: every token has to be the same. Bound: reading the
logits once and making random numbers for all tokens (numpy's Mersenne twister, two words each),
without which torch's token cannot be known. Peers: transformers and torch; llama.cpp's samplers,
which draw one number for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, facts, record, settings

CHAINS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "top-k, top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None, help="default: as torch")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 151_936, 262_144])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    points = []
    for count in args.vocabulary:
        for name, chain in CHAINS.items():
            point = {"vocabulary": count, "chain": name, **measure(count, chain, args.samples)}
            if args.llama_python is not None:
                point["llama_cpp_s"] = llama(args, count, chain)
                point["to_llama_cpp"] = point["llama_cpp_s"] / point["seconds"]
            points.append(point)
            print(line(point), flush=True)
    result = {
        "benchmark": "sampling", "facts": facts(), "settings": settings(args), "points": points,
    }  # fmt: skip
    print(f"written to {record('sampling', result, args.output)}")


def measure(count: int, chain: dict[str, float], samples: int) -> dict[str, Any]:
    """Medians of seconds per token, the three in turn."""
    import numpy as np
    import torch
    from transformers import LogitsProcessorList

    from offload.generation.draw import draw
    from offload.generation.scores import faster

    torch.manual_seed(0)
    logits = [3 * torch.randn(1, count) for _ in range(8)]
    ids = torch.tensor([[1]])
    stock = LogitsProcessorList(warpers(chain))
    steps = faster(stock)
    twister = np.random.MT19937(0)

    def ours(row: torch.Tensor) -> int:
        for step in steps:
            row = step(ids, row)
        return draw(torch.softmax(row, dim=-1)[0])

    def theirs(row: torch.Tensor) -> int:
        probabilities = torch.softmax(stock(ids, row), dim=-1)
        return int(torch.multinomial(probabilities, num_samples=1))

    def least(row: torch.Tensor) -> int:
        twister.random_raw(2 * count)
        return int(row.numpy().argmax())

    def timed(choose: Callable[[torch.Tensor], int], i: int) -> tuple[float, int]:
        torch.manual_seed(i)
        began = time.perf_counter()
        token = choose(logits[i % len(logits)])
        return time.perf_counter() - began, token

    for choose in (ours, theirs, least):
        timed(choose, 0)
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "least": []}
    for i in range(samples):
        (seconds, token), (their_seconds, their_token) = timed(ours, i), timed(theirs, i)
        if token != their_token:
            raise SystemExit(f"token {token} instead of {their_token}: {chain}, {count}")
        found["ours"].append(seconds)
        found["theirs"].append(their_seconds)
        found["least"].append(timed(least, i)[0])
    seconds, bound = statistics.median(found["ours"]), statistics.median(found["least"])
    their_seconds = statistics.median(found["theirs"])
    return {
        "seconds": seconds,
        "transformers_s": their_seconds,
        "to_transformers": their_seconds / seconds,
        "bound_s": bound,
        "fraction_of_bound": bound / seconds,
    }


def warpers(chain: dict[str, float]) -> list[Any]:
    """In transformers' order."""
    from transformers.generation import logits_process as kinds

    found: list[Any] = [kinds.TemperatureLogitsWarper(chain["temperature"])]
    if "top_k" in chain:
        found.append(kinds.TopKLogitsWarper(int(chain["top_k"])))
    if "top_p" in chain:
        found.append(kinds.TopPLogitsWarper(chain["top_p"]))
    if "min_p" in chain:
        found.append(kinds.MinPLogitsWarper(chain["min_p"]))
    return found


def llama(args: argparse.Namespace, count: int, chain: dict[str, float]) -> float:
    """Seconds of llama.cpp's samplers for a token."""
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "llama.json"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in chain.items()]
        command = [
            str(args.llama_python), str(ROOT / "benchmarks" / "peers" / "llama_cpp_sampling.py"),
            f"--vocabulary={count}", f"--samples={args.samples}", f"--json={out}", *flags,
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return float(json.loads(out.read_text())["seconds"])


def line(point: dict[str, Any]) -> str:
    """What a person reads."""
    said = (
        f"{point['vocabulary']:>7} {point['chain']:14} {1e3 * point['seconds']:6.2f} ms "
        f"{point['fraction_of_bound']:4.0%} of the bound, transformers "
        f"{1e3 * point['transformers_s']:6.2f} ({point['to_transformers']:.1f}x)"
    )
    if "llama_cpp_s" in point:
        ratio = point["to_llama_cpp"]
        said += f", llama.cpp {1e3 * point['llama_cpp_s']:.2f} ({ratio:.1f}x)"
    return said


if __name__ == "__main__":
    main()
