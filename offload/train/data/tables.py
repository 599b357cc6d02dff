"""Rows of Parquet files and of the Arrow files that ``datasets`` saves.

Both are read by pyarrow alone and without mapping them: ``datasets`` would map the files, whose
pages then count as this process's memory, and import a hundred modules to do so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.errors import DataError
from offload.train.data.bad_rows import BadRow
from offload.train.data.shapes import KEYS

_ROWS = 64
"""Converted to Python at a time."""
_BUFFER_BYTES = 1 << 20


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise DataError(
            f"{path.name}: reading {path.suffix} needs pyarrow: pip install 'offload[data]'"
        ) from e


def parquet_rows(path: Path) -> Iterator[tuple[int, Any, int]]:
    """(row from 1, its columns that mean something here or ``BadRow``, bytes read so far, by share
    of rows).

    Raises:
        DataError: pyarrow is missing, the file is damaged or has no column of use.
        OSError: the file cannot be read.
    """
    parquet = _pyarrow("pyarrow.parquet", path)
    arrow = _pyarrow("pyarrow", path)
    try:
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            columns = _useful(file.schema_arrow.names, path)
            batches = file.iter_batches(batch_size=_ROWS, columns=columns)
            total = max(1, file.metadata.num_rows)
            yield from _rows(batches, columns, path.stat().st_size, total)
    except arrow.ArrowException as e:
        raise DataError(f"{path.name}: is no sound Parquet file: {e}") from e


def arrow_rows(path: Path) -> Iterator[tuple[int, Any, int]]:
    """As ``parquet_rows``, of an Arrow stream.

    Raises:
        DataError: pyarrow is missing, the file is damaged or has no column of use.
        OSError: the file cannot be read.
    """
    arrow = _pyarrow("pyarrow", path)
    ipc = _pyarrow("pyarrow.ipc", path)
    try:
        with arrow.OSFile(str(path)) as file, ipc.open_stream(file) as stream:
            columns = _useful(stream.schema.names, path)
            first = 0
            for batch in stream:
                for number, row, _ in _rows([batch], columns, 0, 1):
                    yield first + number, row, file.tell()
                first += batch.num_rows
    except arrow.ArrowException as e:
        raise DataError(f"{path.name}: is no sound Arrow stream: {e}") from e


def _useful(names: list[str], path: Path) -> list[str]:
    columns = [name for name in names if name in KEYS]
    if not columns:
        raise DataError(
            f"{path.name}: has the columns {', '.join(names) or '(none)'}; wanted are text, or "
            "prompt and completion, or messages"
        )
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f"{path.name}: has the column {name} twice: keep one of them")
    return columns


def _rows(
    batches: Any, columns: list[str], nbytes: int, total: int
) -> Iterator[tuple[int, Any, int]]:
    number = 0
    for batch in batches:
        for first in range(0, batch.num_rows, _ROWS):
            for row in _values(batch.select(columns).slice(first, _ROWS)):
                number += 1
                if not isinstance(row, BadRow):
                    row = {name: _without_nulls(value) for name, value in row.items()}
                yield number, row, nbytes * number // total


def _values(part: Any) -> Iterator[Any]:
    """The rows of a part of a table; of those that Python has no values for, what is wrong."""
    try:
        yield from part.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8; times out of range
        for i in range(part.num_rows):
            try:
                yield from part.slice(i, 1).to_pylist()
            except UnicodeDecodeError as e:
                yield BadRow(
                    f"has text that is not UTF-8: byte {e.object[e.start]:#04x} at position "
                    f"{e.start + 1}"
                )
            except (ValueError, OverflowError) as e:
                yield BadRow(f"has a value that cannot be read: {e}")


def _without_nulls(value: Any) -> Any:
    """A column's value as it was before there was a table: all objects of a place have all fields
    there, null where a row has no such field. A template would show them: every tool the arguments
    of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_without_nulls(held) for held in value]
    return value
