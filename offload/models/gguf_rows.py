"""Rows of a model's tensors from the bytes of a GGUF file."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.packing import check_scales
from offload.errors import CheckpointError
from offload.io.gguf import GGUFFile
from offload.io.gguf_types import BY_NAME
from offload.io.source_files import SourceFiles
from offload.models.gguf_entries import GGUFEntry, Transform
from offload.models.gguf_places import Made, Stored
from offload.models.gguf_requant import REQUANTISED, dequantize_rows
from offload.models.pack_source import FLOATS, Bytes, as_float32


class GGUFRows:
    """Reads places. Thread-safe."""

    def __init__(self, gguf: GGUFFile) -> None:
        """Open the parts. Raises CheckpointError."""
        self._gguf = gguf
        self._files = SourceFiles(gguf.files)

    def stored(self, place: Stored, start: int, stop: int) -> Bytes:
        """Rows ``start:stop`` as they are in the file: ``uint8 [n, row_bytes]``.

        Raises:
            CheckpointError: they cannot be read, or have scales that are NaN or infinite.
        """
        entry, start, stop = place.entry, place.first + start, place.first + stop
        order = None
        if entry.row_permutation is not None:
            # Rows move within a head, so what is read is at most a head more at either end.
            order = _array(entry.row_permutation)[start:stop]
            start, stop = int(order.min()), int(order.max()) + 1
        rows = self._read(entry, start, stop)
        return rows if order is None else rows[order - start]

    def made(self, place: Made, columns: int, start: int, stop: int) -> Bytes:
        """Rows ``start:stop`` of a tensor with rows of ``columns``, in ``place.format``.

        Raises:
            CheckpointError: as ``stored``.
        """
        dtype = np.float32 if place.format == "f32" else np.uint16
        out = np.zeros((stop - start, columns), dtype)
        for entry in place.entries:
            rows, part = _target(entry)
            first, last = max(start, rows.start), min(stop, rows.stop)
            if first < last:
                value = self._values(entry, place.format).reshape(len(rows), -1)
                out[first - start : last - start, part] = value[
                    first - rows.start : last - rows.start
                ]
        return out.view(np.uint8)

    def _values(self, entry: GGUFEntry, format: str) -> npt.NDArray[Any]:
        """An entry's values, permuted and transformed: float32, or the words of ``format``."""
        count = entry.nbytes // _row_bytes(entry)
        rows = self._read(entry, 0, count)
        values: npt.NDArray[Any]
        if format != "f32":
            values = rows.view(np.uint16)
        elif entry.type in FLOATS:
            values = as_float32(entry.type, rows)
        elif entry.type in REQUANTISED:
            values = dequantize_rows(entry.type, rows)
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{self._name(entry)} has NaN or infinite weights; the file is damaged: fetch "
                    "it again"
                )
        else:
            values = decode_rows(get_format(entry.type), rows)
        values = values.reshape(entry.shape)
        if entry.row_permutation is not None:
            values = values[_array(entry.row_permutation)]
        if entry.transform is Transform.MINUS_ONE:
            values = values - np.float32(1)
        return values.T if entry.transform is Transform.TRANSPOSE else values

    def _read(self, entry: GGUFEntry, start: int, stop: int) -> Bytes:
        """Rows ``start:stop`` as they are stored."""
        row_bytes = _row_bytes(entry)
        rows: Bytes = np.empty((stop - start, row_bytes), np.uint8)
        if rows.size:
            at = entry.offset + start * row_bytes
            self._files.read_into(entry.file, at, rows.reshape(-1).data)
            if entry.type not in FLOATS | REQUANTISED:
                name = f"{self._name(entry)}, {len(rows)} rows from byte {at} on"
                check_scales(get_format(entry.type), rows, name)
        return rows

    def _name(self, entry: GGUFEntry) -> str:
        return f"{self._gguf.files[entry.file]}: tensor {entry.gguf_name}"

    def close(self) -> None:
        """Idempotent."""
        self._files.close()


def _row_bytes(entry: GGUFEntry) -> int:
    kind = BY_NAME[entry.type]
    return entry.shape[-1] // kind.elements * kind.nbytes


def _target(entry: GGUFEntry) -> tuple[range, slice]:
    """Rows and columns of the parameter that an entry is; a vector is one row."""
    shape, index = entry.hf_shape, entry.hf_index
    if len(shape) == 1:
        return range(1), slice(None)
    if not index:
        return range(prod(shape[:-1])), slice(None)
    row, *rest = index
    rows = range(row, row + 1) if isinstance(row, int) else range(*row.indices(shape[0]))
    columns = rest[0] if rest else slice(None)
    if len(rest) > 1 or not isinstance(columns, slice):
        raise ValueError(f"{entry.hf_name}{index} is not rows and columns")
    return rows, columns


@lru_cache(maxsize=8)
def _array(permutation: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(permutation, np.int64)
