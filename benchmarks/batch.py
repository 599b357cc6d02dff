"""New tokens per second against the number of prompts at once, with weights that stream.

    python benchmarks/batch.py --model DIR --ram 2GiB --sizes 1,2,4,8,16,32

For each number a model is opened under the budget and as many prompts as run at once are answered;
what is timed are the passes in which all of them decode. The bound of a number of sequences comes
from the same run: a pass cannot take less than its reads at the disk's rate (its own files, read as
they are when streaming), nor less than its multiplications: at the rate of torch's product of many
rows in the model's dtype, or of a pack at that of its own kernel with 512 rows; nor less than
reading the weights that it multiplies with from memory, once (of experts, as many as even routing
needs). What a pass would compute if every sequence multiplied by itself (a single token's
computing, beside waiting, times their number) is recorded, too: no bound, as sequences are joined.

Peers, in the same run: the loop over single prompts (one at a time, the same model, budget and
code); transformers with as many rows in a batch and all weights in RAM, which may take what memory
it wants; with ``--folder`` (written by peers/accelerate_disk.py) accelerate's ``disk_offload`` in a
memory group of the budget and half a gibibyte; llama.cpp (``--llama-python``, ``--gguf``: a file of
the same shape) with as many sequences, in RAM or, with ``--limit-llama``, in a memory group of the
budget and 128 MiB, in which the pages of its file count.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, drop_page_cache, facts, record, run_limited, settings
from moe import read_stream


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random ids, the same in every run."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (count, tokens), generator=draw).tolist()


@dataclass(frozen=True)
class Shape:
    """Weights of a model, in numbers."""

    hidden: int
    inner: int
    """Of a feed-forward layer, or of an expert."""
    dense: int
    """That every token is multiplied with."""
    looked_up: int
    expert: int = 0
    layers: int = 0
    experts: int = 0
    """Of a layer."""
    top_k: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or hidden // heads
        layer = hidden * dim * (2 * heads + 2 * kv)
        table = hidden * config["vocab_size"]
        experts = config.get("num_experts", 0)
        inner = config["moe_intermediate_size" if experts else "intermediate_size"]
        layer += experts * hidden if experts else 3 * hidden * inner
        many = {
            "expert": 3 * hidden * inner, "layers": layers, "experts": experts,
            "top_k": config["num_experts_per_tok"],
        } if experts else {}  # fmt: skip
        looked_up = 0 if config["tie_word_embeddings"] else table
        return cls(hidden, inner, layers * layer + table, looked_up, **many)

    @property
    def multiplied(self) -> int:
        """With one token."""
        return self.dense + self.layers * self.top_k * self.expert

    def touched(self, sequences: int) -> float:
        """Of all weights, the share that tokens of so many sequences need, with even routing."""
        every = self.dense + self.looked_up + self.layers * self.experts * self.expert
        missed = (1 - self.top_k / self.experts) ** sequences if self.experts else 0.0
        return (self.dense + self.layers * self.experts * (1 - missed) * self.expert) / every


def product_rate(model_dir: Path, shape: Shape, dtype: Any) -> float:
    """Flop/s of torch's product of 256 rows with a feed-forward matrix of the model's shape."""
    import torch

    if list(model_dir.glob("bundle-*.bin")):
        return packed_rate(model_dir, shape.hidden, shape.inner)
    x, w = torch.randn(256, shape.hidden).to(dtype), torch.randn(shape.inner, shape.hidden)
    w = w.to(dtype)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - began)
    return 2 * x.shape[0] * w.numel() / best


def packed_rate(model_dir: Path, hidden: int, inner: int) -> float:
    """The same of a pack's own kernel, for most of its bytes."""
    import numpy as np

    from offload.cpu_ops.kernels import gemm
    from offload.cpu_ops.packing import packed_bytes
    from offload.models.pack_reader import PackedModel
    from offload.models.packed_probe import main_format

    fmt = main_format(PackedModel.open(model_dir))
    if fmt is None:
        raise SystemExit("nothing in this pack is packed")
    weights = np.full(packed_bytes(fmt, inner, hidden), 0x20, np.uint8)
    x, out = np.ones((512, hidden), np.float32), np.empty((512, inner), np.float32)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        gemm(fmt, weights, inner, hidden, x, out)
        best = min(best, time.perf_counter() - began)
    return 2 * x.shape[0] * inner * hidden / best


def planned_with(model: Path, *, packed: bool) -> Any:
    """Rates of now, as the command line plans with."""
    from offload.cli import planning

    found = planning.find_hardware(model)
    if found is None:
        return None
    if packed:
        from offload.models.pack_reader import PackedModel

        return planning.sample_pack(found, PackedModel.open(model), fewer=False)[0]
    return planning.on_these_files(found, model, fewer=False)[0]


