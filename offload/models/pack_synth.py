"""A random model as a source: packs of any size without a checkpoint of floats first.

The outline, the vectors and the standard deviations are those of ``synth``. A matrix is not drawn
and quantised element by element: 2 Mi normal values are drawn once per standard deviation, kept
as blocks of the format, and rows are cut from that pool at places that depend on the seed, the
tensor, the expert and the row alone. So a pack is written at the speed of the disk, and the same
seed gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.cpu_ops.formats import get_format
from offload.errors import OffloadError
from offload.io.pack_manifest import SourceId
from offload.models.pack_kernels import encode
from offload.models.pack_outline import outline
from offload.models.pack_plan import QUANTS, part_bytes, target
from offload.models.pack_source import (
    GGUF_OF,
    TORCH_OF,
    Bytes,
    Experts,
    Outline,
    Tensor,
    float_row_bytes,
    parts_of,
)
from offload.models.synth_config import read_source, small_files
from offload.models.synth_plan import RESIDUAL_SCALE, TO_RESIDUAL, skeleton, spread
from offload.models.synth_values import POOL_VALUES, derive_key

SPAN_VALUES = 2**17
"""Values (about) that are taken from one place of the pool."""

_POOLS_KEPT = 8


class SynthSource:
    """Random weights of the model that a config describes, in the format of ``quant``.

    Pack it with the same ``quant``: its rows are in the format they are to have.
    """

    def __init__(
        self, config_path: str | Path, *, quant: str, seed: int = 0, layers: int | None = None
    ) -> None:
        """Read the config and build the model's skeleton.

        Raises:
            CheckpointError, UnsupportedModelError, OffloadError: see ``synth.synth``.
        """
        if quant not in QUANTS:
            raise OffloadError(f"quant {quant!r} is not one of {', '.join(QUANTS)}")
        self._config = read_source(config_path, dtype=None, layers=layers)
        self._quant = quant
        self._seed = seed
        model = skeleton(self._config, seed)
        state = model.state_dict()
        self._outline = outline(model, state)
        self._vectors: dict[Tensor, torch.Tensor] = {}
        self._std: dict[Tensor, float] = {}
        self._formats: dict[Tensor, str] = {}
        self._lock = threading.Lock()
        self._pools: OrderedDict[tuple[str, float], Bytes] = OrderedDict()
        normal = np.random.Generator(np.random.SFC64(derive_key(seed, "pool")))
        self._normal = normal.standard_normal(POOL_VALUES, dtype=np.float32)
        for item in self._outline.items:
            for tensor in parts_of(item):
                self._describe(model, tensor, state[_param(tensor)])

    def _describe(self, model: Any, tensor: Tensor, value: torch.Tensor) -> None:
        """Note the format of a tensor, and its values or their standard deviation."""
        if not value.is_meta:
            self._vectors[tensor] = value.detach().contiguous()
            dtype = str(value.dtype).removeprefix("torch.")
            self._formats[tensor] = GGUF_OF.get(dtype, dtype)
            return
        format, _, _ = target(tensor, GGUF_OF[self._config.dtype], self._quant)
        self._formats[tensor] = GGUF_OF.get(format, format)
        if len(tensor.shape) < 2:  # experts' biases
            self._std[tensor] = 0.0
            return
        std = spread(model, tensor.name, value) if tensor.slice is None else 0.0
        std = std or max(tensor.shape[-2:]) ** -0.5
        if TO_RESIDUAL.search(f"{tensor}_proj" if tensor.slice else tensor.name):
            std *= RESIDUAL_SCALE
        self._std[tensor] = std

    @property
    def id(self) -> SourceId:
        facts = [self._config.raw, self._seed, self._quant, np.__version__.split(".")[0]]
        text = json.dumps(facts, sort_keys=True)
        return SourceId(
            kind="random",
            path=f"{self._config.config.model_type}, seed {self._seed}",
            fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        )

    @property
    def outline(self) -> Outline:
        return self._outline

    @property
    def total_bytes(self) -> int:
        """What is made: as many bytes as are packed."""
        total = 0
        for item in self._outline.items:
            for tensor in parts_of(item):
                format, layout, _ = target(tensor, self._formats[tensor], "none")
                count = item.count if isinstance(item, Experts) else 1
                total += count * part_bytes(tensor, format, layout)
        return total

    def format_of(self, tensor: Tensor) -> str:
        return self._formats[tensor]

    def rows(self, tensor: Tensor, expert: int | None, start: int, stop: int) -> Bytes:
        vector = self._vectors.get(tensor)
        if vector is not None:
            raw = vector.reshape(-1).view(torch.uint8).numpy()
            return raw.reshape(tensor.rows, -1)[start:stop].copy()
        name, std = self._formats[tensor], self._std[tensor]
        if name in TORCH_OF:
            row_bytes = float_row_bytes(name, tensor.columns)
        else:
            row_bytes = get_format(name).row_bytes(tensor.columns)
        out: Bytes = np.zeros((stop - start, row_bytes), np.uint8)
        if std == 0.0:
            return out
        pool = self._pool(name, std)
        flat, unit = out.reshape(-1), get_format(name).block_bytes
        if len(pool) < row_bytes:
            pool = np.tile(pool, -(-row_bytes // len(pool)))
        # By row, not by call: how a tensor is cut into chunks changes nothing.
        per = max(1, min(SPAN_VALUES // tensor.columns, len(pool) // row_bytes))
        for first in range(start - start % per, stop, per):
            draw = derive_key(self._seed, f"{tensor}/{expert}/{first}")
            low, high = max(first, start), min(first + per, stop)
            at = draw % ((len(pool) - per * row_bytes) // unit + 1) * unit
            at += (low - first) * row_bytes
            nbytes = (high - low) * row_bytes
            flat[(low - start) * row_bytes :][:nbytes] = pool[at : at + nbytes]
        return out

    def _pool(self, name: str, std: float) -> Bytes:
        """The drawn values times ``std``, as blocks of a format."""
        with self._lock:
            found = self._pools.get((name, std))
            if found is None:
                values = self._normal * np.float32(std)
                found = _encode(name, values)
                while len(self._pools) >= _POOLS_KEPT:
                    self._pools.popitem(last=False)
                self._pools[name, std] = found
            self._pools.move_to_end((name, std))
            return found

    def extras(self) -> dict[str, bytes]:
        text = json.dumps(self._config.raw, indent=2) + "\n"
        found = {"config.json": text.encode()}
        folder = self._config.folder
        if folder:
            found |= {name: (folder / name).read_bytes() for name in small_files(folder)}
        return found

    def check(self) -> None:
        """Nothing can have changed."""

    def close(self) -> None:
        """Nothing is open."""


def _param(tensor: Tensor) -> str:
    return tensor.slice.param if tensor.slice else tensor.name


def _encode(name: str, values: Any) -> Bytes:
    rows: Bytes = values.reshape(-1, 4096).view(np.uint8)
    format = get_format(name)
    if name in ("q4_0", "q8_0"):
        return encode(format, "f32", rows, "random values").reshape(-1)
    tensor = torch.from_numpy(values).to(getattr(torch, TORCH_OF[name]))
    raw: Bytes = tensor.view(torch.uint8).numpy()
    return raw
