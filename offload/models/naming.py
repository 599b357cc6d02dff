"""What a model is called in messages."""

from __future__ import annotations

from pathlib import Path

from offload.errors import StoreError
from offload.io.pack_manifest import read_manifest
from offload.runtime.cache_folder import cache_folder


def packs_folder() -> Path:
    """Where packs that are made on first use lie: ``$XDG_CACHE_HOME/offload/packs``.

    Raises:
        StoreError: nothing says where this user's home is.
    """
    try:
        return cache_folder() / "packs"
    except StoreError as e:
        raise StoreError(f"{e}, or run 'offload pack' and give its directory") from e


def model_name(directory: Path) -> str:
    """The directory's name; of one in a cache, whose name is a digest, its model's."""
    found = directory.resolve()
    try:
        if found.parent == packs_folder().resolve():
            manifest = read_manifest(found)
            name = _own_name(Path(manifest.source.path))
            return name if manifest.quant == "none" else f"{name} ({manifest.quant})"
    except StoreError:
        return found.name  # whoever opens it says what is wrong with it
    return _own_name(found)


def _own_name(path: Path) -> str:
    """Its name; in the hub's cache, models--ORG--NAME/snapshots/COMMIT, that of the model."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return path.name
