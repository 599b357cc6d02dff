"""Which weights a checkpoint has, by a few of their bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os

from offload.errors import CheckpointError
from offload.io.files import open_to_read
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
    digest = hashlib.sha256()
    names = sorted(index.tensors, key=lambda n: hashlib.sha256(n.encode()).digest())
    places = sorted(index.tensors[name] for name in names[:_SAMPLED])
    try:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open_to_read(file, 0)) for file in index.files]
            for number, tensor in places if opened else ():
                at = tensor.offset + max(0, tensor.nbytes - _BYTES) // 2
                size = min(_BYTES, tensor.nbytes)
                digest.update(os.pread(opened[number].fileno(), size, at))
    except OSError as e:
        raise CheckpointError(f"cannot read {index.directory}: {e.strerror}") from e
    return digest.hexdigest()[:32]
