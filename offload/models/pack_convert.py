"""From rows of a source to the bytes of a block, and how far those are from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.packing import dequantize, packed_bytes
from offload.errors import CheckpointError
from offload.io.pack_manifest import ROWS_PER_GROUP, Block, Layout, Part
from offload.models.gguf_requant import REQUANTISED, dequantize_rows
from offload.models.pack_interleave import interleave
from offload.models.pack_kernels import encode
from offload.models.pack_plan import Piece
from offload.models.pack_source import FLOATS, Bytes, Source, as_float32

CHUNK_ELEMENTS = 4 * 2**20
"""Elements that are converted at a time: what bounds the memory, whatever a tensor's size."""


@dataclass(slots=True)
class Deviation:
    """Sums over sampled rows: of squared errors, of squared weights, and how many rows."""

    error: float = 0.0
    weight: float = 0.0
    rows: int = 0

    def add(self, other: Deviation) -> None:
        self.error += other.error
        self.weight += other.weight
        self.rows += other.rows

    @property
    def relative_rms(self) -> float:
        return (self.error / self.weight) ** 0.5 if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes ``start:stop`` of block number ``block``, made of rows of its parts.

    A chunk is a whole block, or some rows of one part. ``last``: it ends its block.
    """

    block: int
    start: int
    stop: int
    rows: tuple[tuple[int, int, int], ...]
    """(number of the part, first row, behind the last row)."""
    last: bool


def row_count(part: Part, piece: Piece) -> int:
    """Rows that the packer asks the source for."""
    return piece.tensor.rows if part.nbytes else 0


def chunks(number: int, block: Block, fill: tuple[Piece, ...]) -> Iterator[Chunk]:
    """Cut a block into chunks of about ``CHUNK_ELEMENTS``."""
    elements = sum(p.tensor.rows * p.tensor.columns for p in fill)
    pairs = list(zip(block.parts, fill, strict=True))
    if elements <= CHUNK_ELEMENTS:
        rows = tuple((i, 0, row_count(*pair)) for i, pair in enumerate(pairs))
        yield Chunk(number, 0, block.nbytes, rows, True)
        return
    todo = []
    for i, (part, piece) in enumerate(pairs):
        rows_all = row_count(part, piece)
        step = max(1, CHUNK_ELEMENTS // max(1, piece.tensor.columns))
        step = max(ROWS_PER_GROUP, step // ROWS_PER_GROUP * ROWS_PER_GROUP)
        for first in range(0, rows_all, step):
            stop = min(first + step, rows_all)
            start, end = (part.offset + bytes_of(part, piece, r) for r in (first, stop))
            todo.append(((i, first, stop), start, end))
    at = 0
    for k, (rows_of_part, _, end) in enumerate(todo):
        # A chunk begins where the one before ended: the padding in between goes with it.
        yield Chunk(number, at, end, (rows_of_part,), k == len(todo) - 1)
        at = end


def bytes_of(part: Part, piece: Piece, rows: int) -> int:
    """Bytes that the first ``rows`` rows of a part take; a multiple of 16 rows, or all of them."""
    if part.layout is Layout.PACKED:
        return packed_bytes(get_format(part.format), rows, piece.tensor.columns)
    return part.nbytes // piece.tensor.rows * rows


def make(
    source: Source, chunk: Chunk, block: Block, fill: tuple[Piece, ...]
) -> tuple[Bytes, Deviation]:
    """The bytes of a chunk. Zeros where nothing belongs.

    Raises:
        CheckpointError: the source cannot be read, or holds values that cannot be quantised.
    """
    out: Bytes = np.zeros(chunk.stop - chunk.start, np.uint8)
    total = Deviation()
    for number, first, stop in chunk.rows:
        part, piece = block.parts[number], fill[number]
        if first == stop:
            continue
        start, end = (
            part.offset - chunk.start + bytes_of(part, piece, row) for row in (first, stop)
        )
        rows = source.rows(piece.tensor, piece.expert, first, stop)
        total.add(_fill(part, piece, rows, out[start:end]))
    return out, total


def _fill(part: Part, piece: Piece, rows: Bytes, out: Bytes) -> Deviation:
    """Put rows of the source into ``out`` as ``part`` has them."""
    stays = part.layout is Layout.PLAIN or part.format in ("f32", piece.source_format)
    if stays and piece.source_format in FLOATS:  # others are checked as they are quantised
        _check_finite(piece, rows)
    if part.layout is Layout.PLAIN:
        if part.nbytes != rows.size:
            rows = as_float32(piece.source_format, rows).view(np.uint8)
        out[:] = rows.reshape(-1)
        return Deviation()
    format, columns = get_format(part.format), piece.tensor.columns
    native = piece.source_format
    if part.format == "f32" and native in FLOATS:  # wider at most: exact
        rows, native = as_float32(native, rows).view(np.uint8), "f32"
    gguf = rows
    if part.format != native:
        if native in REQUANTISED:
            rows, native = dequantize_rows(native, rows).view(np.uint8), "f32"
        gguf = encode(format, native, rows, str(piece.tensor))
    if part.layout is Layout.ROWS:
        out[:] = gguf.reshape(-1)
    else:
        interleave(format, gguf, columns, out)
    if gguf is rows:
        return Deviation()
    weights = as_float32(native, rows[:ROWS_PER_GROUP])
    return _sample(part, weights, gguf, out)


EXPONENTS = {"f32": ("<u4", 0x7F800000), "f16": ("<u2", 0x7C00), "bf16": ("<u2", 0x7F80)}
"""Of a float format: the integer its values are stored as, and the bits of the exponent, all of
which are set in NaN and in infinities and in nothing else."""


def _check_finite(piece: Piece, rows: Bytes) -> None:
    """Refuse what a kernel would turn into NaN, tokens and layers away from its cause.

    Quantised rows are checked where they are read or made; these are kept as they are.
    """
    word, exponent = EXPONENTS[piece.source_format]
    values = rows.reshape(-1).view(word)
    bad = int(np.count_nonzero((values & exponent) == exponent))
    if bad:
        raise CheckpointError(
            f"{piece.tensor} has {bad} weights that are NaN or infinite among {values.size}; the "
            "file is damaged, or training went wrong: fetch it again"
        )


def _sample(part: Part, weights_NK: npt.NDArray[np.float32], gguf: Bytes, out: Bytes) -> Deviation:
    """The error of a chunk's first rows, read back from the very bytes that are written."""
    format, (n, columns) = get_format(part.format), weights_NK.shape
    if part.layout is Layout.PACKED:
        values = dequantize(format, out[: packed_bytes(format, n, columns)], n, columns)
    else:
        values = decode_rows(format, gguf[:n])
    weights = weights_NK.astype(np.float64)
    error = float(np.square(weights - values).sum())
    return Deviation(error, float(np.square(weights).sum()), n)
