"""Files opened past the page cache, with a fallback where the filesystem refuses.

The page cache would keep a second copy of every block, outside the RAM budget, and evict other
programs' pages for bytes we cache ourselves. So files are opened with O_DIRECT; where that is
refused, reads and writes are buffered and the pages are given back after each request.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal

from offload.blocks import ALIGN
from offload.errors import ClosedError, StoreError
from offload.io.memory import address
from offload.units import format_bytes

log = logging.getLogger(__name__)

Mode = Literal["direct", "buffered"]


def open_to_read(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """``open(path, "rb")`` of what is meant to be a file: a named pipe, where that would wait for
    somebody to write, is empty.

    Raises:
        OSError: as ``open``.
    """
    return open(
        path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    )


LFS_MAGIC = b"version https://git-lfs"
"""What git leaves in the place of a large file that was not fetched."""
LFS_POINTER = (
    "this is a pointer of git-lfs and not the file; fetch it (git lfs pull), or download the model "
    "again"
)

REFUSALS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What filesystems answer to O_DIRECT: tmpfs of old kernels, some FUSE and network ones."""


class TransferError(StoreError):
    """A read or write of a file failed.

    Attributes: ``path``; ``offset`` in the file, bytes; ``errno``, or None where the system
    reported no error (a file that ends too early).
    """

    def __init__(self, message: str, *, path: str, offset: int, errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.errno = errno


def _set_flags(fd: int, flags: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Syscalls:
    """The system calls a ``DirectFile`` makes, so that a test can put a failure in any place."""

    open: Callable[[str, int, int], int] = os.open
    set_flags: Callable[[int, int], None] = _set_flags
    preadv: Callable[[int, list[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, list[memoryview], int], int] = os.pwritev
    fadvise: Callable[[int, int, int, int], None] = os.posix_fadvise


class DirectFile:
    """A regular file for whole-page requests from any thread.

    Offsets, lengths and buffer addresses must be multiples of 4096 in both modes: a request that
    only works on a machine without O_DIRECT is a bug that should show on every machine.

    Attributes:
        path: the name, for messages.
        size: bytes at the time of opening or behind our last write; a reader may count on them.
        mode: ``"direct"`` or ``"buffered"``; may change to buffered on the first request.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        *,
        refused: OSError | None = None,
        syscalls: Syscalls | None = None,
    ) -> None:
        """Take over an open descriptor; it is closed here if that fails.

        ``refused``: why it could not be opened with O_DIRECT, if that was tried already.
        """
        self._sys = syscalls or Syscalls()
        self._fd = fd
        self.path = path
        self.mode: Mode = "buffered"
        self._idle = threading.Condition()
        self._users = 0
        self._closed = False
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise StoreError(f"{path} is not a regular file")
            self.size = info.st_size
            self._mtime_ns = info.st_mtime_ns
            if refused is None:
                refused = self._turn_on()
            if refused is not None:
                self._warn(refused)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        writable: bool = False,
        syscalls: Syscalls | None = None,
    ) -> DirectFile:
        """Open an existing file.

        Raises:
            StoreError: it is missing, forbidden, or not a regular file.
        """
        name = os.fspath(path)
        calls = syscalls or Syscalls()
        # Without waiting: a FIFO in a file's place would be opened when somebody writes to it.
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        refused = None
        try:
            try:
                fd = calls.open(name, flags | os.O_DIRECT, 0)
            except OSError as e:
                if e.errno not in REFUSALS:
                    raise
                refused = e
                fd = calls.open(name, flags, 0)
        except OSError as e:
            hint = "; raise their limit (ulimit -n)" if e.errno == errno.EMFILE else ""
            raise StoreError(f"cannot open {name}: {e.strerror}{hint}") from e
        file = cls(fd, name, refused=refused, syscalls=calls)
        os.set_blocking(fd, True)
        return file

    def _turn_on(self) -> OSError | None:
        """Set O_DIRECT, or return why not. A descriptor that has it already is asked again:
        anonymous files are opened without it."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            self._sys.set_flags(self._fd, flags | os.O_DIRECT)
        except OSError as e:
            if e.errno not in REFUSALS:
                raise StoreError(f"cannot open {self.path}: {e.strerror}") from e
            return e
        self.mode = "direct"
        return None

    def _turn_off(self, why: OSError) -> None:
        """Give up O_DIRECT after a refused request; once, whichever thread comes first."""
        with self._idle:
            if self.mode == "buffered":
                return
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            self._sys.set_flags(self._fd, flags & ~os.O_DIRECT)
            self.mode = "buffered"
        self._warn(why)

    def _warn(self, why: OSError) -> None:
        log.warning(
            "%s: the filesystem refuses O_DIRECT (%s); using buffered I/O and dropping the pages",
            self.path,
            why.strerror or errno.errorcode.get(why.errno or 0, "unknown"),
        )

    def read(self, offset: int, *bufs: memoryview) -> int:
        """Fill ``bufs``, one after the other, from ``offset``; blocks. Returns the bytes read.

        That is their length, or less where the range reaches past ``size``: the enclosing pages
        of an unaligned end of file. Bytes of ``bufs`` behind the returned count are undefined.

        Raises:
            TransferError: a read error, or the file is shorter than when it was opened.
            ClosedError: the file is closed.
            ValueError: something is not aligned to 4096.
        """
        _check_aligned(offset, bufs)
        want = min(sum(b.nbytes for b in bufs), max(0, self.size - offset))
        fd = self._begin()
        try:
            done = self._loop(self._sys.preadv, fd, offset, bufs, want, "read")
            if done < want:
                raise TransferError(
                    f"{self.path} shrank while it was in use: {self.size} bytes when opened, now "
                    f"{os.fstat(fd).st_size}; {want} bytes were wanted at offset {offset}, "
                    f"{done} came. Restore the file and start again",
                    path=self.path,
                    offset=offset + done,
                )
        finally:
            self._end()
        return done

    def write(self, offset: int, buf: memoryview) -> int:
        """Write all of ``buf`` at ``offset``; blocks. Returns ``buf.nbytes``.

        Raises:
            TransferError: a write error, a full disk included.
            ClosedError: the file is closed.
            ValueError: something is not aligned to 4096.
        """
        _check_aligned(offset, [buf])
        with self._use() as fd:
            done = self._loop(self._sys.pwritev, fd, offset, [buf], buf.nbytes, "write")
            if done < buf.nbytes:
                raise TransferError(
                    f"{self.path}: wrote {done} of {buf.nbytes} bytes at offset {offset}, "
                    "then nothing more was accepted",
                    path=self.path,
                    offset=offset + done,
                )
            with self._idle:
                self.size = max(self.size, offset + done)
        return done

    def _loop(
        self,
        call: Callable[[int, list[memoryview], int], int],
        fd: int,
        offset: int,
        bufs: Sequence[memoryview],
        want: int,
        verb: str,
    ) -> int:
        """Repeat a short call until ``want`` bytes went through or nothing moves any more."""
        whole = sum(b.nbytes for b in bufs)
        done = 0
        while done < want:
            # A call may stop in the middle of a page; the next one starts at a page again and
            # repeats some bytes, because O_DIRECT takes no other offset.
            start = done - done % ALIGN
            mode = self.mode  # before the call: another thread may turn it off meanwhile
            try:
                end = start + call(fd, _rest(bufs, start), offset + start)
            except OSError as e:
                if mode == "direct" and e.errno in REFUSALS:
                    self._turn_off(e)
                    continue
                raise self._failed(e, verb, offset + start, whole - start) from e
            if end <= done:
                break
            done = end
        if self.mode == "buffered" and done:
            self._drop(fd, offset, whole)
        return done

    def _drop(self, fd: int, offset: int, nbytes: int) -> None:
        try:
            self._sys.fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as e:  # advice: the data is right either way, only the cache grows
            log.debug("%s: posix_fadvise: %s", self.path, e.strerror)

    def _failed(self, e: OSError, verb: str, offset: int, nbytes: int) -> TransferError:
        message = f"cannot {verb} {nbytes} bytes at offset {offset} of {self.path}: {e.strerror}"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            try:
                disk = os.fstatvfs(self._fd)
                message += f"; {format_bytes(disk.f_bavail * disk.f_frsize)} are free there"
            except OSError:
                message += "; the free space is unknown"
            message += ". Free some, or use another directory"
        return TransferError(message, path=self.path, offset=offset, errno=e.errno)

    @contextmanager
    def _use(self) -> Iterator[int]:
        """The descriptor, kept open meanwhile."""
        fd = self._begin()
        try:
            yield fd
        finally:
            self._end()

    def _begin(self) -> int:
        """The descriptor, kept open until ``_end``: a closed number may name another file by then.
        Without a context's object and frames, for reads."""
        with self._idle:
            if self._closed:
                raise ClosedError(f"{self.path} is closed")
            self._users += 1
        return self._fd

    def _end(self) -> None:
        with self._idle:
            self._users -= 1
            if self._closed:
                self._idle.notify_all()

    def changed(self) -> bool:
        """Whether others have written to it, or touched it, since it was opened; of a file that is
        only read. One that was put in its place does not count: this one is still read. Raises
        nothing, as it is asked on the way to ``close``: False of what is closed, or whose
        filesystem does not answer."""
        with self._idle:
            if self._closed:
                return False
            try:
                now = os.fstat(self._fd)
            except OSError as e:
                log.debug("%s: fstat: %s", self.path, e.strerror)
                return False
        return (now.st_size, now.st_mtime_ns) != (self.size, self._mtime_ns)

    def truncate(self, nbytes: int) -> None:
        """Cut the file to at most ``nbytes``."""
        with self._use() as fd, self._idle:
            if self.size > nbytes:
                os.ftruncate(fd, nbytes)
                self.size = nbytes

    def sync(self) -> None:
        """Have everything written reach the disk."""
        with self._use() as fd:
            try:
                os.fsync(fd)
            except OSError as e:
                raise self._failed(e, "sync", 0, self.size) from e

    def fileno(self) -> int:
        """The descriptor, valid until ``close``."""
        return self._fd

    def close(self) -> None:
        """Wait for the requests under way, then close. Idempotent."""
        with self._idle:
            first, self._closed = not self._closed, True
            self._idle.wait_for(lambda: self._users == 0)
            if first:
                os.close(self._fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rest(bufs: Sequence[memoryview], start: int) -> list[memoryview]:
    """``bufs`` without their first ``start`` bytes."""
    out = []
    for buf in bufs:
        if start < buf.nbytes:
            out.append(buf[start:] if start else buf)
        start = max(0, start - buf.nbytes)
    return out


def _check_aligned(offset: int, bufs: Sequence[memoryview]) -> None:
    for buf in bufs:
        at = address(buf)
        if offset < 0 or offset % ALIGN or buf.nbytes % ALIGN or at % ALIGN:
            raise ValueError(
                f"offset {offset}, length {buf.nbytes} and address {at:#x} must be multiples of "
                f"{ALIGN}"
            )
