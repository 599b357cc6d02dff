"""What a card, its driver and libraries are, and what the runtime's assumptions of them come to.

Every question is asked by itself, and one that fails leaves its traceback: the first run on a new
machine is to tell all it can.
"""

from __future__ import annotations

import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

MIB = 1 << 20
PACKAGES = (
    "torch", "transformers", "numpy", "numba", "cupy-cuda12x", "cupy-cuda13x", "accelerate",
    "torchao", "aiofiles", "greenlet", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12",
)  # fmt: skip


def look(job: dict[str, Any]) -> dict[str, Any]:
    """All answers by name, each with what it raised if it did, and the process's size after it."""
    from offload.runtime.rss import current_rss

    found: dict[str, Any] = {}
    questions: list[Callable[[], dict[str, Any]]] = [versions, system]
    if job["device"] == "cuda":
        questions += [card, pinning, events, workspaces, attention, heads, kernels, toy]
    for question in questions:
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                answer = question()
            except Exception:  # noqa: BLE001  it is what is to be known
                answer = {"error": traceback.format_exc()[-3000:]}
        answer["seconds"] = round(time.perf_counter() - began, 3)
        answer["process_bytes"] = current_rss()
        if warned:
            answer["warnings"] = sorted({str(w.message)[:300] for w in warned})
        found[question.__name__] = answer
    return found


def versions() -> dict[str, Any]:
    """Of what is installed."""
    found: dict[str, Any] = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def system() -> dict[str, Any]:
    """What the host allows."""
    import os
    import resource

    from offload.runtime.memory import huge_page_mode
    from offload.runtime.rss import available_ram

    limits = Path("/proc/self/limits").read_text().splitlines()
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "available_ram": available_ram(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "limits": [line for line in limits if "locked" in line or "open files" in line],
        "huge_pages": huge_page_mode(),
    }


def card() -> dict[str, Any]:
    """Names, sizes, what is free before and after this process's context."""
    said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    torch.zeros(1, device="cuda")
    return {
        "nvidia_smi": said.stdout[-3000:],
        "name": found.name,
        "capability": torch.cuda.get_device_capability(0),
        "total": total,
        "properties": str(found),
        "cards": torch.cuda.device_count(),
        "free": free,
        "free_with_context": torch.cuda.mem_get_info()[0],
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def pinning() -> dict[str, Any]:
    """How long memory of ours takes to pin, and whether the runtime's error of a refusal is
    forgotten."""
    from offload.runtime.cuda_api import TorchCard
    from offload.runtime.cuda_memory import PinnedMemory

    api = TorchCard(0)
    found: dict[str, Any] = {}
    for mib in (1, 256, 2048):
        began = time.perf_counter()
        memory = PinnedMemory(mib * MIB, "pins", api)
        pinned_s = time.perf_counter() - began
        answer = {"refused": memory.refused, "seconds": pinned_s}
        answer["torch_says_pinned"] = memory.tensor().is_pinned()
        if mib == 1:
            again = api.pin(memory.tensor().data_ptr(), 4096)
            answer["twice"] = again
            answer["next_kernel"] = float(torch.ones(8, device="cuda").sum())
        began = time.perf_counter()
        memory.close()
        answer["close_s"] = time.perf_counter() - began
        found[f"{mib} MiB"] = answer
    return found


def events() -> dict[str, Any]:
    """Microseconds of the host for what each block that goes up costs it."""
    from offload.runtime.cuda_api import TorchCard
    from offload.runtime.cuda_device import CudaDevice
    from offload.runtime.device import Region

    api = TorchCard(0)
    stream = api.stream()
    found: dict[str, Any] = {"record": per_call(lambda: api.record(stream))}
    event = api.record(stream)
    api.block(event)
    found["query"] = per_call(lambda: api.reached(event))
    found["wait"] = per_call(lambda: api.wait(stream, event))
    found["block_when_done"] = per_call(lambda: api.block(event))
    found["launch"] = per_call(torch.ones(8, device="cuda").mul_, 1.0)
    device = CudaDevice(8 * MIB)
    try:
        host, slot = device.host_memory(MIB, "host"), device.device_memory(MIB, "slot")
        there, here = Region(slot, 0, MIB), Region(host, 0, MIB)
        found["copy_queued"] = per_call(lambda: device.copy(there, here, device.h2d))
        device.h2d.record().wait()
        found["copy_waited_for"] = per_call(lambda: device.copy(there, here, device.h2d).wait())
    finally:
        device.close()
    return {f"{name}_us": value for name, value in found.items()}


def per_call(work: Callable[..., Any], *args: Any) -> float:
    """Median microseconds of a call, of 200."""
    times = []
    for _ in range(200):
        began = time.perf_counter()
        work(*args)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e6


def workspaces() -> dict[str, Any]:
    """Bytes of torch's allocator that products keep and take besides their operands: plans set
    ``offload.models.workspace.CARD_BYTES`` aside for them."""
    from offload.models.workspace import CARD_BYTES

    found: dict[str, Any] = {"planned": CARD_BYTES}
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 16, 512):
            x = torch.ones((rows, 4096), dtype=dtype, device="cuda")
            w = torch.ones((4096, 4096), dtype=dtype, device="cuda")
            b = torch.ones(4096, dtype=dtype, device="cuda")
            for name, beside in (("plain", None), ("bias", b)):
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                y = F.linear(x, w, beside)
                took = torch.cuda.max_memory_allocated() - before - y.nbytes
                del y
                kept = torch.cuda.memory_allocated() - before
                found[f"{dtype} {rows} {name}"] = {"took": took, "kept": kept}
    return found


