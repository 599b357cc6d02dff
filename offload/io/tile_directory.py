"""The directory of a tile store: who may use it, what is in it, how a manifest gets its name.

    DIRECTORY/            0700, locked by the process that uses it
      tiles.bin           all slots, reserved when the store is made
      commit-12.json      a commit (see ``tile_manifest``)

A manifest is written under a temporary name, synced, renamed and the directory synced: a commit is
there as a whole or not at all. The lock is on the directory itself, so it leaves no file behind
and ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import StoreError
from offload.io.files import DirectFile, Syscalls
from offload.io.private import reserve
from offload.io.tile_file import TileFile
from offload.io.tile_manifest import Commit, Layout, load, require_same
from offload.units import format_bytes

log = logging.getLogger(__name__)

DATA = "tiles.bin"
TEMPORARY = "commit.tmp"
_COMMIT = re.compile(r"commit-([1-9][0-9]{0,17})\.json")


def is_tile_store(directory: str | os.PathLike[str]) -> bool:
    """Whether ``directory`` holds a tile store, with or without a commit."""
    return (Path(directory) / DATA).is_file()


def reserved(directory: str | os.PathLike[str]) -> int:
    """Bytes of the data file of a store; 0 where there is none."""
    path = Path(directory) / DATA
    return path.stat().st_size if path.is_file() else 0


def has_commits(directory: str | os.PathLike[str]) -> bool:
    """Whether there is a file that is named like a commit."""
    path = Path(directory)
    return path.is_dir() and any(_COMMIT.fullmatch(name) for name in os.listdir(path))


def stored_identity(directory: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The identity in the newest whole commit; None if there is none. Nothing is locked: whoever
    opens the store compares it again.

    Raises:
        StoreError: the newest whole one is of another version.
    """
    path = Path(directory)
    names = os.listdir(path) if path.is_dir() else []
    for number in sorted((int(m[1]) for m in map(_COMMIT.fullmatch, names) if m), reverse=True):
        file = path / f"commit-{number}.json"
        with contextlib.suppress(OSError, ValueError):
            return load(file.read_bytes(), os.fspath(file)).identity
    return None


def check_directory(directory: str | os.PathLike[str], *, resume: bool) -> None:
    """Refuse early what making a store in ``directory`` (or opening the one there: ``resume``)
    would refuse. Nothing is made or changed.

    Raises:
        StoreError: somebody else's files are in it, it cannot be read, or it is in use.
    """
    path = Path(directory)
    if not path.is_dir():
        return
    TileDirectory.lock(path, TileSyscalls()).close()
    if not resume:
        try:
            _check_empty(path, os.listdir(path))
        except OSError as e:
            raise StoreError(f"cannot look into {path}: {e.strerror}") from e


def _check_empty(path: Path, names: Collection[str]) -> None:
    if DATA in names:
        raise StoreError(
            f"{path} already holds training states; continue from them with --resume, or choose "
            "another directory"
        )
    if names:
        raise StoreError(
            f"{path} is not empty (it has {min(names)}) and no store of training states; nothing "
            "in it was touched, choose another directory"
        )


