"""What is moved: blocks. A block says what it is and how its bytes are laid out, never where.

A block is the unit of residency: it is loaded, pinned, evicted and written as a whole. It holds
one or several tensors (an expert's gate, up and down; a slice of a layer) that are used together.
Imports neither torch nor numpy: the scheduler is built on it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat

ALIGN = 4096
"""Alignment in bytes of blocks in files and arenas: what O_DIRECT asks for."""

TENSOR_ALIGN = 64
"""Alignment in bytes of a tensor inside its block: one cache line, one AVX-512 register.

BLAS libraries pick other kernels (other rounding) for unaligned operands, so this is part of
being bit-equal to a resident model, whose tensors the allocator aligns to 64 as well. Where the
resident model's tensor is *not* aligned (a view of a mapped file), ``phases`` of ``layout`` puts
the streamed one at the same place within 64 bytes.
"""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes per element, keyed by torch's name of the dtype."""


def align_up(n: int, to: int = ALIGN) -> int:
    """The smallest multiple of ``to`` that is not below ``n``."""
    return -(-n // to) * to


class BlockKind(enum.Enum):
    """What a block holds."""

    WEIGHT = "weight"
    EXPERT = "expert"
    KV = "kv"
    GRAD = "grad"
    STATE = "state"
    ACTIVATION = "activation"


class Tier(enum.IntEnum):
    """Where bytes can be. Data flows up to compute; only dirty blocks flow down."""

    DISK = 0
    RAM = 1
    DEVICE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor inside a block: ``offset`` bytes from the block's start, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        n = DTYPE_BYTES[self.dtype]
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """An immutable description of a block; ``nbytes`` includes the padding between tensors."""

    id: str
    kind: BlockKind
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    group: str = field(default="")
    """Experts only: the layer they belong to. Others: empty."""

    def __post_init__(self) -> None:
        end = 0
        for t in self.tensors:
            if t.offset < end or t.offset % DTYPE_BYTES[t.dtype]:
                raise ValueError(
                    f"block {self.id}: tensor {t.name} at {t.offset} overlaps or is unaligned"
                )
            end = t.offset + t.nbytes
        if end > self.nbytes:
            raise ValueError(
                f"block {self.id}: tensors end at {end}, block has {self.nbytes} bytes"
            )

    @property
    def payload_nbytes(self) -> int:
        """Bytes of tensor data, without padding."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def slot_nbytes(self) -> int:
        """Bytes a slot for this block takes in an arena or a packed file."""
        return align_up(self.nbytes)


def layout(
    id: str,
    kind: BlockKind,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    group: str = "",
    phases: Iterable[int] = (),
) -> BlockSpec:
    """Lay ``(name, dtype, shape)`` tensors one after the other, each aligned to 64 bytes.

    ``phases``: for each tensor, where it starts within 64 bytes; 0 where none is given.

    >>> layout("b", BlockKind.WEIGHT, [("w", "bfloat16", (3, 5)), ("b", "float32", (3,))]).nbytes
    76
    """
    out, end = [], 0
    for (name, dtype, shape), phase in zip(tensors, chain(phases, repeat(0)), strict=False):
        offset = align_up(end - phase, TENSOR_ALIGN) + phase
        spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape), offset=offset)
        out.append(spec)
        end = spec.offset + spec.nbytes
    return BlockSpec(id=id, kind=kind, tensors=tuple(out), nbytes=end, group=group)
