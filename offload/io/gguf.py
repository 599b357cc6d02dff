"""GGUF files as people have them: one file, or the parts of a split one, checked before use.

``read_gguf`` reads headers only; a tensor's bytes are read where and when they are needed, from
the offsets it returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from offload.errors import CheckpointError
from offload.io.files import open_to_read
from offload.io.gguf_header import GGUFHeader, GGUFTensor, read_header
from offload.units import brief

__all__ = ["GGUFFile", "GGUFTensor", "read_gguf"]

_PART = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_BUFFER = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """A checked model file.

    Attributes:
        files: its parts in order; one for a file that is not split.
        metadata: key -> Python value (int, float, bool, str, list) of the first part. Text that
            is not UTF-8 has its bytes as surrogate escapes.
        tensors: name -> where it lies, in the order of the files.
        headers: the parts' headers, in the order of ``files``.
    """

    files: tuple[Path, ...]
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GGUFTensor] = field(repr=False)
    headers: tuple[GGUFHeader, ...] = field(repr=False)
    mtimes_ns: tuple[int, ...] = field(repr=False)

    @property
    def name(self) -> str:
        """The first file, for messages."""
        return str(self.files[0])

    @property
    def version(self) -> int:
        return self.headers[0].version

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def fingerprint(self) -> str:
        """A digest of the files' names, sizes, times and headers; not of the tensors' content."""
        facts = [
            [file.name, header.file_size, mtime_ns, header.digest]
            for file, header, mtime_ns in zip(self.files, self.headers, self.mtimes_ns, strict=True)
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def read(self, name: str) -> bytes:
        """The stored bytes of a small tensor (RoPE factors, a norm), through the page cache.

        Raises:
            CheckpointError: no such tensor, or it cannot be read.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            _fail(self.name, f"there is no tensor {name}")
        file = self.files[tensor.file]
        try:
            with open(file, "rb") as f:
                f.seek(tensor.offset)
                raw = f.read(tensor.nbytes)
        except OSError as e:
            raise CheckpointError(f"cannot read {file}: {e.strerror}") from e
        if len(raw) != tensor.nbytes:
            _fail(str(file), f"tensor {name}: {len(raw)} of {tensor.nbytes} bytes could be read")
        return raw


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file; of a split one (``…-00001-of-00003.gguf``), any part will do.

    Raises:
        CheckpointError: a missing, truncated or damaged file, a missing part (named), parts that
            do not belong together, a big-endian file, a version or a tensor type we do not know.
    """
    first = Path(path)
    files = _parts(first)
    try:
        missing = [f.name for f in files if not f.exists()]
    except OSError as e:  # a closed folder, a name that is too long
        raise CheckpointError(f"cannot read {first!s:.500}: {e.strerror}") from e
    if missing and len(files) > 1:
        raise CheckpointError(
            f"{first.parent}: {len(missing)} of the {len(files)} parts of this GGUF are missing, "
            f"{missing[0]} first; download the rest"
        )
    opened = [_open(f) for f in files]
    headers = tuple(header for header, _ in opened)
    _check_split(files, headers)
    tensors: dict[str, GGUFTensor] = {}
    for i, header in enumerate(headers):
        for t in header.tensors:
            if t.name in tensors:
                other = files[tensors[t.name].file].name
                _fail(str(first), f"tensor {t.name} is both in {other} and in {files[i].name}")
            tensors[t.name] = t._replace(file=i)
    metadata = headers[0].metadata
    promised = metadata.get("split.tensors.count") if len(files) > 1 else None
    if promised is not None and promised != len(tensors):
        _fail(
            str(files[0]),
            f"split.tensors.count is {promised}, the {len(files)} parts have {len(tensors)}",
        )
    return GGUFFile(
        files=files,
        metadata=metadata,
        tensors=tensors,
        headers=headers,
        mtimes_ns=tuple(mtime for _, mtime in opened),
    )


def _fail(file: str, why: str) -> NoReturn:
    raise CheckpointError(f"{file}: {why}")


def _open(file: Path) -> tuple[GGUFHeader, int]:
    try:
        with open_to_read(file, _BUFFER) as f:
            stat = os.fstat(f.fileno())
            return read_header(str(file), f, stat.st_size), stat.st_mtime_ns
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}") from e


def _parts(path: Path) -> tuple[Path, ...]:
    """All parts by the name of one; whether they are parts is for their metadata to say."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["no"]) <= count:
        _fail(str(path), f"part {int(match['no'])} of {count} cannot be; was the file renamed?")
    stem = match["stem"]
    return tuple(path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))


def _check_split(files: tuple[Path, ...], headers: tuple[GGUFHeader, ...]) -> None:
    for i, (file, header) in enumerate(zip(files, headers, strict=True)):
        count = header.metadata.get("split.count", 0)
        if count in (0, 1) and len(files) == 1:
            continue
        if len(files) == 1:
            _fail(
                str(file),
                f"it is one of {count} parts; give all of them the names they were published "
                f"with (…-00001-of-{count:05d}.gguf), in one directory",
            )
        if count != len(files):
            _fail(str(file), f"its split.count is {count}, by its name there are {len(files)}")
        first, arch = (h.metadata.get("general.architecture") for h in (headers[0], header))
        if arch not in (None, first):  # most say nothing
            _fail(
                str(file),
                f"it is of the architecture {brief(arch)}, the first part of {brief(first)}: they "
                "are parts of different models",
            )
        number = header.metadata.get("split.no")
        if number != i:
            _fail(str(file), f"its split.no is {brief(number, 40)}, by its name it is {i}")
