"""Open a packed model: what is in it, and how to read it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import Format, get_format
from offload.cpu_ops.packing import packed_bytes, unpack_rows
from offload.errors import OffloadError, StoreError
from offload.io.engines import Engine
from offload.io.memory import Staging
from offload.io.pack_bundle import BundleStore
from offload.io.pack_manifest import (
    ROWS_PER_GROUP,
    Block,
    Kind,
    Layout,
    Manifest,
    Part,
    SourceId,
    again,
    config_digest,
    read_manifest,
    require_source,
)
from offload.io.store import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """The experts of one layer. ``parts`` and ``nbytes`` are the same for each of ``blocks``."""

    name: str
    blocks: tuple[str, ...]
    parts: tuple[Part, ...]
    nbytes: int

    def part(self, name: str) -> Part:
        """``gate``, ``up``, ``down``, ``gate_bias``, .... Raises KeyError."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(f"experts of {self.name} have no {name}")


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor and the block that holds it."""

    block: Block
    part: Part


class RowReader:
    """Single rows of a table, wherever they are stored.

    A table of rows is read a row at a time. A tied embedding is stored once, as the packed head:
    there 16 rows share a tile, so a row costs one read of its tile, sixteen times as long (34 KiB
    for 2048 columns in q8_0: still a single request). The values are the same.
    """

    def __init__(self, located: Located) -> None:
        part = located.part
        if len(part.shape) != 2:
            raise ValueError(f"{part.name} of shape {part.shape} has no rows")
        self.block = located.block.name
        self.rows, self.columns = part.shape
        self._part = part
        self._per_read = ROWS_PER_GROUP if part.layout is Layout.PACKED else 1
        groups = -(-self.rows // self._per_read)
        self.read_bytes = part.nbytes // groups if groups else 0
        """Bytes that ``span`` reads."""

    def span(self, row: int, dst: int = 0) -> Span:
        """What to read for ``row`` into offset ``dst`` of a buffer. Raises IndexError."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        src = self._part.offset + row // self._per_read * self.read_bytes
        return Span(src, dst, self.read_bytes)

    def decode(self, row: int, data: memoryview) -> npt.NDArray[np.float32]:
        """The values of ``row``, float32 ``[columns]``, from what ``span`` has read.

        Every format's values are exact in float32.
        """
        raw = np.frombuffer(data[: self.read_bytes], np.uint8)
        part = self._part
        if part.layout is Layout.PLAIN:
            plain = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[part.format]
            return decode_rows(get_format(plain), raw.reshape(1, -1)).reshape(-1)
        format = get_format(part.format)
        if part.layout is Layout.PACKED:
            raw = unpack_rows(format, raw, ROWS_PER_GROUP, self.columns)[row % ROWS_PER_GROUP]
        return decode_rows(format, raw.reshape(1, -1)).reshape(-1)


