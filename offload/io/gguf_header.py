"""The header of one GGUF file, parsed and checked by us.

Format (github.com/ggml-org/ggml, ``docs/gguf.md``), little-endian: ``GGUF``, version, the numbers
of tensors and of metadata pairs; the pairs (key, type, value); for each tensor its name, sizes
(innermost first), type and offset from the start of the data, which is the end of the header
rounded up to the alignment.

A header says how much to read and where, so every number is checked before it is used: counts and
lengths against what is left of the file, and the whole header against ``MAX_HEADER_BYTES``, which
keeps a damaged length from filling the memory. Imports neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from offload.errors import CheckpointError
from offload.io.files import LFS_MAGIC, LFS_POINTER, open_to_read
from offload.io.gguf_types import REMOVED, TYPES
from offload.io.whole_file import expanded
from offload.units import brief

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Version 3 only adds big-endian files, which are refused; version 1 had 32-bit lengths."""

MAX_HEADER_BYTES = 256 * 2**20
"""A vocabulary of 256 Ki tokens with its merges takes about 20 MiB."""

MAX_LABEL_BYTES = 1024
"""Of a key or the name of a tensor. The format allows keys of 64 KiB and names of 64 bytes; what is
longer than this is no label but what a damaged length has swallowed, and messages repeat it."""

MAX_ELEMENTS = 2**23
"""Of all arrays together: each becomes an object of 60 bytes and more. A vocabulary of 256 Ki
tokens with types, scores and merges has 1.3 million."""

_HASHED_TOGETHER = 2**16

MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20

# Values by type code. "l" and "I" of array differ between platforms, "i" and "q" do not.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_AGAIN = "the file is truncated or damaged; download it again"
_SMALLEST_PAIR = 8 + 1 + 4 + 1  # a key of one letter and a byte
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8  # a name of one letter and no dimensions


