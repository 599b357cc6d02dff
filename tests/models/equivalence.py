"""What the equivalence tests share: the reference's answers, budgets, checks after a run."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from left_threads import threads_left

from offload.blocks import Tier
from offload.models import load, split, units
from offload.models.load import Options, Prepared, prepare

PLENTY = 2**31
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Golden:
    """What unmodified transformers answers for a checkpoint. L positions, V vocabulary."""

    directory: Path
    dtype: torch.dtype
    ids_BL: torch.Tensor
    logits_BLV: torch.Tensor
    sequences: torch.Tensor | None
    """Greedy; None if transformers itself cannot generate with the family."""
    steps_BV: tuple[torch.Tensor, ...]


def reference(directory: Path, dtype: torch.dtype, auto: Any = None) -> Any:
    """The resident model as unmodified transformers loads it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    cls = auto or getattr(transformers, config.architectures[0])
    return cls.from_pretrained(directory, dtype=dtype, experts_implementation="eager").eval()


def prompt(rows: int = 1, length: int = 9, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 100, (rows, length), generator=generator)


def greedy(model: Any, ids_BL: torch.Tensor, **kwargs: Any) -> Any:
    return model.generate(
        ids_BL,
        **{
            "max_new_tokens": STEPS,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
            **kwargs,
        },
    )


def golden(directory: Path, dtype: torch.dtype = torch.bfloat16, generates: bool = True) -> Golden:
    """Ask the reference."""
    model = reference(directory, dtype)
    ids_BL = prompt()
    with torch.no_grad():
        logits_BLV = model(ids_BL).logits
    out = greedy(model, ids_BL) if generates else None
    return Golden(
        directory=directory,
        dtype=dtype,
        ids_BL=ids_BL,
        logits_BLV=logits_BLV,
        sequences=out.sequences if out else None,
        steps_BV=out.logits if out else (),
    )


def options(device: str, **kwargs: Any) -> Options:
    """Plenty of everything; ``overhead_bytes=0`` keeps the interpreter out of tiny budgets."""
    gpu = None if device == "cpu" else PLENTY
    base = {"ram": PLENTY, "gpu": gpu, "device": device, "context": 64, "overhead_bytes": 0}
    return Options(**{**base, **kwargs})


def budgets(directory: Path, device: str, **kwargs: Any) -> dict[str, dict[str, int]]:
    """``ram`` and ``gpu`` under which everything, about half, and as little as possible fits."""
    key = (directory, device, repr(kwargs), split.STEP_BYTES, units.HEAD_SLICE_BYTES)
    if key not in _budgets:
        _budgets[key] = find_budgets(directory, device, **kwargs)
    return _budgets[key]


_budgets: dict[Any, dict[str, dict[str, int]]] = {}


def find_budgets(directory: Path, device: str, **kwargs: Any) -> dict[str, dict[str, int]]:
    """``budgets`` without a memory. The three or four plans that it takes are of one structure:
    planning changes none, and to make one is a third of planning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "build", functools.cache(load.build))
        return _find_budgets(directory, device, **kwargs)


def _find_budgets(directory: Path, device: str, **kwargs: Any) -> dict[str, dict[str, int]]:
    def budget(of: dict[Tier, int]) -> dict[str, int]:
        return {("ram" if tier is Tier.RAM else "gpu"): n for tier, n in of.items()}

    whole = prepare(directory, options(device, **kwargs))
    top = whole.plan.compute_tier
    weights = sum(s.slot_nbytes for s in whole.cut.blocks.values())
    # One byte short of everything: what is cut then (the head, too) is what small budgets cut.
    least = {Tier.RAM: PLENTY, top: weights + sum(whole.request.reserves[top].values()) - 1}
    while True:  # staging takes a share of the budget, so a smaller one needs less
        found = dict(prepare(directory, options(device, **kwargs, **budget(least))).minimum)
        if all(found[tier] >= least[tier] for tier in found):
            break
        least = found
    everything = budget(dict.fromkeys(least, PLENTY))
    half = budget({tier: n + weights // 2 for tier, n in least.items()})
    return {"all": everything, "half": half, "minimum": budget(least)}


@contextmanager
def opened(prepared: Prepared, **kwargs: Any) -> Iterator[Any]:
    """The streamed model; checks after the block that nothing raced, is held, or has leaked."""
    threads, files = set(threading.enumerate()), open_files()
    model = prepared.open(**kwargs)
    handle = model.offload
    try:
        yield model
        handle.executor.settle()
        assert handle.executor.held() == []
        handle.executor.validate()
    finally:
        handle.close()
    assert not (left := threads_left(threads)), f"threads are left: {left}"
    assert open_files() <= files, "files are left open"
    assert handle.executor.device.acquired_memory() == 0
    assert handle.executor.live_leases() == 0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_logits(model: Any, want: Golden) -> None:
    """Prefill logits, greedy tokens, and the logits of each decode step, bit by bit."""
    with torch.no_grad():
        got_BLV = model(want.ids_BL).logits
    assert got_BLV.dtype == want.logits_BLV.dtype
    assert torch.equal(got_BLV, want.logits_BLV)
    if want.sequences is None:
        return
    out = greedy(model, want.ids_BL)
    assert torch.equal(out.sequences, want.sequences)
    assert len(out.logits) == len(want.steps_BV)
    for step, (got_BV, want_BV) in enumerate(zip(out.logits, want.steps_BV, strict=True)):
        assert torch.equal(got_BV, want_BV), f"decode step {step}"
