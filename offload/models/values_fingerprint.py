"""Which weights a checkpoint has, by a few of their bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from offload.errors import CheckpointError
from offload.io.files import open_to_read
from offload.io.gguf import GGUFFile
from offload.io.safetensors import CheckpointIndex

_SAMPLED, _BYTES = 2048, 256
"""Tensors, and bytes of each."""


def values_fingerprint(index: CheckpointIndex) -> str:
    """Of a few bytes from the middle of up to ``_SAMPLED`` tensors. Of a pack there are no files:
    its blocks' checksums say what is in them.

    A base model and what was made of it have files of the same shape. Reading all of them would
    take as long as a step; which tensors are read is decided by the digests of their names, as a
    stride could meet the same kind in every layer.

    Raises:
        CheckpointError: a file cannot be read.
    """
    places = sorted(index.tensors[name] for name in _some(index.tensors))
    return _digest(index.files, [(file, t.offset, t.nbytes) for file, t in places])


def gguf_values_fingerprint(gguf: GGUFFile) -> str:
    """The same of a GGUF file."""
    found = (gguf.tensors[name] for name in _some(gguf.tensors))
    return _digest(gguf.files, sorted((t.file, t.offset, t.nbytes) for t in found))


def _some(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda n: hashlib.sha256(n.encode("utf-8", "replace")).digest())[
        :_SAMPLED
    ]


def _digest(files: Sequence[Path], places: list[tuple[int, int, int]]) -> str:
    digest = hashlib.sha256()
    try:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open_to_read(file, 0)) for file in files]
            for number, offset, nbytes in places if opened else ():
                at = offset + max(0, nbytes - _BYTES) // 2
                digest.update(os.pread(opened[number].fileno(), min(_BYTES, nbytes), at))
    except OSError as e:
        raise CheckpointError(f"cannot read {files[0].parent}: {e.strerror}") from e
    return digest.hexdigest()[:32]
