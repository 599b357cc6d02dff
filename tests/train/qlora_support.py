"""Packs of tiny checkpoints, the models that their values make, and engines on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_support import on_device
from engine_support import TILE, placements
from equivalence import reference
from lora_support import HOW, Made, pinned, start_somewhere
from memory_tiles import MemoryTiles

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.packing import dequantize
from offload.io.engines import make_engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_manifest import Layout
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_reader import PackedModel
from offload.models.pack_run import pack
from offload.runtime.device import Device
from offload.train.engine import Engine
from offload.train.layout import TrainLayout, lay_out
from offload.train.lora import Adapters, inject
from offload.train.opening import EngineOptions, open_engine
from offload.train.packed_base import PackedBase, choose_base

CASES = {
    "qwen3": {"tie_word_embeddings": True, "vocab_size": 520},
    "llama": {"tie_word_embeddings": False, "vocab_size": 521},
    "qwen3_moe": {"vocab_size": 520},
    "gpt_oss": {"vocab_size": 520},
}
"""Vocabularies whose tables are units of their own; no multiples of 16."""


class Packs:
    """By (family, quant): checkpoint, pack, and the checkpoint that its values make."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._tiny = Made(factory)
        self._factory = factory
        self._made: dict[Any, tuple[Path, Path, Path]] = {}

    def __call__(self, family: str, quant: str) -> tuple[Path, Path, Path]:
        if (family, quant) not in self._made:
            directory = self._tiny(family, **CASES[family])
            room = self._factory.mktemp("packs")
            packed = pack_checkpoint(directory, room / "pack", quant)
            values = unpacked_model(directory, PackedModel.open(packed), room / "values")
            self._made[family, quant] = directory, packed, values
        return self._made[family, quant]


def pack_checkpoint(directory: Path, out: Path, quant: str) -> Path:
    source = CheckpointSource.open(directory)
    try:
        pack(source, out, quant=quant)
    finally:
        source.close()
    return out


def values_of(packed: PackedModel) -> dict[str, torch.Tensor]:
    """float32 values of everything in a pack by the reference codecs; experts' parts as
    ``group#e.part``."""
    engine, staging = make_engine(queue_depth=4), Staging(4, 1 << 20)
    store = packed.store(engine, staging)
    out: dict[str, torch.Tensor] = {}
    try:
        for block in packed.manifest.blocks:
            with AlignedBuffer(block.spec().slot_nbytes) as buffer:
                store.read_into(block.name, buffer).result()
                for part in block.parts:
                    raw = np.frombuffer(bytes(buffer[part.offset : part.offset + part.nbytes]),
                                        np.uint8)  # fmt: skip
                    name = f"{block.name}.{part.name}" if block.group else part.name
                    out[name] = _decode(part, raw)
    finally:
        store.close()
        engine.close()
        staging.close()
    for alias, name in packed.manifest.aliases.items():
        out[alias] = out[name]
    return out


def _decode(part: Any, raw: Any) -> torch.Tensor:
    if part.layout is Layout.PLAIN:
        return torch.frombuffer(bytearray(raw), dtype=getattr(torch, part.format)).view(part.shape)
    fmt = get_format(part.format)
    if part.layout is Layout.ROWS:
        return torch.from_numpy(decode_rows(fmt, raw.reshape(part.shape[0], -1)))
    return torch.from_numpy(dequantize(fmt, raw, *part.shape))


def unpacked_model(directory: Path, packed: PackedModel, out: Path) -> Path:
    """The checkpoint of ``directory`` with the pack's values, rounded to bfloat16 once. Knows of
    two layouts of experts: gate and up one behind the other, and gpt-oss'."""
    model = reference(directory, torch.bfloat16)
    values = values_of(packed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in values:
                param.copy_(values[name])
                continue
            group, _, attr = name.rpartition(".")
            for e, block in enumerate(packed.experts[group].blocks):
                parts = {p: values.get(f"{block}.{p}") for p in
                         ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")}  # fmt: skip
                param[e].copy_(_expert(attr, parts, oss="gpt_oss" in model.config.model_type))
    model.save_pretrained(out)
    return out


def _expert(attr: str, parts: dict[str, Any], *, oss: bool) -> torch.Tensor:
    bias = "_bias" if attr.endswith("_bias") else ""
    if attr.startswith("down"):
        down: torch.Tensor = parts[f"down{bias}"]
        return down.T if oss and not bias else down
    gate, up = parts[f"gate{bias}"], parts[f"up{bias}"]
    if not oss:
        return torch.cat([gate, up])
    both = torch.stack([gate, up], dim=1).flatten(0, 1)
    return both if bias else both.T


@contextlib.contextmanager
def packed_engine(
    directory: Path, quant: str | None, place: str, *, tiles: MemoryTiles | None = None,
    device: Device | None = None, room: str = "all", dtype: torch.dtype = torch.bfloat16,
    **how: Any,
) -> Iterator[tuple[Engine, Adapters, PackedBase, MemoryTiles]]:  # fmt: skip
    """An engine with adapters on the pack ``directory``, or on one of the checkpoint there; with a
    ``device`` its layers run there, with as much room as ``on_device`` says."""
    choice = choose_base(str(directory), quant)
    assert choice is not None
    base = choice.open(dtype)
    model = base.meta.model.train()
    adapters = inject(model, **{**HOW, **how})
    start_somewhere(adapters)
    layout = lay_out(model, tile=TILE, packed=base.names)
    base.attach(layout)
    made: list[MemoryTiles] = []

    def make_tiles(layout: TrainLayout, parts: Callable[[int], Any], io: Any) -> MemoryTiles:
        made.append(tiles or MemoryTiles([parts(i) for i in range(len(layout.tiles))]))
        return made[0]

    options = EngineOptions(initial=adapters.initial, base=base, device=device)
    where = pinned(place)(layout)
    if device is not None:
        where = replace(where, device=on_device(layout, room))
    engine = open_engine(base.meta, layout, where, options, make_tiles)
    try:
        yield engine, adapters, base, made[0]
        if device is not None:
            engine.drain()
    finally:
        engine.close()


__all__ = [
    "CASES",
    "Packs",
    "pack_checkpoint",
    "packed_engine",
    "placements",
    "unpacked_model",
    "values_of",
]
