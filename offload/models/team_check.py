"""Does one thread fewer compute the same bits for a token on this machine?

Libraries split a product's rows among threads, and then each output is summed as ever, or they
split the sums, and then it is not: nothing promises either. So it is tried, like the slices of an
LM head (``head_check``): in a process of its own, on weights of the model's shapes whose memory is
a few megabytes mapped again and again, with one token.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offload.models.units import Cut
from offload.runtime.known import Known

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0

_TRIAL = """
import ctypes, json, math, mmap, os, sys
import torch
import torch.nn.functional as F
job = json.loads(sys.argv[1])
generator = torch.Generator().manual_seed(0)
def random(*shape, dtype):
    return torch.randn(*shape, generator=generator).to(dtype)
def repeated(rows, columns, dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    row = columns * size
    unit = math.lcm(mmap.ALLOCATIONGRANULARITY, row)
    period = unit * max(1, (4 << 20) // unit)
    if rows * row <= 2 * period:
        return random(rows, columns, dtype=dtype) * 0.05
    total = -(-rows * row // period) * period
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    i32 = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, i32, i32, i32, ctypes.c_long]
    fd = os.memfd_create("weights")
    os.ftruncate(fd, period)
    base = libc.mmap(None, total, 0, 0x22, -1, 0)
    for at in range(0, total, period):
        if libc.mmap(base + at, period, 3, 0x11, fd, 0) != base + at:
            raise OSError("mmap failed")
    whole = (ctypes.c_char * (rows * row)).from_address(base)
    W = torch.frombuffer(whole, dtype=dtype).view(rows, columns)
    some = period // row
    W[:some] = random(some, columns, dtype=dtype) * 0.05
    return W
def same(work):
    torch.set_num_threads(job["threads"])
    want = work()
    torch.set_num_threads(job["threads"] - 1)
    return torch.equal(work(), want)
def linear(rows, columns, name, biased):
    dtype = getattr(torch, name)
    W = repeated(rows, columns, dtype)
    b = random(rows, dtype=dtype) if biased else None
    return all(
        same(lambda x=random(1, columns, dtype=dtype): F.linear(x, W, b))
        for _ in range(max(3, job["outputs"] // rows))
    )
def turned(rows, columns, name, biased):  # x @ W, and W of one expert
    dtype = getattr(torch, name)
    W = repeated(rows, columns, dtype)
    return all(
        same(lambda x=random(1, rows, dtype=dtype): x @ W)
        for _ in range(max(3, job["outputs"] // columns))
    )
def attends(heads, key_heads, dim, value_dim, length, name):
    dtype = getattr(torch, name)
    q, k = (random(1, h, t, dim, dtype=dtype) for h, t in ((heads, 1), (key_heads, length)))
    v = random(1, key_heads, length, value_dim, dtype=dtype)
    K, V = (x.repeat_interleave(heads // key_heads, 1) for x in (k, v))
    return (
        same(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != key_heads))
        and same(lambda: F.scaled_dot_product_attention(q, K, V))
        and same(lambda: torch.matmul(torch.softmax(torch.matmul(q, K.mT), -1), V))
    )
works = {"linear": linear, "turned": turned, "attends": attends}
with torch.inference_mode():
    print(json.dumps(all(works[kind](*rest) for kind, *rest in job["products"])))
"""

_OUTPUTS = 2**15
"""Compared for each matrix, at least: what is summed in another order differs in one of thousands
after rounding to bfloat16."""


def same_bits(products: list[list[Any]], threads: int) -> bool:
    """Whether one thread fewer than ``threads`` computes the same; False if it cannot be tried.
    Known from the first time on: that takes some seconds, and some 0.3 GiB of another process.

    Args:
        products: of ``products_of``.
    """
    from offload.runtime.hardware_cache import cpu_name

    job = {"products": products, "threads": threads, "outputs": _OUTPUTS}
    about = {**job, "torch": torch.__version__, "cpu": cpu_name()}
    key, known = json.dumps(about, sort_keys=True), Known("teams.json")
    found = known.get(key)
    if isinstance(found, bool):
        return found
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, json.dumps(job)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        stderr = (getattr(error, "stderr", None) or "").strip().splitlines()[-1:]
        logger.info(
            "whether a thread fewer computes the same is not known: %s",
            " ".join([str(error), *stderr]),
        )
        return False
    known.put(key, answer is True)
    return answer is True


def products_of(model: nn.Module, cut: Cut, context: int) -> list[list[Any]] | None:
    """What one token is multiplied by, for ``same_bits``; None if the model multiplies by what is
    not known here (convolutions, recurrences). ``model``: on meta, or as it runs."""
    found: set[tuple[Any, ...]] = set()
    fused = {id(param.tensor): param for group in cut.groups for param in group.params}
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is None or tensor.dim() < 2 or isinstance(module, nn.Embedding):
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tensor.dim() == 2:
                biased = getattr(module, "bias", None) is not None
                found.add(("linear", *tensor.shape, dtype, biased))
                if not isinstance(module, nn.Linear):
                    found.add(("turned", *tensor.shape, dtype, False))
            elif id(tensor) in fused and tensor.dim() == 3:
                found.add(("linear", *tensor.shape[1:], dtype, False))
                found.add(("turned", *tensor.shape[1:], dtype, False))
            else:
                return None
        if isinstance(module, nn.RNNBase):
            return None
    if cut.head is not None:
        width, kind = cut.head.param.tensor.shape[1], cut.head.param.tensor.dtype
        for a, b in cut.head.rows:
            found.add(("linear", b - a, width, str(kind).removeprefix("torch."), False))
    return sorted([list(p) for p in found | _attention(model, context)], key=str)


def _attention(model: nn.Module, context: int) -> set[tuple[Any, ...]]:
    """A token's attention, as the config has it."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return set()
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return set()
    keys = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    values = getattr(config, "v_head_dim", None) or dim
    nope, rope = (getattr(config, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    if isinstance(nope, int) and isinstance(rope, int):
        dim, keys = nope + rope, heads
    if heads % keys:
        return set()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {("attends", heads, keys, dim, values, length, dtype) for length in _lengths(context)}


def _lengths(context: int) -> Iterable[int]:
    """Of keys: few, so that another context need not be another trial."""
    return (1, 67, 515, 2049, *((16384,) if context > 4096 else ()))


__all__ = ["products_of", "same_bits"]
