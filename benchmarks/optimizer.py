"""How fast the optimizer kernels go through memory.

    python benchmarks/optimizer.py --threads 2

Every kernel goes round over as many parameters as make --gib of float32 states, tile by tile, so
that no cache helps. Bytes are what a step must read and write per parameter; that a copy's lines
are read before they are written is not counted. Bounds, in turn with the kernels and by as many
threads: a stream that reads and writes memory in place (``torch.Tensor.neg_``) and one that only
reads (``sum``). Peer: ``torch.optim.AdamW(fused=True)`` in float32, over as many parameters.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import facts, record, settings


@dataclass(frozen=True, slots=True)
class Work:
    """Something that is timed."""

    name: str
    parameters: int
    bytes_per_parameter: float
    run: Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None, help="default: as torch")
    parser.add_argument("--gib", type=float, default=1.0, help="states to go round over")
    parser.add_argument("--tile", type=int, default=1 << 20, help="parameters per call")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--only", default=None, help="names, separated by semicolons")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import torch

    from offload.cpu_ops import threads

    if args.threads:
        torch.set_num_threads(args.threads)
    n_threads = threads.setup()
    works = list(everything(args))
    if args.only:
        works = [w for w in works if w.name in args.only.split(";")]
    seconds: dict[str, list[float]] = {w.name: [] for w in works}
    for work in works:
        work.run()
    for _ in range(args.samples):  # in turn: the machine's memory rate drifts within minutes
        for work in works:
            began = time.perf_counter()
            work.run()
            seconds[work.name].append(time.perf_counter() - began)
    rows = [row(w, statistics.median(seconds[w.name])) for w in works]
    by_name = {r["name"]: r for r in rows}
    bound = by_name["stream in place"]["bytes_per_s"]
    peer = by_name.get("torch fused")
    for found in rows:
        found["of_stream"] = found["bytes_per_s"] / bound
        found["to_torch_fused"] = (
            found["parameters_per_s"] / peer["parameters_per_s"] if peer else None
        )
        print(
            f"{found['name']:34s} {found['bytes_per_s'] / 1e9:6.1f} GB/s "
            f"{found['of_stream']:5.0%} of the stream   "
            f"{found['parameters_per_s'] / 1e9:6.3f} G parameters/s"
            + (f" {found['to_torch_fused']:6.2f} x torch fused" if peer else ""),
            flush=True,
        )
    result = {
        "benchmark": "optimizer",
        "facts": facts(),
        "settings": settings(args),
        "threads": n_threads,
        "rates": rows,
    }
    print(f"written to {record('optimizer', result, args.output)}")


def row(work: Work, seconds: float) -> dict[str, Any]:
    rate = work.parameters / seconds
    return {
        "name": work.name,
        "bytes_per_parameter": work.bytes_per_parameter,
        "parameters_per_s": rate,
        "bytes_per_s": rate * work.bytes_per_parameter,
    }


def everything(args: argparse.Namespace) -> Any:
    """All that is timed, on one area of memory: each kernel uses it as its own."""
    import numpy as np
    import torch

    from offload.cpu_ops import grad_norm
    from offload.cpu_ops.adam import AdamStep, adam_fp32
    from offload.cpu_ops.adam_states import adam_8bit, adam_bf16

    tile = args.tile
    tiles = max(1, int(args.gib * 2**30) // (12 * tile))
    count = tiles * tile
    rng = np.random.default_rng(0)
    pattern = rng.standard_normal(1 << 20).astype(np.float32)

    def array(dtype: Any, scale: float = 0.0) -> Any:
        """``count`` numbers of that deviation (of bfloat16 the bits), in huge pages."""
        area = mmap.mmap(-1, count * np.dtype(dtype).itemsize)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        found = np.frombuffer(area, dtype)
        values = np.float32(scale) * pattern
        found[:] = np.resize((values.view(np.uint32) >> 16) if dtype == u16 else values, count)
        return found

    def cut(*arrays: Any) -> list[tuple[Any, ...]]:
        """Tiles of all of them."""
        return [tuple(a[i : i + tile] for a in arrays) for i in range(0, count, tile)]

    f32, u16, u8 = np.float32, np.uint16, np.uint8
    step = AdamStep(lr=1e-5, step=1000, clip=0.5)

    p, m, v, g32 = (array(f32, s) for s in (0.02, 0.0, 0.0, 1e-3))
    words = torch.from_numpy(p), torch.from_numpy(m), torch.from_numpy(v), torch.from_numpy(g32)
    yield Work("stream in place", 8 * count, 8, lambda: void([w.neg_().neg_() for w in words]))
    yield Work("stream read", 4 * count, 4, lambda: void([w.sum() for w in words]))

    def fp32(tiles: Any) -> Callable[[], None]:
        return lambda: void([adam_fp32(step, *tile) for tile in tiles])

    g16, copy = array(u16, 1e-3), array(u16)
    yield Work("fp32, bf16 gradient and copy", count, 28, fp32(cut(g16, p, m, v, copy)))
    yield Work("fp32, fp32 gradient, no copy", count, 28, fp32(cut(g32, p, m, v)))

    parameters = [torch.nn.Parameter(torch.from_numpy(t)) for (t,) in cut(p)]
    fused = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for parameter, (g, m_, v_) in zip(parameters, cut(g32, m, v), strict=True):
        parameter.grad = torch.from_numpy(g)
        fused.state[parameter] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.from_numpy(m_),
            "exp_avg_sq": torch.from_numpy(v_),
        }
    yield Work("torch fused", count, 28, lambda: void(fused.step()))

    halves = list(enumerate(cut(g16, array(u16, 0.02), array(u16), array(u16))))
    yield Work(
        "bf16, bf16 gradient", count, 14,
        lambda: void([adam_bf16(step, *t, seed=1, first=i * tile) for i, t in halves]),
    )  # fmt: skip

    scales = np.zeros((2, tiles, tile // 256), f32)
    codes = list(zip(cut(g16, p, array(u8), array(u8)), *scales, cut(copy), strict=True))
    yield Work(
        "8-bit, bf16 gradient and copy", count, 16 + 16 / 256,
        lambda: void([adam_8bit(step, *t, *s, *c, isa=args.isa) for t, *s, c in codes]),
    )  # fmt: skip

    sums = np.empty((tiles, grad_norm.chunks(tile)))

    def squares(gradients: Any) -> Callable[[], None]:
        work = list(zip(cut(gradients), sums, strict=True))
        return lambda: void([grad_norm.squares(g, out) for (g,), out in work])

    yield Work("squares of fp32", count, 4, squares(p))
    yield Work("squares of bf16", count, 2, squares(g16))
    pairs = cut(g32, g16)
    yield Work("fp32 += bf16", count, 10, lambda: void([grad_norm.accumulate(*t) for t in pairs]))
    scaled = cut(copy)
    yield Work("scale bf16", count, 4, lambda: void([grad_norm.scale(*t, 1.0) for t in scaled]))


def void(_: Any) -> None:
    """Nothing of it."""


if __name__ == "__main__":
    main()