def attention() -> dict[str, Any]:
    """Bytes that attention takes besides its result, as transformers calls it: plans measure it on
    the CPU's."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, keys in ((2048, 2048), (1, 2048)):
            q = torch.randn((1, 32, tokens, 128), dtype=dtype, device="cuda")
            k = torch.randn((1, 8, keys, 128), dtype=dtype, device="cuda")
            mask = torch.ones((1, 1, tokens, keys), dtype=torch.bool, device="cuda").tril()
            whole = k.repeat_interleave(4, dim=1)
            ways: dict[str, Callable[[], torch.Tensor]] = {
                "causal": lambda q=q, w=whole, c=tokens > 1: F.scaled_dot_product_attention(
                    q, w, w, is_causal=c
                ),
                "causal, grouped": lambda q=q, k=k, c=tokens > 1: F.scaled_dot_product_attention(
                    q, k, k, is_causal=c, enable_gqa=True
                ),
                "mask": lambda q=q, w=whole, m=mask: F.scaled_dot_product_attention(
                    q, w, w, attn_mask=m
                ),
            }
            for name, way in ways.items():
                way()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                out = way()
                took = torch.cuda.max_memory_allocated() - before - out.nbytes
                del out
                found[f"{dtype} {tokens}x{keys} {name}"] = took
    return found


def heads() -> dict[str, Any]:
    """For which numbers of rows a sliced LM head has the whole one's bits here."""
    from offload.models.head_check import ROWS_TRIED, verified_rows

    found: dict[str, Any] = {}
    for vocabulary, width, dtype in (
        (32000, 2048, torch.bfloat16), (32000, 2048, torch.float32), (256, 64, torch.bfloat16),
    ):  # fmt: skip
        step = vocabulary // 8
        rows = verified_rows(
            vocabulary, width, dtype, step, 1, (*ROWS_TRIED, 9, 64, 512), device="cuda:0"
        )
        found[f"{vocabulary} x {width} {dtype}"] = sorted(rows)
    return found


def kernels() -> dict[str, Any]:
    """Whether CuPy is there, finds its compiler and compiles; how long that takes."""
    from offload.cpu_ops.formats import get_format
    from offload.gpu_ops.launch import CupyLauncher, import_cupy
    from offload.gpu_ops.records import make_records, records_bytes
    from offload.gpu_ops.source import kernel

    began = time.perf_counter()
    cupy = import_cupy()
    found: dict[str, Any] = {
        "cupy": cupy.__version__,
        "import_s": time.perf_counter() - began,
        "nvrtc": cupy.cuda.nvrtc.getVersion(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
    }
    launcher = CupyLauncher(torch.device("cuda", 0))
    fmt = get_format("q4_k")
    for one in (kernel("quantize"), kernel("linear", fmt, 4), kernel("gate_up", fmt, 4)):
        began = time.perf_counter()
        launcher.prepare(one)
        found[f"compile {one}"] = time.perf_counter() - began
    x = torch.randn((3, 512), device="cuda")
    at = torch.zeros(records_bytes(fmt, 3, 512), dtype=torch.uint8, device="cuda")
    made = make_records(launcher, fmt, x.data_ptr(), 3, 512, at.data_ptr())
    found["scales"] = launcher.floats_at(made.scale, 6).cpu().tolist()
    found["scales_wanted"] = (x.abs().view(6, 256).amax(1) / 127).cpu().tolist()
    found["launch_us"] = per_call(
        lambda: make_records(launcher, fmt, x.data_ptr(), 3, 512, at.data_ptr())
    )
    return found


def toy() -> dict[str, Any]:
    """By how much a process grows when a family first runs on the card: code that CUDA loads as it
    is called. What grows behind the moment at which a process is weighed counts against ``--ram``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from offload.models.toy import small_config
    from offload.runtime.cuda_api import TorchCard
    from offload.runtime.rss import current_rss

    found: dict[str, Any] = {"at_first": current_rss()}
    TorchCard(0).warm_up()
    found["warmed_up"] = current_rss()
    model = LlamaForCausalLM(small_config(LlamaConfig)).to("cuda", torch.bfloat16).eval()
    for tokens in (4, 64):
        ids = torch.ones((1, tokens), dtype=torch.int64, device="cuda")
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        found[f"greedy, {tokens} tokens"] = current_rss()
    model.generate(ids, max_new_tokens=4, do_sample=True, top_k=20, top_p=0.9, pad_token_id=0)
    found["sampled"] = current_rss()
    return found


__all__ = ["look"]
