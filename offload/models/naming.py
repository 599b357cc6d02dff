"""What a model is called in messages."""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import StoreError
from offload.io.pack_manifest import read_manifest


def packs_folder() -> Path:
    """Where packs that are made on first use lie: ``$XDG_CACHE_HOME/offload/packs``.

    Raises:
        StoreError: nothing says where this user's home is.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: what is not absolute is to be ignored.
    if os.path.isabs(cache):
        return Path(cache) / "offload" / "packs"
    try:
        return Path.home() / ".cache" / "offload" / "packs"
    except RuntimeError as e:
        raise StoreError(
            "there is no cache directory to pack into: neither XDG_CACHE_HOME nor HOME is set; "
            "set one, or run 'offload pack' and give its directory"
        ) from e


def model_name(directory: Path) -> str:
    """The directory's name; of a pack in the cache, whose name is a digest, its source's."""
    found = directory.resolve()
    try:
        if found.parent == packs_folder().resolve():
            manifest = read_manifest(found)
            name = Path(manifest.source.path).name
            return name if manifest.quant == "none" else f"{name} ({manifest.quant})"
    except StoreError:
        return found.name  # whoever opens it says what is wrong with it
    return found.name
