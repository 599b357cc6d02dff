"""What fine-tuning leaves: an ordinary Hugging Face model directory, written tensor by tensor.

The sizes are known before the first byte, so each file's header is written first and the values
stream after it; no more than one piece of one tensor is in memory. The directory appears whole or
not at all (``output_target``), and its tensors have the names of the checkpoint the training
started from (``output_tensors``), so it can be used wherever that one could.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import StoreError
from offload.io.safetensors import CheckpointIndex
from offload.train.output_files import CONFIG, companions, updated_config
from offload.train.output_header import OutputTensor, Shard, index_json, plan_shards
from offload.train.output_target import (
    check_target,
    copy_durable,
    new_directory,
    write_durable,
)
from offload.units import format_bytes

__all__ = [
    "SHARD_BYTES", "Values", "check_space", "check_target", "write_files", "write_model",
    "write_shards",
]  # fmt: skip

log = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000
"""Data bytes of a file, as transformers splits them: what downloads restart at."""

SYNC_BYTES = 256 * 2**20
"""What is written is forced to the disk and out of the page cache every so many bytes: dirty pages
count against a container's memory limit, and nobody reads them soon."""

_SPARE_BYTES = 64 * 2**20
"""Most that is left free: the marker, directory entries, whatever else writes to that disk."""
_SPARE_PART = 8
"""Of a small output as much as this part of it: 64 MiB beside 10 would refuse what fits."""

Values = Callable[[str], Any]
"""``read(name)``: the tensor's values in the promised dtype, row-major: a ``torch.Tensor``, a
``memoryview``, or an iterable of such pieces, each valid until the next is asked for."""


def write_model(
    target: Path,
    source: Path,
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    read: Values,
    *,
    run_id: str,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model directory, whole or not at all.

    Args:
        target: the directory to be; see ``check_target`` for what may be there.
        source: the checkpoint directory training started from. Its config, tokenizer, templates
            and licence are copied.
        tensors: ``(name, dtype, shape)`` in the order in which they are best read; dtypes are
            torch's names.
        read: see ``Values``. Called once per tensor, file by file; within a file, tensors of whole
            pages come first (see ``output_header``).
        run_id: written into ``offload_training.json``; makes the directory replaceable.
        dtype: for ``config.json``; None leaves it.
        metadata: into every file's ``__metadata__``.
        shard_bytes: data bytes of a file; one larger tensor is a file by itself.
        progress: hears ``(bytes written, bytes in all)``.

    Raises:
        OffloadError: ``target`` may not be replaced.
        StoreError: too little space, or the disk refused.
        ValueError: ``read`` gave other bytes than promised.
    """
    check_target(target, source)
    copied = companions(source)
    files = {CONFIG: updated_config(source, dtype)}
    shards = plan_shards(tensors, shard_bytes, metadata)
    if len(shards) > 1:
        files["model.safetensors.index.json"] = index_json(shards).encode()
    need = sum(s.nbytes for s in shards)
    check_space(target, need, files, copied)
    with new_directory(target, run_id, facts={"trained_from": source.name}) as partial:
        write_shards(partial, shards, read, progress)
        write_files(partial, files, copied)
        CheckpointIndex.open(partial)  # headers, sizes and index, as whoever loads it will see them
    log.info("wrote %d files with %s to %s", len(shards), format_bytes(need), target)


def write_shards(
    directory: Path,
    shards: Sequence[Shard],
    read: Values,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write durable safetensors files into ``directory``. Errors as of ``write_model``."""
    total = sum(t.nbytes for shard in shards for t in shard.tensors)
    done = 0
    for shard in shards:
        path = directory / shard.file
        try:
            with path.open("xb", buffering=0) as file:
                fd, unsynced = file.fileno(), len(shard.header)
                _write_all(fd, memoryview(shard.header))
                for tensor in shard.tensors:
                    for data in _checked(tensor, read(tensor.name)):
                        _write_all(fd, data)
                        done += len(data)
                        unsynced += len(data)
                        if unsynced >= SYNC_BYTES:
                            _settle(fd)
                            unsynced = 0
                        if progress is not None:
                            progress(done, total)
                _settle(fd)
        except OSError as e:
            free = _free(directory)
            raise StoreError(
                f"cannot write {path.name} in {directory.parent}: {e.strerror or e} "
                f"({format_bytes(free)} free, {format_bytes(total - done)} to go)"
            ) from e


def write_files(directory: Path, files: Mapping[str, bytes], copied: Mapping[str, Path]) -> None:
    """Write the small files of ``directory``, durably: by content, and as copies."""
    for name, data in files.items():
        write_durable(directory / name, data)
    for name, path in copied.items():
        copy_durable(path, directory / name)


def check_space(
    target: Path, need: int, files: Mapping[str, bytes], copied: Mapping[str, Path]
) -> None:
    """Raise StoreError when less than ``need`` bytes and these files is free for ``target``.

    An earlier output there does not count: it is deleted only when the new one is complete.
    """
    folder = target.expanduser().resolve().parent
    while not folder.exists():
        folder = folder.parent
    need += sum(map(len, files.values())) + sum(p.stat().st_size for p in copied.values())
    free, need = _free(folder), with_spare(need)
    if free < need:
        raise StoreError(
            f"the output needs {format_bytes(need)} in {folder}, {format_bytes(free)} are "
            f"free: {format_bytes(need - free)} too little; free some or choose another output"
        )


def with_spare(nbytes: int) -> int:
    """What has to be free for an output of so many bytes. Asked before a run as well as at its end:
    what is refused in the end was trained for nothing."""
    return nbytes + min(_SPARE_BYTES, nbytes // _SPARE_PART)


def _free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _settle(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, data: memoryview) -> None:
    rest = data
    while len(rest):
        rest = rest[os.write(fd, rest) :]


def _checked(tensor: OutputTensor, value: Any) -> Iterable[memoryview]:
    """The bytes of ``value``; raises ValueError unless they are exactly the tensor's."""
    given = 0
    for piece in _pieces(value):
        data = _bytes(tensor, piece)
        given += len(data)
        if given > tensor.nbytes:
            break
        yield data
    if given != tensor.nbytes:
        raise ValueError(f"{tensor.name} has {tensor.nbytes} bytes, {given} were given")


def _pieces(value: Any) -> Iterable[Any]:
    if isinstance(value, memoryview) or hasattr(value, "element_size"):
        return (value,)
    pieces: Iterable[Any] = value
    return pieces


def _bytes(tensor: OutputTensor, piece: Any) -> memoryview:
    if isinstance(piece, memoryview):
        return piece.cast("B") if piece.nbytes else memoryview(b"")
    import torch

    if piece.dtype != getattr(torch, tensor.dtype):
        raise ValueError(f"{tensor.name} is to be {tensor.dtype}, values of {piece.dtype} came")
    flat = piece.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