class PackedModel:
    """A packed model directory. Opening reads the manifest and the bundles' sizes, no weights.

    Attributes:
        path: the directory; config.json and the tokenizer's files are in it as in any other.
        manifest: everything that ``pack.json`` says.
        experts: by name of the module that holds them.
        tensors: every tensor outside of experts by its parameter's name, aliases included.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        for parts in {b.parts for b in manifest.blocks}:
            for part in parts:
                _check_size(path, part)
        self.experts: Mapping[str, ExpertGroup] = _groups(path, manifest)
        tensors = {
            p.name: Located(b, p) for b in manifest.blocks if b.kind is not Kind.EXPERT
            for p in b.parts
        }  # fmt: skip
        for alias, name in manifest.aliases.items():
            if name not in tensors:
                raise StoreError(f"{path}: {alias} is tied to {name}, which is not there")
            tensors[alias] = tensors[name]
        self.tensors: Mapping[str, Located] = tensors

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        source: SourceId | None = None,
        quant: str | None = None,
    ) -> PackedModel:
        """Open a packed model.

        Args:
            source: what it has to be made from; None: anything.
            quant: what it has to be packed as, if ``source`` is given; None: anything.

        Raises:
            StoreError: it is not complete, damaged, of another version, or of another source; the
                message names both. Nothing is deleted.
        """
        manifest = read_manifest(path)
        if source is not None:
            require_source(manifest, source, quant or manifest.quant, path)
        _check_config(Path(path), manifest)
        return cls(Path(path), manifest)

    def blocks(self, kind: Kind) -> tuple[Block, ...]:
        """The blocks of one kind, in the order they lie on disk."""
        return tuple(b for b in self.manifest.blocks if b.kind is kind)

    def matrix_formats(self) -> list[Format]:
        """Of matrices outside of experts, each once."""
        return [get_format(name) for name in sorted({
            p.format for b in self.manifest.blocks for p in b.parts
            if p.layout is Layout.PACKED and b.kind is not Kind.EXPERT
        })]  # fmt: skip

    def expert_formats(self) -> list[tuple[str, str]]:
        """Of experts, (gate and up, down), each pair once."""
        return sorted({
            (g.part("gate").format, g.part("down").format)
            for g in self.experts.values()
            if {"gate", "down"} <= {p.name for p in g.parts}
        })  # fmt: skip

    def matrices(self, rows: int) -> Iterator[tuple[Format, int, int, int]]:
        """Yields (format, outputs, inputs, rows that are multiplied with it) of each matrix outside
        of experts, for passes of ``rows`` tokens: the head sees only the last one of a prompt."""
        for located in self.tensors.values():
            block, part = located.block, located.part
            if part.layout is Layout.PACKED:
                outputs, inputs = part.shape
                seen = 1 if block.kind is Kind.HEAD else rows
                yield get_format(part.format), outputs, inputs, seen

    def flops(self) -> dict[str, int]:
        """By block: operations per token of its products, which its bytes do not tell."""
        return {
            block.name: sum(2 * prod(p.shape) for p in block.parts if p.layout is Layout.PACKED)
            for block in self.manifest.blocks
        }

    def rows(self, name: str) -> RowReader:
        """How to read single rows of a table, ``model.embed_tokens.weight`` say. KeyError."""
        return RowReader(self.tensors[name])

    def store(
        self,
        engine: Engine,
        staging: Staging,
        *,
        verify: bool = True,
        request_bytes: int | None = None,
    ) -> BundleStore:
        """The blocks as a store; see ``BundleStore``. The caller closes it."""
        return BundleStore(
            self.path, self.manifest, engine, staging, verify=verify, request_bytes=request_bytes
        )


def _check_config(path: Path, manifest: Manifest) -> None:
    """Say that config.json is another one than the blocks were packed with: within their shapes it
    may be (positions that are scaled on purpose, say), and the answers are others then."""
    file = path / "config.json"
    if not manifest.config or not file.is_file():  # whoever needs it says that it is not there
        return
    try:
        now = config_digest(file.read_bytes())
    except OSError:
        return  # as above
    if now != manifest.config:
        logger.warning(
            "%s is not what it was when it was packed, and what it says now is run: if that is not "
            "meant, put the config.json of %s in its place, or %s",
            file,
            manifest.source.path,
            again(path),
        )


def _check_size(path: Path, part: Part) -> None:
    """Raise StoreError unless ``part`` has the bytes of its format: kernels count on them."""
    if part.layout is Layout.PLAIN:
        return
    try:
        n_rows, columns = part.shape
        format = get_format(part.format)
        if part.layout is Layout.PACKED:
            want = packed_bytes(format, n_rows, columns)
        else:
            want = n_rows * format.row_bytes(columns)
    except (ValueError, OffloadError) as e:
        raise StoreError(f"{path}: {part.name} {list(part.shape)}: {e}; {again(path)}") from e
    if part.nbytes != want:
        raise StoreError(
            f"{path}: {part.name} {list(part.shape)} in {part.format} has {part.nbytes} bytes "
            f"instead of {want}; {again(path)}"
        )


def _groups(path: Path, manifest: Manifest) -> dict[str, ExpertGroup]:
    blocks: dict[str, list[Block]] = {}
    for b in manifest.blocks:
        if b.kind is Kind.EXPERT:
            blocks.setdefault(b.group, []).append(b)
    out = {}
    for name, members in blocks.items():
        first = members[0]
        for b in members:
            if b.parts != first.parts:
                raise StoreError(
                    f"{path}: {b.name} is laid out differently from {first.name}; {again(path)}"
                )
        out[name] = ExpertGroup(
            name=name,
            blocks=tuple(b.name for b in members),
            parts=first.parts,
            nbytes=first.nbytes,
        )
    return out
