"""How much of the memory's read rate the quantised CPU kernels reach.

    python benchmarks/kernels.py --threads 2

Every measurement goes round over more weights than caches hold (--gib). The bound is a read-only
stream over the same memory by as many threads, taken before and after each row of the table. With
--tokens, also the products per second, whose bound is the processor.
Also: what a parallel region costs alone, and in turn with torch's own regions.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import facts, record, settings


def rate(work: Callable[[], int], samples: int) -> float:
    """Median bytes per second of ``work``, which returns the bytes it read."""
    work()
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        nbytes = work()
        found.append(nbytes / (time.perf_counter() - began))
    return statistics.median(found)


def region_costs() -> dict[str, float]:
    """Microseconds per call: of a region in which there is nothing to do, of the smallest kernel
    (so of Python and checks), of a torch operation on all threads, and of the last two in turn:
    their sum if they do not disturb each other."""
    import numpy as np
    import torch

    from offload.cpu_ops import threads
    from offload.cpu_ops.entries import gemm_entry
    from offload.cpu_ops.formats import FORMATS
    from offload.cpu_ops.isa import choose
    from offload.cpu_ops.kernels import gemv
    from offload.cpu_ops.packing import packed_bytes
    from offload.cpu_ops.tiles import Gemm

    nothing, entry = np.zeros(Gemm.SIZE, np.int64), gemm_entry("f32", choose())
    nothing[Gemm.TILES_PER_TASK] = 1

    fmt = FORMATS["f32"]
    packed = np.zeros(packed_bytes(fmt, 32, 16), np.uint8)
    x, out = np.zeros(16, np.float32), np.zeros(32, np.float32)
    a, b = torch.ones(128, 128), torch.ones(128, 128)
    result = torch.empty(128, 128)

    def kernel() -> None:
        gemv(fmt, packed, 32, 16, x, out)

    def product() -> None:
        torch.mm(a, b, out=result)

    def both() -> None:
        kernel()
        product()

    def microseconds(work: Callable[[], None], calls: int = 1000) -> float:
        work()
        found = []
        for _ in range(7):
            began = time.perf_counter()
            for _ in range(calls):
                work()
            found.append((time.perf_counter() - began) / calls * 1e6)
        return statistics.median(found)

    return {
        "region_us": microseconds(lambda: threads.run(entry.call, entry.address, nothing)),
        "kernel_us": microseconds(kernel),
        "torch_mm_us": microseconds(product),
        "in_turn_us": microseconds(both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None, help="default: as torch")
    parser.add_argument("--gib", type=float, default=1.0, help="weights to go round over")
    parser.add_argument("--formats", default="q4_0,q8_0,bf16,q4_k,mxfp4,q6_k,q5_k,f16,f32")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=8, help="per token")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import numpy as np
    import torch

    from offload.cpu_ops import threads
    from offload.cpu_ops.experts import expert_ffn, expert_layout
    from offload.cpu_ops.formats import FORMATS
    from offload.cpu_ops.isa import choose
    from offload.cpu_ops.kernels import gemm
    from offload.cpu_ops.packing import packed_bytes

    if args.threads:
        torch.set_num_threads(args.threads)
    n_threads = threads.setup()
    size = int(args.gib * 2**30)
    area = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    weights = np.frombuffer(area, np.uint8)
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2**16, 1 << 20, dtype=np.uint16)

    def fill(name: str) -> None:
        """Random bytes, of which each scale is moderate: no NaN, and nothing subnormal, for which
        some processors take a hundred cycles. A scale of MXFP4 is a byte, others are float16 or
        bfloat16."""
        kind = (0x1F1F, 0x6060) if name == "mxfp4" else (0x8FFF, 0x2000)
        pattern = (numbers & kind[0] | kind[1]).view(np.uint8)
        for start in range(0, size, pattern.size):
            weights[start : start + pattern.size] = pattern[: size - start]

    words = torch.frombuffer(area, dtype=torch.int64)

    def stream() -> int:
        words.sum()
        return size

    tokens = args.tokens
    x_K = rng.standard_normal((tokens, args.columns)).astype(np.float32)
    x_H = rng.standard_normal((tokens, args.hidden)).astype(np.float32)
    out_N = np.empty((tokens, args.rows), np.float32)
    out_H = np.empty((tokens, args.hidden), np.float32)
    routing = np.full((tokens, args.experts), 1 / args.experts, np.float32)
    base = weights.__array_interface__["data"][0]
    rows: list[dict[str, Any]] = []
    for name in args.formats.split(","):
        fmt = FORMATS[name]
        fill(name)
        step = packed_bytes(fmt, args.rows, args.columns)
        layout = expert_layout(fmt, fmt, args.hidden, args.inner)
        bundle = -(-layout.nbytes // 4096) * 4096
        places = base + bundle * rng.permutation(size // bundle).astype(np.int64)
        calls = [places[i : i + args.experts] for i in range(0, len(places), args.experts)]
        calls = [c for c in calls if len(c) == args.experts]

        def matrices(fmt: Any = fmt, step: int = step) -> int:
            for address in range(base, base + size - step + 1, step):
                gemm(fmt, address, args.rows, args.columns, x_K, out_N, isa=args.isa)
            return size // step * step

        def experts(layout: Any = layout, calls: Any = calls) -> int:
            for bases in calls:
                expert_ffn(layout, bases, x_H, routing, out_H, isa=args.isa)
            return len(calls) * args.experts * layout.nbytes

        before = rate(stream, args.samples)
        gemv_rate = rate(matrices, args.samples)
        between = rate(stream, args.samples)
        ffn_rate = rate(experts, args.samples)
        after = rate(stream, args.samples)
        found = {
            "format": name,
            "gemv_bytes_per_s": gemv_rate,
            "gemv_of_stream": gemv_rate / ((before + between) / 2),
            "ffn_bytes_per_s": ffn_rate,
            "ffn_of_stream": ffn_rate / ((between + after) / 2),
            "stream_bytes_per_s": [before, between, after],
        }
        if tokens > 1:
            per_byte = 2 * args.rows * args.columns * tokens / step
            found["gemm_ops_per_s"] = gemv_rate * per_byte
            print(f"{name:7s} {tokens} tokens: {gemv_rate * per_byte / 1e12:.2f} Tops/s")
        rows.append(found)
        print(
            f"{name:7s} gemv {gemv_rate / 1e9:5.1f} GB/s = {found['gemv_of_stream']:4.0%}   "
            f"expert ffn {ffn_rate / 1e9:5.1f} GB/s = {found['ffn_of_stream']:4.0%}   "
            f"stream {before / 1e9:.1f}, {between / 1e9:.1f}, {after / 1e9:.1f}",
            flush=True,
        )
    costs = region_costs()
    print(
        f"a region {costs['region_us']:.1f} us, a kernel {costs['kernel_us']:.1f} us, "
        f"torch.mm {costs['torch_mm_us']:.1f} us, in turn {costs['in_turn_us']:.1f} us"
    )
    result = {
        "benchmark": "kernels",
        "facts": facts(),
        "settings": settings(args),
        "threads": n_threads,
        "isa": choose(args.isa).value,
        "rates": rows,
        "regions": costs,
    }
    print(f"written to {record('kernels', result, args.output)}")


if __name__ == "__main__":
    main()
