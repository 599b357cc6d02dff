"""Random GGUF rows of every format: any bits for quants, moderate scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.formats import Format


def random_rows(
    fmt: Format, rows: int, columns: int, seed: int = 0, scale: float = 0.02
) -> npt.NDArray[np.uint8]:
    """uint8 [rows, row_bytes]; weights are about normal with deviation 1 x ``scale`` x levels."""
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 256, (rows, fmt.row_bytes(columns)), dtype=np.uint8)
    blocks = out.reshape(-1, fmt.block_bytes)

    def put(name: str, values: npt.NDArray[Any]) -> None:
        section = next(s for s in fmt.sections if s.name == name)
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(blocks), -1)
        blocks[:, section.offset : section.offset + section.nbytes] = raw

    for s in fmt.sections:
        if s.name in ("d", "m", "dmin"):
            put(s.name, (rng.standard_normal(len(blocks)) * scale).astype(np.float16))
        elif s.name == "e":
            put(s.name, rng.integers(118, 124, len(blocks), dtype=np.uint8))
        elif s.name == "x":
            values = rng.standard_normal((len(blocks), fmt.block)).astype(np.float32)
            if fmt.name == "f16":
                put("x", values.astype(np.float16))
            elif fmt.name == "bf16":
                put("x", (values.view(np.uint32) >> 16).astype(np.uint16))
            else:
                put("x", values)
    return out
