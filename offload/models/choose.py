"""What a user names as a model: a directory, a hub id, a GGUF file; packed on first use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from offload.errors import OffloadError
from offload.io.gguf_header import is_gguf
from offload.io.pack_manifest import is_pack, read_manifest
from offload.io.safetensors import gguf_hint
from offload.io.whole_file import expanded
from offload.models.meta import resolve

# Packing is imported where a pack is made: Numba takes 60 MB that nothing else needs here.
if TYPE_CHECKING:
    from offload.models.pack_run import PackProgress
    from offload.models.pack_source import Source

Announce: TypeAlias = "Callable[[Path], None]"
Report: TypeAlias = "Callable[[PackProgress], None]"


def model_directory(
    model: str | Path,
    quant: str | None = None,
    *,
    kernels: str | None = None,
    announce: Announce | None = None,
    progress: Report | None = None,
) -> Path:
    """The directory to run ``model`` from.

    Args:
        quant: ``"none"``, ``"q8"`` or ``"q4"``: run it packed so. None: as it is, which for a GGUF
            file is packed with every bit kept.
        kernels: ``"fast"``: packed, with every bit kept unless ``quant`` says otherwise, because
            our kernels take nothing else; ``"exact"``: not packed. None: as ``quant`` says.
        announce: called with the directory before a pack is made.
        progress: called while it is made.

    Raises:
        OffloadError: there is no such model, it is a directory of GGUF files, or it cannot be had
            in ``quant``.
        StoreError: the pack cannot be made.
    """
    file = expanded(Path(model))
    gguf = is_gguf(file)
    if kernels == "exact" and (gguf or quant is not None or is_pack(resolve(model))):
        why = f"--quant {quant}" if quant is not None else f"{file.name} is packed or a GGUF file"
        raise OffloadError(
            f"--kernels exact cannot take effect: {why}, and packed weights run on our own "
            f"kernels; drop --kernels exact, or name a checkpoint and drop --quant"
        )
    if gguf:
        from offload.models.gguf_source import GgufSource

        return _pack(GgufSource.open(file), quant or "none", announce, progress)
    directory = resolve(model)
    hint = gguf_hint(directory)
    if hint and not any(directory.glob("*.safetensors")) and not is_pack(directory):
        # What else it may lack (a tokenizer, say) is in the GGUF file.
        raise OffloadError(f"{directory} has no safetensors{hint}")
    if quant is None and kernels == "fast" and not is_pack(directory):
        quant = "none"
    if quant is None:
        return directory
    if is_pack(directory):
        has = read_manifest(directory).quant
        if has != quant:
            raise OffloadError(
                f"{directory.name} is packed as {has} already and cannot be run as {quant}: drop "
                f"--quant, or name the model it was made from"
            )
        return directory
    from offload.models.pack_checkpoint import CheckpointSource

    return _pack(CheckpointSource.open(directory), quant, announce, progress)


def _pack(source: Source, quant: str, announce: Announce | None, progress: Report | None) -> Path:
    from offload.models.pack_cache import packed

    try:
        return packed(source, quant, announce=announce, progress=progress).path
    finally:
        source.close()
