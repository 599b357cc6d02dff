"""Result files: written whole or not at all; what is no file takes the bytes as they come."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from offload.errors import OffloadError

PRIVATE = 0o600


def expanded(path: Path) -> Path:
    """``path`` without its ``~``. Raises OffloadError: it is the home of nobody."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise OffloadError(
            f"{path}: there is no home directory {path.parts[0]}; give the whole path"
        ) from error


def check_name(path: Path, flag: str) -> Path:
    """``path`` without its ``~``; nothing has to be there. ``pathlib`` answers the names that are
    refused here with errors of its own, whatever it is asked about them.

    Raises:
        OffloadError: no file can be there, or none that we may know of: a name that is too long,
            links in a circle, a directory that may not be entered, the home of nobody.
    """
    try:
        path = expanded(path)
    except OffloadError as error:
        raise OffloadError(f"{flag} {error}") from error
    try:
        # Whoever needs it to be there says so.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
    except OSError as error:
        raise OffloadError(f"{flag} {path}: {error.strerror}; give another path") from error
    return path


def temporary_of(target: Path) -> Path:
    """A new name beside ``target``, for what is to take its place when it is complete."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def check_temporary(path: Path, what: str, inside: str = "") -> None:
    """Refuse a name that is not too long itself, but is while the file is written: said before the
    work, not behind it.

    Args:
        path: the result; nothing has to be there.
        what: the result, as an error names it.
        inside: where the result is a directory, a file in it.

    Raises:
        OffloadError: with how much shorter it must be.
    """
    target = expanded(path).resolve()
    if not target.name:
        return  # the root: a directory, as whoever asked for it is told
    temporary = temporary_of(target)
    try:
        os.lstat(temporary / inside)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return  # nothing is there, as it should be; whoever makes it says what else is wrong
        more = len(os.fsencode(temporary.name)) - len(os.fsencode(target.name))
        raise OffloadError(
            f"{what}: its name is {len(os.fsencode(target.name))} bytes long, and while it is "
            f"written another {more} ({error.strerror}); give one of "
            f"{_longest(target.parent) - more} or fewer, and a shorter path if that is not enough"
        ) from error


def _longest(folder: Path) -> int:
    """Bytes of the longest name that a directory can have in it, which may not be there yet."""
    while not folder.exists():
        folder = folder.parent
    return os.pathconf(folder, "PC_NAME_MAX")


def takes_bytes(path: Path) -> bool:
    """Whether ``path`` is there and neither a file nor a directory: a pipe, a device, a shell's
    ``>(command)``. A file put in its place would be of use to nobody, and as root the end of
    /dev/null."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to; whoever reads ``path`` sees the old one, or all of the new one.

    ``mode``: of the new file, less the umask. Links are followed. After an error there is nothing
    new.

    Raises:
        OSError: it cannot be written.
    """
    path = expanded(path)
    if takes_bytes(path):  # not resolved: /dev/fd/63 leads to no name
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    # Not mkstemp: its files are 0600 whatever the user's umask says.
    temporary = temporary_of(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        fd = os.open(temporary, flags, mode)
        stack.callback(temporary.unlink, missing_ok=True)
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        stack.pop_all()


__all__ = [
    "PRIVATE",
    "check_name",
    "check_temporary",
    "expanded",
    "takes_bytes",
    "temporary_of",
    "whole_file",
]
