"""Results as JSON files, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.io.whole_file import takes_bytes, whole_file


def check_json_target(path: Path | None) -> None:
    """``check_target`` of ``--json``."""
    check_target(path, "--json")


def check_target(path: Path | None, flag: str) -> None:
    """Refuse a file that cannot be written now, not after the work is done.

    Raises:
        OffloadError: its directory is missing or not writable, or it is a directory itself.
    """
    if path is None:
        return
    path = path.expanduser()
    if takes_bytes(path):
        if not os.access(path, os.W_OK):
            raise OffloadError(f"{flag} {path} is not writable; give a file")
        return
    folder = path.resolve().parent
    if path.is_dir():
        raise OffloadError(f"{flag} {path} is a directory; give a file")
    if not folder.is_dir():
        raise OffloadError(f"{flag} {path}: there is no directory {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OffloadError(f"{flag} {path}: the directory {folder} is not writable")


def write_json(path: Path | None, data: Mapping[str, Any], flag: str = "--json") -> None:
    """Write ``data``; a reader sees the old file or the whole new one. Does nothing without a path.

    Raises:
        OffloadError: it cannot be written.
    """
    if path is None:
        return
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise OffloadError(f"{flag} {path} cannot be written: {error.strerror}") from error
