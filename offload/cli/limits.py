"""What the system does not give this process, where libraries say so in their own ways."""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence
from pathlib import Path

from offload.errors import OffloadError
from offload.io.whole_file import expanded
from offload.io.workers import NO_THREAD, is_no_thread

_TORCH = "DefaultCPUAllocator: "
_NO_TEMPORARY = "No usable temporary directory"
_NO_HOME = "Could not determine home directory."  # of pathlib
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_OF_PATHS = frozenset(
    {errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)


def limit_reached(error: BaseException) -> str | None:
    """A line for the user if ``error`` is of a limit that the system or a shell has set; None if it
    is anything else, which may be a bug."""
    if is_no_thread(error):
        return NO_THREAD
    text = str(error)
    if isinstance(error, OSError) and error.errno in _NO_FILES:
        return f"there are {_too_many_files(error)}"
    if isinstance(error, OSError):
        if _NO_TEMPORARY not in text:
            return None
        return (
            f"there is no place for temporary files ({error.strerror}); set TMPDIR to a directory "
            "that can be written to"
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _TORCH in text):
        what = text.partition(_TORCH)[2] or text
        detail = f" ({what.splitlines()[0]})" if what else ""
        return (
            f"there is no more memory for this process{detail}: the machine's is used up, or a "
            "limit is reached (ulimit -v); give a smaller --ram, raise the limit, or end other "
            "programs"
        )
    return None


def and_files(error: BaseException) -> str:
    """What to add to the words of an error of ours that comes of too many open files and sends
    elsewhere for it: to another directory, say."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_FILES:
            return "" if "ulimit -n" in str(error) else f": {_too_many_files(cause)}"
        cause = cause.__cause__
    return ""


def _too_many_files(error: OSError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    whose = f"this process may have {limit}" if error.errno == errno.EMFILE else "in all programs"
    return f"too many open files ({whose}); raise their limit (ulimit -n)"


def path_refused(error: BaseException, words: Sequence[str]) -> str | None:
    """A line for the user if the system does not even look at a path: a folder that is closed, a
    name that is too long, the home of nobody. None if it is anything else, which may be a bug.

    Args:
        words: those of the command; pathlib does not say whose home it looked for.
    """
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_PATHS:
        return f"cannot use {error.filename!s:.500}: {error.strerror}; name another place"
    if not isinstance(error, RuntimeError) or str(error) != _NO_HOME:
        return None
    for word in words:
        given = word.partition("=")[2] if word.startswith("-") else word
        if given.startswith("~"):
            try:
                expanded(Path(given))
            except OffloadError as nobody:
                return str(nobody)
    return "there is no home directory; set HOME"


__all__ = ["and_files", "limit_reached", "path_refused"]
