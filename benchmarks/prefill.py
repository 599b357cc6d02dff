"""How close prompts on packed weights come to plain bfloat16 products of the same shapes.

    python benchmarks/prefill.py --threads 2

The bound is torch.mm on weights that are bfloat16 in memory already, measured beside each row of
the table: flops over it are the least time a product by slabs can take. "slabs" dequantises and
multiplies, "gemm" are the integer kernels on the same packed weights, which alone compute experts
(all of a layer's in one call, activation and sum included). Errors are norms against float64
products of the exact weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import facts, record, settings


def seconds(works: list[Callable[[], object]], samples: int) -> list[float]:
    """Least seconds of each; in turn, so that a slow spell of the machine meets them all."""
    best = [float("inf")] * len(works)
    for sample in range(samples + 1):
        for i, work in enumerate(works):
            began = time.perf_counter()
            work()
            if sample:  # the first prepares
                best[i] = min(best[i], time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None, help="default: as torch")
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dense", type=int, default=4096, help="rows and columns")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", default="1024,768")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top", type=int, default=8, help="experts per token")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import numpy as np
    import torch

    from offload.cpu_ops import prefill, threads
    from offload.cpu_ops.experts import expert_ffn, expert_layout
    from offload.cpu_ops.formats import FORMATS
    from offload.cpu_ops.kernels import gemm
    from offload.cpu_ops.packing import dequantize, pack_rows, packed_bytes, quantize

    if args.threads:
        torch.set_num_threads(args.threads)
    n_threads, fmt, tokens = threads.setup(), FORMATS[args.format], args.tokens
    rng = np.random.default_rng(0)

    def pack(rows: int, columns: int) -> Any:
        """Normal weights; 64 different rows over and over."""
        some = quantize(fmt, rng.standard_normal((64, columns)).astype(np.float32) / columns**0.5)
        return pack_rows(fmt, np.tile(some, (-(-rows // 64), 1))[:rows], columns)

    table: list[dict[str, Any]] = []

    def add(
        what: str, flops: float, bound: float, found: dict[str, float], errors: dict[str, float]
    ) -> None:
        row: dict[str, Any] = {
            "what": what, "flops": flops, "torch_bf16_flops_per_s": flops / bound, **errors,
        }  # fmt: skip
        text = f"{what}: torch bf16 {flops / bound / 1e12:.3f} Tflop/s"
        for how, took in found.items():
            row |= {f"{how}_flops_per_s": flops / took, f"{how}_of_torch": bound / took}
            text += f", {how} {flops / took / 1e12:.3f} = {bound / took:.0%}"
        table.append(row)
        print(f"{text}  {errors}", flush=True)

    n = args.dense
    packed, x = pack(n, n), rng.standard_normal((tokens, n)).astype(np.float32)
    exact = x.astype(np.float64) @ dequantize(fmt, packed, n, n).astype(np.float64).T
    by_slabs, by_gemm = (np.empty((tokens, n), np.float32) for _ in range(2))
    x_bf16, w_bf16 = torch.randn(tokens, n).bfloat16(), torch.randn(n, n).bfloat16()
    bound, slabs, kernels = seconds(
        [
            lambda: torch.mm(x_bf16, w_bf16.T),
            lambda: prefill.matmul(fmt, packed, n, n, x, by_slabs),
            lambda: gemm(fmt, packed, n, n, x, by_gemm),
        ],
        args.samples,
    )
    norm = np.linalg.norm(exact)
    errors = {
        "slabs_error": float(np.linalg.norm(by_slabs - exact) / norm),
        "gemm_error": float(np.linalg.norm(by_gemm - exact) / norm),
    }
    took = {"slabs": slabs, "gemm": kernels}
    add(f"dense {n} x {n}", 2.0 * tokens * n * n, bound, took, errors)

    for inner in map(int, args.inner.split(",")):
        hidden = args.hidden
        layout = expert_layout(fmt, fmt, hidden, inner)
        bundle = np.zeros(layout.nbytes, np.uint8)
        for at, rows, columns in (
            (layout.gate_offset, inner, hidden),
            (layout.up_offset, inner, hidden),
            (layout.down_offset, hidden, inner),
        ):
            bundle[at : at + packed_bytes(fmt, rows, columns)] = pack(rows, columns)
        bundles = [bundle.copy() for _ in range(args.experts)]
        bases = np.array([b.ctypes.data for b in bundles])
        chosen = np.argsort(rng.random((tokens, args.experts)), axis=1)[:, : args.top]
        routing_TE = np.zeros((tokens, args.experts), np.float32)
        np.put_along_axis(routing_TE, chosen, 1 / args.top, axis=1)
        x_TH = rng.standard_normal((tokens, hidden)).astype(np.float32)
        out_TH = np.empty_like(x_TH)
        plain = [
            (torch.randn(2, inner, hidden).bfloat16(), torch.randn(hidden, inner).bfloat16())
            for _ in range(args.experts)
        ]
        inputs = [
            (torch.randn(of, hidden).bfloat16(), torch.randn(of, inner).bfloat16())
            for of in map(int, np.count_nonzero(routing_TE, axis=0))
        ]

        def products(plain: Any = plain, inputs: Any = inputs) -> None:
            """Only the products: no gathering, activation or sum."""
            for (gate_up, down), (x_e, h_e) in zip(plain, inputs, strict=True):
                torch.mm(x_e, gate_up[0].T)
                torch.mm(x_e, gate_up[1].T)
                torch.mm(h_e, down.T)

        def layer(
            layout: Any = layout, bases: Any = bases, x: Any = x_TH,
            routing: Any = routing_TE, out: Any = out_TH,
        ) -> None:  # fmt: skip
            expert_ffn(layout, bases, x, routing, out)

        flops = 6.0 * tokens * args.top * hidden * inner
        bound, kernels = seconds([products, layer], args.samples)
        what = f"moe {hidden} x {inner}, {args.experts} experts, top {args.top}"
        add(what, flops, bound, {"gemm": kernels}, {})

    result = {
        "benchmark": "prefill",
        "facts": facts(),
        "settings": settings(args),
        "threads": n_threads,
        "rows": table,
    }
    print(f"written to {record('prefill', result, args.output)}")


if __name__ == "__main__":
    main()
