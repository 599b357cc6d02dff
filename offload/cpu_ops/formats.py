"""Weight formats: the blocks of a GGUF row, and the order in which kernels read them.

*GGUF rows* are the interchange form: a ``uint8`` array ``[N, row_bytes]`` exactly as a GGUF tensor
of ``N`` rows holds them. A row is a sequence of blocks; a block holds quants and scales, in
*sections*. Packing (``packing.py``) moves whole words of sections and nothing else, so a format is
fully described by the table here. Byte layouts: the block structs of ggml's ``ggml-common.h``.
Imports neither numpy nor numba.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from offload.errors import OffloadError

TILE_ROWS = 16
"""Rows interleaved in a packed tile: the lanes of 32 bits in a 512-bit register."""


class Activation(enum.Enum):
    """What a kernel multiplies the weights with."""

    FLOAT32 = "float32"
    """The activations as they are."""
    Q8_32 = "q8_32"
    """int8 with one scale and the sum of the integers per 32 columns."""
    Q8_256 = "q8_256"
    """int8 with one scale per 256 columns and sums per 16 and per 32 of them."""

    @property
    def columns(self) -> int:
        """Columns that share a scale; 1 where there is none."""
        return {"float32": 1, "q8_32": 32, "q8_256": 256}[self.value]


@dataclass(frozen=True, slots=True)
class Section:
    """``nbytes`` at ``offset`` of a GGUF block, moved in words of ``word`` bytes."""

    name: str
    offset: int
    nbytes: int
    word: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One weight format.

    ``block``: elements per block, ``block_bytes``: its bytes in a GGUF row (and in a packed tile,
    per row); ``sections``: in packed order, together the whole block; ``ggml_type``: the number
    that GGUF files use.
    """

    name: str
    ggml_type: int
    block: int
    block_bytes: int
    activation: Activation
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        covered = sorted((s.offset, s.offset + s.nbytes) for s in self.sections)
        ends = [0, *(end for _, end in covered)]
        starts = [*(start for start, _ in covered), self.block_bytes]
        if starts != ends:
            raise ValueError(f"{self.name}: sections {covered} do not cover {self.block_bytes}")

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block

    def blocks(self, columns: int) -> int:
        """Blocks in a row of ``columns`` elements.

        Raises:
            OffloadError: ``columns`` is not a positive multiple of the block.
        """
        if columns <= 0 or columns % self.block:
            raise OffloadError(
                f"{self.name} stores rows in blocks of {self.block} elements; {columns} columns "
                f"are not a positive multiple of it; keep this tensor in bf16 or f32"
            )
        return columns // self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a GGUF row of ``columns`` elements. Raises OffloadError as ``blocks`` does."""
        return self.blocks(columns) * self.block_bytes


def _format(
    name: str,
    ggml_type: int,
    block: int,
    activation: Activation,
    sections: list[tuple[str, int, int]],
    packed_order: str,
) -> Format:
    """``sections``: (name, bytes, word) in the order of the GGUF block."""
    found, offset = {}, 0
    for section, nbytes, word in sections:
        found[section] = Section(section, offset, nbytes, word)
        offset += nbytes
    return Format(
        name=name,
        ggml_type=ggml_type,
        block=block,
        block_bytes=offset,
        activation=activation,
        sections=tuple(found[s] for s in packed_order.split()),
    )


_F32, _Q32, _Q256 = Activation.FLOAT32, Activation.Q8_32, Activation.Q8_256
_D, _M, _QS, _QH = ("d", 2, 2), ("m", 2, 2), ("qs", 16, 4), ("qh", 4, 4)
_DMIN, _SCALES, _SCALES16 = ("dmin", 2, 2), ("scales", 12, 4), ("scales", 16, 4)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _format("f32", 0, 1, _F32, [("x", 4, 4)], "x"),
        # A 16-bit row is read in pairs of columns: 16 rows of a pair are one register.
        _format("f16", 1, 2, _F32, [("x", 4, 4)], "x"),
        _format("bf16", 30, 2, _F32, [("x", 4, 4)], "x"),
        # Scales lie in front of the quants they belong to: what is needed first is read first.
        _format("q4_0", 2, 32, _Q32, [_D, _QS], "d qs"),
        _format("q4_1", 3, 32, _Q32, [_D, _M, _QS], "d m qs"),
        _format("q5_0", 6, 32, _Q32, [_D, _QH, _QS], "d qh qs"),
        _format("q5_1", 7, 32, _Q32, [_D, _M, _QH, _QS], "d m qh qs"),
        _format("q8_0", 8, 32, _Q32, [_D, ("qs", 32, 4)], "d qs"),
        _format("iq4_nl", 20, 32, _Q32, [_D, _QS], "d qs"),
        _format("mxfp4", 39, 32, _Q32, [("e", 1, 1), _QS], "e qs"),
        _format("q4_k", 12, 256, _Q256, [_D, _DMIN, _SCALES, ("qs", 128, 4)], "d dmin scales qs"),
        _format(
            "q5_k", 13, 256, _Q256,
            [_D, _DMIN, _SCALES, ("qh", 32, 4), ("qs", 128, 4)], "d dmin scales qh qs",
        ),
        _format(
            # Halves of 128 columns one after the other, so that memory is read in order.
            "q6_k", 14, 256, _Q256,
            [("ql0", 64, 4), ("ql1", 64, 4), ("qh0", 32, 4), ("qh1", 32, 4), _SCALES16, _D],
            "d scales qh0 ql0 qh1 ql1",
        ),
    )
}  # fmt: skip
"""Every format that the kernels take, by name."""


def get_format(name: str) -> Format:
    """The format of that name. Raises OffloadError that lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join(FORMATS)
        raise OffloadError(f"no kernels for weights in {name!r}; there are {known}") from None
