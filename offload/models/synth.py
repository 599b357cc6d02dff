"""Random checkpoints for any Hugging Face config: try speed and memory before a download.

    report = synth("Qwen3-30B-A3B/config.json", "/scratch/qwen", layers=4, seed=0)

The result looks like a published checkpoint of that family: the same tensor names and shapes, in
safetensors shards with an index, with the config and, when the source directory has them, the
tokenizer and generation settings. Its weights are random but well behaved: activations stay
finite in bfloat16 through any depth, logits vary, experts are chosen about evenly.

The model is never in memory. Above the interpreter with torch and transformers, the peak is the
meta skeleton, the model's vectors (norms and biases) and a pool of random values of at most
110 MiB; it depends on the number of tensors, not on their bytes: 160 MiB for DeepSeek-V3's 45,395
tensors of 1.2 TiB. Making values is no bottleneck: a 4.9 GB checkpoint took 4.9 s of one core and
7.0 s in all (0.7 GB/s, fsync included) on a busy machine with two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadError, StoreError
from offload.io.whole_file import expanded
from offload.units import parse_bytes

_PROGRESS_STEP = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthProgress:
    """How far a run is: tensor bytes written, of how many, and for how long."""

    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Mean rate so far; 0.0 before any time has passed."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthReport:
    """What was written. ``weight_bytes`` are tensor bytes, headers not counted; ``parameters``
    counts the elements of the stored tensors (tied ones once); ``seconds`` includes the fsyncs."""

    path: Path
    model_type: str
    architecture: str
    dtype: str
    layers: int | None
    seed: int
    tensors: int
    parameters: int
    weight_bytes: int
    shards: int
    copied_files: tuple[str, ...]
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.weight_bytes / self.seconds if self.seconds > 0 else 0.0


def synth(
    config_path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int | str = "2GiB",
    seed: int = 0,
    layers: int | None = None,
    progress: Callable[[SynthProgress], None] | None = None,
    overwrite: bool = False,
) -> SynthReport:
    """Write a random checkpoint of the model that ``config_path`` describes.

    Args:
        config_path: a config JSON file, or a directory with ``config.json``. From a directory (or
            a file of that name) tokenizer and generation settings beside it are copied as well.
        out: the directory to create. It appears only when it is complete.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``; default: the config's, else
            bfloat16. What the family keeps in float32 stays float32.
        shard_bytes: most tensor bytes per file, as a number or ``"2GiB"``; a larger tensor gets a
            file of its own.
        seed: the same seed and config give the same bytes. A tensor's values depend on the seed
            and its name, not on shards or on the other layers.
        layers: keep only this many layers.
        progress: called at the start, about every 16 MiB, and at the end, from this thread. What
            it raises aborts the run and removes what was written.
        overwrite: replace ``out`` if it is a model directory already.

    Raises:
        CheckpointError: the config cannot be read.
        UnsupportedModelError: transformers does not know the model, it needs remote code, or it
            is quantised.
        StoreError: not enough space (with the numbers), or the disk failed.
        OffloadError: ``out`` exists, or an argument is out of range.
    """
    from offload.models.synth_config import read_source
    from offload.models.synth_plan import plan_tensors
    from offload.models.synth_values import ValueSource
    from offload.models.synth_writer import (
        check_replaceable,
        check_space,
        shard_header,
        shard_names,
        split_shards,
        whole_directory,
        write_shard,
    )

    started = time.monotonic()
    most = parse_bytes(shard_bytes)
    out = Path(os.path.realpath(expanded(Path(out))))
    check_replaceable(out, overwrite=overwrite)
    source = read_source(config_path, dtype=dtype, layers=layers)
    if source.folder is not None and source.folder.resolve() == out:
        raise OffloadError(f"{out} is where the config comes from; choose another path")

    tensors = plan_tensors(source, seed)
    shards = split_shards(tensors, most)
    names = shard_names(len(shards))
    total = sum(tensor.nbytes for tensor in tensors)
    check_space(out.parent, total + sum(len(shard_header(shard)) for shard in shards))

    done = told = 0

    def tell() -> None:
        nonlocal told
        told = done
        if progress is not None:
            elapsed = time.monotonic() - started
            progress(SynthProgress(bytes_done=done, bytes_total=total, seconds=elapsed))

    def on_bytes(n: int) -> None:
        nonlocal done
        done += n
        if done - told >= _PROGRESS_STEP:
            tell()

    with whole_directory(out, overwrite=overwrite) as partial:
        tell()
        values = ValueSource(seed)
        for name, shard in zip(names, shards, strict=True):
            write_shard(partial / name, shard, values, on_bytes)
        if len(shards) > 1:
            weight_map = {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            }
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(partial / "model.safetensors.index.json", index)
        _write_json(partial / "config.json", source.raw)
        copied = _copy_companions(source.folder, partial)
        tell()
    return SynthReport(
        path=out,
        model_type=source.config.model_type,
        architecture=source.model_class.__name__,
        dtype=source.dtype,
        layers=source.layers,
        seed=seed,
        tensors=len(tensors),
        parameters=sum(tensor.count for tensor in tensors),
        weight_bytes=total,
        shards=len(shards),
        copied_files=copied,
        seconds=time.monotonic() - started,
    )


def _copy_companions(source: Path | None, target: Path) -> tuple[str, ...]:
    """Copy tokenizer, processor and generation files that lie beside the source config."""
    from offload.models.synth_config import small_files

    copied: list[str] = []
    if source is not None:
        for name in small_files(source):
            try:
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, target / name)
                copied.append(name)
            except OSError as e:
                raise StoreError(f"cannot copy {source / name}: {e.strerror or e}") from e
    return tuple(copied)


def _write_json(path: Path, value: object) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise StoreError(f"cannot write {path}: {e.strerror or e}") from e
