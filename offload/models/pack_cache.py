"""Packs that are made on first use, in the user's cache directory."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from offload.errors import StoreError
from offload.io.pack_manifest import SourceId, is_pack
from offload.io.whole_file import PRIVATE, whole_file
from offload.models.naming import packs_folder
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_reader import PackedModel
from offload.models.pack_run import PackProgress, pack
from offload.models.pack_source import Source
from offload.models.synth_config import small_files

logger = logging.getLogger(__name__)


def pack_cache_dir(source: SourceId, quant: str) -> Path:
    """Where the pack of ``source`` as ``quant`` belongs: ``$XDG_CACHE_HOME/offload/packs/…``.

    A changed source has another fingerprint, and so another directory.
    """
    return packs_folder() / f"{source.fingerprint[:32]}-{quant}"


def packed(
    source: Source,
    quant: str,
    *,
    progress: Callable[[PackProgress], None] | None = None,
    announce: Callable[[Path], None] | None = None,
) -> PackedModel:
    """The cached pack of ``source``, made now if it is not there.

    Two processes that want it at once make it once: the second waits for the first.

    Args:
        announce: called with the directory before packing begins, so that a user is told why
            nothing happens yet and what fills the disk.

    Raises:
        StoreError: the pack cannot be made or opened.
        CheckpointError, OffloadError: see ``pack``.
    """
    path = pack_cache_dir(source.id, quant)
    if not is_pack(path):
        if announce is not None:
            announce(path)
        logger.info("packing %s into %s", source.id, path)
        _make_writable(path.parent)
        pack(source, path, quant=quant, progress=progress, wait=True)
    elif isinstance(source, CheckpointSource):
        _refresh(path, source.extras())
    return PackedModel.open(path, source=source.id, quant=quant)


def _refresh(path: Path, extras: Mapping[str, bytes]) -> None:
    """The checkpoint's tokenizer, chat template and generation settings as they are now: they are
    corrected now and then, and weights that are the same need no other pack for it.

    Raises:
        StoreError: they differ and cannot be written.
    """
    names = dict.fromkeys((*extras, *small_files(path)))
    try:
        for name in names:
            file, wanted = path / name, extras.get(name)
            if wanted is None:
                file.unlink(missing_ok=True)
            elif not file.is_file() or file.read_bytes() != wanted:
                logger.info("%s has changed since it was packed: copied to %s", name, path)
                file.parent.mkdir(mode=0o700, exist_ok=True)
                with whole_file(file, PRIVATE) as out:
                    out.write(wanted)
    except OSError as e:
        raise StoreError(
            f"{name} of the checkpoint has changed, and {path} cannot be: {e.strerror}; set "
            "XDG_CACHE_HOME to another place"
        ) from e


def _make_writable(folder: Path) -> None:
    """Make ``folder``. Raises StoreError if it cannot be made, or be written to where it is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # os.access() knows nothing of quotas and ACLs
    except OSError as e:
        raise StoreError(
            f"cannot write in {folder}: {e.strerror}; set XDG_CACHE_HOME to another place, or run "
            "'offload pack' and give its directory"
        ) from e
