"""What a step will cost on this machine, measured in about two seconds before anything is planned.

One unit of each kind is run forward, and forward and backward, on made-up weights in the run's own
shapes: the bound of matrix products alone leaves out a fifth. The disk is asked for reads and
writes at once, as updates do.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.io.engines import make_engine
from offload.io.files import DirectFile
from offload.io.memory import Staging
from offload.io.private import nameless_file, reserve
from offload.models.params import parameters
from offload.train.footprint import any_unit_calls
from offload.train.head_find import HeadForm
from offload.train.head_loss import ResidentHead, head_loss
from offload.train.loop import HEAD_ROWS
from offload.train.row_grads import RowGradient, taking_rows

logger = logging.getLogger(__name__)

UPDATE_BYTES_S = 8e9
"""Of one thread's Adam beside computing threads; no more than a guess, and seldom the
bottleneck."""


def compute_seconds(
    model: Any, units: Sequence[nn.Module], form: HeadForm | None, rows: int, length: int,
    tables: Sequence[torch.Tensor] = (),
) -> tuple[dict[str, float], tuple[float, ...]] | None:  # fmt: skip
    """Phase -> seconds of one micro-batch, and each unit's seconds of forward; None where a unit
    does not run on made-up inputs.

    ``tables``: parameters whose gradients from lookups leave by rows.
    """
    try:
        calls = any_unit_calls(model, list(units), rows, length)
        known: dict[Any, tuple[float, float]] = {}
        forward = backward = 0.0
        each: list[float] = []
        for unit in units:
            each.append(0.0)
            if id(unit) not in calls:
                continue
            leaves, spec = tree_flatten(calls[id(unit)])
            shapes = tuple((tuple(x.shape), x.dtype) for x in leaves if torch.is_tensor(x))
            key = type(unit), shapes, sum(p.nbytes for p in parameters(unit).values())
            if key not in known:
                known[key] = _time_unit(unit, leaves, spec, tables)
            forward += known[key][0]
            each[-1] = known[key][0]
            backward += known[key][1]
        if form is not None:
            backward += _time_head(form, next(model.parameters()).dtype, rows * length)
    except Exception as error:  # noqa: BLE001  a prediction must never stop a run
        logger.info("a step's computing cannot be measured: %s", error)
        return None
    return {"forward": forward, "backward": backward}, tuple(each)


def _time_unit(
    unit: nn.Module, leaves: list[Any], spec: Any, tables: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(seconds forward, seconds forward and backward), each the best of two."""
    real = copy.deepcopy(unit).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(0.01)
            else:
                tensor.zero_()
    by_rows = {
        id(now.weight): _drop
        for was, now in zip(unit.modules(), real.modules(), strict=True)
        if isinstance(now, nn.Embedding) and any(was.weight is table for table in tables)
    }
    grads = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in leaves]
    inputs = [_real(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    forward, both = [], []
    for _ in range(2):
        began = time.perf_counter()
        with torch.no_grad():
            args, kwargs = tree_unflatten(inputs, spec)
            real(*args, **kwargs)
        forward.append(time.perf_counter() - began)
        began = time.perf_counter()
        fresh = [
            x.detach().requires_grad_() if g else x for x, g in zip(inputs, grads, strict=True)
        ]
        args, kwargs = tree_unflatten(fresh, spec)
        with torch.enable_grad(), taking_rows(by_rows):
            out, _spec = tree_flatten(real(*args, **kwargs))
        outs = [x for x in out if isinstance(x, torch.Tensor) and x.requires_grad]
        if outs:  # none of a frozen embedding's
            torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
        both.append(time.perf_counter() - began)
        real.zero_grad()
    return min(forward), min(both)


def _drop(rows: RowGradient) -> None:
    del rows


def _real(like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.ones(like.shape, dtype=like.dtype)  # a mask that hides nothing
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.rand(like.shape).to(like.dtype)


def _time_head(form: HeadForm, dtype: torch.dtype, tokens: int) -> float:
    """Loss and gradients over a few slices, extended to all."""
    rows = min(form.vocabulary, 4 * HEAD_ROWS)
    head = ResidentHead(torch.rand(rows, form.width).to(dtype), rows=HEAD_ROWS)
    hidden = torch.rand(tokens, form.width).to(dtype)
    labels = torch.zeros(tokens, dtype=torch.int64)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        head_loss(hidden, labels, head, scale=1.0, transform=form.transform)
        times.append(time.perf_counter() - began)
    return min(times) * form.vocabulary / rows


def disk_mix(
    directory: Path, *, request_bytes: int = 4 << 20, depth: int = 4, sample_bytes: int = 384 << 20
) -> tuple[float, float]:
    """Bytes per second of reads, and of writes, while both go on in turns."""
    slots = sample_bytes // request_bytes
    fd, _ = nameless_file(directory)
    try:
        reserve(fd, slots * request_bytes, os.fspath(directory))
    except BaseException:
        os.close(fd)
        raise
    file = DirectFile(fd, f"{directory}/(probe)")
    engine, staging = make_engine(queue_depth=depth), Staging(depth, request_bytes)
    noise = memoryview(os.urandom(request_bytes))
    spent = {"read": 0.0, "write": 0.0}

    def move(slot: int, what: str) -> None:
        with staging.chunk() as chunk:
            if what == "write":
                chunk.view[:] = noise
            began = time.perf_counter()
            (file.write if what == "write" else file.read)(slot * request_bytes, chunk.view)
            spent[what] += time.perf_counter() - began

    def run(jobs: Sequence[tuple[int, str]]) -> float:
        began = time.perf_counter()
        futures: list[Future[None]] = []
        for slot, what in jobs:
            futures.append(engine.submit(lambda s=slot, w=what: move(s, w)))  # type: ignore[misc]
        for future in futures:
            future.result()
        return time.perf_counter() - began

    try:
        run([(s, "write") for s in range(slots)])  # the first write of a block is no disk's rate
        spent.update(read=0.0, write=0.0)
        kinds = itertools.cycle(("read", "write"))
        seconds = run([(s, next(kinds)) for s in range(slots)])
    finally:
        engine.close()
        staging.close()
        file.close()
    nbytes = slots // 2 * request_bytes
    share = spent["read"] / (spent["read"] + spent["write"])
    return nbytes / (seconds * share), nbytes / (seconds * (1 - share))
