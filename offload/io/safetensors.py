"""Safetensors headers, parsed and checked by us, and the index of a sharded checkpoint.

Format (github.com/huggingface/safetensors, "Format"): 8 bytes of header length, little-endian; a
JSON object ``name -> {dtype, shape, data_offsets}`` padded with spaces; the tensors' bytes, which
must cover the rest of the file without holes or overlap. Offsets count from the end of the header.

A header says where to read, so every number in it is checked before it is used. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from offload.blocks import DTYPE_BYTES
from offload.errors import CheckpointError
from offload.io.files import LFS_MAGIC, LFS_POINTER, open_to_read
from offload.io.pack_manifest import JOURNAL, MANIFEST, again, bundle_name, no_pack
from offload.units import brief

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000
"""The reference implementation's limit."""

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""torch's names of the format's dtypes."""

_SUB_BYTE = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
ADAPTER = "adapter_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorRange(NamedTuple):
    """Where a tensor lies: ``offset`` bytes from the start of the file, row-major.

    ``dtype`` is torch's name, e.g. ``"bfloat16"``.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """A checked header. ``digest`` is the SHA-256 of its bytes; sizes and offsets in bytes."""

    tensors: dict[str, TensorRange]
    data_start: int
    file_size: int
    metadata: dict[str, str]
    digest: str = field(repr=False)


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of one file.

    Raises:
        CheckpointError: the file is missing, truncated, or its header breaks the format.
    """
    name = os.fspath(path)
    try:
        with open_to_read(path) as f:
            file_size = os.fstat(f.fileno()).st_size
            if file_size < 8:
                _fail(name, f"{file_size} bytes are too few for a safetensors file (at least 8)")
            start = f.read(len(LFS_MAGIC))
            if start == LFS_MAGIC:
                _fail(name, LFS_POINTER)
            (length,) = struct.unpack("<Q", start[:8])
            f.seek(8)
            if length > MAX_HEADER_BYTES:
                _fail(name, f"a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
            if 8 + length > file_size:
                _fail(
                    name,
                    f"the header is {length} bytes long, but the file ends after {file_size}; "
                    "the download is incomplete or this is not a safetensors file",
                )
            raw = f.read(length)
    except OSError as e:
        raise CheckpointError(f"cannot read {name}: {e.strerror}") from e
    if len(raw) != length:
        _fail(name, f"the header is {length} bytes long, {len(raw)} could be read")
    content = _parse_object(name, raw)
    metadata = _metadata(name, content.pop("__metadata__", None))
    data_start = 8 + length
    tensors = {k: _tensor(name, k, v, data_start) for k, v in content.items()}
    _check_cover(name, tensors, data_start, file_size)
    return SafetensorsHeader(
        tensors=tensors,
        data_start=data_start,
        file_size=file_size,
        metadata=metadata,
        digest=hashlib.sha256(raw).hexdigest(),
    )


def _fail(file: str, why: str) -> NoReturn:
    raise CheckpointError(f"{file}: {why}")


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(f"the key {twice!r} is there twice")
    return out


def _parse_object(name: str, raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKeyError as e:
        raise CheckpointError(f"{name}: {e}") from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{name}: its header is not valid JSON ({e})") from None
    if not isinstance(content, dict):
        _fail(name, f"its header is a JSON {type(content).__name__}, not an object")
    return content


def _metadata(name: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _fail(name, f"__metadata__ is a {type(value).__name__}, not an object")
    for key, text in value.items():
        if not isinstance(text, str):
            _fail(name, f"__metadata__ {key!r} is a {type(text).__name__}, not a string")
    return value


def _is_size(n: Any) -> bool:
    return type(n) is int and n >= 0  # not isinstance: True is an int


def _tensor(file: str, name: str, entry: Any, data_start: int) -> TensorRange:
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        has = brief(entry, 200)
        _fail(file, f"tensor {name}: needs dtype, shape and two data_offsets, has {has}")
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        if isinstance(code, str) and code in _SUB_BYTE:
            _fail(file, f"tensor {name}: dtype {code} has less than a byte per element, which is "
                        "not supported; use a checkpoint in 8 bits or more")  # fmt: skip
        _fail(file, f"tensor {name}: unknown dtype {brief(code)}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        _fail(file, f"tensor {name}: shape {brief(shape, 200)} is not a list of sizes")
    if not (_is_size(start) and _is_size(end)) or start > end:
        given = f"{brief(start, 40)} to {brief(end, 40)}"
        _fail(file, f"tensor {name}: data_offsets {given} are not a range")
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if nbytes != end - start:
        _fail(
            file,
            f"tensor {name}: {code} {shape} takes {nbytes} bytes, "
            f"but data_offsets {start} to {end} are {end - start}",
        )
    return TensorRange(dtype, tuple(shape), data_start + start, nbytes)


def _check_cover(
    file: str, tensors: dict[str, TensorRange], data_start: int, file_size: int
) -> None:
    """The tensors must tile the data: in bounds, no overlap, no hole, nothing behind them."""
    end, before = data_start, "the header"
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if t.offset < end:
            _fail(
                file,
                f"tensor {name} starts at byte {t.offset}, inside {before}, which ends at {end}",
            )
        if t.offset > end:
            _fail(
                file,
                f"a hole of {t.offset - end} bytes between {before} (to {end}) and tensor {name} "
                f"(from {t.offset})",
            )
        end, before = t.offset + t.nbytes, f"tensor {name}"
    if end > file_size:
        _fail(
            file,
            f"truncated: its header promises {end} bytes, the file has {file_size}, "
            f"{end - file_size} are missing; download it again",
        )
    if end < file_size:
        _fail(
            file, f"{file_size - end} bytes behind the last tensor, which ends at {end}, are unused"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """All tensors of a checkpoint directory.

    Attributes:
        directory: where it is.
        files: the shards, sorted by name.
        headers: their headers, in the order of ``files``.
        tensors: name -> (number of the file, range in it).
        said_dtype: what the index says that all of it is in.
    """

    directory: Path
    files: tuple[Path, ...]
    headers: tuple[SafetensorsHeader, ...] = field(repr=False)
    tensors: dict[str, tuple[int, TensorRange]] = field(repr=False)
    mtimes_ns: tuple[int, ...] = field(repr=False)
    said_dtype: str | None = None

    @classmethod
    def open(cls, directory: str | os.PathLike[str], variant: str | None = None) -> CheckpointIndex:
        """Find and check the safetensors files of ``directory``.

        ``model.safetensors`` is preferred to ``model.safetensors.index.json``, as transformers
        does; ``variant`` as in ``model.fp16.safetensors``. A tensor that lies in a shard without
        being in the index is part of the checkpoint, because transformers reads every tensor of
        every shard; one that lies in two shards is an error.

        Raises:
            CheckpointError: no safetensors there, pickles only, a missing or damaged shard, an
                index that does not match its shards.
        """
        root = Path(directory)
        if not root.is_dir():
            what = "is not a directory" if root.exists() else "does not exist"
            raise CheckpointError(f"{root} {what}; a checkpoint is a directory with safetensors")
        dot = f".{variant}" if variant else ""
        single = root / f"model{dot}.safetensors"
        index = root / f"model.safetensors.index{dot}.json"
        if single.is_file():
            return cls._from_files(root, [single.name], {})
        if index.is_file():
            weight_map, dtype = _weight_map(index)
            found = cls._from_files(root, sorted(set(weight_map.values())), weight_map)
            return replace(found, said_dtype=dtype)
        raise CheckpointError(_nothing_found(root, single.name, index.name))

    @classmethod
    def _from_files(
        cls, root: Path, names: Iterable[str], weight_map: dict[str, str]
    ) -> CheckpointIndex:
        files = tuple(root / name for name in names)
        try:
            missing = [f.name for f in files if not f.is_file()]
        except OSError as e:  # it is not only "not there": a name that is too long, a closed folder
            raise CheckpointError(f"cannot read {e.filename!s:.500}: {e.strerror}") from e
        if missing:
            raise CheckpointError(
                f"{root}: {len(missing)} of {len(files)} shards are missing, {missing[0]} first; "
                "download the rest"
            )
        # The times first: a file that changes in between has a newer one than we noted.
        mtimes_ns = tuple(f.stat().st_mtime_ns for f in files)
        headers = tuple(read_header(f) for f in files)
        tensors: dict[str, tuple[int, TensorRange]] = {}
        for i, header in enumerate(headers):
            for name, where in header.tensors.items():
                if name in tensors:
                    other = files[tensors[name][0]].name
                    _fail(str(root), f"tensor {name} is both in {other} and in {files[i].name}")
                tensors[name] = (i, where)
        for name, shard in weight_map.items():
            found = tensors.get(name)
            if found is None or files[found[0]] != root / shard:
                where_it_is = "in none" if found is None else f"in {files[found[0]].name}"
                _fail(str(root), f"the index says tensor {name} is in {shard}, it is {where_it_is}")
        if weight_map and len(tensors) > len(weight_map):
            extra = next(name for name in tensors if name not in weight_map)
            log.info(
                "%s: %d tensors are not in the index, %s first; they are used all the same",
                root,
                len(tensors) - len(weight_map),
                extra,
            )
        return cls(
            directory=root, files=files, headers=headers, tensors=tensors, mtimes_ns=mtimes_ns
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(h.file_size - h.data_start for h in self.headers)

    def check_unchanged(self) -> None:
        """Check that the shards still are what their headers said, once they are open to be read:
        a model that was saved again meanwhile has its tensors elsewhere in them.

        Raises:
            CheckpointError: one has another header now, or is gone.
        """
        for file, header, mtime_ns in zip(self.files, self.headers, self.mtimes_ns, strict=True):
            try:
                now = file.stat()
            except OSError as e:
                raise CheckpointError(f"cannot read {file}: {e.strerror}") from e
            if (now.st_size, now.st_mtime_ns) == (header.file_size, mtime_ns):
                continue
            if read_header(file).digest != header.digest:  # not only touched
                _fail(
                    str(file),
                    f"was replaced while the model was planned ({header.file_size} bytes then, "
                    f"{now.st_size} now); start again once it is written to the end",
                )

    def fingerprint(self) -> str:
        """A digest of the files' names, sizes, times and headers; not of the tensors' content.

        It changes when a shard is replaced, and costs nothing for a large checkpoint.
        """
        facts = [
            [file.name, header.file_size, mtime_ns, header.digest]
            for file, header, mtime_ns in zip(self.files, self.headers, self.mtimes_ns, strict=True)
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _weight_map(index: Path) -> tuple[dict[str, str], str | None]:
    try:
        raw = index.read_bytes()
    except OSError as e:
        raise CheckpointError(f"cannot read {index}: {e.strerror}") from e
    content = _parse_object(str(index), raw)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(str(index), "it has no weight_map of tensor names to shards")
    shards: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            _fail(str(index), f"tensor {name} is mapped to {shard!r}, not to a file name")
        path = PurePosixPath(shard)
        # By the name alone: links are how the hub's cache stores every shard.
        if path.is_absolute() or ".." in path.parts or "\0" in shard:
            _fail(str(index), f"tensor {name} is mapped to {shard!r}, outside the checkpoint")
        shards[name] = str(path)  # "./x" and "x" are one file
    metadata = content.get("metadata")
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    return shards, dtype if isinstance(dtype, str) else None


def _nothing_found(root: Path, single: str, index: str) -> str:
    for name in (single, index):
        if (root / name).is_symlink():
            return (
                f"{root / name} is a link to {os.readlink(root / name)}, which is not there; "
                "download the model again"
            )
    if (root / JOURNAL).exists():
        return no_pack(root)
    if (root / MANIFEST).exists():
        return (
            f"{root} is a packed model, and what is asked for needs a checkpoint's own weights; "
            f"give the checkpoint or the GGUF file that it was packed from"
        )
    if (root / bundle_name(0)).exists():
        return f"{root} was a packed model, but its {MANIFEST} is missing; {again(root)}"
    pickles = sorted(p.name for pattern in _PICKLES for p in root.glob(pattern))
    parts = sorted(p.name for p in root.glob("*.safetensors"))
    if (root / ADAPTER).exists() and all(name.startswith("adapter_model") for name in parts):
        return f"{root} has no weights of a model{adapter_hint(root)}"
    if parts:
        shown = ", ".join(parts[:4]) + (", …" if len(parts) > 4 else "")
        return (
            f"{root} has neither {single} nor {index}, but {shown}; "
            "download the index, or name the variant"
        )
    if pickles:
        return (
            f"{root} has only pickled weights ({pickles[0]}), which can run any code when they are "
            "loaded, so they are refused; convert them where you trust them: "
            "from_pretrained() and then save_pretrained() of transformers write safetensors"
        )
    hint = gguf_hint(root) or "; download them, or give the directory that has them"
    return f"{root} has no weights: neither {single} nor {index} is there{hint}"


def adapter_hint(directory: Path) -> str:
    """What to do about a directory that PEFT wrote, to go behind an error; or ""."""
    if not (directory / ADAPTER).exists():
        return ""
    return (
        "; it has an adapter of PEFT, which is no model by itself: merge it into its base "
        "(PEFT's merge_and_unload() and then save_pretrained()), and give that directory"
    )


def gguf_hint(directory: Path) -> str:
    """What to name instead of a directory that has GGUF files, to go behind an error; or ""."""
    # Of a split file any part will do, and only the first of them is named.
    found = sorted(p for p in directory.glob("*.gguf") if not _LATER_PART.search(p.name))
    if not found:
        return ""
    others = f" (or another of its {len(found)})" if len(found) > 1 else ""
    return f"; it has GGUF files, which are named themselves: {found[0]}{others}"
