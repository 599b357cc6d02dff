"""Eviction policies on the routing of a trained model: recorded, replayed, and two real runs.

Records what ``examples/tiny_moe`` routes to on pages of its corpus that it was never trained on
(``apt-get install python3.11-doc``; without it, the included beginning of one page), in windows
of the length that it was trained on, replays every policy against Belady's optimum, and runs the
model with less than one token's experts in memory under several policies.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, facts, record, settings

MODEL = ROOT / "examples" / "tiny_moe"
WINDOW = 192
EXPERT_BYTES = 72 * 2**10


def held_out_ids(limit: int, skip: int = 0) -> tuple[list[int], str]:
    """Token ids of held-out text, and where it is from."""
    from transformers import AutoTokenizer

    sys.path.insert(0, str(MODEL))
    from corpus import HTML_ROOT, read_pages

    tokenizer = AutoTokenizer.from_pretrained(MODEL, model_max_length=10**9)
    if HTML_ROOT.is_dir():
        source = "held-out pages of Python 3.11's documentation"
        texts = [page.text for page in read_pages() if page.held_out]
    else:
        source = "heldout.txt"
        texts = [(MODEL / "heldout.txt").read_text(encoding="utf-8")]
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode(text, add_special_tokens=False), 0]
    return ids[skip : skip + limit], source


def windows(model: Any, ids: list[int]) -> None:
    """Run all ids, a window at a time."""
    import torch

    with torch.no_grad():
        for start in range(0, len(ids), WINDOW):
            model(input_ids=torch.tensor([ids[start : start + WINDOW]]), use_cache=False)


def record_routing(path: Path, ids: list[int]) -> None:
    import offload

    model = offload.load(MODEL, ram="64MiB", context=WINDOW, record_routing=path)
    windows(model, ids)
    model.offload.close()


def replays(path: Path, shares: list[float], learnt: Path) -> dict[str, Any]:
    from offload.cli.bench import replay_all
    from offload.runtime.routings import RecordedRouting

    routing = RecordedRouting(path)
    blocks = {
        layer: [f"{i}.{e}" for e in range(n)]
        for i, (layer, n) in enumerate(
            zip(routing.header.layers, routing.header.experts, strict=True)
        )
    }
    return replay_all(routing, shares, RecordedRouting(learnt, blocks=blocks))


def prefix_rates(path: Path, shares: list[float]) -> dict[str, float]:
    """What a fixed prefix of the experts would hit, with the slots that running needs beside it."""
    from offload.runtime.routings import RecordedRouting
    from offload.scheduler.policies import make_policy
    from offload.scheduler.replay import Replay

    routing = RecordedRouting(path)
    names = [f"{i}.{e}" for i, n in enumerate(routing.header.experts) for e in range(n)]
    runs = {}
    for share in shares:
        slots = max(1, round(len(names) * share / 100))
        kept = names[: max(0, slots - 3)]
        runs[f"{share:g}"] = Replay(make_policy("pinned", routing.header.layers, kept), slots)
    for one in routing:
        for run in runs.values():
            run.feed(one)
    return {share: run.tally.hit_rate for share, run in runs.items()}


def real_runs(slots: int, ids: list[int], learnt: Path, tokens: int) -> list[dict[str, Any]]:
    """Decode under a budget of so many slots; returns each policy's figures."""
    import torch

    import offload
    from offload.models.load import prepare
    from offload.models.options import Options

    prompt = torch.tensor([ids[:32]])
    common: dict[str, Any] = {
        "context": 32 + tokens, "prompt_tokens": 32, "overhead_bytes": 2 * 2**20, "guess": False,
    }  # fmt: skip
    ram = 6 * 2**20
    while (found := prepare(MODEL, Options(ram=ram, **common)).plan.tiers[1].slots) != slots:
        ram += (slots - found) * EXPERT_BYTES
    results = []
    said: dict[str, list[int]] = {}
    for name in ("lru", "laps", "pinned"):
        more = {"routing": learnt} if name == "pinned" else {}
        model = offload.load(MODEL, ram=ram, expert_policy=name, **common, **more)
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=tokens, min_new_tokens=tokens,
        )  # fmt: skip
        stats = model.offload.stats()
        plan = model.offload.plan
        model.offload.close()
        said[name] = out[0].tolist()
        results.append(
            {
                "policy": name,
                "slots": plan.tiers[1].slots,
                "hit_rate": stats["hit_rate"],
                "payload_read_bytes": stats["payload_read_bytes"],
                "warning": next((r for r in plan.reasons if r.startswith("warning:")), None),
            }
        )
    if len({tuple(ids) for ids in said.values()}) != 1:
        raise SystemExit("policies changed the text: a bug")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=60 * WINDOW)
    parser.add_argument("--shares", default="4,6,10,25,50,75", help="cache sizes, %% of experts")
    parser.add_argument("--slots", type=int, default=8, help="of the real runs")
    parser.add_argument("--decode", type=int, default=200, help="tokens of the real runs")
    parser.add_argument("--keep", type=Path, help="also keep the recorded routing here")
    parser.add_argument("--output", type=Path, help="the JSON file")
    args = parser.parse_args()
    shares = [float(s) for s in args.shares.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        trace, learnt = args.keep or Path(folder) / "trace", Path(folder) / "learnt"
        # What ``pinned`` learns from comes after what it is tried on: other pages.
        ids, source = held_out_ids(args.tokens)
        others, _ = held_out_ids(max(WINDOW, args.tokens // 3), skip=len(ids))
        began = time.perf_counter()
        record_routing(trace, ids)
        record_routing(learnt, others or ids[: len(ids) // 3])
        recorded_s = time.perf_counter() - began
        report = replays(trace, shares, learnt)
        result = {
            "benchmark": "cache",
            "facts": facts(),
            "settings": settings(args),
            "text": {"source": source, "tokens": len(ids), "window": WINDOW},
            "trace_bytes": trace.stat().st_size,
            "record_s": recorded_s,
            "replay": report,
            "fixed_prefix": prefix_rates(trace, [s for s in shares if s <= 12.5]),
            "below_one_token": real_runs(args.slots, ids, learnt, args.decode),
        }
    for row in report["results"]:
        rates = ", ".join(f"{k} {v:.3f}" for k, v in row["policies"].items())
        print(f"{row['slots']:>4} slots: {rates}; optimum {row['optimum']:.3f}")
    print("fixed prefix:", result["fixed_prefix"])
    for run in result["below_one_token"]:
        print(f"{run['policy']}, {run['slots']} slots: {run['hit_rate']:.3f}")
    print(record("cache", result, args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
