"""Pieces of a model's parameters and the bytes of a GGUF file that they are made of.

``hf_name`` is the name in published checkpoints (one tensor per expert and projection where the
family publishes them so), which transformers' own loading maps to its modules. Where a family
publishes stacks in another layout (gpt-oss), ``hf_index`` and ``transform`` say where in the
stack the values go.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from math import prod

from offload.io.gguf import GGUFFile, GGUFTensor
from offload.io.gguf_types import BY_NAME
from offload.models.gguf_metadata import Metadata
from offload.models.gguf_rope import FREQS

Index = tuple[int | slice, ...]


class Transform(Enum):
    """What is done to the values, after ``row_permutation``."""

    NONE = "none"
    MINUS_ONE = "minus one"
    """Gemma's norms multiply by 1 + weight; the file has the sum."""
    TRANSPOSE = "transpose"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GGUFEntry:
    """One piece of a parameter and the bytes it is made of.

    Attributes:
        hf_name: the parameter's name in a published checkpoint.
        hf_shape: its whole shape.
        hf_index: where in it the values go; ``()`` is all of it.
        gguf_name: the tensor it comes from.
        expert: which expert this is, or None.
        file, offset, nbytes: where the stored blocks are.
        type: GGML's name of their type, lower case.
        shape: of the values as they are stored, row-major; the last dimension is in blocks.
        row_permutation: row ``i`` of the parameter is stored row ``row_permutation[i]``. Whole
            rows only, so it can be done to quantised blocks.
        transform: what is done to the values then.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    hf_index: Index
    gguf_name: str
    expert: int | None
    file: int
    offset: int
    nbytes: int
    type: str
    shape: tuple[int, ...]
    row_permutation: tuple[int, ...] | None
    transform: Transform


class Taker:
    """Collects entries and remembers which tensors are used."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.meta = Metadata(gguf)
        self.entries: list[GGUFEntry] = []
        self.used: set[str] = set()

    def __call__(
        self,
        name: str,
        hf_name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, ...] | None = None,
        transform: Transform = Transform.NONE,
    ) -> None:
        """A whole tensor as a whole parameter."""
        tensor = self.find(name, shape)
        self.add(tensor, hf_name, shape, (), 0, tensor.shape, rows=rows, transform=transform)

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def find(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = self.gguf.tensors.get(name)
        if tensor is None:
            self.meta.fail(
                f"tensor {name} is missing, of which the metadata makes {list(shape)}; the file "
                "is incomplete, or of another variant of the architecture"
            )
        # Older converters drop dimensions of 1.
        if tensor.shape != shape and tensor.shape != tuple(n for n in shape if n != 1):
            self.meta.fail(
                f"tensor {name} has the shape {list(tensor.shape)}, by the metadata it is "
                f"{list(shape)}"
            )
        self.used.add(name)
        return tensor

    def add(
        self,
        tensor: GGUFTensor,
        hf_name: str,
        hf_shape: tuple[int, ...],
        hf_index: Index,
        row: int,
        shape: tuple[int, ...],
        *,
        expert: int | None = None,
        rows: tuple[int, ...] | None = None,
        transform: Transform = Transform.NONE,
    ) -> None:
        """The values of ``shape`` from stored row ``row`` on (rows of the last dimension)."""
        start = row * tensor.shape[-1]
        self._append(tensor, hf_name, hf_shape, hf_index, start, shape, expert, rows, transform)

    def add_run(
        self,
        tensor: GGUFTensor,
        hf_name: str,
        hf_shape: tuple[int, ...],
        hf_index: Index,
        expert: int,
        start: int,
        count: int,
    ) -> None:
        """An expert's ``count`` biases from ``start`` on, of a matrix with a row per expert."""
        kind, width = BY_NAME[tensor.type], tensor.shape[-1]
        if start % kind.elements or count % kind.elements:
            self.meta.fail(
                f"tensor {tensor.name} is {tensor.type.upper()}: {count} values from {start} on "
                f"are not whole blocks of {kind.elements}"
            )
        start += expert * width
        self._append(
            tensor, hf_name, hf_shape, hf_index, start, (count,), expert, None, Transform.NONE
        )

    def _append(
        self,
        tensor: GGUFTensor,
        hf_name: str,
        hf_shape: tuple[int, ...],
        hf_index: Index,
        start: int,
        shape: tuple[int, ...],
        expert: int | None,
        rows: tuple[int, ...] | None,
        transform: Transform,
    ) -> None:
        """``start`` is an element of the stored tensor; it and the last dimension are whole
        blocks."""
        kind = BY_NAME[tensor.type]
        self.entries.append(
            GGUFEntry(
                hf_name=hf_name,
                hf_shape=hf_shape,
                hf_index=hf_index,
                gguf_name=tensor.name,
                expert=expert,
                file=tensor.file,
                offset=tensor.offset + start // kind.elements * kind.nbytes,
                nbytes=prod(shape) // kind.elements * kind.nbytes,
                type=tensor.type,
                shape=shape,
                row_permutation=rows,
                transform=transform,
            )
        )

    def check_rest(self, layers: int) -> None:
        for name in self.gguf.tensors:
            if name in self.used or name == FREQS:
                continue
            block = re.match(r"blk\.(\d+)\.", name)
            # Layers behind the last predict tokens ahead: transformers does not have them.
            if block and int(block[1]) >= layers and self.meta.has("nextn_predict_layers"):
                continue
            self.meta.fail(
                f"tensor {name} is not understood for the architecture {self.meta.arch!r}; "
                "leaving it out would change the model"
            )