def _rename(old: str, new: str, folder: int) -> None:
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def _unlink(name: str, folder: int) -> None:
    os.unlink(name, dir_fd=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSyscalls(Syscalls):
    """The system calls of a tile store. ``open`` is called for manifests, too, with their path."""

    write: Callable[[int, memoryview], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    rename: Callable[[str, str, int], None] = _rename
    """(old name, new name, descriptor of their directory)"""
    unlink: Callable[[str, int], None] = _unlink
    """(name, descriptor of its directory)"""


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DoubtfulError(StoreError):
    """Neither could a commit be made durable nor could it be taken back for certain."""


class TileDirectory:
    """A locked directory. Not thread-safe, except that ``publish`` may run in any one thread."""

    def __init__(self, path: Path, folder: int, calls: TileSyscalls) -> None:
        self.path = path
        self._folder = folder
        self._sys = calls

    @classmethod
    def make(cls, path: Path, calls: TileSyscalls) -> TileDirectory:
        """Make ``path`` private and lock it; one that is there already must be empty.

        Raises:
            StoreError: it holds something, is no directory, cannot be made, or is in use.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        except OSError as e:
            raise StoreError(f"cannot make {path}: {e.strerror}; choose another directory") from e
        self = cls.lock(path, calls)
        try:
            _check_empty(path, os.listdir(self._folder))
            os.fchmod(self._folder, 0o700)
            _sync_directory(path.parent)
        except BaseException as e:
            self.close()
            if isinstance(e, OSError):
                raise StoreError(f"cannot make {path} private: {e.strerror}") from e
            raise
        return self

    @classmethod
    def lock(cls, path: Path, calls: TileSyscalls) -> TileDirectory:
        """Lock a directory that is there.

        Raises:
            StoreError: it is missing or in use.
        """
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise StoreError(f"cannot open {path}: {e.strerror}; choose another directory") from e
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise StoreError(
                f"{path} is in use by another process, or is open already; wait for it, or choose "
                "another directory"
            ) from None
        except OSError as e:
            if e.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK):
                os.close(folder)
                raise StoreError(f"cannot lock {path}: {e.strerror}") from e
            log.warning("%s cannot be locked (%s); let one process use it", path, e.strerror)
        return cls(path, folder, calls)

    # The data file

    def make_data(self, nbytes: int) -> DirectFile:
        """The data file, all of it reserved.

        Raises:
            StoreError: too little space.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(DATA, flags, 0o600, dir_fd=self._folder)
        except OSError as e:
            raise StoreError(f"cannot make {self.path / DATA}: {e.strerror}") from e
        try:
            os.fchmod(fd, 0o600)  # whatever the umask made of it
            self._reserve(fd, 0, nbytes)
            os.fsync(self._folder)
        except BaseException as e:
            os.close(fd)
            os.unlink(DATA, dir_fd=self._folder)
            if isinstance(e, OSError):
                raise StoreError(f"cannot make {self.path / DATA}: {e.strerror}") from e
            raise
        return DirectFile(fd, os.fspath(self.path / DATA), syscalls=self._sys)

    def open_data(self, needed: int, wanted: int) -> DirectFile:
        """The data file, grown to ``wanted`` bytes if it is shorter.

        Raises:
            StoreError: it is missing, shorter than the ``needed`` bytes of its commits, or there
                is too little space to grow.
        """
        path = self.path / DATA
        try:
            fd = os.open(DATA, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError as e:
            raise StoreError(
                f"cannot open {path}: {e.strerror}; the training states are in it: bring it "
                "back, or start again in another directory"
            ) from e
        try:
            size = os.fstat(fd).st_size
            if size < needed:
                raise StoreError(
                    f"{path} has {size} bytes, its commits need {needed}: it was cut; bring it "
                    "back, or start again in another directory"
                )
            if size < wanted:
                self._reserve(fd, size, wanted)
        except BaseException:
            os.close(fd)
            raise
        return DirectFile(fd, os.fspath(path), syscalls=self._sys)

    def grow(self, file: TileFile, generations: int) -> None:
        """Reserve room for more generations.

        Raises:
            StoreError: too little space.
        """
        have, want = (n * file.layout.nbytes for n in (file.generations, generations))
        self._reserve(file.data.fileno(), have, want)
        file.generations = generations

    def _reserve(self, fd: int, have: int, want: int) -> None:
        disk = os.fstatvfs(fd)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and want - have > free:
            raise StoreError(
                f"{self.path} has too little space: {format_bytes(want - have)} "
                f"({want - have} bytes) are needed for the training states and the commits that "
                f"are kept, {format_bytes(free)} ({free} bytes) are free; free some, keep fewer "
                "commits or choose another directory"
            )
        reserve(fd, want, os.fspath(self.path), start=have)

    # Commits

    def numbers(self) -> list[int]:
        """Of all files that are named like a commit, in order."""
        found = map(_COMMIT.fullmatch, os.listdir(self._folder))
        return sorted(int(m[1]) for m in found if m)

    def name(self, number: int) -> str:
        return f"commit-{number}.json"

    def read(self, number: int) -> bytes:
        """A manifest. Raises StoreError if it cannot be read: that is no reason to go without."""
        path = self.path / self.name(number)
        try:
            return path.read_bytes()
        except OSError as e:
            raise StoreError(
                f"cannot read {path}: {e.strerror}; try again, or delete it to continue from an "
                "earlier commit"
            ) from e

    def choose(
        self, layout: Layout, identity: Mapping[str, Any], wanted: int | None
    ) -> tuple[Commit | None, dict[int, bytes]]:
        """Commit ``wanted``, or the newest valid one, and the generations of all valid ones.

        Raises:
            StoreError: there is no such commit, all are damaged, or they are of another run.
        """
        chosen: Commit | None = None
        valid: dict[int, bytes] = {}
        why: dict[int, str] = {}
        for number in reversed(self.numbers()):
            where = os.fspath(self.path / self.name(number))
            try:
                found = load(self.read(number), where)
                if found.number != number:
                    raise ValueError(f"it is commit {found.number}")
            except ValueError as e:
                why[number] = f"{where} is damaged: {e}"
                continue
            require_same(where, found, layout, identity)
            valid[number] = found.generations
            if number == wanted or (wanted is None and chosen is None):
                chosen = found
        there = ", ".join(map(str, sorted(valid))) or "none"
        if wanted is not None and chosen is None:
            reason = why.get(wanted, f"{self.path} has no commit {wanted}")
            raise StoreError(f"{reason}; these can be used: {there}")
        if why and chosen is None:
            raise StoreError(
                f"{next(iter(why.values()))}, and there is no other commit in {self.path}; bring a "
                "copy back, or start again in another directory"
            )
        for reason in why.values():
            log.warning("%s; these can be used: %s", reason, there)
        return chosen, valid

    def clean(self) -> None:
        """Remove what a killed commit left. Raises StoreError."""
        if TEMPORARY in os.listdir(self._folder):
            self.remove_names([TEMPORARY])

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove commits, for certain: their slots are written to from now on.

        Raises:
            StoreError: that failed; some may be gone.
        """
        self.remove_names([self.name(n) for n in numbers])

    def remove_names(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._sys.unlink(name, self._folder)
            self._sys.fsync(self._folder)
        except OSError as e:
            raise StoreError(f"cannot remove {names} in {self.path}: {e.strerror}") from e

    def publish(self, number: int, manifest: bytes) -> None:
        """Make a commit durable under its name; it is there as a whole or not at all.

        Raises:
            DoubtfulError: it may come back after a crash, so its slots must not be written to.
            StoreError: it failed and left nothing.
        """
        target, renamed = self.name(number), False
        try:
            self._write(manifest)
            self._sys.rename(TEMPORARY, target, self._folder)
            renamed = True
            self._sys.fsync(self._folder)
        except OSError as e:
            why = f"cannot write {self.path / target} ({len(manifest)} bytes): {e.strerror}"
            try:
                self.remove_names([target] if renamed else [TEMPORARY])
            except StoreError as worse:
                if renamed:
                    raise DoubtfulError(f"{why}; nor could it be taken back: {worse}") from e
                log.warning("%s", worse)  # a temporary file stays until the next start
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                why += "; free some space, then continue with --resume"
            raise StoreError(why) from e

    def _write(self, manifest: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._sys.open(os.fspath(self.path / TEMPORARY), flags, 0o600)
        try:
            rest = memoryview(manifest)
            while rest:
                written = self._sys.write(fd, rest)
                if written == 0:
                    raise OSError(errno.EIO, "nothing more was accepted")
                rest = rest[written:]
            self._sys.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._folder)
