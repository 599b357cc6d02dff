"""Private files: without a name, with their space reserved, and how they get a name."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import tempfile
from pathlib import Path

from offload.errors import StoreError
from offload.io.files import DirectFile
from offload.io.memory import AlignedBuffer
from offload.units import format_bytes

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def nameless_file(directory: str | os.PathLike[str]) -> tuple[int, bool]:
    """A descriptor of a new file without a name, and whether it can be linked later."""
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), True
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        # mkstemp makes it 0600; between the two calls a kill leaves an empty file.
        fd, name = tempfile.mkstemp(prefix=".offload-", dir=directory)
        os.unlink(name)
    except OSError as e:
        raise StoreError(
            f"cannot make a file in {os.fspath(directory)}: {e.strerror}; "
            "choose another directory for the disk tier"
        ) from e
    return fd, False


def reserve(fd: int, nbytes: int, directory: str, *, start: int = 0, smaller: str = "") -> None:
    """Check the free space and take it: for a file of ``nbytes`` that has ``start`` already.

    Args:
        smaller: what makes smaller files of the same content, for the error where this one is
            larger than any may be. Empty: nothing does.

    Raises:
        StoreError: there is too little space, or no file may be so large.
    """
    disk = os.fstatvfs(fd)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and nbytes - start > free:
        raise _too_small(nbytes - start, free, directory)
    if nbytes == start:
        return
    # Not os.posix_fallocate: where the filesystem cannot, glibc writes into every block instead,
    # which takes minutes for a large file; there we go on without a reservation.
    if _libc.fallocate(fd, 0, ctypes.c_int64(start), ctypes.c_int64(nbytes - start)) != 0:
        code = ctypes.get_errno()
        if code == errno.EFBIG:
            raise StoreError(
                f"{directory} takes no file of {format_bytes(nbytes)} ({nbytes} bytes): its "
                "filesystem, or this process's limit (ulimit -f), allows only smaller ones; raise "
                f"the limit, or choose another directory{smaller and f', or {smaller}'}"
            )
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise _too_small(nbytes, free, directory)
        log.debug("fallocate in %s: %s", directory, os.strerror(code))
        os.ftruncate(fd, nbytes)


def _too_small(nbytes: int, free: int, directory: str) -> StoreError:
    return StoreError(
        f"{directory} has too little space: the blocks need {format_bytes(nbytes)} "
        f"({nbytes} bytes), {format_bytes(free)} ({free} bytes) are free; "
        "free some or choose another directory"
    )


def give_name(file: DirectFile, linkable: bool, folder: int, target: Path) -> None:
    """Publish ``file`` under the name of ``target`` in ``folder``, in one step.

    ``linkable`` as ``nameless_file`` said; otherwise the file is copied first.
    """
    # A link cannot replace a name, a rename can: so link under a new name, then rename.
    temp = f".{target.name}.{secrets.token_hex(8)}"
    try:
        if not (linkable and _link(file, folder, temp)):
            _copy(file, folder, temp)
        os.replace(temp, target.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        try:
            os.unlink(temp, dir_fd=folder)
        except FileNotFoundError:
            log.debug("%s was not made", temp)
        raise


def _link(file: DirectFile, folder: int, temp: str) -> bool:
    """Give the nameless file a name; False where the system cannot (other disk, no /proc)."""
    try:
        # With a dir_fd Python calls linkat(AT_SYMLINK_FOLLOW); without, link(), which would
        # link the symbolic link in /proc itself.
        os.link(
            f"/proc/self/fd/{file.fileno()}",
            temp,
            src_dir_fd=folder,
            dst_dir_fd=folder,
            follow_symlinks=True,
        )
    except OSError as e:
        if e.errno in (errno.EXDEV, errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP):
            log.info("cannot link the private file (%s); copying it", e.strerror)
            return False
        raise
    return True


def _copy(source: DirectFile, folder: int, temp: str) -> None:
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        size = os.fstat(source.fileno()).st_size
        reserve(fd, size, "the target directory")
        with AlignedBuffer(_COPY_BYTES) as buf:
            for at in range(0, size, _COPY_BYTES):
                part = buf[: min(_COPY_BYTES, size - at)]
                source.read(at, part)
                _write_all(fd, at, part)
                part.release()
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, offset: int, part: memoryview) -> None:
    done = 0
    while done < part.nbytes:
        done += os.pwrite(fd, part[done:], offset + done)