class GGUFTensor(NamedTuple):
    """A tensor of a GGUF file.

    ``type`` is GGML's name in lower case (``"q4_0"``). ``shape`` is row-major, as torch's: the
    last dimension is the one that is stored in blocks. ``offset`` counts from the start of file
    number ``file``; ``nbytes`` is the size of its blocks.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """One checked header. ``digest`` is the SHA-256 of its bytes; sizes and offsets in bytes."""

    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: tuple[GGUFTensor, ...] = field(repr=False)
    alignment: int
    data_start: int
    file_size: int
    digest: str = field(repr=False)


class _Cursor:
    """Reads the header in order and never past the end of the file or of the limit."""

    def __init__(self, name: str, f: BinaryIO, file_size: int) -> None:
        self.name = name
        self.at = 0
        self.end = min(file_size, MAX_HEADER_BYTES)
        self.file_size = file_size
        self.hash = hashlib.sha256()
        self.elements = 0
        self._read = f.read

    def fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.name}: {why}")

    def take(self, n: int, what: str) -> bytes:
        if n > self.end - self.at:
            if self.file_size > MAX_HEADER_BYTES:
                self.fail(
                    f"{what} at byte {self.at} takes {n} bytes, over the limit of "
                    f"{MAX_HEADER_BYTES} for a header; the file is damaged"
                )
            self.fail(
                f"truncated in its header: {what} at byte {self.at} takes {n} bytes, the file "
                f"ends after {self.file_size}; download it again"
            )
        raw = self._read(n)
        if len(raw) != n:
            self.fail(f"{what} at byte {self.at}: {len(raw)} of {n} bytes could be read")
        self.at += n
        self.hash.update(raw)
        return raw

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def sized(self, what: str) -> bytes:
        return self.take(self.u64(what), what)

    def label(self, what: str) -> str:
        """A key or the name of a tensor: valid UTF-8 and not empty."""
        at, size = self.at, self.u64(what)
        if MAX_LABEL_BYTES < size <= self.end - self.at:
            self.fail(
                f"{what} at byte {at} is {size} bytes long, over the limit of {MAX_LABEL_BYTES}; "
                f"{_AGAIN}"
            )
        raw = self.take(size, what)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            self.fail(f"{what} at byte {at} is not UTF-8 ({e.reason}): {raw[:40]!r}")
        if not text:
            self.fail(f"{what} at byte {at} is empty")
        return text

    def text(self, what: str) -> str:
        # Vocabularies have tokens that are parts of characters; escapes keep their bytes.
        return self.sized(what).decode("utf-8", "surrogateescape")

    def _texts(self, n: int, what: str) -> list[str]:
        # As n times text(); half a million of them in a file make the calls worth saving.
        read, end = self._read, self.end
        parts: list[bytes] = []
        out: list[str] = []
        for _ in range(n):
            head = read(8)
            size = int.from_bytes(head, "little")
            if len(head) != 8 or size > end - self.at - 8:
                self.take(8 + size, what)  # fails, and says how
            raw = read(size)
            self.at += 8 + len(raw)
            if len(raw) != size:
                self.fail(f"{what} at byte {self.at}: {len(raw)} of {size} bytes could be read")
            parts += (head, raw)
            if len(parts) >= _HASHED_TOGETHER:
                self.hash.update(b"".join(parts))
                parts.clear()
            out.append(raw.decode("utf-8", "surrogateescape"))
        self.hash.update(b"".join(parts))
        return out

    def value(self, code: int, key: str, depth: int = 0) -> Any:
        what = f"the value of {key}"
        if code == _STRING:
            return self.text(what)
        if code == _ARRAY:
            return self._array(key, depth + 1)
        if code == _BOOL:
            return self._bool(self.take(1, what), key)[0]
        kind = _SCALARS.get(code)
        if kind is None:
            self.fail(f"{what} has the unknown type {code}; known are 0 to 12")
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))[0]

    def _bool(self, raw: bytes, key: str) -> list[bool]:
        if odd := raw.strip(b"\0\1"):
            self.fail(f"the value of {key} is a truth of {odd[0]}, neither 0 nor 1")
        return [b == 1 for b in raw]

    def _array(self, key: str, depth: int) -> list[Any]:
        what = f"the array {key}"
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{what} is nested more than {MAX_ARRAY_DEPTH} deep")
        code, n = self.u32(what), self.u64(what)
        self.elements += n
        if self.elements > MAX_ELEMENTS:
            others = f" and the arrays before it {before}" if (before := self.elements - n) else ""
            self.fail(f"{what} has {n} elements{others}, over the limit of {MAX_ELEMENTS}")
        if code in (_STRING, _ARRAY):
            least = 8 if code == _STRING else 12
            if n * least > self.end - self.at:
                self.fail(
                    f"{what} has {n} elements of at least {least} bytes, {self.end - self.at} "
                    f"bytes are left; {_AGAIN}"
                )
            if code == _STRING:
                return self._texts(n, what)
            return [self.value(code, key, depth) for _ in range(n)]
        kind = _SCALARS.get(code)
        if kind is None:
            self.fail(f"{what} has elements of the unknown type {code}; known are 0 to 12")
        raw = self.take(n * struct.calcsize("<" + kind), what)
        if code == _BOOL:
            return self._bool(raw, key)
        return list(struct.unpack(f"<{n}{kind}", raw))


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is meant to be a GGUF file: by its name, or by how it begins."""
    file = expanded(Path(path))
    if file.suffix.lower() == ".gguf":
        return not os.path.isdir(file)
    try:
        with open_to_read(file) as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # whoever opens it says why it cannot be


def read_header(name: str, f: BinaryIO, file_size: int) -> GGUFHeader:
    """Read and check the header of one file, positioned at its start.

    Raises:
        CheckpointError: truncated, or the header breaks the format.
    """
    cursor = _Cursor(name, f, file_size)
    version = _version(cursor)
    n_tensors, n_pairs = cursor.u64("the number of tensors"), cursor.u64("the number of pairs")
    left = file_size - cursor.at
    for n, least, what in (
        (n_pairs, _SMALLEST_PAIR, "metadata pairs"),
        (n_tensors, _SMALLEST_TENSOR, "tensors"),
    ):
        if n * least > left:
            cursor.fail(
                f"{n} {what} of at least {least} bytes do not fit in {left} bytes; {_AGAIN}"
            )
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = cursor.label("a metadata key")
        if key in metadata:
            cursor.fail(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.u32(f"the type of {key}"), key)
    alignment = _alignment(cursor, metadata)
    found: dict[str, GGUFTensor] = {}
    for _ in range(n_tensors):
        tensor = _tensor(cursor, alignment)
        if tensor.name in found:
            cursor.fail(f"tensor {tensor.name} is there twice")
        found[tensor.name] = tensor
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(t._replace(offset=data_start + t.offset) for t in found.values())
    _check_cover(cursor, tensors, data_start, alignment)
    return GGUFHeader(
        version=version,
        metadata=metadata,
        tensors=tensors,
        alignment=alignment,
        data_start=data_start,
        file_size=file_size,
        digest=cursor.hash.hexdigest(),
    )


