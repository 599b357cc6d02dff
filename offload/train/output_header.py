"""Which tensor lies where in the safetensors files that training writes.

The format allows no holes between tensors, so alignment has to come from the order: what is a
multiple of 4096 bytes first, then multiples of 64, then the rest by the width of its elements. The
header is padded with spaces so that the data starts at a multiple of 4096. All large tensors then
start at a page, and O_DIRECT reads them without a bounce buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from offload.blocks import ALIGN, DTYPE_BYTES, TENSOR_ALIGN, align_up
from offload.io.safetensors import DTYPES

CODES = {name: code for code, name in DTYPES.items()}
"""torch's names of dtypes -> the format's."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written. ``dtype`` is torch's name, e.g. ``"bfloat16"``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file: its name, the tensors in the order of their bytes, and what comes before them."""

    file: str
    tensors: tuple[OutputTensor, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def plan_shards(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
    stem: str = "model",
) -> list[Shard]:
    """Group ``(name, dtype, shape)`` in order into files of at most ``shard_bytes`` of data.

    A larger tensor is a file by itself. One file is ``model.safetensors``, several are
    ``model-00001-of-00003.safetensors`` and so on. ``metadata`` goes into every header, beside
    the ``format`` that transformers asks for.

    Raises:
        ValueError: a name twice, a dtype that the format does not have, or no room for anything.
    """
    if shard_bytes < 1:
        raise ValueError(f"files of {shard_bytes} bytes hold nothing")
    groups: list[list[OutputTensor]] = [[]]
    seen: set[str] = set()
    filled = 0
    for name, dtype, shape in tensors:
        if name in seen or name == "__metadata__":
            raise ValueError(f"the tensor {name} is there twice, or is no tensor's name")
        if dtype not in CODES:
            raise ValueError(f"{name}: safetensors has no dtype {dtype}")
        seen.add(name)
        tensor = OutputTensor(name, dtype, tuple(shape))
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    shards = []
    for i, group in enumerate(groups):
        group.sort(key=_alignment)  # stable: an expert's matrices stay side by side
        part = f"-{i + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        header = header_bytes(group, metadata)
        shards.append(Shard(f"{stem}{part}.safetensors", tuple(group), header))
    return shards


def _alignment(tensor: OutputTensor) -> tuple[int, int]:
    if tensor.nbytes % ALIGN == 0:
        return (0, 0)
    if tensor.nbytes % TENSOR_ALIGN == 0:
        return (1, 0)
    return (2, -DTYPE_BYTES[tensor.dtype])


def header_bytes(
    tensors: Sequence[OutputTensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length and JSON of a safetensors file of ``tensors``; a multiple of 4096 bytes."""
    table: dict[str, object] = {"__metadata__": {**(metadata or {}), "format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        table[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (align_up(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def index_json(shards: Sequence[Shard]) -> str:
    """``model.safetensors.index.json``: which file has which tensor."""
    total = sum(t.nbytes for shard in shards for t in shard.tensors)
    weight_map = {t.name: shard.file for shard in shards for t in shard.tensors}
    content = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(content, indent=2) + "\n"
