"""What rounding or forgetting keys and values costs on real text: ``--kv`` and ``--kv-keep``.

    python benchmarks/quality_kv.py

Text that ``examples/tiny_moe`` was never trained on, in windows of the length that it was trained
on, read --block tokens at a time behind a cache of blocks of as many: like that all tokens but the
newest are rounded (or gone) by the time the others attend to them. Arithmetic is float32, weights
are the checkpoint's. Perplexity, KL divergence and agreement of the most probable next token are
against the same passes with all keys and values in full precision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from cache import MODEL, WINDOW
from common import facts, record, settings
from quality import Ids, Logits, compare, perplexity, text

QUANTISED = ("bf16", "q8", "q4")


def passes(ids: Ids, block: int, **how: Any) -> tuple[Logits, dict[str, Any]]:
    """float32 [windows, WINDOW, vocabulary], and the cache's figures at the end."""
    import torch

    import offload

    model = offload.load(
        MODEL, quant="none", ram="256MiB", context=WINDOW, attention="offload",
        kv_block_tokens=block, **how,
    )  # fmt: skip
    out = np.empty((*ids.shape, model.config.vocab_size), np.float32)
    try:
        with torch.no_grad():
            for row, window in zip(out, torch.tensor(ids, dtype=torch.int64), strict=True):
                cache = model.offload.new_cache()
                for at in range(0, len(window), block):
                    some = window[None, at : at + block]
                    row[at : at + block] = model(some, past_key_values=cache).logits[0].numpy()
        return out, model.offload.stats()["kv"]
    finally:
        model.offload.close()


def row(found: Logits, ids: Ids, whole: Logits) -> dict[str, float]:
    """Against the passes with everything in full precision."""
    mine = perplexity(found, ids)
    change = mine / perplexity(whole, ids) - 1
    return {"perplexity": mine, "perplexity_change": change, **compare(whole, found)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=64, help="of 192 tokens; 0: all there are")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--keep", type=int, nargs="*", default=[144, 96, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    from offload.kv.keep import Recency

    torch.set_num_threads(args.threads)
    ids, source = text(args.windows)
    whole, _ = passes(ids, args.block)
    ways: dict[str, dict[str, Any]] = {f"--kv {kind}": {"kv": kind} for kind in QUANTISED}
    for tokens in args.keep:
        ways[f"--kv-keep {tokens}"] = {"kv_keep": tokens}
        ways[f"--kv-keep {tokens}, newest"] = {"kv_keep": tokens, "kv_importance": Recency}
    rows = {}
    for name, how in ways.items():
        found, kv = passes(ids, args.block, **how)
        rows[name] = {**row(found, ids, whole), "attention_error": kv["attention_error"]}
        print(
            f"{name}: perplexity {rows[name]['perplexity_change']:+.3%}, KL "
            f"{rows[name]['kl']:.6f}, argmax {rows[name]['argmax']:.2%}",
            flush=True,
        )
    result = {
        "benchmark": "quality_kv",
        "facts": facts(),
        "settings": settings(args),
        "text": {"source": source, "windows": len(ids), "window": WINDOW},
        "perplexity": perplexity(whole, ids),
        "rows": rows,
    }
    print(f"written to {record('quality_kv', result, args.output)}")


if __name__ == "__main__":
    main()
