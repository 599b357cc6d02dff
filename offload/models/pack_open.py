"""The source that a path is: a model directory, a hub id, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from offload.errors import OffloadError
from offload.io.gguf_header import is_gguf
from offload.models.pack_source import Source


def open_source(path: str | Path, *, allow_requant: bool = False) -> Source:
    """Open what can be packed. The caller closes it.

    Args:
        allow_requant: for a GGUF file with types that have no kernels.

    Raises:
        CheckpointError, UnsupportedModelError: see ``CheckpointSource.open``, ``GgufSource.open``.
        OffloadError: types without kernels, or ``allow_requant`` for something else than a GGUF.
    """
    if is_gguf(path):
        from offload.models.gguf_source import GgufSource

        return GgufSource.open(path, allow_requant=allow_requant)
    if allow_requant:
        raise OffloadError(f"--allow-requant is for GGUF files, and {path} is none; leave it away")
    from offload.models.pack_checkpoint import CheckpointSource

    return CheckpointSource.open(path)
