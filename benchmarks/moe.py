"""A MoE model on a laptop's processor: this runtime and llama.cpp on the same GGUF file.

    python benchmarks/moe.py --model MODEL.gguf --llama-python VENV/bin/python
    offload synth benchmarks/configs/moe-30b-a3b.json PACK --quant q4
    python benchmarks/moe.py --model PACK --ram 4GiB --name moe-30b-a3b

The second form has no peer: a pack of random weights routes evenly, where random GGUF files often
stay in a few experts.

In RAM, and with memory for a share of the model: then both run in a cgroup of that share of the
file plus our bare process, which bounds the page cache as well. Bounds, measured in the same run:

* in RAM: bytes of weights that a token uses / the rate of a read-only stream;
* beyond: bytes of the experts that were missed / the rate of O_DIRECT reads, at the hit rate that
  was measured, to be read beside the share of experts that the cache can hold.

A peer that runs out of memory or time did not run; it is no ratio.
"""

from __future__ import annotations

import argparse
import json
import random
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a pack")
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--shares", type=int, nargs="*", default=[100, 75, 50, 25])
    parser.add_argument("--ram", nargs="*", default=[], help="budgets instead of shares")
    parser.add_argument("--name", default="moe", help="of the results' file")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--peer-tokens", type=int, default=8, help="of the peer beyond RAM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--no-cgroup", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from offload.models.choose import model_directory
    from offload.units import parse_bytes

    pack = model_directory(args.model)
    rates = {"ram_read": read_stream(args.threads), "weights": token_bytes(pack)}
    points = []
    baseline: int | None = None
    size = rates["weights"]["pack_bytes"] if args.model.is_dir() else args.model.stat().st_size
    asked = [(100 * parse_bytes(ram) / size, parse_bytes(ram)) for ram in args.ram]
    for share, ram in asked or [(share, None) for share in args.shares]:
        point = measure(args, pack, size, share, ram, baseline, rates)
        baseline = baseline or point.get("baseline_rss_bytes")
        points.append(point)
        print(line(point), flush=True)
    result = {"facts": facts(), "settings": settings(args), "rates": rates, "points": points}
    print(f"written to {record(args.name, result, args.output)}")


def read_stream(threads: int) -> float:
    """Bytes per second of a read-only stream over 1 GiB."""
    from offload.runtime import probe_compute
    from offload.runtime.memory import HostMemory

    memory = HostMemory(1 << 30, "read stream")
    try:
        with probe_compute.torch_threads(threads):
            return probe_compute.ram_read(memory, samples=7, sample_s=0.15).median
    finally:
        memory.close()


def token_bytes(pack: Path) -> dict[str, int]:
    """Bytes of weights that a token uses, and of an expert."""
    from offload.io.pack_manifest import Kind
    from offload.models.meta import read_config
    from offload.models.pack_reader import PackedModel
    from offload.models.request import expert_top_k

    model = PackedModel.open(pack)
    k = expert_top_k(read_config(pack))
    dense = sum(b.nbytes for kind in (Kind.MATRIX, Kind.HEAD) for b in model.blocks(kind))
    routed = sum(k * g.nbytes for g in model.experts.values())
    return {
        "token_bytes": dense + routed,
        "expert_bytes": max((g.nbytes for g in model.experts.values()), default=0),
        "pack_bytes": sum(model.manifest.files),
    }


