"""The directory of stored groups: private files, least recently used ones go first.

``DIR/<root, 32 digits>/<name, 64 digits>.kv``. Nothing else in DIR is ever touched. There are no
locks: a file gets its name when it is whole and is never changed after, so a reader has all of it
or none; two writers of one name write the same thing; who removes a file that another has removed
already is content; who misses one computes it. What a killed writer leaves has no name.

A file's modification time is when its prefix was last used: an order that survives a crash. The
groups of a prompt get times that fall from its beginning to its end, so the end goes first: without
its beginning no group can be used.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

from offload.errors import OffloadError, StoreError
from offload.io.files import DirectFile
from offload.io.private import give_name, nameless_file, reserve
from offload.io.whole_file import expanded
from offload.units import format_bytes

log = logging.getLogger(__name__)

SUFFIX = ".kv"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{64}\.kv")
_LEFT = re.compile(r"\.[0-9a-f]{64}\.kv\.[0-9a-f]{16}")
"""What ``give_name`` calls a file for the moment before it has its own name."""

LEFT_S = 3600.0
"""Such a name older than this is of a writer that was killed in that moment."""

STEP_NS = 1000
"""By so much the time of a group is before that of the one in front of it."""


class Stored(NamedTuple):
    """A file: when its prefix was used last (ns), its bytes, where it is."""

    used_ns: int
    nbytes: int
    path: str


def open_directory(directory: str | os.PathLike[str]) -> Path:
    """Make the directory if there is none, for its owner only, and see whether it can be written.

    Raises:
        OffloadError: it cannot be used; says why.
    """
    path = expanded(Path(directory))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise OffloadError(f"--prompt-cache {path} is not a directory; give another") from None
    except OSError as error:
        raise OffloadError(f"--prompt-cache {path} cannot be made: {error.strerror}") from error
    try:
        os.close(nameless_file(path)[0])
    except StoreError as error:
        raise OffloadError(
            f"--prompt-cache {path} cannot be written to: {_reason(error)}; give another directory"
        ) from error
    return path


class PrefixFolder:
    """The groups of one ``root`` in a directory, and the size of all that is in it.

    One thread at a time writes; any may read.
    """

    def __init__(self, directory: Path, root: str, limit: int) -> None:
        """
        Args:
            directory: from ``open_directory``.
            limit: bytes of all groups in it, of other models too.

        Raises:
            OffloadError: the folder in it is not private, or cannot be made.
        """
        self.directory, self.limit = directory, limit
        self.path = directory / root[:32]
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise OffloadError(
                f"--prompt-cache {self.path} cannot be used: {error.strerror}"
            ) from error
        info = os.fstat(self._folder)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            os.close(self._folder)
            raise OffloadError(
                f"--prompt-cache {self.path} is open to others (owner {info.st_uid}, mode "
                f"{stat.S_IMODE(info.st_mode):03o}), and prompts are private; give another "
                f"directory, or chmod 700 it"
            )

    def holds(self, name: str) -> bool:
        """Whether a group is there now."""
        return (self.path / f"{name}{SUFFIX}").exists()

    def read(self, name: str, room: Callable[[int], memoryview]) -> memoryview | None:
        """The whole file of a group, in ``room(nbytes)``; None: it is not there.

        Raises:
            StoreError: it cannot be read.
        """
        path = self.path / f"{name}{SUFFIX}"
        try:
            file = DirectFile.open(path)
        except StoreError:
            if path.exists():
                raise
            return None
        with file:
            area = room(file.size)
            file.read(0, area)
        return area

    def touch(self, name: str, used_ns: int) -> None:
        """Say that a group was used; one that is gone is no matter."""
        try:
            os.utime(self.path / f"{name}{SUFFIX}", ns=(used_ns, used_ns))
        except OSError as error:
            log.debug("%s was not touched: %s", name, error.strerror)

    def publish(self, name: str, data: memoryview, used_ns: int) -> None:
        """Write a group and give it its name; until then there is nothing to see of it.

        Raises:
            StoreError, OSError: no space, or a write failed; then nothing is left of it.
        """
        target = self.path / f"{name}{SUFFIX}"
        fd, linkable = nameless_file(self.path)
        with DirectFile(fd, f"{self.path}/{name[:16]}…{SUFFIX}") as file:
            reserve(fd, data.nbytes, str(self.path))
            file.write(0, data)
            os.utime(fd, ns=(used_ns, used_ns))
            file.sync()
            give_name(file, linkable, self._folder, target)

    def drop(self, name: str) -> None:
        """Remove a damaged group."""
        _unlink(str(self.path / f"{name}{SUFFIX}"))

    def make_room(self, nbytes: int, keep: Container[str]) -> bool:
        """Remove least recently used groups until ``nbytes`` more are within the limit; False: they
        are not without removing one of the names ``keep``."""
        stored = self.scan()
        over = sum(n.nbytes for n in stored) + nbytes - self.limit
        gone = []
        for found in sorted(stored):
            if over <= 0:
                break
            if os.path.basename(found.path).removesuffix(SUFFIX) in keep:
                continue
            gone.append(found)
            over -= found.nbytes
        if over > 0:
            return False
        for found in gone:
            _unlink(found.path)
        if gone:
            size = sum(n.nbytes for n in gone)
            log.info("%d groups (%s) made room in the prompt cache", len(gone), format_bytes(size))
        return True

    def scan(self) -> list[Stored]:
        """All groups in the directory, of all models; removes what killed writers left."""
        found = []
        for folder in _entries(self.directory, _FOLDER):
            for entry in _entries(folder.path, _FILE):
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process has removed it
                found.append(Stored(info.st_mtime_ns, info.st_size, entry.path))
        for entry in _entries(self.path, _LEFT):
            try:
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFT_S:
                    _unlink(entry.path)
            except FileNotFoundError:
                continue
        return found

    def close(self) -> None:
        """Idempotent."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


def _entries(path: str | Path, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as listing:
            return [entry for entry in listing if pattern.fullmatch(entry.name)]
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        log.debug("%s is left out: %s", path, error.strerror)
        return []


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        log.debug("%s is gone already", path)
    except OSError as error:
        log.info("%s cannot be removed: %s", path, error.strerror)


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)
