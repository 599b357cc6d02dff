"""``packing.pack_rows`` at the speed of a disk: compiled, without the GIL, to the bit.

That one states the layout in numpy and moves it in strided copies: 0.6 GB/s of a core for q4_0,
0.35 for q8_0, and most GGUF files need nothing else. Here a word of each of 16 rows goes straight
to its place, at 2.5 and 2.9 GB/s; K-quants have the 3 GB/s of numpy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops import kernel_cache
from offload.cpu_ops.formats import TILE_ROWS, Format, get_format
from offload.cpu_ops.packing import pack_rows, packed_bytes
from offload.models.pack_source import Bytes

_BY_NUMPY = ("f32", "f16", "bf16", "q5_0", "q5_1")
"""Left to ``pack_rows``: floats, which have nothing but words (2.5 GB/s there, 1.5 here, where 16
rows of a power of two bytes meet in one set of the cache), and bits that move within a word."""

_jit = kernel_cache.kept


@_jit
def _move(rows: Any, tile: int, src: int, words: int, width: int, flip: Any, out: Any) -> None:
    """``words`` words of ``width`` bytes from column byte ``src`` of 16 rows, one row after the
    other. The inner loops have constant lengths, so that a word is one load and one store."""
    first = tile * 16
    if width == 4:
        for w in range(words):
            for r in range(16):
                for i in range(4):
                    out[w * 64 + r * 4 + i] = rows[first + r, src + w * 4 + i] ^ flip
    elif width == 2:
        for w in range(words):
            for r in range(16):
                for i in range(2):
                    out[w * 32 + r * 2 + i] = rows[first + r, src + w * 2 + i] ^ flip
    else:
        for w in range(words):
            for r in range(16):
                out[w * 16 + r] = rows[first + r, src + w] ^ flip


@_jit
def _interleave(rows: Any, tiles: int, block_bytes: int, sections: Any, out: Any) -> None:
    blocks = rows.shape[1] // block_bytes
    at = 0
    for tile in range(tiles):
        for b in range(blocks):
            for s in range(sections.shape[0]):
                offset, nbytes, width = sections[s, 0], sections[s, 1], sections[s, 2]
                end = at + 16 * nbytes
                src = b * block_bytes + offset
                flip = np.uint8(sections[s, 3])
                _move(rows, tile, src, nbytes // width, width, flip, out[at:end])
                at = end


@lru_cache
def _sections(name: str) -> npt.NDArray[np.int64]:
    """Offset, bytes, width and the bits to flip of each section, in packed order."""
    return np.array(
        [
            (s.offset, s.nbytes, s.word, 0x80 if (name, s.name) == ("q8_0", "qs") else 0)
            for s in get_format(name).sections
        ],
        np.int64,
    )


def interleave(format: Format, rows: Bytes, columns: int, out: Bytes) -> None:
    """Pack GGUF rows ``uint8 [n, row_bytes]`` into ``out``; equal to ``pack_rows``.

    Raises:
        OffloadError: a shape or dtype does not fit the format.
    """
    whole = 0 if format.name in _BY_NUMPY else len(rows) // TILE_ROWS
    fits = rows.dtype == np.uint8 and rows.shape[1:] == (format.row_bytes(columns),)
    if not fits or out.shape != (packed_bytes(format, len(rows), columns),):
        pack_rows(format, rows, columns, out)  # says what is wrong
        return
    end = whole * TILE_ROWS * rows.shape[1]
    if whole:
        block_bytes, sections = format.block_bytes, _sections(format.name)
        _interleave(np.ascontiguousarray(rows), whole, block_bytes, sections, out[:end])
    if len(rows) > whole * TILE_ROWS:
        pack_rows(format, rows[whole * TILE_ROWS :], columns, out[end:])
