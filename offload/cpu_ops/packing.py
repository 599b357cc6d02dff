"""GGUF rows to the kernels' layout and back.

A packed tensor is a sequence of tiles of 16 rows; a tile is, block after block, the sections of its
16 rows with words interleaved: word 0 of rows 0..15, then word 1 of rows 0..15 and so on. A lane
of a register is a row, so a kernel reads a tile from its first byte to its last and needs no sum
across lanes. Rows are padded with zero bytes to a multiple of 16; nothing else is added, no bit is
lost. Two sections are changed inside their words, reversibly (see ``_twist``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.formats import TILE_ROWS, Format
from offload.errors import CheckpointError, OffloadError

Bytes = npt.NDArray[np.uint8]

_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_CHUNK_BYTES = 8 << 20
"""What is moved at once: bounds the temporary memory of packing, not its speed."""


def packed_bytes(fmt: Format, rows: int, columns: int) -> int:
    """Bytes of ``rows`` x ``columns`` weights in the kernels' layout, padding rows included."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * fmt.row_bytes(columns)


def pack_rows(
    fmt: Format, gguf_rows: npt.NDArray[Any], columns: int, out: Bytes | None = None
) -> Bytes:
    """Pack ``gguf_rows`` [N, row_bytes] uint8; returns uint8 [packed_bytes], ``out`` if given.

    Raises:
        OffloadError: a shape or dtype does not fit the format.
    """
    nbytes = fmt.row_bytes(columns)
    if gguf_rows.dtype != np.uint8 or gguf_rows.ndim != 2 or gguf_rows.shape[1] != nbytes:
        raise OffloadError(
            f"{fmt.name} rows of {columns} columns are uint8 [N, {nbytes}], "
            f"got {gguf_rows.dtype} {list(gguf_rows.shape)}"
        )
    rows = gguf_rows.shape[0]
    out = _flat(out, fmt, rows, columns, writable=True)
    blocks = fmt.blocks(columns)
    tile_bytes = TILE_ROWS * nbytes
    step = max(1, _CHUNK_BYTES // tile_bytes)
    tiles = -(-rows // TILE_ROWS)
    for first in range(0, tiles, step):
        last = min(first + step, tiles)
        part = np.ascontiguousarray(gguf_rows[first * TILE_ROWS : last * TILE_ROWS])
        missing = (last - first) * TILE_ROWS - part.shape[0]
        if missing:
            part = np.concatenate([part, np.zeros((missing, nbytes), np.uint8)])
        src = part.reshape(last - first, TILE_ROWS, blocks, fmt.block_bytes)
        dst = out[first * tile_bytes : last * tile_bytes].reshape(last - first, blocks, -1)
        at = 0
        for s in fmt.sections:
            words = _words(src[..., s.offset : s.offset + s.nbytes], s.word)
            words = _twist(fmt, s.name, words, inverse=False).transpose(0, 2, 3, 1)
            end = at + TILE_ROWS * s.nbytes
            dst[..., at:end] = (
                np.ascontiguousarray(words).view(np.uint8).reshape(last - first, blocks, -1)
            )
            at = end
    return out


def unpack_rows(fmt: Format, packed: Bytes, rows: int, columns: int) -> Bytes:
    """The exact inverse of ``pack_rows``: uint8 [rows, row_bytes]."""
    packed = _flat(packed, fmt, rows, columns, writable=False)
    blocks, nbytes = fmt.blocks(columns), fmt.row_bytes(columns)
    out = np.empty((rows, nbytes), np.uint8)
    tile_bytes = TILE_ROWS * nbytes
    step = max(1, _CHUNK_BYTES // tile_bytes)
    tiles = -(-rows // TILE_ROWS)
    for first in range(0, tiles, step):
        last = min(first + step, tiles)
        src = packed[first * tile_bytes : last * tile_bytes].reshape(last - first, blocks, -1)
        dst = np.empty((last - first, TILE_ROWS, blocks, fmt.block_bytes), np.uint8)
        at = 0
        for s in fmt.sections:
            end = at + TILE_ROWS * s.nbytes
            words = _words(src[..., at:end], s.word)
            words = words.reshape(last - first, blocks, -1, TILE_ROWS).transpose(0, 3, 1, 2)
            words = np.ascontiguousarray(_twist(fmt, s.name, words, inverse=True))
            dst[..., s.offset : s.offset + s.nbytes] = words.view(np.uint8)
            at = end
        rows_here = min(last * TILE_ROWS, rows) - first * TILE_ROWS
        out[first * TILE_ROWS : first * TILE_ROWS + rows_here] = dst.reshape(-1, nbytes)[:rows_here]
    return out


def _words(part: npt.NDArray[Any], word: int) -> npt.NDArray[Any]:
    """Bytes [..., n] as words [..., n / word]; a copy."""
    return np.ascontiguousarray(part).view(_WORDS[word])


def _twist(
    fmt: Format, section: str, words: npt.NDArray[Any], *, inverse: bool
) -> npt.NDArray[Any]:
    """What changes inside a word.

    q8_0: the integers are stored plus 128, because ``vpdpbusd`` multiplies unsigned by signed and
    the activations are the signed side. q5_0, q5_1: the fifth bits of columns ``4c + b`` (bit
    ``4c + b`` of ``qh``) go to byte ``b``, bit ``c``, so that four columns' bits are one shift
    away from their places.
    """
    if fmt.name == "q8_0" and section == "qs":
        return words ^ np.uint32(0x80808080)
    if fmt.name in ("q5_0", "q5_1") and section == "qh":
        bits = np.unpackbits(
            np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4),
            axis=-1,
            bitorder="little",
        )
        shape = (4, 8) if inverse else (8, 4)
        bits = bits.reshape(*words.shape, *shape).swapaxes(-1, -2).reshape(*words.shape, 32)
        twisted = np.packbits(np.ascontiguousarray(bits), axis=-1, bitorder="little")
        return twisted.view(np.uint32).reshape(words.shape)
    return words


def _flat(out: Bytes | None, fmt: Format, rows: int, columns: int, *, writable: bool) -> Bytes:
    """The packed array, checked, or a new one."""
    want = packed_bytes(fmt, rows, columns)
    if out is None:
        return np.empty(want, np.uint8)
    if out.dtype != np.uint8 or out.shape != (want,) or not out.flags.c_contiguous:
        raise OffloadError(
            f"{rows} x {columns} weights in {fmt.name} pack into uint8 [{want}], contiguous; "
            f"got {out.dtype} {list(out.shape)}"
        )
    if writable and not out.flags.writeable:
        raise OffloadError("the array to pack into is read-only")
    return out


def dequantize(fmt: Format, packed: Bytes, rows: int, columns: int) -> npt.NDArray[np.float32]:
    """The weights' exact values, float32 [rows, columns]."""
    from offload.cpu_ops.codecs import decode_rows

    return decode_rows(fmt, unpack_rows(fmt, packed, rows, columns))


def quantize(fmt: Format, weights: npt.NDArray[np.float32], *, search: bool = False) -> Bytes:
    """GGUF rows uint8 [N, row_bytes] of float32 [N, K]; see ``codecs.encode_rows``."""
    from offload.cpu_ops.codecs import encode_rows

    return encode_rows(fmt, weights, search=search)


def check_scales(fmt: Format, gguf_rows: Bytes, name: str = "a tensor") -> None:
    """Refuse weights that are or would become NaN or infinite.

    Quantised formats: their scales, which is all that can be. Float formats: every element.

    Raises:
        CheckpointError: naming the tensor (``name``), the first such row and how many there are.
    """
    rows = np.ascontiguousarray(gguf_rows)
    blocks = rows.reshape(rows.shape[0], -1, fmt.block_bytes)
    bad = np.zeros(rows.shape[0], bool)
    for s in fmt.sections:
        part = np.ascontiguousarray(blocks[..., s.offset : s.offset + s.nbytes])
        if s.name in ("d", "m", "dmin") or fmt.name == "f16":
            bad |= ((part.view(np.uint16) & 0x7C00) == 0x7C00).any(axis=(1, 2))
        elif s.name == "e":
            bad |= (part == 255).any(axis=(1, 2))  # NaN of E8M0
        elif fmt.name == "bf16":
            bad |= ((part.view(np.uint16) & 0x7F80) == 0x7F80).any(axis=(1, 2))
        elif fmt.name == "f32":
            bad |= ~np.isfinite(part.view(np.float32)).all(axis=(1, 2))
    if bad.any():
        raise CheckpointError(
            f"{name}: {int(bad.sum())} of {len(bad)} rows in {fmt.name} hold NaN or infinite "
            f"values, the first is row {int(bad.argmax())}; the file is damaged or was "
            f"quantised from damaged weights: fetch it again"
        )
