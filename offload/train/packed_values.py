"""Values of packed bytes, in the dtype that computes: what a frozen, packed base is unpacked by.

float32 values are exactly those of ``cpu_ops.codecs``, bfloat16 ones the nearest to them, ties to
even (a subnormal bfloat16, below 1e-38, counts as 0).
"""

# N rows (outputs), K columns (inputs)

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import TILE_ROWS, get_format
from offload.cpu_ops.packing import packed_bytes
from offload.cpu_ops.prefill import dequantize_tiles, row_stride, tensor_at
from offload.errors import OffloadError
from offload.io.pack_manifest import Layout, Part
from offload.train.layout import Piece

SCRATCH_BYTES = 2 << 20
"""Rows that cannot be unpacked where they belong go through so many bytes at a time."""

KINDS = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""What kernels write, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Where one part of a pack goes: to outputs ``base``, ``base + step``, ... of a piece, which
    are its last dimension where ``transposed``, else its first."""

    part: Part
    at: int
    """Bytes from the start of the packed block."""
    piece: Piece
    base: int = 0
    step: int = 1
    transposed: bool = False

    def target(self, values: torch.Tensor) -> torch.Tensor:
        """The view of ``values`` (a block's [count]) that the part's values belong in."""
        piece = self.piece
        out = values[piece.offset : piece.offset + piece.count].view(piece.shape)
        if not self.part.shape:
            return out
        if self.transposed:
            out = out.T
        last = self.base + self.step * (self.part.shape[0] - 1)
        return out[self.base : last + 1 : self.step]


class Unpacker:
    """Unpacks parts. One thread at a time; keeps ``SCRATCH_BYTES`` (or one tile's) of scratch."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fill(self, fill: Fill, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Put a part's values where they belong in ``values`` [count]; ``packed``: uint8, the
        packed block."""
        part = fill.part
        raw = packed[fill.at + part.offset : fill.at + part.offset + part.nbytes]
        target = fill.target(values)
        if part.layout is Layout.PLAIN:
            target.copy_(plain(part, raw))
        else:
            self.rows(part, raw, 0, part.shape[0], target)

    def rows(
        self, part: Part, raw: torch.Tensor, first: int, end: int, out_NK: torch.Tensor
    ) -> None:
        """Rows ``first:end`` of a matrix or table whose bytes are ``raw`` (uint8 [part.nbytes]).
        ``first`` is a multiple of 16."""
        if part.layout is Layout.PLAIN:
            out_NK.copy_(plain(part, raw)[first:end])
        elif part.layout is Layout.ROWS:
            row_bytes = get_format(part.format).row_bytes(part.shape[1])
            self._decode(part, raw.view(-1, row_bytes)[first:end], out_NK)
        else:
            at = raw.data_ptr() + first * get_format(part.format).row_bytes(part.shape[1])
            self._tiles(part, at, end - first, out_NK)

    def some_rows(
        self, part: Part, raw: torch.Tensor, ids: torch.Tensor, out_VK: torch.Tensor
    ) -> None:
        """Rows ``ids`` (int64 [n], ascending) of a table into the same rows of ``out_VK``; no
        other row is touched."""
        if part.layout is Layout.PLAIN:
            out_VK[ids] = plain(part, raw)[ids].to(out_VK.dtype)
            return
        columns = part.shape[1]
        row_bytes = get_format(part.format).row_bytes(columns)
        many = max(1, SCRATCH_BYTES // (16 * columns * out_VK.element_size()))
        if part.layout is Layout.ROWS:
            table = raw.view(-1, row_bytes)
            for some in ids.split(16 * many):
                rows = out_VK.new_empty(len(some), columns)
                self._decode(part, table[some], rows)
                out_VK[some] = rows
            return
        tiles = raw.view(-1, TILE_ROWS * row_bytes)
        wanted, which = torch.unique_consecutive(ids // TILE_ROWS, return_inverse=True)
        for first in range(0, len(wanted), many):
            mine = (which >= first) & (which < first + many)
            here = tiles[wanted[first : first + many]]
            rows = out_VK.new_empty(len(here) * TILE_ROWS, columns)
            self._tiles(part, here.data_ptr(), len(rows), rows)
            at = (which[mine] - first) * TILE_ROWS + ids[mine] % TILE_ROWS
            out_VK[ids[mine]] = rows[at]

    def _decode(self, part: Part, gguf_rows: torch.Tensor, out_NK: torch.Tensor) -> None:
        fmt = get_format(part.format)
        step = max(1, SCRATCH_BYTES // (4 * part.shape[1]))
        for first in range(0, len(gguf_rows), step):
            some = gguf_rows[first : first + step].contiguous().numpy()
            out_NK[first : first + step] = torch.from_numpy(decode_rows(fmt, some))

    def _tiles(self, part: Part, at: int, rows: int, out_NK: torch.Tensor) -> None:
        """``rows`` rows of the tiles at address ``at``."""
        fmt, columns = get_format(part.format), part.shape[1]
        kind = KINDS.get(out_NK.dtype)
        if kind is None:
            raise OffloadError(f"{part.name}: packed weights are not unpacked to {out_NK.dtype}")
        done = 0
        if self._takes_tiles(out_NK):
            done = rows // TILE_ROWS * TILE_ROWS
            stride = out_NK.stride(0) * out_NK.element_size()
            dequantize_tiles(
                fmt, at, columns, done // TILE_ROWS, out_NK.data_ptr(), kind, stride=stride
            )
        stride = row_stride(kind, columns)
        slab = max(1, SCRATCH_BYTES // (stride * TILE_ROWS)) * TILE_ROWS
        while done < rows:
            count = min(slab, rows - done)
            tiles = -(-count // TILE_ROWS)
            scratch = self._room(tiles * TILE_ROWS * stride)
            dequantize_tiles(fmt, at + packed_bytes(fmt, done, columns), columns, tiles,
                             scratch, kind)  # fmt: skip
            out_NK[done : done + count] = tensor_at(scratch, kind, count, columns, stride)
            done += count

    @staticmethod
    def _takes_tiles(out_NK: torch.Tensor) -> bool:
        """Whether the kernel can write there: rows in a piece, of whole groups of 32 columns, as
        it writes those, on cache lines."""
        line = out_NK.stride(0) * out_NK.element_size() % 64 == 0 == out_NK.data_ptr() % 64
        return out_NK.stride(1) == 1 and out_NK.shape[1] % 32 == 0 and line

    def _room(self, nbytes: int) -> int:
        if self._scratch.numel() < nbytes + 64:
            self._scratch = torch.empty(nbytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


def plain(part: Part, raw: torch.Tensor) -> torch.Tensor:
    """A part in plain layout: a view of its bytes."""
    dtype: torch.dtype = getattr(torch, part.format)
    return raw.view(dtype).view(part.shape)


def unpacked(part: Part, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part's values as a new tensor: in ``dtype``, or its own if it is plain."""
    if part.layout is Layout.PLAIN:
        return plain(part, raw).clone()
    out = torch.empty(part.shape, dtype=dtype)
    Unpacker().rows(part, raw, 0, part.shape[0], out)
    return out


__all__ = ["KINDS", "Fill", "Unpacker", "plain", "unpacked"]
