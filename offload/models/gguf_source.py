"""A GGUF file as a source of packs: its rows, bit for bit, under the model's own names.

The entries of the file are offered to transformers' own conversion as the tensors of a published
checkpoint; where it puts them is where a parameter's rows are (``gguf_places``). So fused experts,
renamed modules and tied weights need no second list of names. Quantised rows are never decoded,
except where a tensor is no matrix, its rows are not rows of the file (DeepSeek's ``kv_b`` in two
parts), or its type has no kernels and the user agrees to another.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from offload.errors import CheckpointError, StoreError
from offload.io.gguf import GGUFFile, read_gguf
from offload.io.pack_manifest import SourceId
from offload.io.safetensors import CheckpointIndex, TensorRange
from offload.io.whole_file import expanded
from offload.models.gguf_config import config_from_gguf
from offload.models.gguf_entries import GGUFEntry
from offload.models.gguf_generation import generation_defaults
from offload.models.gguf_names import entries_from_gguf
from offload.models.gguf_places import Stored, find_places
from offload.models.gguf_requant import require_kernels
from offload.models.gguf_rows import GGUFRows
from offload.models.gguf_tokenizer import load_tokenizer
from offload.models.meta import assemble
from offload.models.pack_outline import outline
from offload.models.pack_source import Bytes, Outline, Tensor
from offload.models.values_fingerprint import gguf_values_fingerprint


class GgufSource:
    """The weights of a GGUF file. Open with ``open``; thread-safe."""

    def __init__(self, gguf: GGUFFile, *, allow_requant: bool = False) -> None:
        """Find every tensor of the model; reads no weights. See ``open``."""
        self._gguf = gguf
        self._config = config_from_gguf(gguf)
        entries = entries_from_gguf(gguf, self._config)
        used = dict.fromkeys(entry.gguf_name for entry in entries)
        types = (gguf.tensors[name].type for name in used)
        require_kernels(types, gguf.name, allow_requant=allow_requant)
        built = assemble(self._config, _as_checkpoint(gguf, entries))
        sources = built.mapping.map.sources
        whole = outline(built.model, sources)
        self._places = find_places(whole, sources, entries)
        self._outline = replace(whole, converted=self._places.converted)
        self._total_bytes = sum(entry.nbytes for entry in entries)
        self._rows = GGUFRows(gguf)

    @classmethod
    def open(cls, path: str | Path, *, allow_requant: bool = False) -> GgufSource:
        """Open a GGUF file, or all parts of a split one by any of them.

        Args:
            allow_requant: types without kernels may be requantised; see ``gguf_requant``.

        Raises:
            CheckpointError: the file is damaged, incomplete, or not what its metadata says.
            UnsupportedModelError: an architecture that is not supported.
            OffloadError: types without kernels.
        """
        return cls(read_gguf(expanded(Path(path))), allow_requant=allow_requant)

    @cached_property
    def id(self) -> SourceId:
        gguf = self._gguf
        # Times alone do not tell files of the same shape apart: archives and images set them.
        facts = gguf.fingerprint() + gguf_values_fingerprint(gguf)
        return SourceId(
            kind="gguf",
            path=os.path.abspath(gguf.files[0]),
            fingerprint=hashlib.sha256(facts.encode()).hexdigest(),
            files=tuple(
                (file.name, header.file_size, mtime_ns, header.digest)
                for file, header, mtime_ns in zip(
                    gguf.files, gguf.headers, gguf.mtimes_ns, strict=True
                )
            ),
        )

    @property
    def outline(self) -> Outline:
        return self._outline

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def format_of(self, tensor: Tensor) -> str:
        return self._places.of[tensor, 0 if tensor.group else None].format

    def rows(self, tensor: Tensor, expert: int | None, start: int, stop: int) -> Bytes:
        place = self._places.of[tensor, expert]
        if isinstance(place, Stored):
            return self._rows.stored(place, start, stop)
        return self._rows.made(place, tensor.columns, start, stop)

    def extras(self) -> dict[str, bytes]:
        """config.json, and from the file's vocabulary the tokenizer's files and
        generation_config.json. A file without a vocabulary has neither.

        Raises:
            CheckpointError, UnsupportedModelError: the vocabulary is damaged, or of an unknown
                kind.
            StoreError: there is no place for temporary files.
        """
        try:
            return self._extras()
        except OSError as e:
            raise StoreError(
                f"the tokenizer of {self._gguf.name} is written to a temporary file first, which "
                f"cannot be: {e.strerror}; set TMPDIR to a directory that can be written to"
            ) from e

    def _extras(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(prefix="offload-") as folder:
            self._config.save_pretrained(folder)
            if self._gguf.metadata.get("tokenizer.ggml.model", "none") != "none":
                tokenizer = load_tokenizer(self._gguf)
                # Several templates go into the settings: as files they would take a folder, and
                # names that the file chose.
                single = not isinstance(tokenizer.chat_template, dict)
                tokenizer.save_pretrained(folder, save_jinja_files=single)
                make: Any = GenerationConfig  # untyped
                # Not save_pretrained: it refuses a top_k beside greedy decoding, which is what a
                # file with a temperature of 0 says.
                settings = make(**generation_defaults(self._gguf))
                settings.to_json_file(Path(folder, GENERATION_CONFIG_NAME))
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}

    def check(self) -> None:
        if read_gguf(self._gguf.files[0]).fingerprint() != self._gguf.fingerprint():
            raise CheckpointError(
                f"{self._gguf.name} was changed while it was being packed; run it again"
            )

    def close(self) -> None:
        self._rows.close()


def _as_checkpoint(gguf: GGUFFile, entries: list[GGUFEntry]) -> CheckpointIndex:
    """The published checkpoint that the entries describe: names and shapes. All in one dtype,
    because parameters that are joined must be, and rows are counted, not bytes."""
    shapes = {entry.hf_name: entry.hf_shape for entry in entries}
    tensors = {
        name: (0, TensorRange("bfloat16", shape, 0, 2 * prod(shape)))
        for name, shape in shapes.items()
    }
    return CheckpointIndex(
        directory=gguf.files[0], files=gguf.files, headers=(), tensors=tensors, mtimes_ns=()
    )
