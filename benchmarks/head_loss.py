"""How near the loss of a language-model head comes to the products it is made of.

    python benchmarks/head_loss.py --vocabulary 128000 --width 2048 --tokens 512 2048

Work: loss and gradients of a resident bfloat16 head, 8 V H N flops (6 frozen). Bound: that many
flops at the rate of the products themselves, on the shapes of a slice, measured in turn.
Peer: torch with whole logits (``F.linear``, ``.float()``, ``F.cross_entropy``, backward), where
they fit in --peer-gib.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import facts, record, settings

from offload.train.head_loss import ResidentHead, head_loss, token_chunk, workspace_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rows", type=int, default=4096, help="of a slice")
    parser.add_argument("--threads", type=int, default=None, help="default: as torch")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--peer-gib", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    weight = (torch.randn(args.vocabulary, args.width) * 0.02).bfloat16()
    results = [measure(weight, tokens, args) for tokens in args.tokens]
    record(
        "head_loss", {"settings": settings(args), "facts": facts(), "runs": results}, args.output
    )


def measure(weight: torch.Tensor, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    vocabulary, width = weight.shape
    hidden = torch.randn(tokens, width).bfloat16()
    labels = torch.randint(0, vocabulary, (tokens,))
    head = ResidentHead(weight, rows=args.rows)
    chunk = token_chunk(tokens, args.rows)
    products = 3 if args.frozen else 4

    def ours() -> None:
        head_loss(hidden, labels, head, scale=1 / tokens, frozen=args.frozen)

    # A quarter of the slices: long enough to be timed, and weights from memory, not from caches.
    spans = [(a, b) for a, b in head.slices if b - a == args.rows][::4]
    h = hidden[:chunk]
    z, dw, dh = h @ weight[: args.rows].t(), torch.empty_like(weight[: args.rows]), h.clone()

    def bound() -> None:
        """The products of one chunk and some slices."""
        for first, end in spans:
            w = weight[first:end]
            for _ in range(2):
                torch.mm(h, w.t(), out=z)
            torch.mm(z, w, out=dh)
            if not args.frozen:
                torch.mm(z.t(), h, out=dw)

    def whole() -> None:
        x, y = hidden.clone().requires_grad_(), weight.detach().requires_grad_(not args.frozen)
        (F.cross_entropy(F.linear(x, y).float(), labels, reduction="sum") / tokens).backward()

    works: dict[str, Callable[[], None]] = {"ours": ours, "products": bound}
    if tokens * vocabulary * 14 <= args.peer_gib * 2**30:
        works["whole logits"] = whole
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.samples):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begin)
    took = {name: statistics.median(s) for name, s in seconds.items()}
    rate = 2 * products * chunk * args.rows * len(spans) * width / took["products"]
    limit = 2 * products * tokens * vocabulary * width / rate
    result = {
        "tokens": tokens,
        "seconds": took,
        "samples": seconds,
        "products_gflops": rate / 1e9,
        "fraction_of_products": limit / took["ours"],
        "workspace_bytes": workspace_bytes(
            tokens, width, head.slices, weight.dtype, frozen=args.frozen, gathered=False
        ),
    }
    line = f"{tokens} tokens: {took['ours']:.2f} s, {result['fraction_of_products']:.0%} of the"
    line += f" products' {rate / 1e9:.0f} GFLOP/s, {result['workspace_bytes'] / 2**20:.0f} MiB"
    if "whole logits" in took:
        line += f", whole logits {took['whole logits']:.2f} s"
    print(line)
    return result


if __name__ == "__main__":
    main()
