"""A Hugging Face directory as a source: sharded safetensors of any family transformers knows.

transformers' own conversion says where each parameter's bytes lie (see ``sources``), so a layer's
experts may be stored one by one or fused. Only the rows that are asked for are read. Parameters
that the conversion computes are converted by it, an expert at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.blocks import DTYPE_BYTES
from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.pack_manifest import SourceId
from offload.io.safetensors import CheckpointIndex
from offload.io.source_files import SourceFiles
from offload.models.meta import MetaModel, build
from offload.models.pack_outline import outline
from offload.models.pack_source import COPY_IN_BF16, GGUF_OF, Bytes, Outline, Tensor
from offload.models.recipes import split_rows
from offload.models.sources import Ranges, Run, Source
from offload.models.synth_config import small_files
from offload.models.values_fingerprint import values_fingerprint


@dataclass(slots=True)
class _Cached:
    """The last parameter that had to be converted, or expert of it."""

    key: tuple[str, int | None] = ("", None)
    value: Any = None


class CheckpointSource:
    """The weights of a model directory. Open with ``open``; thread-safe."""

    def __init__(self, built: MetaModel) -> None:
        self._built = built
        self._sources = built.mapping.map.sources
        self._outline = outline(built.model, self._sources)
        self._id = checkpoint_id(built.directory, built.index)
        self._lock = threading.Lock()
        self._converted = _Cached()
        self._split: dict[str, list[list[Run]]] = {}
        self._files = SourceFiles(built.index.files)

    @classmethod
    def open(cls, path: str | Path) -> CheckpointSource:
        """Open a directory with config.json and safetensors, or a hub id in the local cache.

        Raises:
            CheckpointError, UnsupportedModelError: see ``meta.build``.
        """
        return cls(build(path))

    @property
    def id(self) -> SourceId:
        return self._id

    @property
    def outline(self) -> Outline:
        return self._outline

    @property
    def total_bytes(self) -> int:
        return self._built.index.total_bytes

    def extras(self) -> dict[str, bytes]:
        found = {}
        for name in ("config.json", *small_files(self._built.directory)):
            path = self._built.directory / name
            try:
                found[name] = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as e:
                raise CheckpointError(f"cannot read {path}: {e.strerror}") from e
        return found

    def check(self) -> None:
        directory = self._built.directory
        now = checkpoint_id(directory, CheckpointIndex.open(directory))
        if now.fingerprint != self._id.fingerprint:
            raise CheckpointError(
                f"{directory} was changed while it was being packed; run it again"
            )

    # Rows

    def _source(self, tensor: Tensor) -> Source:
        names = (tensor.slice.param,) if tensor.slice else tensor.names
        for name in names:
            if name in self._sources:
                return self._sources[name]
        raise CheckpointError(f"no tensor of the checkpoint is {names[0]}")

    def format_of(self, tensor: Tensor) -> str:
        source = self._source(tensor)
        dtype = source.found.dtype if source.found is not None else source.dtype
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPE_BYTES or name.startswith("float8"):
            raise UnsupportedModelError(
                f"{tensor} is in {name}, which is not packed; {COPY_IN_BF16}"
            )
        return GGUF_OF.get(name, name)

    def rows(self, tensor: Tensor, expert: int | None, start: int, stop: int) -> Bytes:
        source = self._source(tensor)
        if source.found is None:
            value = self._convert(source, expert)
            return _bytes(_rows_of(value, tensor, start, stop))
        if tensor.slice is None or expert is None:
            found = source.found.reshape([tensor.rows, tensor.columns])
            return self._read(found.narrow(0, start, stop - start))
        mine = self._ranges_of(source.target, source.found)[expert]
        found = Ranges(source.found.shape[1:], source.found.dtype, mine)
        where = tensor.slice
        if len(tensor.shape) == 2:
            # Only what the rows need, on whichever side of the matrix the outputs are.
            first, count = where.base + where.step * start, where.step * (stop - start - 1) + 1
            found = found.narrow(1 if where.transposed else 0, first, count)
            value = self._array(found)
            return _bytes((value.T if where.transposed else value)[:: where.step])
        return _bytes(_rows_of(self._array(found), tensor, start, stop))

    def _ranges_of(self, target: str, found: Ranges) -> list[list[Run]]:
        """The runs of each expert of a fused parameter; the last few parameters' are kept."""
        with self._lock:
            runs = self._split.get(target)
            if runs is None:
                while len(self._split) >= 8:
                    del self._split[next(iter(self._split))]
                runs = self._split[target] = split_rows(found)
            return runs

    def _array(self, ranges: Ranges) -> Any:
        """Values as integers of their width, of the shape of ``ranges``."""
        raw = self._read(ranges).reshape(-1)
        return raw.view(f"u{ranges.dtype.itemsize}").reshape(tuple(ranges.shape))

    def _read(self, ranges: Ranges) -> Bytes:
        """The bytes of ``ranges``, one row for each element of the first dimension."""
        itemsize = ranges.dtype.itemsize
        nbytes = ranges.numel() * itemsize
        out = np.empty(nbytes, np.uint8)
        view, at = out.data, 0
        for run in ranges.runs:
            number, where = self._built.index.tensors[run.name]
            n = run.count * itemsize
            self._files.read_into(number, where.offset + run.start * itemsize, view[at : at + n])
            at += n
        rows = ranges.shape[0] if ranges.dim() > 1 else 1
        return out.reshape(rows, -1)

    # What has to be computed

    def _convert(self, source: Source, expert: int | None) -> Any:
        """A parameter (or an expert's part of one) as transformers converts it, as integers."""
        key = (source.target, expert)
        with self._lock:
            if self._converted.key != key:
                mapping = self._built.mapping
                if expert is None:
                    value = mapping.convert(source.target, self._tensor)
                else:
                    value = mapping.convert_expert(source.target, expert, self._tensor_of)
                raw = value.contiguous().view(torch.uint8).numpy()
                self._converted = _Cached(key, raw.view(f"u{value.element_size()}"))
            return self._converted.value

    def _tensor(self, name: str) -> torch.Tensor:
        shape, dtype = self._shape(name)
        return self._torch(Ranges.of(name, shape, dtype))

    def _tensor_of(self, name: str, expert: int) -> torch.Tensor:
        """A per-expert tensor whole, or one expert's rows of a fused one."""
        shape, dtype = self._shape(name)
        whole = Ranges.of(name, shape, dtype)
        return self._torch(whole.narrow(0, expert, 1) if len(shape) == 3 else whole)

    def _shape(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        where = self._built.index.tensors[name][1]
        return where.shape, getattr(torch, where.dtype)

    def _torch(self, ranges: Ranges) -> torch.Tensor:
        out = torch.empty(tuple(ranges.shape), dtype=ranges.dtype)
        view, at = out.view(-1).view(torch.uint8).numpy().data, 0
        for run in ranges.runs:
            number, where = self._built.index.tensors[run.name]
            itemsize = ranges.dtype.itemsize
            n = run.count * itemsize
            self._files.read_into(number, where.offset + run.start * itemsize, view[at : at + n])
            at += n
        return out

    def close(self) -> None:
        self._files.close()


def _rows_of(value: Any, tensor: Tensor, start: int, stop: int) -> Any:
    """Rows of a value that is there as a whole, by the tensor's slice if it has one."""
    if tensor.slice is not None and tensor.slice.transposed:
        value = value.T
    if tensor.slice is not None:
        end = tensor.slice.base + tensor.slice.step * ((tensor.shape or (1,))[0] - 1) + 1
        value = value[tensor.slice.base : end : tensor.slice.step]
    return value.reshape(tensor.rows, tensor.columns)[start:stop]


def _bytes(value: Any) -> Bytes:
    """Rows of integers as rows of bytes; contiguous, and nobody else's memory."""
    whole = np.array(value, order="C", copy=True)
    flat: Bytes = whole.reshape(len(whole), -1).view(np.uint8)
    return flat


def checkpoint_id(directory: Path, index: CheckpointIndex) -> SourceId:
    """What identifies a checkpoint: names, sizes, times and headers of its files, some of their
    bytes, and the config.

    A model and what was made of it may have the same times: archives and images set them.

    Raises:
        CheckpointError: config.json or a file of weights cannot be read.
    """
    try:
        config = (directory / "config.json").read_bytes()
    except OSError as e:
        raise CheckpointError(f"cannot read {directory / 'config.json'}: {e.strerror}") from e
    files = tuple(
        (file.name, header.file_size, mtime_ns, header.digest)
        for file, header, mtime_ns in zip(index.files, index.headers, index.mtimes_ns, strict=True)
    )
    facts = [files, hashlib.sha256(config).hexdigest(), values_fingerprint(index)]
    return SourceId(
        kind="safetensors",
        path=os.path.abspath(directory),
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        files=files,
    )
