"""The rates that bound a training step: products at a model's shapes, memory, and a disk that reads
and writes at once."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from finetune_bound import FORWARD, INPUT, WEIGHT, Model, Rates

SHARES = (0.0, 0.4, 0.5, 0.6, 1.0)
"""Of reads among the bytes: updates of float32 states read 12 of 26 bytes, and what is around."""

HEAD_ROWS = 4096
"""The head is multiplied in slices of so many rows."""


def measure(
    model: Model, tokens: int, directory: Path, *, request_bytes: int, depth: int,
    checkpoint: Path | None = None,
) -> Rates:  # fmt: skip
    """All of them, now: about ten seconds. ``checkpoint``: whose layer is timed, too."""
    return Rates(
        layer=None if checkpoint is None else layer_alone(checkpoint, tokens),
        products=products(model, tokens),
        dram=stream(),
        ssd=ssd_mix(directory, SHARES, request_bytes=request_bytes, depth=depth),
    )


def ssd_mix(
    directory: Path, shares: Sequence[float], *, request_bytes: int, depth: int,
    file_bytes: int = 2 << 30, sample_bytes: int = 512 << 20, samples: int = 3,
) -> dict[float, float]:  # fmt: skip
    """Bytes per second of ``depth`` O_DIRECT requests at a time of which a share are reads.

    On a file of its own whose blocks have been written: what the first write to a block costs is no
    disk's rate. Without a flush, as states are written between commits. Shares take turns, so that
    none has a good minute of the disk for itself.
    """
    from offload.io.engines import make_engine
    from offload.io.files import DirectFile
    from offload.io.memory import Staging
    from offload.io.private import nameless_file, reserve

    slots = file_bytes // request_bytes
    fd, _ = nameless_file(directory)
    reserve(fd, slots * request_bytes, str(directory))
    file = DirectFile(fd, f"{directory}/(probe)")
    engine, staging = make_engine(queue_depth=depth), Staging(depth, request_bytes)
    noise = memoryview(os.urandom(request_bytes))  # a disk that compresses gains nothing
    rng = random.Random(0)

    def transfer(slot: int, write: bool) -> None:
        with staging.chunk() as chunk:
            move = file.write if write else file.read
            move(slot * request_bytes, chunk.view)

    def fill(slot: int) -> None:
        with staging.chunk() as chunk:
            chunk.view[:] = noise
            file.write(slot * request_bytes, chunk.view)

    def finish(jobs: list[Future[Any]]) -> None:
        for job in jobs:
            job.result()

    def once(share: float) -> float:
        count = sample_bytes // request_bytes
        places = rng.sample(range(slots), min(count, slots))
        began = time.perf_counter()
        finish(
            [
                engine.submit(partial(transfer, slot, write))
                for slot, write in zip(places, writes(share, len(places)), strict=True)
            ]
        )
        return len(places) * request_bytes / (time.perf_counter() - began)

    try:
        finish([engine.submit(partial(fill, slot)) for slot in range(slots)])
        os.fdatasync(fd)
        found: dict[float, list[float]] = {share: [] for share in shares}
        for _ in range(samples):
            for share in shares:
                found[share].append(once(share))
    finally:
        engine.close()
        staging.close()
        file.close()
    return {share: statistics.median(rates) for share, rates in found.items()}


def writes(share: float, count: int) -> list[bool]:
    """Which of ``count`` requests write, so that ``share`` of every stretch of them read."""
    return [int((k + 1) * share + 1e-9) == int(k * share + 1e-9) for k in range(count)]


def layer_alone(checkpoint: Path, tokens: int, samples: int = 5) -> dict[str, float]:
    """Seconds of the model's first layer as transformers runs it on one causal sequence, resident:
    "forward", and "both" with backward to its input and its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    config.num_hidden_layers, config.vocab_size = 1, 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    calls: list[tuple[Any, Any]] = []
    # The only list of modules of such a model is that of its layers.
    layer = next(m[0] for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    handle.remove()
    (hidden, *rest), kwargs = calls[0]

    def forward() -> Any:
        with torch.no_grad():
            layer(hidden, *rest, **kwargs)

    def both() -> None:
        out = layer(hidden.detach().requires_grad_(), *rest, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
        layer.zero_grad(set_to_none=True)

    return {"forward": seconds_of(forward, samples), "both": seconds_of(both, samples)}


def stream(nbytes: int = 1 << 30, samples: int = 7) -> float:
    """Bytes per second of memory that is read and written in place, by all threads."""
    words = torch.ones(nbytes // 4)
    return 2 * nbytes / seconds_of(words.neg_, samples)


def products(model: Model, tokens: int, samples: int = 3, cold_bytes: int = 256 << 20) -> dict[
    str, float
]:  # fmt: skip
    """Flops per second of the bfloat16 products of all of the model's shapes, by kind.

    Each shape has its share of the flops. Weights come from memory, as they do in a step: every
    shape goes round over matrices of ``cold_bytes`` in all.
    """
    shapes: dict[tuple[int, int], float] = dict(model.linears)
    head_o, head_i = model.head
    slice_ = (min(HEAD_ROWS, head_o), head_i)
    shapes[slice_] = shapes.get(slice_, 0) + head_o / slice_[0]
    total = {FORWARD: 0.0, INPUT: 0.0, WEIGHT: 0.0}
    work = 0.0
    for (o, i), count in shapes.items():
        each = seconds_of_products(tokens, o, i, samples, cold_bytes)
        for kind in total:
            total[kind] += count * each[kind]
        work += count * 2.0 * tokens * o * i
    return {kind: work / seconds for kind, seconds in total.items()}


def seconds_of_products(
    tokens: int, outputs: int, inputs: int, samples: int, cold_bytes: int
) -> Mapping[str, float]:
    """Seconds of each kind of product with one matrix [outputs, inputs]."""
    n = max(1, min(16, cold_bytes // (2 * outputs * inputs)))
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(n)]
    x_TI = torch.randn(tokens, inputs).bfloat16()
    y_TO = torch.randn(tokens, outputs).bfloat16()
    dx_TI, dw_OI = torch.empty_like(x_TI), torch.empty_like(weights[0])
    out = torch.empty_like(y_TO)

    def forward() -> None:
        for w_OI in weights:
            torch.mm(x_TI, w_OI.t(), out=out)

    def of_input() -> None:
        for w_OI in weights:
            torch.mm(y_TO, w_OI, out=dx_TI)

    def of_weight() -> None:
        for _ in weights:
            torch.mm(y_TO.t(), x_TI, out=dw_OI)

    kinds = {FORWARD: forward, INPUT: of_input, WEIGHT: of_weight}
    return {kind: seconds_of(work, samples) / n for kind, work in kinds.items()}


def seconds_of(work: Callable[[], Any], samples: int) -> float:
    """The median over ``samples`` calls, after one that does not count."""
    work()
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)
