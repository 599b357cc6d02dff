"""What a model is packed from: an interface, so that files of any kind can be a source.

A source names the tensors of a model (its *outline*: by the model's own parameter names, experts
one by one) and gives their rows, as *GGUF rows*: ``uint8 [n, row_bytes]``, in whatever format it
has them. Floats are GGUF rows as well: ``bf16`` has two bytes per column. A source that holds
quantised rows gives those, and they are packed bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from offload.io.pack_manifest import Kind, SourceId

Bytes = npt.NDArray[np.uint8]

GGUF_OF = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Formats of the dtypes that matrices are quantised from, by torch's name."""
TORCH_OF = {gguf: torch for torch, gguf in GGUF_OF.items()}
COPY_IN_BF16 = (
    "make a copy of the model in bfloat16 or float32 (from_pretrained(DIR, dtype=torch.bfloat16), "
    "then save_pretrained) and give that"
)
FLOATS = frozenset(TORCH_OF)
"""Formats whose rows are values as torch has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where an expert's matrix lies in its layer's fused parameter ``[experts, ...]``.

    Output row ``r`` is index ``base + step * r`` of the outputs; those are the last dimension
    where ``transposed``, else the first.
    """

    param: str
    base: int = 0
    step: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor to pack: a parameter under all its ``names``, or a part of every expert.

    ``shape`` is what is packed: a matrix is ``(outputs, inputs)`` whatever the source has.
    Parts of experts have a ``group`` (the module that holds them), a ``slice`` and one name:
    ``gate``, ``up``, ``down``, ``gate_bias``, ....
    """

    names: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    group: str = ""
    slice: Slice | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def columns(self) -> int:
        """Elements of a row; vectors are one row."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    def __str__(self) -> str:
        return f"{self.group}.{self.name}" if self.group else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """``count`` experts of one layer. Parts are of kind ``MATRIX`` or ``PLAIN``."""

    name: str
    count: int
    parts: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's tensors in the order of its modules.

    ``facts`` go into the manifest; so does ``converted``: which tensors (by ``str(tensor)``) the
    source gives in another format than it has them, and why.
    """

    items: tuple[Tensor | Experts, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, str] = field(default_factory=dict)


class Source(Protocol):
    """A model that can be packed. ``rows`` is called from several threads."""

    @property
    def id(self) -> SourceId:
        """What it is; decides whether a pack is of this source."""
        ...

    @property
    def outline(self) -> Outline: ...

    @property
    def total_bytes(self) -> int:
        """Bytes that will be read."""
        ...

    def format_of(self, tensor: Tensor) -> str:
        """The format of ``rows``: GGUF's name, or torch's name of a dtype that GGUF has not."""
        ...

    def rows(self, tensor: Tensor, expert: int | None, start: int, stop: int) -> Bytes:
        """Rows ``start:stop`` of a tensor (of one expert): a new array ``[n, row_bytes]``.

        Raises:
            CheckpointError: they cannot be read.
        """
        ...

    def extras(self) -> dict[str, bytes]:
        """The other files of a model directory: config.json, the tokenizer's, ...."""
        ...

    def check(self) -> None:
        """Raise CheckpointError if the source has changed since it was opened."""
        ...

    def close(self) -> None:
        """Close its files. Idempotent."""
        ...


def parts_of(item: Tensor | Experts) -> tuple[Tensor, ...]:
    """The tensors of an item."""
    return item.parts if isinstance(item, Experts) else (item,)


def float_row_bytes(format: str, columns: int) -> int:
    """Bytes of a row of floats; any number of columns, where a GGUF row needs an even one."""
    return columns * (4 if format == "f32" else 2)


def as_float32(format: str, rows: Bytes) -> npt.NDArray[np.float32]:
    """Values of float rows, ``float32 [n, columns]``."""
    if format == "f32":
        return rows.view(np.float32)
    if format == "f16":
        return rows.view(np.float16).astype(np.float32)
    if format != "bf16":
        raise ValueError(f"{format} is not a float format")
    bits: Any = rows.view(np.uint16).astype(np.uint32)
    bits <<= 16
    values: npt.NDArray[np.float32] = bits.view(np.float32)
    return values
