"""Rows of files, one at a time, with the place that each came from.

What a path may be: a ``.jsonl`` or ``.json`` file (an object per line, or one list of objects), a
``.parquet`` file, a ``.txt`` file (one stream of text), a directory that ``datasets`` saved, or a
directory of such files, read in the order of their names. Of these, files that by their names are
no data, or held out from training, are left out, which is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import DataError
from offload.train.data.json_rows import json_rows
from offload.train.data.plain_text import text_chunks
from offload.train.data.tables import arrow_rows, parquet_rows

Reader = Callable[[Path], Iterator[tuple[int, Any, int]]]
"""Yields (number from 1, what was found, bytes of the file read so far)."""

_READERS: dict[str, Reader] = {
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".json": json_rows,
    ".parquet": parquet_rows,
    ".txt": text_chunks,
    ".arrow": arrow_rows,
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".zip")
_TABLES = (".parquet", ".arrow")
_TRAIN = re.compile(r"train(ing)?([-_.]|$)", re.IGNORECASE)
_HELD_OUT = re.compile(r"(test|valid|validation|val|dev|eval|evaluation)([-_.]|$)", re.IGNORECASE)
_NO_DATA = re.compile(r"(readme|licen[cs]e|notice|requirements)([-_.]|$)", re.IGNORECASE)
"""Texts that describe a folder."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was found."""

    file: int
    line: int
    """From 1; of a table, the number of the row."""
    value: Any
    """The object, a ``plain_text.Chunk``, or the ``BadRow`` that says why there is none."""
    done: int
    """Bytes of the whole source read so far."""


class Source:
    """Files to read in order.

    Raises:
        DataError: there is nothing at ``path``, or nothing that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _find(path)
        self.left_out = _left_out(path, self.files)
        """Files beside these, or splits, that could have been read, and were not."""
        try:
            self._sizes = [file.stat().st_size for file in self.files]
        except OSError as e:
            raise DataError(f"cannot read {e.filename}: {e.strerror}") from e
        self.nbytes = sum(self._sizes)

    def rows(self) -> Iterator[Row]:
        """All rows.

        Raises:
            DataError: a file cannot be read, or is damaged beyond one row.
        """
        before = 0
        for number, (file, nbytes) in enumerate(zip(self.files, self._sizes, strict=True)):
            try:
                for line, value, done in _READERS[file.suffix.lower()](file):
                    yield Row(number, line, value, before + min(done, nbytes))
            except OSError as e:
                raise DataError(f"cannot read {file}: {e.strerror or e}") from e
            before += nbytes

    def place(self, file: int, line: int) -> str:
        """How a message names a row: "train.jsonl:17", "train.parquet: row 17"."""
        found = self.files[file]
        between = ": row " if found.suffix.lower() in _TABLES else ":"
        return f"{found.name}{between}{line}"


def _find(path: Path) -> list[Path]:
    if path.is_dir():
        return _in_directory(path)
    if not path.exists():
        raise DataError(f"there is no {path}; --data takes a file or a directory")
    if path.suffix.lower() in _COMPRESSED:
        raise DataError(
            f"{path.name}: is compressed, and --data takes plain files: unpack it first"
        )
    if path.suffix.lower() not in _READERS:
        raise DataError(
            f"{path.name}: cannot tell what is in a {path.suffix or 'nameless'} file; "
            f"--data takes {', '.join(_READERS)} or a saved datasets directory"
        )
    return [path]


def _in_directory(path: Path) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise DataError(
                f"{path} has the splits {', '.join(map(str, splits)) or '(none)'}, but no train; "
                "give one of them, as in --data DIR/SPLIT"
            )
        path = path / "train"
    if (path / "state.json").is_file():
        listed: Any = _json(path / "state.json").get("_data_files")
        try:
            return [path / entry["filename"] for entry in listed]
        except (TypeError, KeyError) as e:
            raise DataError(f"{path / 'state.json'} does not list its data files") from e
    found = _readable(path)
    # A .json beside data in other formats describes it (dataset_info.json, config.json).
    data = [f for f in found if f.suffix.lower() != ".json"] or found
    data = [f for f in data if not (f.suffix.lower() == ".txt" and _NO_DATA.match(f.name))]
    if any(_TRAIN.match(f.name) for f in data):
        data = [f for f in data if not _HELD_OUT.match(f.name)]
    if not data:
        raise DataError(f"{path} has no file of {', '.join(_READERS)}, nor saved datasets")
    return data


def _readable(path: Path) -> list[Path]:
    """Hidden files are left by programs, for themselves."""
    return sorted(
        f for f in path.iterdir()
        if f.suffix.lower() in _READERS and not f.name.startswith(".") and f.is_file()
    )  # fmt: skip


def _left_out(path: Path, files: list[Path]) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        return [path / str(split) for split in splits if split != "train"]
    if not path.is_dir() or (path / "state.json").is_file():
        return []
    told = {suffix for suffix in _READERS if suffix != ".json"} | {f.suffix.lower() for f in files}
    return [f for f in _readable(path) if f not in files and f.suffix.lower() in told]


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"cannot read {file}: {e}") from e
    if not isinstance(value, dict):
        raise DataError(f"{file} is no JSON object")
    return value
