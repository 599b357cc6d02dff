"""Results as JSON files, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.io.whole_file import check_name, check_temporary, takes_bytes, whole_file


def check_json_target(path: Path | None) -> None:
    """``check_target`` of ``--json``."""
    check_target(path, "--json")


def check_targets(targets: Mapping[str, Path | None], *, reads: Iterable[Path | None] = ()) -> None:
    """``check_target`` of all files that a command writes, by flag.

    Raises:
        OffloadError: one is refused, or two are the same.
    """
    reads, flags = list(reads), dict[Path, str]()
    for flag, path in targets.items():
        if path is None:
            continue
        check_target(path, flag, reads=reads)
        if takes_bytes(path.expanduser()):  # a pipe, a terminal: nothing is replaced
            continue
        other = flags.setdefault(path.expanduser().resolve(), flag)
        if other != flag:
            raise OffloadError(f"{other} and {flag} are the same file, {path}; name two")


def check_target(path: Path | None, flag: str, *, reads: Iterable[Path | None] = ()) -> None:
    """Refuse a file that cannot be written now, not after the work is done.

    Args:
        reads: what the same command reads, and must not replace.

    Raises:
        OffloadError: its directory is missing or not writable, it is a directory itself, or a
            file of a model, or one that is read, or no file can have its name.
    """
    if path is None:
        return
    path = check_name(path, flag)
    if takes_bytes(path):
        if not os.access(path, os.W_OK):
            raise OffloadError(f"{flag} {path} is not writable; give a file")
        return
    check_temporary(path, f"{flag} {path}")
    folder = path.resolve().parent
    if is_of_a_model(path):
        raise OffloadError(
            f"{flag} {path} is a file of a model, and would be replaced; give another name"
        )
    if any(path.exists() and r.exists() and path.samefile(r) for r in reads if r is not None):
        raise OffloadError(
            f"{flag} {path} is read by this command, and would be replaced; give another name"
        )
    if path.is_dir():
        raise OffloadError(f"{flag} {path} is a directory; give a file")
    if not folder.is_dir():
        raise OffloadError(f"{flag} {path}: there is no directory {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OffloadError(f"{flag} {path}: the directory {folder} is not writable")


_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")


def is_of_a_model(path: Path) -> bool:
    """Whether there is a file that may be the only copy of somebody's weights, or what they cannot
    be used without: by how it begins, or by its name, or that of what a link leads to."""
    from offload.io.gguf_header import MAGIC  # here: help needs none of this, and no numpy
    from offload.io.pack_manifest import JOURNAL, MANIFEST
    from offload.models.synth_config import TOKENIZER_FILES

    others = {"config.json", "generation_config.json", MANIFEST, JOURNAL, *TOKENIZER_FILES}
    names = {path.name, path.resolve().name}
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return True
    except OSError:
        return False  # whoever replaces it says why it cannot be
    return any(n.lower().endswith(_WEIGHTS) for n in names) or not names.isdisjoint(others)


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
