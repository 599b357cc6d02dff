"""Where this user's caches are: measurements, packs, private files. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import StoreError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/offload``, by default ``~/.cache/offload``; it need not be there.

    Raises:
        StoreError: nothing says where this user's home is.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: what is not absolute is to be ignored.
    if os.path.isabs(cache):
        return Path(cache) / "offload"
    try:
        return Path.home() / ".cache" / "offload"
    except RuntimeError as e:
        raise StoreError(
            "there is no cache directory: neither XDG_CACHE_HOME nor HOME is set; set one"
        ) from e


__all__ = ["cache_folder"]
