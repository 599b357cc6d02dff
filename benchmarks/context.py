"""Decoding behind long contexts: tokens per second and memory within a fixed budget of RAM.

    offload synth benchmarks/configs/dense-1b-128k.json PACK --quant q4
    python benchmarks/context.py --model PACK --work /scratch
    python benchmarks/context.py --model PACK --work /scratch --parts check,prompt --short SMALL

Parts, each point in a process of its own (``context_points.py``):

* ``speed``: decoding behind --contexts tokens within each --ram. Keys and values of the context are
  random, written through the cache's own road; a true prompt of 128k tokens would take hours.
  The bound of a token is its busiest lane, with rates measured around the point: what was read from
  the disk / O_DIRECT reads of a private file; weights and all keys and values / a read-only stream.
  Peers in the same run: transformers' DynamicCache with SDPA in bfloat16, everything in RAM, which
  may take what it wants; llama.cpp (--llama-python, --gguf) behind true prompts of up to
  --llama-context tokens.
* ``check``: behind a true prompt of --check tokens, blocks that stream from the disk give the
  tokens of DynamicCache, and our attention the same bits wherever they are. --short: a pack of the
  same shape with fewer layers, where a prompt of all would take too long.
* ``prompt``: time to the first token of a prompt of --prompt tokens with ``--prompt-cache``, first
  and repeated, from the command line's own figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, facts, offload_command, record, run_limited, settings

REQUEST_BYTES, DEPTH = 4 << 20, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a pack of a dense model")
    parser.add_argument("--work", type=Path, required=True, help="a directory on the disk to use")
    parser.add_argument("--parts", default="speed,check,prompt")
    parser.add_argument("--contexts", default="1024,4096,16384,65536,131072")
    parser.add_argument("--ram", nargs="*", default=["2GiB"])
    parser.add_argument("--kv-ram", default="960MiB", help="of it, where not all fit")
    parser.add_argument("--kv", nargs="*", default=["bf16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--peer-context", type=int, default=131072, help="the most for DynamicCache"
    )
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--gguf", type=Path, help="a file of the same shape, for llama.cpp")
    parser.add_argument("--llama-context", type=int, default=4096)
    parser.add_argument("--short", type=Path, help="for check: fewer layers")
    parser.add_argument("--check", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument(
        "--prompt-chunk", nargs="*", default=["256", "128"], help="of prompt: tokens of a pass"
    )
    parser.add_argument("--prompt-ram", default="16GiB", help="for prompt, which is about time")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--add", action="store_true", help="to what --output has already")
    args = parser.parse_args()
    target = args.output or ROOT / "benchmarks" / "results" / "context.json"
    known = json.loads(target.read_text()) if args.add and target.exists() else {}
    result: dict[str, Any] = {
        **known,
        "facts": facts(),
        "settings": [*known.get("settings", []), settings(args)],
    }
    for part in args.parts.split(","):
        # After each point: a run that is broken off has what it had.
        for found in {"speed": speed, "check": check, "prompt": prompt}[part](args):
            if "rows" in found:
                found["rows"] = merged(known.get(part, {}).get("rows", []), found["rows"])
            result[part] = found
            record("context", result, args.output)
    print(f"written to {target}")


def merged(before: list[Any], rows: list[Any]) -> list[Any]:
    """Old rows where there are no new ones, by context."""

    def key(row: Any) -> Any:
        return row["context"], row["ram"], row["kv"]

    found = {key(row): row for row in [*before, *rows]}
    return [found[k] for k in sorted(found)]


# Rates


class Disk:
    """A private file to read, as large as makes what a host caches not matter much."""

    def __init__(self, directory: Path, nbytes: int = 3 << 30) -> None:
        import numpy as np

        from offload.io.files import DirectFile
        from offload.io.memory import Staging
        from offload.io.private import nameless_file, reserve

        fd, _ = nameless_file(directory)
        self._file = DirectFile(fd, "the probe's file")
        reserve(fd, nbytes, str(directory))
        self._file.size = self._nbytes = nbytes
        self._staging = Staging(DEPTH, REQUEST_BYTES)
        noise = np.random.default_rng(0).integers(0, 256, REQUEST_BYTES, np.uint8)
        with self._staging.chunk() as chunk:
            chunk.view[:] = memoryview(noise)
            for offset in range(0, nbytes, REQUEST_BYTES):
                self._file.write(offset, chunk.view)

    def rate(self) -> float:
        """Bytes per second, once through the file."""
        import time
        from functools import partial

        from offload.io.engines import make_engine

        def fetch(offset: int) -> int:
            with self._staging.chunk() as chunk:
                return int(self._file.read(offset, chunk.view))

        engine = make_engine(queue_depth=DEPTH)
        try:
            began = time.perf_counter()
            jobs = [
                engine.submit(partial(fetch, at)) for at in range(0, self._nbytes, REQUEST_BYTES)
            ]
            return sum(job.result() for job in jobs) / (time.perf_counter() - began)
        finally:
            engine.close()

    def close(self) -> None:
        self._staging.close()
        self._file.close()


def point(args: argparse.Namespace, kind: str, **more: Any) -> dict[str, Any]:
    """One point in a process of its own; ``error`` if it did not run."""
    base = {
        "model": str(args.model), "disk": str(args.work), "threads": args.threads,
        "warm": args.warm, "steps": args.steps, "options": {},
    }  # fmt: skip
    script = ROOT / "benchmarks" / "context_points.py"
    with tempfile.TemporaryFile("w+") as out:
        try:
            done = subprocess.run(
                [sys.executable, str(script), kind, json.dumps({**base, **more})],
                stdout=out, stderr=subprocess.PIPE, text=True, timeout=args.timeout, check=False,
                cwd=ROOT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {args.timeout:.0f} s"}
        if done.returncode:
            return {"error": f"exit {done.returncode}: {done.stderr.strip()[-300:]}"}
        out.seek(0)
        found: dict[str, Any] = json.loads(out.read().splitlines()[-1])
        return found


# Speed


def token_bytes(config: dict[str, Any], kv: str) -> int:
    """Of keys and values of one token, without what scales take."""
    bits = {"bf16": 16, "f32": 32, "q8": 8, "q4": 4}[kv]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim * bits // 8)


def speed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from moe import read_stream
    from moe import token_bytes as weight_bytes

    from offload.units import parse_bytes

    config = json.loads((args.model / "config.json").read_text())
    weights = weight_bytes(args.model)["token_bytes"]
    rows = []
    disk = Disk(args.work)
    try:
        for context in (int(n) for n in args.contexts.split(",")):
            peers = {"dynamic_cache": peer(args, context), "llama_cpp": llama(args, context)}
            for ram in args.ram:
                for kv in args.kv:
                    cached = context * token_bytes(config, kv)
                    kv_ram = args.kv_ram if cached > parse_bytes(args.kv_ram) else None
                    rates = [(disk.rate(), read_stream(args.threads))]
                    found = point(args, "ours", ram=ram, kv=kv, kv_ram=kv_ram, context=context)
                    rates.append((disk.rate(), read_stream(args.threads)))
                    row = {
                        "context": context, "ram": ram, "kv": kv, "kv_ram": kv_ram,
                        "ssd_read": [r[0] for r in rates], "ram_read": [r[1] for r in rates],
                        "token_bytes": token_bytes(config, kv), "weight_bytes": weights, **found,
                        "peers": peers,
                    }  # fmt: skip
                    if "error" not in found:
                        judge(row, parse_bytes(ram))
                    print(line(row), flush=True)
                    rows.append(row)
                    yield {
                        "model": args.model.name, "dtype": "float32 computing on q4 weights",
                        "config": config, "rows": rows,
                    }  # fmt: skip
    finally:
        disk.close()


def judge(row: dict[str, Any], budget: int) -> None:
    """Bound and what of it was reached; memory against the budget and over the tokens."""
    ssd, stream = max(row["ssd_read"]), max(row["ram_read"])  # rates drift: the better of two
    cached = row["context"] * row["token_bytes"]
    if "block_bytes" in row:
        cached = (row["blocks_in_ram"] + row["blocks_on_disk"]) * row["block_bytes"]
    bound_s = {
        "disk": (row["kv_read_bytes"] + row["weight_read_bytes"]) / ssd,
        "memory": (row["weight_bytes"] + cached) / stream,
    }
    step_s = statistics.median(row["step_s"])
    row["kv_bytes"] = cached
    row["tok_s"], row["bound_s"] = 1 / step_s, bound_s
    row["lane"] = max(bound_s, key=lambda lane: bound_s[lane])
    row["fraction_of_bound"] = bound_s[row["lane"]] / step_s
    row["of_budget"] = row["peak_above_process_bytes"] / budget
    row["grown_bytes"] = row["rss_bytes"][-1] - row["rss_bytes"][0]
    for found in row["peers"].values():
        if "step_s" in found:
            found["tok_s"] = 1 / statistics.median(found["step_s"])


def peer(args: argparse.Namespace, context: int) -> dict[str, Any]:
    if context > args.peer_context:
        return {"error": f"not run beyond {args.peer_context} tokens (--peer-context)"}
    return point(args, "dynamic", context=context, steps=3, warm=1)


def llama(args: argparse.Namespace, context: int) -> dict[str, Any]:
    if args.llama_python is None or args.gguf is None:
        return {"error": "no interpreter with llama_cpp, or no --gguf"}
    if context > args.llama_context:
        return {"error": f"its prompts are not read beyond {args.llama_context} tokens"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "llama.json"
        command = [
            str(args.llama_python), str(ROOT / "benchmarks" / "peers" / "llama_cpp_speed.py"),
            str(args.gguf), "--prompt", str(context), "--tokens", "16", "--threads",
            str(args.threads), "--json", str(out),
        ]  # fmt: skip
        code, err, _ = run_limited(command, None, args.timeout)
        if code or not out.exists():
            return {"error": f"exit {code}: {err.strip()[-300:]}"}
        found = json.loads(out.read_text())
    return {**found, "tok_s": found["decode_median_tok_s"]}


def line(row: dict[str, Any]) -> str:
    """What a person reads."""
    head = f"{row['context']:>7} tokens, {row['kv']} in {row['ram']}:"
    if "error" in row:
        return f"{head} did not run: {row['error']}"
    others = ", ".join(
        f"{name} {p['tok_s']:.2f}" for name, p in row["peers"].items() if "tok_s" in p
    )
    return (
        f"{head} {row['tok_s']:.2f} tok/s, {row['fraction_of_bound']:.0%} of the bound "
        f"({row['lane']}), {row['kv_read_bytes'] / 2**20:.0f} MiB a token from disk, "
        f"{row['of_budget']:.0%} of the budget, {row['grown_bytes'] / 2**20:+.1f} MiB over the "
        f"tokens; {others or 'no peer'}"
    )


# True prompts


def check(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens and bits behind a true prompt."""
    found = point(
        args, "check", model=str(args.short or args.model), ram="4GiB", kv_ram="48MiB",
        context=args.check, chunk=512,
    )  # fmt: skip
    print("check:", json.dumps(found), flush=True)
    yield {"model": (args.short or args.model).name, **found}


