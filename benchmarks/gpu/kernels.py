"""The kernels for packed weights against the card's own memory: cases of ``case.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

FORMATS = ("q4_0", "q8_0", "q4_k", "q6_k", "mxfp4", "bf16")
SAMPLES = 5


def rates(job: dict[str, Any]) -> dict[str, Any]:
    """Bytes of packed weights per second: products with 1, 4 and 16 tokens, and dequantising.

    A format's matrices lie one after the other, more of them than any cache holds, and each product
    takes another one. ``of_read``: over the rate at which the card reads, in the same process.
    """
    if job["device"] != "cuda":
        return {"skipped": "a rate of kernels is one of a card"}
    from offload.cpu_ops.formats import get_format
    from offload.cpu_ops.packing import packed_bytes
    from offload.gpu_ops import linear as dense
    from offload.gpu_ops.launch import CupyLauncher
    from offload.gpu_ops.records import Scratch

    rows, columns, nbytes = job["rows"], job["columns"], job["nbytes"]
    launcher = CupyLauncher(torch.device("cuda", 0))
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    # Any bits are weights. Scales that are infinite cost no time of their own.
    memory.random_(0, 256)
    words = memory[: nbytes // 8 * 8].view(torch.int64)
    read = measured(lambda _: words.sum(), 1, words.nbytes)
    found: dict[str, Any] = {"read_bytes_per_s": read, "formats": {}}
    scratch = Scratch(
        max(dense.scratch_bytes(get_format(f), rows, columns, 16) for f in FORMATS) + 4096,
        launcher.device,
    )
    for name in FORMATS:
        fmt = get_format(name)
        each = packed_bytes(fmt, rows, columns)
        count = nbytes // each
        figures: dict[str, float] = {}
        for tokens in (1, 4, 16):
            x = torch.randn((tokens, columns), device="cuda")
            out = torch.empty((tokens, rows), device="cuda")

            def product(i: int, fmt: Any = fmt, x: Any = x, out: Any = out, e: int = each) -> None:
                dense.linear(launcher, scratch, fmt, memory.data_ptr() + i * e, x, out)

            rate = measured(product, count, each)
            figures[f"{tokens}_tokens_bytes_per_s"] = rate
            figures[f"{tokens}_tokens_of_read"] = rate / read
        slab = torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda")

        def unpack(i: int, fmt: Any = fmt, slab: Any = slab, e: int = each) -> None:
            dense.dequantize(launcher, fmt, memory.data_ptr() + i * e, slab)

        moved = each + slab.nbytes
        figures["dequantize_of_read"] = measured(unpack, count, moved) / read
        found["formats"][name] = figures
    return found


def measured(work: Callable[[int], object], count: int, nbytes: int) -> float:
    """Bytes per second of ``count`` calls, each of ``nbytes``: the median of a few, after one."""
    seconds = []
    for _ in range(SAMPLES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(count):
            work(i)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return count * nbytes / sorted(seconds[1:])[SAMPLES // 2]


def agree(job: dict[str, Any]) -> dict[str, Any]:
    """Every format's products and values on the device against float64 on the CPU: the largest
    error over the row's bound. On the simulated device there is nothing that could differ."""
    if job["device"] != "cuda":
        return {"skipped": "tests/gpu_ops runs the kernels' source on the CPU"}
    from kernel_support import rounded, tolerance
    from random_rows import random_rows

    from offload.cpu_ops.codecs import decode_rows
    from offload.cpu_ops.formats import FORMATS as ALL
    from offload.cpu_ops.packing import pack_rows
    from offload.gpu_ops import linear as dense
    from offload.gpu_ops.launch import CupyLauncher
    from offload.gpu_ops.records import Scratch

    launcher = CupyLauncher(torch.device("cuda", 0))
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for name, fmt in ALL.items():
        columns = max(fmt.block, 32) * 13
        gguf = random_rows(fmt, 37, columns)
        values = decode_rows(fmt, gguf)
        packed = torch.from_numpy(pack_rows(fmt, gguf, columns)).cuda()
        x = torch.randn((5, columns))
        out = torch.empty((5, 37), device="cuda")
        scratch = Scratch(dense.scratch_bytes(fmt, 37, columns, 5), launcher.device)
        dense.linear(launcher, scratch, fmt, packed.data_ptr(), x.cuda(), out)
        exact = rounded(fmt, x.numpy())
        want = exact @ values.T.astype(np.float64)
        bound = tolerance(fmt, values.astype(np.float64), exact)
        plain = torch.empty((37, columns), device="cuda")
        dense.dequantize(launcher, fmt, packed.data_ptr(), plain)
        found[name] = {
            "error_over_bound": float((np.abs(out.cpu().numpy() - want) / bound).max()),
            "values_equal": bool(np.array_equal(plain.cpu().numpy(), values)),
        }
    wrong = [n for n, f in found.items() if f["error_over_bound"] > 1 or not f["values_equal"]]
    if wrong:
        raise RuntimeError(f"kernels that are wrong on this card: {', '.join(wrong)}: {found}")
    return {"formats": found, "seconds": time.perf_counter() - began}


__all__ = ["agree", "rates"]
