"""How fast attention over blocks reads keys and values, against what bounds it.

    python benchmarks/attention.py --threads 2

Decode: one query over --context tokens, going round over as many layers as fill --gib, so that
nothing stays in a cache between two turns. Its bounds, taken in the same run: a read-only stream
over the same memory by as many threads; and the multiply-adds it needs (two per element and query
head of a group) at the rate of a loop of nothing but those in registers. The peer is torch's SDPA
with ``enable_gqa`` on the same shapes in contiguous tensors, bfloat16 and float32.

Blocks: bfloat16 decode with blocks of other sizes. Quantise: a block of bfloat16 to 8 and 4 bits,
by the kernel and by numpy. Chunk: --queries queries at the end of --chunk-context tokens, against
the second bound and SDPA with a mask.
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

KINDS = "bf16,f32,q8,q4"
SHAPES = "32/4x128,32/8x128,16/16x128,32/4x64,32/8x64,16/2x256"
BLOCKS = "64,128,256,512,1024"


def seconds(work: Callable[[], object], samples: int) -> float:
    """Median of a call."""
    work()
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def multiply_rates(samples: int) -> dict[str, float]:
    """Multiply-adds per second of all threads, from registers: "fma" and, where there are
    the instructions, "dot" of bfloat16 and "words" of 16 bits."""
    import numpy as np

    from offload.cpu_ops import threads
    from offload.cpu_ops.block_rates import STEPS, multiply_entry, products_per_step
    from offload.cpu_ops.block_vectors import multiplier
    from offload.cpu_ops.isa import Isa, choose

    found, a = {}, np.zeros(8, np.int64)
    ways = ["fma", multiplier(choose()), *(["words"] if choose() is Isa.AVX512VNNI else [])]
    for how in dict.fromkeys(ways):
        entry = multiply_entry(how)

        def work(entry: Any = entry) -> None:
            threads.run(entry.call, entry.address, a)

        took = seconds(work, samples)
        found[how] = threads.count() * STEPS * products_per_step(how) / took
    return found


class Shape:
    """ "32/4x128": query heads / key heads x head size."""

    def __init__(self, text: str) -> None:
        heads, self.dim = text.split("x")[0], int(text.split("x")[1])
        self.heads, self.key_heads = (int(n) for n in heads.split("/"))
        self.text = text

    def products(self, tokens: float) -> float:
        """Multiply-adds of one query."""
        return 2.0 * self.heads * self.dim * tokens


def tables(memory: Any, layout: Any, context: int) -> list[Any]:
    """Layers' tables over all of ``memory``."""
    import numpy as np

    from offload.cpu_ops.kernels import address_of

    blocks = context // layout.tokens
    layers = memory.size // (blocks * layout.nbytes)
    found, base = [], address_of(memory)
    for layer in range(layers):
        keys = base + (layer * blocks + np.arange(blocks)) * layout.nbytes
        columns = (keys, keys + layout.values_at, np.full(blocks, layout.tokens))
        found.append(np.ascontiguousarray(np.stack(columns, axis=1).astype(np.int64)))
    return found


def decode(
    shape: Shape, kind: str, block: int, memory: Any, rates: dict[str, float], args: Any,
    stream: Callable[[], float],
) -> dict[str, Any]:  # fmt: skip
    import numpy as np

    from offload.cpu_ops.block_attention import BlockAttention
    from offload.cpu_ops.block_bodies import mode_of
    from offload.cpu_ops.block_layout import BlockKind, BlockLayout
    from offload.cpu_ops.isa import choose

    dim, context = shape.dim, args.context
    layout = BlockLayout(BlockKind(kind), shape.key_heads, dim, dim, block)
    layers = tables(memory, layout, context)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, shape.heads, 1, dim)).astype(np.float32)
    if kind != "f32":
        q = (q.view(np.uint32) >> 16).astype(np.uint16)

    def turn() -> None:
        for table in layers:
            one = BlockAttention(
                q, key_heads=shape.key_heads, dim=dim, positions=[context - 1], scale=dim**-0.5
            )
            one.add(layout, [table])
            one.result()

    # The bound may move with the machine's other guests: the better of both sides counts.
    before = stream()
    took = seconds(turn, args.samples) / len(layers)
    reading = max(before, stream())
    nbytes = (
        shape.key_heads
        * context
        // layout.span
        * sum(layout.record(keys=keys) for keys in (True, False))
    )
    mode = mode_of(kind, half_queries=q.dtype == np.uint16, whole=dim % 64 == 0, isa=choose())
    how = {"bf16dot": "dot", "q8dot": "words", "q4dot": "words"}.get(mode, "fma")
    reading_s, multiplying_s = nbytes / reading, shape.products(context) / rates[how]
    return {
        "shape": shape.text, "kind": kind, "mode": mode, "context": context, "block": block,
        "layers": len(layers), "bytes": nbytes, "us": took * 1e6,
        "gb_per_s": nbytes / took / 1e9,
        "stream_bound_gb_per_s": reading / 1e9,
        "multiply_bound_gb_per_s": nbytes / multiplying_s / 1e9,
        "of_smaller_bound": max(reading_s, multiplying_s) / took,
    }  # fmt: skip


