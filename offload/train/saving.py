"""``save_pretrained`` of a streamed model: into a directory that others write to, too.

A Trainer's checkpoint directory exists, has or will have files of its own, and may be written
again. So files are written into a hidden directory inside, and take their names when all are
complete; what killed programs have left there is cleared away. ``output.write_model``, which owns
its directory, replaces that as a whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from offload.errors import OffloadError, StoreError
from offload.io.safetensors import CheckpointIndex
from offload.io.whole_file import expanded
from offload.models.meta import MetaModel
from offload.train.output import SHARD_BYTES, check_space, write_files, write_shards
from offload.train.output_files import CONFIG, companions, updated_config
from offload.train.output_header import index_json, plan_shards
from offload.train.output_target import make_locked, remove_leftovers
from offload.train.output_tensors import OutputTensors

INDEX = "model.safetensors.index.json"
_PARTIAL = "saving"
"""What the hidden directory is named after."""


def save_model(
    directory: Path, meta: MetaModel, tensors: OutputTensors, shard_bytes: int | None = None
) -> None:
    """Write weights, config and tokenizer files of ``meta`` into ``directory``.

    Raises:
        OffloadError: ``directory`` is the checkpoint that is trained, or no directory.
        StoreError: too little space, or the disk refused; what was there is as it was, unless that
            was when complete files took their names.
    """
    directory = expanded(directory)
    source = meta.directory
    if directory.exists() and not directory.is_dir():
        raise OffloadError(f"{directory} is a file; choose another path")
    if directory.resolve() == source.resolve():
        raise OffloadError(f"{directory} is the model that is trained; choose another directory")
    files = {CONFIG: updated_config(source, str(meta.dtype).removeprefix("torch."))}
    copied = companions(source)
    shards = plan_shards(tensors.tensors, shard_bytes or SHARD_BYTES)
    if len(shards) > 1:
        files[INDEX] = index_json(shards).encode()
    check_space(directory, sum(s.nbytes for s in shards), files, copied)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory / _PARTIAL)
        partial, lock = make_locked(directory / _PARTIAL)
    except OSError as e:
        raise StoreError(f"cannot write into {directory}: {e.strerror or e}") from e
    try:
        write_shards(partial, shards, tensors.read)
        write_files(partial, files, copied)
        CheckpointIndex.open(partial)  # headers and sizes, as whoever loads it will see them
        _give_names(partial, directory)
    except OSError as e:
        raise StoreError(f"cannot write the model into {directory}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _give_names(partial: Path, directory: Path) -> None:
    """Move what is complete to its place, and only then delete weights that are not of it: whoever
    is killed in between leaves the old model or the new one, but for shards of the same names."""
    written = {str(f.relative_to(partial)) for f in partial.rglob("*") if f.is_file()}
    for name in sorted(written):  # an index comes after its shards
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / name, directory / name)
    for old in directory.glob("model*.safetensors"):
        if old.name not in written:
            old.unlink()
    if INDEX not in written:
        (directory / INDEX).unlink(missing_ok=True)


__all__ = ["save_model"]