def _version(cursor: _Cursor) -> int:
    if cursor.file_size < 24:
        cursor.fail(f"{cursor.file_size} bytes are too few for a GGUF file (at least 24)")
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        if LFS_MAGIC.startswith(magic):
            cursor.fail(LFS_POINTER)
        older = {b"ggml", b"ggmf", b"ggjt", b"lmgg", b"fmgg", b"tjgg"}
        hint = "a format before GGUF; convert the model again" if magic in older else "not GGUF"
        cursor.fail(f"it starts with {magic!r} instead of {MAGIC!r}: {hint}")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0 and version >> 24:
            cursor.fail(
                "it is big-endian, which is not supported; convert the model again without "
                "--bigendian"
            )
        cursor.fail(f"GGUF version {version} is not supported; known are 2 and 3")
    return version


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    n = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(n) is not int or not 0 < n <= MAX_ALIGNMENT or n & (n - 1):
        cursor.fail(
            f"general.alignment is {brief(n, 40)}, not a power of two up to {MAX_ALIGNMENT}"
        )
    return n


def _tensor(cursor: _Cursor, alignment: int) -> GGUFTensor:
    name = cursor.label("the name of a tensor")
    what = f"tensor {name}"
    dims = cursor.u32(what)
    if dims > MAX_DIMS:
        cursor.fail(f"{what} has {dims} dimensions, at most {MAX_DIMS} are possible")
    sizes = struct.unpack(f"<{dims}Q", cursor.take(8 * dims, what))
    code, offset = cursor.u32(what), cursor.u64(what)
    kind = TYPES.get(code)
    if kind is None:
        if code in REMOVED:
            cursor.fail(
                f"{what} has the GGML type {REMOVED[code]} ({code}), a repacked layout that "
                "llama.cpp has removed; use a file in Q4_0 or another type"
            )
        cursor.fail(
            f"{what} has the unknown GGML type {code}; known are "
            f"{', '.join(t.name.upper() for t in TYPES.values())}"
        )
    shape = tuple(reversed(sizes))
    row = shape[-1] if shape else 1
    if row % kind.elements:
        cursor.fail(
            f"{what}: rows of {row} values are not whole blocks of {kind.elements}, as "
            f"{kind.name.upper()} needs"
        )
    if offset % alignment:
        cursor.fail(f"{what} starts at offset {offset}, not a multiple of {alignment}")
    nbytes = prod(shape) // kind.elements * kind.nbytes
    return GGUFTensor(name, kind.name, shape, offset, nbytes)


def _check_cover(
    cursor: _Cursor, tensors: tuple[GGUFTensor, ...], data_start: int, alignment: int
) -> None:
    """In bounds, no overlap, no hole but padding, nothing but padding behind the last."""
    end, before = data_start, "the header"
    for t in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if t.offset < end:
            cursor.fail(
                f"tensor {t.name} starts at byte {t.offset}, inside {before}, which ends at {end}"
            )
        if t.offset - end >= alignment:
            cursor.fail(
                f"a hole of {t.offset - end} bytes between {before} (to {end}) and tensor "
                f"{t.name} (from {t.offset})"
            )
        end, before = t.offset + t.nbytes, f"tensor {t.name}"
    size = cursor.file_size
    if tensors and end > size:
        cursor.fail(
            f"truncated: its header promises {end} bytes, the file has {size}, {end - size} are "
            "missing; download it again"
        )
    if size - end >= alignment:
        cursor.fail(f"{size - end} bytes behind {before}, which ends at {end}, are unused")
