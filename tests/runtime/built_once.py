"""What tests compile with the C++ compiler, once for all processes and runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def once(name: str, sources: Iterable[Path], make: Callable[[Path], Path]) -> Path:
    """What ``make`` compiles of ``sources`` for this torch, kept for other processes, which wait
    for the one that compiles."""
    known = hashlib.sha256(torch.__version__.encode())
    for source in sorted(sources):
        known.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"offload-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}-{known.hexdigest()[:16]}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            make(library.with_suffix(".new")).rename(library)
    return library
