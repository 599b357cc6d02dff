"""What the tests of packing share: a source in memory, and what a pack says of a tensor."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.packing import dequantize
from offload.errors import CheckpointError
from offload.io.engines import make_engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_manifest import Kind, Layout, Part, SourceId
from offload.models.pack_reader import PackedModel
from offload.models.pack_source import Bytes, Experts, Outline, Tensor, parts_of


class ArraySource:
    """Named float32 arrays; experts are ``[experts, rows, columns]`` under ``group.part``."""

    def __init__(self, items: list[Tensor | Experts], arrays: dict[str, Any]) -> None:
        self.outline = Outline(items=tuple(items), facts={"model_type": "test"})
        self.arrays = arrays
        self.id = SourceId(kind="arrays", path="memory", fingerprint="a" * 64)
        self.total_bytes = sum(a.nbytes for a in arrays.values())
        self.changed = False

    def format_of(self, tensor: Tensor) -> str:
        return "f32"

    def rows(self, tensor: Tensor, expert: int | None, start: int, stop: int) -> Bytes:
        value = self.arrays[str(tensor)]
        value = value if expert is None else value[expert]
        rows = value.reshape(tensor.rows, tensor.columns)[start:stop]
        found: Bytes = np.ascontiguousarray(rows, np.float32).view(np.uint8)
        return found

    def extras(self) -> dict[str, bytes]:
        return {"config.json": b"{}"}

    def check(self) -> None:
        if self.changed:
            raise CheckpointError("memory was changed while it was being packed")

    def close(self) -> None:
        """Nothing is open."""


def small_source(
    seed: int = 0, experts: int = 6, columns: int = 64, inner: int = 32, vocabulary: int = 100
) -> ArraySource:
    """A layer of experts, a matrix, a norm, a table and a head."""
    draw = np.random.default_rng(seed)
    group = "layers.0.experts"
    shapes = {"gate": (inner, columns), "up": (inner, columns), "down": (columns, inner)}
    parts = tuple(
        Tensor(names=(name,), kind=Kind.MATRIX, shape=shape, group=group)
        for name, shape in shapes.items()
    )
    items: list[Tensor | Experts] = [
        Tensor(names=("embed",), kind=Kind.ROWS, shape=(vocabulary, columns)),
        Tensor(names=("layers.0.q",), kind=Kind.MATRIX, shape=(columns, columns)),
        Tensor(names=("layers.0.norm",), kind=Kind.PLAIN, shape=(columns,)),
        Experts(name=group, count=experts, parts=parts),
        Tensor(names=("head",), kind=Kind.HEAD, shape=(vocabulary, columns)),
    ]
    arrays = {}
    for item in items:
        for tensor in parts_of(item):
            many = (item.count,) if isinstance(item, Experts) else ()
            arrays[str(tensor)] = draw.standard_normal((*many, *tensor.shape), dtype=np.float32)
    return ArraySource(items, arrays)


def read_all(model: PackedModel, *, verify: bool = True) -> dict[str, bytes]:
    """Every block's bytes."""
    out = {}
    with ExitStack() as stack:
        staging = Staging(2, 65536)
        stack.callback(staging.close)
        engine = make_engine("threads", 2)
        stack.callback(engine.close)
        store = model.store(engine, staging, verify=verify)
        stack.callback(store.close)
        for name in store.ids():
            spec = store.spec(name)
            with AlignedBuffer(spec.slot_nbytes) as buf:
                store.read_into(name, buf).result(timeout=240)
                out[name] = bytes(buf[: spec.nbytes])
    return out


def value_of(part: Part, block: bytes) -> Any:
    """A part's values, float32 (float64 for what needs it), in its shape."""
    raw = np.frombuffer(block[part.offset : part.offset + part.nbytes], np.uint8)
    if part.layout is Layout.PACKED:
        return dequantize(get_format(part.format), raw, *part.shape)
    if part.layout is Layout.ROWS:
        return decode_rows(get_format(part.format), raw.reshape(part.shape[0], -1))
    if part.format == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(part.shape)
    return raw.view(part.format).reshape(part.shape)


def open_pack(path: Path) -> tuple[PackedModel, dict[str, bytes]]:
    model = PackedModel.open(path)
    return model, read_all(model)


def found_in(model: Any) -> dict[str, Any]:
    """A model's values as float32 by name, and its modules."""
    modules = dict(model.named_modules())
    state = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    return {"state": state, "modules": modules}


def expert_of(found: dict[str, Any], group: str, part: str, e: int) -> Any:
    """Part of an expert, by the family's own attributes, written without the packer's."""
    module, state = found["modules"][group], found["state"]
    bias = "_bias" if part.endswith("_bias") else ""
    name = part.removesuffix("_bias")
    if f"{group}.{name}_proj{bias}" in state:
        value = state[f"{group}.{name}_proj{bias}"][e]
        return value.T if module.is_transposed and not bias else value
    both = state[f"{group}.gate_up_proj{bias}"][e]
    both = both.T if module.is_transposed and not bias else both
    if module.is_concatenated:
        gate, up = np.split(both, 2)
    else:
        gate, up = both[::2], both[1::2]
    return {"gate": gate, "up": up}[name]