def measure(
    args: argparse.Namespace,
    pack: Path,
    size: int,
    share: float,
    ram: int | None,
    baseline: int | None,
    rates: dict[str, Any],
) -> dict[str, Any]:
    """Both at one share of the model's ``size`` bytes in memory, or ours in a budget of ``ram``."""
    limit = None if share >= 100 or args.no_cgroup or baseline is None else (
        int(size * share / 100) + baseline
    )  # fmt: skip
    # A budget is kept to 105 %, and the kernel charges the group for tables and sockets.
    budget = ram or (2 * size if share >= 100 else int(0.94 * size * share / 100))
    before = ssd_rate(pack)
    ours = run_offload(args, budget, limit)
    after = ssd_rate(pack)
    theirs = run_llama(args, share, limit)
    rate = (before + after) / 2
    point: dict[str, Any] = {"share": share, "limit_bytes": limit, "ssd": [before, after], **ours}
    point["llama_cpp"] = theirs
    if "error" in ours:
        return point
    steps = max(1, ours["new_tokens"] - 1)
    missed = ours["decode_misses"] * rates["weights"]["expert_bytes"] / steps
    seconds = {
        "ram": rates["weights"]["token_bytes"] / rates["ram_read"],
        "ssd": missed / rate,
    }
    point["bound_s"] = seconds
    point["fraction_of_bound"] = ours["decode_tok_s"] * max(seconds.values())
    if "error" not in theirs:
        point["decode_ratio"] = ours["decode_tok_s"] / theirs["decode_tok_s"]
        # Ours has each token drawn at temperature 1; its decode figure is without that.
        point["sampled_ratio"] = ours["decode_tok_s"] / theirs["sampled_tok_s"]
        point["prefill_ratio"] = ours["prefill_tok_s"] / theirs["prefill_tok_s"]
    return point


def run_offload(args: argparse.Namespace, budget: int, limit: int | None) -> dict[str, Any]:
    rng = random.Random(0)
    ids = ",".join(str(rng.randrange(3, 30000)) for _ in range(args.prompt))
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "ours.json"
        command = offload_command(
            "generate", "-m", str(args.model), "--prompt-ids", ids, "-n", str(args.tokens),
            "--ignore-eos", "--temp", "1", "--seed", "0", "-t", str(args.threads),
            "--ram", str(budget), "--json", str(out),
        )  # fmt: skip
        drop_page_cache()
        code, err, _ = run_limited(command, limit, args.timeout)
        if code or not out.exists():
            return {"error": f"exit {code}: {err.strip()[-300:]}"}
        run: dict[str, Any] = json.loads(out.read_text())
    tier = run["plan"]["tiers"]["ram"]
    experts = sum(
        v["blocks"] for k, v in run["plan"]["homes"].items() if k.startswith("experts cached")
    )
    run["cache_share"] = tier["slots"] / experts if experts else None
    return {k: v for k, v in run.items() if k not in ("token_ids", "plan", "text")}


def run_llama(args: argparse.Namespace, share: float, limit: int | None) -> dict[str, Any]:
    if args.llama_python is None:
        return {"error": "no interpreter with llama_cpp was given (--llama-python)"}
    if args.model.is_dir():
        return {"error": "it reads GGUF files"}
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "llama.json"
        command = [
            str(args.llama_python),
            str(ROOT / "benchmarks" / "peers" / "llama_cpp_speed.py"),
            str(args.model), "--prompt", str(args.prompt), "--threads", str(args.threads),
            "--tokens", str(args.tokens if share >= 100 else args.peer_tokens),
            "--json", str(out),
            *([] if share >= 100 else ["--mmap-only"]),
        ]  # fmt: skip
        drop_page_cache()
        code, err, _ = run_limited(command, limit, args.timeout)
        if code or not out.exists():
            return {"error": f"exit {code}: {err.strip()[-300:]}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def line(point: dict[str, Any]) -> str:
    """What a person reads."""
    if "error" in point:
        return f"{point['share']:>4.0f} %  did not run: {point['error']}"
    peer = point["llama_cpp"]
    said = (
        f"llama.cpp {peer['decode_tok_s']:.2f} and {peer['prefill_tok_s']:.1f}: "
        f"{point['decode_ratio']:.2f}x ({point['sampled_ratio']:.2f}x when it draws the tokens, "
        f"too), {point['prefill_ratio']:.2f}x"
        if "error" not in peer
        else f"llama.cpp did not run: {peer['error']}"
    )
    hits = (
        f", hit {point['decode_hit_rate']:.1%} of a share {point['cache_share']:.1%}"
        if point.get("cache_share")
        else ""
    )
    return (
        f"{point['share']:>4.0f} %  decode {point['decode_tok_s']:.2f} tok/s "
        f"({point['fraction_of_bound']:.0%} of the bound{hits}), prompt "
        f"{point['prefill_tok_s']:.1f} tok/s; {said}"
    )


if __name__ == "__main__":
    main()
