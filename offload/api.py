"""The public functions: ``load``, ``wrap`` and ``unwrap``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from offload.models.load import Progress, parse_options
from offload.models.load import load as _load


def load(
    path: str | Path,
    *,
    ram: str | int | None = None,
    gpu: str | int | None = None,
    disk: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    context: int | None = None,
    batch: int = 1,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Load a checkpoint whose weights need not fit in memory.

    The result is an ordinary transformers model: ``model.generate`` and everything else that
    runs its forward works, and gives the very bits that the resident model gives.

    Args:
        path: a directory with ``config.json`` and safetensors, or a hub id in the local cache.
        ram: bytes, or e.g. ``"8GiB"``: everything above the bare process is kept below it. None:
            a safe share of the memory that is free now.
        gpu: the budget of the device tier; with ``device="sim"`` only.
        disk: directory for private files (only used for weights that must be converted).
        dtype: compute dtype; None takes the checkpoint's.
        device: ``"auto"`` or ``"cpu"``: the CPU computes; ``"sim"``: a simulated accelerator.
        context: tokens of prompt and answer together that memory is set aside for.
        batch: sequences (or beams) at once that memory is set aside for.
        progress: called as ``progress(what, done_bytes, total_bytes)``.

    Raises:
        OffloadError: with one clear message; see ``offload.errors``.
    """
    if context is not None:
        options["context"] = context
    chosen = parse_options(
        ram=ram, gpu=gpu, disk=disk, dtype=dtype, device=device, batch=batch, **options
    )
    return _load(path, chosen, progress)