def measure(args: argparse.Namespace, size: int, ram: str, hardware: Any) -> dict[str, Any]:
    """One number of sequences."""
    import offload
    from offload.batch.conductor import Conductor
    from offload.batch.generation import generate

    context = args.prompt + args.new
    gc.freeze()  # as the command line does: searches for garbage leave out what was imported
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
            "joined_products": conductor.counters.joined,
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


def peers(args: argparse.Namespace) -> dict[str, Any]:
    """What others reach, by name: ``rows`` as ours, or an ``error`` that says why not."""
    from offload.units import parse_bytes

    folder = ROOT / "benchmarks" / "peers"
    batched = [sys.executable, str(folder / "transformers_batch.py"), str(args.model)]
    commands: dict[str, tuple[list[str], int | None]] = {"transformers": (batched, None)}
    ram = parse_bytes(args.ram)
    if args.folder is not None:  # torch and transformers weigh 400 MiB
        commands["disk_offload"] = ([*batched, "--folder", str(args.folder)], ram + (1 << 29))
    if args.llama_python is not None and args.gguf is not None:
        llama = [str(args.llama_python), str(folder / "llama_cpp_batch.py"), str(args.gguf)]
        limited = ([*llama, "--mmap-only"], ram + (1 << 27))
        commands["llama_cpp"] = limited if args.limit_llama else (llama, None)
    found = {}
    for name, (command, limit) in commands.items():
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "rows.json"
            more = (
                "--sizes", args.sizes, "--prompt", str(args.prompt), "--new", str(args.new),
                "--threads", str(args.threads or 2), "--json", str(out),
            )  # fmt: skip
            if limit is not None:
                drop_page_cache()  # what is cached counts for whoever has read it
            code, err, within = run_limited([*command, *more], limit, args.timeout)
            if code or not out.exists():
                found[name] = {"error": f"exit {code}: {err.strip()[-300:]}"}
            else:
                found[name] = {**json.loads(out.read_text()), "limited": within}
        print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ram", default="2GiB")
    parser.add_argument("--sizes", default="1,2,4,8,16,32")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--folder", type=Path, help="weights as disk_offload reads them")
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--gguf", type=Path, help="a file of the same shape, for llama.cpp")
    parser.add_argument("--limit-llama", action="store_true", help="in a group of the budget")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a peer")
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
    hardware = planned_with(args.model, packed=bool(packed))
    rows = [measure(args, size, args.ram, hardware) for size in sizes]
    alone = next((r for r in rows if r["sequences"] == 1), None)
    if alone is None:
        raise SystemExit("--sizes needs 1: the peer is the loop over single prompts")
    token_s = alone["pass_s"] - alone["stall_s_per_pass"]
    # A disk is no slower than what it has just done; the probe reads beside a busy memory.
    read_rate = max(found.read.high, *(row["read_bytes_per_pass"] / row["pass_s"] for row in rows))
    shape = Shape.of(json.loads((args.model / "config.json").read_text()))
    rate = product_rate(args.model, shape, torch.bfloat16)
    weight_bytes = sum(f.stat().st_size for f in packed or args.model.glob("*.safetensors"))
    stream = read_stream(torch.get_num_threads())
    others = peers(args)
    for row in rows:
        row["peers"] = {
            name: theirs["tok_s"]
            for name, found in others.items()
            for theirs in found.get("rows", ())
            if theirs["sequences"] == row["sequences"]
        }
        read_s = row["read_bytes_per_pass"] / read_rate
        lanes = {
            "read": read_s,
            "compute": row["sequences"] * 2 * shape.multiplied / rate,
            "memory": weight_bytes * shape.touched(row["sequences"]) / stream,
        }
        row["bound"] = max(lanes, key=lambda lane: lanes[lane])
        bound_s = lanes[row["bound"]]
        row |= {f"{lane}_s": seconds for lane, seconds in lanes.items()}
        row["compute_s_one_by_one"] = row["sequences"] * token_s
        row["bound_tok_s"] = row["sequences"] / bound_s
        row["of_bound"] = row["tok_s"] / row["bound_tok_s"]
        row["of_peer"] = row["tok_s"] / alone["tok_s"]
        row["as_alone"] = row["tokens"][0] == alone["tokens"][0]
        print(
            f"{row['sequences']:4d} at once: {row['tok_s']:8.2f} tok/s, {row['of_bound']:.0%} of "
            f"the bound ({row['bound']}), {row['of_peer']:.1f} x one by one, "
            f"{row['read_bytes_per_pass'] / 2**20:.0f} MiB a pass; "
            + (", ".join(f"{n} {v:.2f}" for n, v in row["peers"].items()) or "no peer")
        )
    for row in rows:
        del row["tokens"]
    result = {
        "settings": settings(args),
        "facts": facts(),
        "model": args.model.name,
        "threads": torch.get_num_threads(),
        "read_bytes_per_s": read_rate,
        "token_s_alone": token_s,
        "product_flops": rate,
        "memory_bytes_per_s": stream,
        "peers": others,
        "rows": rows,
    }
    print(record("batch", result, args.output))


if __name__ == "__main__":
    main()
