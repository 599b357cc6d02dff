"""Writing safetensors shards without holding a tensor, and a directory that appears whole.

The sizes are known before the first byte, so each header is written first and the data streams
after it. Everything goes into ``OUT.partial-XXXXXXXX`` beside the target, which is renamed to the
target at the end: what carries the target's name is complete. A killed run leaves only its partial
directory; the next run for the same target finds it unlocked and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from offload.blocks import DTYPE_BYTES
from offload.errors import OffloadError, StoreError
from offload.models.synth_plan import PlannedTensor
from offload.models.synth_values import ValueSource
from offload.units import format_bytes

logger = logging.getLogger(__name__)

# torch's names -> the format's names.
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def split_shards(tensors: Sequence[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """Consecutive groups of at most ``shard_bytes`` each; a larger tensor is a group by itself."""
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    # Inside a file as the safetensors library writes it: wider dtypes first, so that every tensor
    # is aligned to its own width, then by name, so that an expert's matrices lie side by side.
    return [sorted(shard, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name)) for shard in shards]


def shard_names(count: int) -> list[str]:
    """``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def shard_header(tensors: Sequence[PlannedTensor]) -> bytes:
    """The length, in 8 bytes, and the JSON of a safetensors file, padded to a multiple of 8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        table[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path,
    tensors: Sequence[PlannedTensor],
    values: ValueSource,
    on_bytes: Callable[[int], None],
) -> None:
    """Write one durable safetensors file; ``on_bytes`` hears of every piece of tensor data.

    Raises:
        StoreError: the disk refused, for instance because it is full.
    """
    try:
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), shard_header(tensors))
            for tensor in tensors:
                for chunk in tensor.chunks(values):
                    _write_all(file.fileno(), chunk)
                    on_bytes(len(chunk))
            os.fsync(file.fileno())
            # What was just written is read by another process, if ever: leave the page cache to
            # those who need it now.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as e:
        free = shutil.disk_usage(path.parent).free
        raise StoreError(
            f"cannot write {path.name} in {path.parent}: {e.strerror or e} "
            f"({format_bytes(free)} free)"
        ) from e


def check_space(folder: Path, need: int) -> None:
    """Raise StoreError when fewer than ``need`` bytes are free where ``folder`` will be."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise StoreError(
            f"the checkpoint needs {format_bytes(need)} but {folder} has {format_bytes(free)} "
            f"free: {format_bytes(need - free)} too little; choose another disk or fewer layers"
        )


@contextlib.contextmanager
def whole_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new directory that becomes ``out`` when the block ends well, and vanishes otherwise.

    An existing ``out`` is replaced only with ``overwrite``, and only after the new one is durable.

    Raises:
        OffloadError: ``out`` exists and may not be replaced.
        StoreError: its parent cannot be written.
    """
    check_replaceable(out, overwrite=overwrite)
    _remove_stale(out)
    partial = out.parent / f"{out.name}.partial-{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as e:
        raise StoreError(f"cannot create {partial}: {e.strerror or e}") from e
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # says that the owner lives; see _remove_stale
        except OSError as e:
            # A filesystem without locks: nobody can take one, so nobody removes this directory.
            logger.debug("no lock on %s: %s", partial, e)
        yield partial
        os.fsync(lock)
        _swap_in(partial, out, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Raise OffloadError unless ``out`` is absent, or a checkpoint that may be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise OffloadError(f"{out} exists; choose another path or pass overwrite")
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise OffloadError(f"{out} is not a model directory; it is not overwritten")


def _swap_in(partial: Path, out: Path, *, overwrite: bool) -> None:
    # Looked at again: writing took a while.
    check_replaceable(out, overwrite=overwrite)
    old = None
    try:
        if os.path.lexists(out):
            # Two renames, with an instant in which the old one has another name only. Linux can
            # exchange two names atomically, but not on every filesystem this should work on.
            old = out.parent / f"{out.name}.partial-old-{secrets.token_hex(4)}"
            out.rename(old)
        partial.rename(out)
        parent = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    except OSError as e:
        if old is not None and not os.path.lexists(out):
            old.rename(out)
        raise StoreError(f"cannot rename {partial} to {out}: {e.strerror or e}") from e
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _remove_stale(out: Path) -> None:
    """Remove what a killed run for the same target left: partial directories nobody holds."""
    ours = re.compile(re.escape(out.name) + r"\.partial-(old-)?[0-9a-f]{8}")
    for partial in out.parent.glob("*.partial-*"):
        found = ours.fullmatch(partial.name)
        if found is None:
            continue
        if found.group(1) and not os.path.lexists(out):
            continue  # killed between the two renames of _swap_in: the only copy of the old one
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as e:
            logger.debug("leaving %s alone: %s", partial, e)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            logger.debug("%s may belong to a run in progress: %s", partial, e)
        else:
            logger.info("removing %s, left by a run that was killed", partial)
            shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(fd, rest) :]
