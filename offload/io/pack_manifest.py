"""The manifest of a packed model directory: ``pack.json``, its records, how it is checked.

    OUT/
      pack.json           this manifest; written last, so a directory that has it is complete
      bundle-00001.bin …  blocks, each at a multiple of 4096, zeros in between
      config.json …       what a model directory has besides weights

A block is what one read brings: an expert (its matrices one behind the other, at the same offsets
for every expert of a layer), a matrix, a table of rows, or a handful of small tensors. The bytes
of a part are in one of three layouts, see ``Layout``. Imports neither torch nor numba.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from offload.blocks import ALIGN, DTYPE_BYTES, BlockKind, BlockSpec, TensorSpec
from offload.errors import StoreError
from offload.io.json_fields import count, moment, real, rows, shape, table, text, texts
from offload.units import brief

MANIFEST = "pack.json"
FORMAT = "offload-pack"
VERSION = 1

ROWS_PER_GROUP = 16
"""Rows that the packed layout interleaves. A group's bytes are contiguous."""


class Kind(enum.Enum):
    """What a block of a packed model is."""

    EXPERT = "expert"
    MATRIX = "matrix"
    HEAD = "head"
    ROWS = "rows"
    PLAIN = "plain"


class Layout(enum.Enum):
    """How the bytes of a part are arranged.

    ``PACKED``: a matrix as the kernels take it, 16 rows interleaved. ``ROWS``: a matrix of GGUF
    rows, each contiguous, for tables that are looked up. ``PLAIN``: a tensor as torch has it.
    """

    PACKED = "packed"
    ROWS = "rows"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a block, ``offset`` bytes from its start.

    ``format`` is GGUF's name in lower case (``"q4_0"``, ``"bf16"``) where the layout is packed or
    rows, and torch's name of a dtype where it is plain. ``shape`` is the tensor's own: a matrix is
    ``(outputs, inputs)``.
    """

    name: str
    format: str
    layout: Layout
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def spec(self) -> TensorSpec:
        """The part as stores know it: bytes, unless it is plain."""
        dtype = "uint8"
        shape: tuple[int, ...] = (self.nbytes,)
        if self.layout is Layout.PLAIN:
            dtype, shape = self.format, self.shape
        elif self.layout is Layout.ROWS:
            shape = (self.shape[0], self.nbytes // self.shape[0] if self.shape[0] else 0)
        return TensorSpec(name=self.name, dtype=dtype, shape=shape, offset=self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``nbytes`` at ``offset`` of bundle number ``file``; ``group``: an expert's layer.

    ``checksum`` (see ``pack_sums``) is None as long as the block is only planned; ``page_crcs``
    are there if single rows of it are read, 4 bytes for each page of its slot.
    """

    name: str
    kind: Kind
    group: str
    file: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]
    checksum: int | None = None
    page_crcs: bytes = b""

    def spec(self) -> BlockSpec:
        """The block as stores and the scheduler know it."""
        kind = BlockKind.EXPERT if self.kind is Kind.EXPERT else BlockKind.WEIGHT
        tensors = tuple(part.spec() for part in self.parts)
        return BlockSpec(
            id=self.name, kind=kind, tensors=tensors, nbytes=self.nbytes, group=self.group
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceId:
    """What a pack was made from. ``fingerprint`` covers files and config, not the place."""

    kind: str
    path: str
    fingerprint: str
    files: tuple[tuple[str, int, int, str], ...] = ()
    """Name, bytes, modification time in ns, digest of the header."""

    def __str__(self) -> str:
        return f"{self.path} ({self.kind} {self.fingerprint[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStat:
    """Quantisation error of one kind of block: RMS(error) / RMS(weights), over ``rows`` rows
    that were taken from all over the model."""

    relative_rms: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A packed model.

    Attributes:
        quant: ``none``, ``q8`` or ``q4``, as asked for; each part says what it is in.
        model: ``model_type``, ``architecture`` and ``dtype`` of the source.
        aliases: other names of a tensor; a tied embedding is stored once, as the head.
        kept: matrices that stayed in source precision, and why.
        converted: tensors in another format than the source has them in, though nobody asked for
            that one, and why.
        files: bytes of each bundle.
        config: ``config_digest`` of config.json as it was packed; empty in the first packs.
    """

    source: SourceId
    quant: str
    offload: str
    model: Mapping[str, str]
    blocks: tuple[Block, ...]
    files: tuple[int, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, ErrorStat] = field(default_factory=dict)
    config: str = ""

    def read_by_row(self, block: Block) -> bool:
        """Whether ``block`` is a table, or the head that a tied embedding is stored as."""
        tied = set(self.aliases.values())
        return block.kind is Kind.ROWS or (
            block.kind is Kind.HEAD and any(p.name in tied for p in block.parts)
        )

    def notes(self) -> list[str]:
        """One line for each reason why matrices stayed in source precision."""
        return [f"{names} in source precision: {why}" for why, names in by_reason(self.kept)]

    def __str__(self) -> str:
        return f"{self.source} as {self.quant}"


def by_reason(whys: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each reason and the names that have it, the first one in full."""
    found: dict[str, list[str]] = {}
    for name, why in whys.items():
        found.setdefault(why, []).append(name)
    return [
        (why, names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
        for why, names in found.items()
    ]


def bundle_name(number: int) -> str:
    """``bundle-00001.bin`` is number 0."""
    return f"bundle-{number + 1:05d}.bin"


def to_json(manifest: Manifest) -> dict[str, Any]:
    """A plain object. Experts of a layer share their parts, which are written once."""
    layouts: list[list[Any]] = []
    seen: dict[tuple[Part, ...], int] = {}
    blocks = []
    for b in manifest.blocks:
        if b.parts not in seen:
            seen[b.parts] = len(layouts)
            layouts.append(
                [
                    [p.name, p.format, p.layout.value, list(p.shape), p.offset, p.nbytes]
                    for p in b.parts
                ]
            )
        at = [b.file, b.offset, b.nbytes, b.checksum]
        blocks.append([b.name, b.kind.value, b.group, *at, seen[b.parts]])
    source = manifest.source
    page_crcs = {
        b.name: base64.b64encode(b.page_crcs).decode() for b in manifest.blocks if b.page_crcs
    }
    return {
        "offload": manifest.offload,
        "source": {
            "kind": source.kind,
            "path": source.path,
            "fingerprint": source.fingerprint,
            "files": [list(f) for f in source.files],
        },
        "quant": manifest.quant,
        "model": dict(manifest.model),
        "aliases": dict(manifest.aliases),
        "kept": dict(manifest.kept),
        "converted": dict(manifest.converted),
        "errors": {
            kind: {"relative_rms": e.relative_rms, "rows": e.rows}
            for kind, e in manifest.errors.items()
        },
        "files": list(manifest.files),
        "layout_columns": ["name", "format", "layout", "shape", "offset", "bytes"],
        "layouts": layouts,
        "block_columns": [
            "name", "kind", "group", "file", "offset", "bytes", "checksum", "layout",
        ],
        "blocks": blocks,
        **({"page_crcs": page_crcs} if page_crcs else {}),
        **({"config": manifest.config} if manifest.config else {}),
    }  # fmt: skip


def _from_json(body: Any) -> Manifest:
    """Raises ValueError, TypeError, KeyError or IndexError for what ``to_json`` never writes."""
    layouts = [
        tuple(
            Part(
                name=text(n, "a part"),
                format=text(f, f"the format of {n}"),
                layout=Layout(y),
                shape=shape(s, f"the shape of {n}"),
                offset=count(o, f"the offset of {n}"),
                nbytes=count(b, f"the size of {n}"),
            )
            for n, f, y, s, o, b in rows(parts, "a layout")
        )
        for parts in rows(body["layouts"], "layouts")
    ]
    page_crcs = texts(body.get("page_crcs", {}), "page_crcs")  # not in the first packs
    blocks = tuple(
        Block(
            name=text(n, "a block"),
            kind=Kind(k),
            group=text(g, f"the group of {n}"),
            file=count(f, f"the file of {n}"),
            offset=count(o, f"the offset of {n}"),
            nbytes=count(b, f"the size of {n}"),
            parts=layouts[count(parts, f"the layout of {n}")],
            checksum=count(c, f"the checksum of {n}"),
            page_crcs=base64.b64decode(page_crcs.get(n, ""), validate=True),
        )
        for n, k, g, f, o, b, c, parts in rows(body["blocks"], "blocks")
    )
    source = dict(table(body["source"], "source"))
    files = tuple(
        (
            text(n, "a file"),
            count(b, f"the size of {n}"),
            moment(t, f"the time of {n}"),
            text(d, f"the digest of {n}"),
        )
        for n, b, t, d in rows(source.pop("files"), "the source's files")
    )
    return Manifest(
        source=SourceId(**texts(source, "source"), files=files),
        quant=text(body["quant"], "quant"),
        offload=text(body["offload"], "offload"),
        model=texts(body["model"], "model"),
        blocks=blocks,
        files=tuple(count(n, "a bundle's size") for n in rows(body["files"], "files")),
        aliases=texts(body["aliases"], "aliases"),
        kept=texts(body["kept"], "kept"),
        converted=texts(body.get("converted", {}), "converted"),  # not in the first packs
        errors={
            kind: ErrorStat(
                relative_rms=real(e["relative_rms"], f"the error of {kind}"),
                rows=count(e["rows"], f"the rows of {kind}"),
            )
            for kind, e in table(body["errors"], "errors").items()
        },
        config=text(body.get("config", ""), "config"),  # not in the first packs
    )


def digest(body: Mapping[str, Any]) -> str:
    """SHA-256 of an object's canonical JSON."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def config_digest(raw: bytes) -> str:
    """``digest`` of what a config.json says, however it is written; empty if it is none."""
    try:
        return digest(table(json.loads(raw), "config.json"))
    except (ValueError, RecursionError):
        return ""


def dump(manifest: Manifest) -> bytes:
    """The text of ``pack.json``."""
    body = to_json(manifest)
    whole = {"format": FORMAT, "version": VERSION, "sha256": digest(body), "pack": body}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def is_pack(directory: str | os.PathLike[str]) -> bool:
    """Whether ``directory`` is a complete packed model, as far as its name tells."""
    # Not Path's: that raises where a folder is closed, and whoever reads it says so.
    return os.path.isfile(os.path.join(directory, MANIFEST))


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and check ``pack.json``, and that the bundles are there in full.

    Raises:
        StoreError: there is none, it is damaged or of another version, a bundle is missing or
            has another length. Nothing is deleted.
    """
    folder = Path(directory)
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for a writer
            raise StoreError(f"{path} is no file; {_instead(folder)}")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(no_pack(folder)) from None
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror}") from e
    try:
        whole = table(json.loads(raw), "it")
    except (ValueError, RecursionError) as e:
        raise StoreError(
            f"{path} is not the manifest of a packed model, or is damaged: of its {len(raw)} bytes "
            f"no JSON object can be made ({e}); {_instead(folder)}"
        ) from e
    kind, version = whole.get("format"), whole.get("version")
    if kind != FORMAT:
        raise StoreError(
            f"{path} is not the manifest of a packed model, or is damaged: its format is "
            f"{brief(kind)}, not {FORMAT!r}; {_instead(folder)}"
        )
    if type(version) is not int or version != VERSION:  # True is 1
        raise StoreError(
            f"{path} is of pack format {brief(version)}, this offload reads format {VERSION}; "
            "pack the model again into another directory, or delete this one first"
        )
    try:
        if digest(table(whole["pack"], "pack")) != whole["sha256"]:
            raise StoreError(f"{path} is damaged: it does not match its checksum; {again(folder)}")
        manifest = _from_json(whole["pack"])
        _check(manifest)
    except (ValueError, TypeError, KeyError, IndexError) as e:
        raise StoreError(f"{path} cannot be understood ({_why(e)}); {again(folder)}") from e
    for number, nbytes in enumerate(manifest.files):
        check_bundle(folder / bundle_name(number), nbytes)
    return manifest


def _why(error: Exception) -> str:
    """A KeyError or an IndexError says nothing without its name."""
    return str(error) if type(error) is ValueError else repr(error)


def no_pack(folder: Path) -> str:
    """Why ``folder`` is no packed model, and what to do."""
    if not folder.is_dir():
        return f"there is no packed model {folder}: it is not a directory"
    if (folder / JOURNAL).exists():
        return (
            f"{folder} is an unfinished pack; run 'offload pack' for it again, which continues "
            "where it stopped"
        )
    return f"{folder} is not a packed model: it has no {MANIFEST}"


def _instead(folder: Path) -> str:
    """The way out of a manifest that is none: only what looks like a pack is one to delete."""
    if (folder / bundle_name(0)).exists():
        return again(folder)
    return "move it away, or give another directory"


def again(folder: str | os.PathLike[str]) -> str:
    """The way out of a damaged pack. By itself packing again does nothing: what has a manifest is
    taken to be complete, and nothing is ever overwritten."""
    return f"delete {os.fspath(folder)} and pack the model again"


JOURNAL = "pack.journal"
"""What was finished so far, next to the bundles of an unfinished pack."""


def check_bundle(path: Path, nbytes: int) -> None:
    """Raise StoreError unless ``path`` has ``nbytes``."""
    try:
        info = path.stat()
    except OSError as e:
        raise StoreError(f"bundle {path} is missing ({e.strerror}); {again(path.parent)}") from e
    if not stat.S_ISREG(info.st_mode):
        raise StoreError(f"bundle {path} is no file; {again(path.parent)}")
    found = info.st_size
    if found != nbytes:
        what = "truncated" if found < nbytes else "too long"
        raise StoreError(
            f"bundle {path} is {what}: {found} bytes where the manifest says {nbytes}; "
            f"{again(path.parent)}"
        )


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless blocks lie in their files in order and parts in their blocks."""
    ends = [0] * len(manifest.files)
    names = set()
    for b in manifest.blocks:
        spec = b.spec()  # checks the parts against each other
        if b.name in names or b.offset % ALIGN or b.offset < ends[b.file] or b.checksum is None:
            raise ValueError(f"block {b.name} is there twice, or at an impossible place")
        names.add(b.name)
        if not b.parts or bool(b.group) != (b.kind is Kind.EXPERT):
            raise ValueError(f"block {b.name} has no parts, or is an expert of no layer")
        if b.page_crcs and len(b.page_crcs) != 4 * (spec.slot_nbytes // ALIGN):
            raise ValueError(f"block {b.name} has {len(b.page_crcs) // 4} checksums of pages")
        ends[b.file] = b.offset + spec.slot_nbytes
        for p in b.parts:
            if p.layout is Layout.PLAIN and p.nbytes != prod(p.shape) * DTYPE_BYTES[p.format]:
                raise ValueError(f"{b.name}: {p.name} has {p.nbytes} bytes")
    if any(end > size for end, size in zip(ends, manifest.files, strict=True)):
        raise ValueError("blocks reach past their bundles")


def require_source(manifest: Manifest, source: SourceId, quant: str, where: object) -> None:
    """Raise StoreError, naming both, unless ``manifest`` was made from ``source`` as ``quant``."""
    if manifest.source.fingerprint != source.fingerprint or manifest.quant != quant:
        raise StoreError(
            f"{where} is a pack of {manifest}, wanted is {source} as {quant}; "
            "choose another directory, or delete that one yourself"
        )


def with_checksums(
    blocks: Iterable[Block], checksums: Iterable[tuple[int, bytes]]
) -> tuple[Block, ...]:
    """Planned blocks with the checksums of what was written, and their pages' CRC-32s."""
    return tuple(
        replace(b, checksum=c, page_crcs=p) for b, (c, p) in zip(blocks, checksums, strict=True)
    )