def sdpa(shape: Shape, kind: str, words: Any, args: Any) -> dict[str, Any]:
    """torch on the same bytes, as contiguous [1, G, T, D] per layer."""
    import torch

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[kind]
    values = words.view(dtype)
    each = shape.key_heads * args.context * shape.dim
    count = values.numel() // (2 * each)
    full = (1, shape.key_heads, args.context, shape.dim)
    pairs = [
        [values[(2 * i + j) * each : (2 * i + j + 1) * each].view(full) for j in range(2)]
        for i in range(min(count, args.peer_layers))
    ]
    q = torch.randn(1, shape.heads, 1, shape.dim).to(dtype)

    def turn() -> None:
        for k, v in pairs:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    took = seconds(turn, max(1, args.samples // 2)) / len(pairs)
    nbytes = 2 * each * values.element_size()
    return {"sdpa_us": took * 1e6, "sdpa_gb_per_s": nbytes / took / 1e9}


def chunk(shape: Shape, memory: Any, rates: dict[str, float], args: Any) -> dict[str, Any]:
    import torch

    from offload.cpu_ops.block_attention import BlockAttention
    from offload.cpu_ops.block_layout import BlockKind, BlockLayout

    dim, n, context = shape.dim, args.queries, args.chunk_context
    layout = BlockLayout(BlockKind.BF16, shape.key_heads, dim, dim, args.block)
    table = tables(memory, layout, context)[0]
    q = torch.randn(1, shape.heads, n, dim).bfloat16()
    bits = q.view(torch.uint16).numpy()

    def work() -> None:
        one = BlockAttention(
            bits, key_heads=shape.key_heads, dim=dim, positions=[context - n], scale=dim**-0.5
        )
        one.add(layout, [table])
        one.result()

    k, v = (torch.randn(1, shape.key_heads, context, dim).bfloat16() for _ in range(2))
    mask = torch.ones(n, context, dtype=torch.bool).tril(context - n)

    def peer() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    took = seconds(work, args.samples // 2)
    began = time.perf_counter()
    peer()
    sdpa_took = time.perf_counter() - began
    products = shape.products(n * (context - (n - 1) / 2))
    rate = rates.get("dot", rates["fma"])
    return {
        "shape": shape.text, "queries": n, "context": context, "ms": took * 1e3,
        "gmac_per_s": products / took / 1e9, "of_multiply_bound": products / took / rate,
        "sdpa_ms": sdpa_took * 1e3,
    }  # fmt: skip


def quantise(shape: Shape, kind: str, memory: Any, args: Any) -> dict[str, Any]:
    """Blocks of bfloat16 that are in memory to others at its end."""
    import numpy as np

    from offload.cpu_ops.block_layout import BlockKind, BlockLayout
    from offload.cpu_ops.block_quantise import quantise_block
    from offload.cpu_ops.kv_cache import from_bf16

    layouts = [
        BlockLayout(k, shape.key_heads, shape.dim, shape.dim, args.block)
        for k in (BlockKind.BF16, BlockKind(kind))
    ]
    source, target = layouts
    blocks = [memory[i * source.nbytes :][: source.nbytes] for i in range(64)]
    plain = [[source.plain(b, keys=keys) for keys in (True, False)] for b in blocks]
    into = memory[-target.nbytes :]

    def work() -> None:
        for keys, values in plain:
            quantise_block(target, keys, values, into)

    def by_numpy() -> None:
        for x, keys in zip(plain[0], (True, False), strict=True):
            target.write(np.empty_like(into), from_bf16(x), keys=keys)

    took, numpy_took = seconds(work, args.samples) / len(blocks), seconds(by_numpy, args.samples)
    return {
        "shape": shape.text, "kind": kind, "us_per_block": took * 1e6,
        "gb_per_s": source.nbytes / took / 1e9, "times_numpy": numpy_took / took,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    peer = f"  SDPA {row['sdpa_gb_per_s']:5.1f}" if "sdpa_gb_per_s" in row else ""
    print(
        f"{row['shape']:>12} {row['kind']:>5} {row['block']:>4} {row['us']:8.0f} us "
        f"{row['gb_per_s']:6.1f} GB/s of {row['stream_bound_gb_per_s']:5.1f} and "
        f"{row['multiply_bound_gb_per_s']:6.1f}: {row['of_smaller_bound']:4.0%}{peer}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=None, help="default: as torch")
    parser.add_argument("--gib", type=float, default=1.0, help="memory to go round over")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--block", type=int, default=256, help="tokens")
    parser.add_argument("--shapes", default=SHAPES, help="query heads/key heads x head size")
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--blocks", default=BLOCKS, help="tokens of blocks to compare")
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--chunk-context", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--peer-layers", type=int, default=4, help="of torch, which is slower")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-chunk", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import numpy as np
    import torch

    from offload.cpu_ops import threads
    from offload.cpu_ops.isa import choose

    if args.threads:
        torch.set_num_threads(args.threads)
    n_threads = threads.setup()
    size = int(args.gib * 2**30)
    area = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, np.uint8)
    # Random words that are moderate bfloat16 and float32: no NaN, no subnormal, no infinity.
    pattern = np.random.default_rng(0).integers(0, 2**16, 1 << 20, dtype=np.uint16) & 0x807F
    pattern = (pattern | 0x3F00).view(np.uint8)
    for start in range(0, size, pattern.size):
        memory[start : start + pattern.size] = pattern[: size - start]
    words = torch.frombuffer(area, dtype=torch.int64)

    def stream() -> float:
        return size / seconds(words.sum, args.samples)

    rates = multiply_rates(args.samples)
    print("multiply-adds", {how: f"{rate / 1e9:.0f} G/s" for how, rate in rates.items()})
    shapes = [Shape(text) for text in args.shapes.split(",")]
    rows, chunks = [], []
    for shape in shapes:
        for kind in args.kinds.split(","):
            row = decode(shape, kind, args.block, memory, rates, args, stream)
            if not args.no_peer and kind in ("bf16", "f32"):
                row |= sdpa(shape, kind, words, args)
                row["times_sdpa"] = row["sdpa_us"] / row["us"]
            rows.append(row)
            show(row)
        if not args.no_chunk:
            chunks.append(chunk(shape, memory, rates, args))
            c = chunks[-1]
            print(
                f"{shape.text:>12} chunk {c['ms']:7.1f} ms, {c['of_multiply_bound']:4.0%} of the "
                f"multiply-add rate; SDPA {c['sdpa_ms']:7.1f} ms",
                flush=True,
            )
    blocks = []
    for block in [int(text) for text in args.blocks.split(",") if text]:
        blocks.append(decode(shapes[0], "bf16", block, memory, rates, args, stream))
        show(blocks[-1])
    quantising = [quantise(shapes[0], kind, memory, args) for kind in ("q8", "q4")]
    for q in quantising:
        print(f"{q['kind']} quantised: {q['gb_per_s']:.1f} GB/s, {q['times_numpy']:.0f}x numpy")
    result = {
        "facts": facts(), "settings": settings(args), "threads": n_threads,
        "isa": choose().value, "multiply_adds_per_s": rates, "decode": rows, "chunk": chunks,
        "blocks": blocks, "quantise": quantising,
    }  # fmt: skip
    record("attention", result, args.output)


if __name__ == "__main__":
    main()
