"""Small filesystems that are really full or read-only, where one may mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_filesystem(place: Path, mebibytes: int) -> Iterator[Path]:
    """An ext4 of ``mebibytes`` in a file, else a tmpfs, mounted; skips the test where neither can
    be. Space that only root may use is not set aside: tests may run as root."""
    disk, image = place / "small", place / "small.img"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    ways = [["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(disk)]]
    if shutil.which("mkfs.ext4") is not None:
        with image.open("wb") as file:
            file.truncate(mebibytes << 20)
        make = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)]
        if _runs(make):
            ways.insert(0, ["mount", "-o", "loop", str(image), str(disk)])
    if not any(_runs(words) for words in ways):
        pytest.skip("no right to mount a filesystem")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _runs(words: list[str]) -> bool:
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is free, to the last block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    free = os.statvfs(disk)
    assert free.f_bavail * free.f_frsize < 1 << 14
    return filler