def prompt(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times to the first token without and with what the first run has stored."""
    from context_points import random_ids

    config = json.loads((args.model / "config.json").read_text())
    ids = ",".join(map(str, random_ids(args.prompt, config["vocab_size"])))
    rows = []
    for chunk in args.prompt_chunk:
        runs = []
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            out = Path(folder) / "run.json"
            for _ in range(2):
                command = offload_command(
                    "generate", "-m", str(args.model), "--prompt-ids", ids, "-n", "8",
                    "--ignore-eos", "-t", str(args.threads), "--ram", args.prompt_ram,
                    "--json", str(out), "--prompt-cache", str(Path(folder) / "prompts"),
                    "--prompt-cache-chunk", chunk,
                )  # fmt: skip
                code, err, _ = run_limited(command, None, args.timeout)
                if code or not out.exists():
                    raise SystemExit(f"exit {code}: {err.strip()[-300:]}")
                runs.append(json.loads(out.read_text()))
                out.unlink()
        first, again = runs
        rows.append(
            {
                "chunk": int(chunk),
                "ttft_s": [r["ttft_s"] for r in runs],
                "share": again["ttft_s"] / first["ttft_s"],
                "tokens_equal": first["token_ids"] == again["token_ids"],
                "reused": again["prompt_cache"],
            }
        )
        print(
            f"prompt of {args.prompt} tokens in passes of {chunk}: first token after "
            f"{first['ttft_s']:.2f} s, again after {again['ttft_s']:.2f} s, "
            f"{rows[-1]['share']:.1%}; tokens equal: {rows[-1]['tokens_equal']}",
            flush=True,
        )
        yield {
            "model": args.model.name,
            "layers": config["num_hidden_layers"],
            "tokens": args.prompt,
            "prompts": rows,
        }


if __name__ == "__main__":
    main()
