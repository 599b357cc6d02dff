"""Writing a packed model directory: locked, resumable, and named as complete only at the end.

Order is what makes it safe. A journal in the new directory says what is being packed; bundles are
written front to back, past the page cache; every ``SYNC_BYTES`` they are synced, and only then the
finished blocks go into the journal, which is synced as well. The manifest comes last, by rename.
So a kill or a power cut at any instant leaves a directory without a manifest whose journal names
blocks that are whole; the next run continues behind them.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.blocks import ALIGN, align_up
from offload.errors import ClosedError, StoreError
from offload.io.files import DirectFile, Syscalls
from offload.io.json_fields import count
from offload.io.memory import AlignedBuffer
from offload.io.pack_manifest import (
    JOURNAL,
    MANIFEST,
    Block,
    Manifest,
    bundle_name,
    check_bundle,
    config_digest,
    dump,
    read_manifest,
    require_source,
    with_checksums,
)
from offload.io.pack_sums import PageSums
from offload.io.private import reserve
from offload.io.whole_file import expanded
from offload.units import format_bytes

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 * 2**20
SYNC_BYTES = 256 * 2**20


@dataclass(slots=True)
class Finished:
    """A block that is on the disk: its checksum, what the packer noted about it, and the CRC-32s
    of its pages if rows of it will be read."""

    checksum: int
    note: Any = None
    page_crcs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a directory is to hold. ``manifest`` has the blocks without checksums; ``plan`` is a
    digest of all that decides their bytes."""

    manifest: Manifest
    plan: str
    extra_bytes: int = 0
    """What the other files will take, for the check of the free space."""

    def header(self) -> dict[str, Any]:
        m = self.manifest
        return {
            "journal": 1,
            "plan": self.plan,
            "offload": m.offload,
            "source": str(m.source),
            "fingerprint": m.source.fingerprint,
            "quant": m.quant,
        }


@dataclass(slots=True)
class _Open:
    """The bundle that is being written."""

    number: int
    file: DirectFile
    at: int
    """Offset of the buffer's first byte."""
    fill: int = 0
    unsynced: int = 0
    pending: list[str] = field(default_factory=list)


class PackDirectory:
    """A directory that becomes a packed model. One process at a time; use ``with``.

    ``finished`` has the blocks that earlier runs left, in order; ``complete`` is the manifest of a
    directory that is a pack of this very job already.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        job: Job,
        *,
        wait: bool = False,
        syscalls: Syscalls | None = None,
        sync_bytes: int = SYNC_BYTES,
    ) -> None:
        """Lock ``path``, making it if it is not there, and see what it holds.

        Args:
            wait: for another process that packs into it; without, that is an error.

        Raises:
            OffloadError: it is something else, a pack of another source, in use, in the home of
                nobody, or there is too little space. Nothing is deleted or changed then.
        """
        self.path = Path(os.path.realpath(expanded(Path(path))))
        self._job = job
        self._syscalls = syscalls
        self._sync_bytes = sync_bytes
        self._open: _Open | None = None
        self._sums: PageSums | None = None
        self._journal = -1
        self._memory = contextlib.ExitStack()
        self._buffer = self._memory.enter_context(AlignedBuffer(BUFFER_BYTES))
        self.complete: Manifest | None = None
        self.finished: list[Finished] = []
        self._lock = -1
        try:
            self._lock = self._take(wait)
            self._look()
        except BaseException:
            self.close()
            raise

    # What is there

    def _take(self, wait: bool) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (NotADirectoryError, FileExistsError) as e:
            raise StoreError(
                f"{e.filename} exists and is no directory; choose another name"
            ) from None
        except OSError as e:
            raise StoreError(f"cannot make {self.path}: {e.strerror}") from e
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise StoreError(
                        f"another process is packing into {self.path}; wait for it, or choose "
                        "another directory"
                    ) from None
                log.info("waiting for another process that packs into %s", self.path)
                fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as e:
            if e.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK):
                os.close(fd)
                raise StoreError(f"cannot lock {self.path}: {e.strerror}") from e
            log.warning("%s cannot be locked (%s); pack into it only once", self.path, e.strerror)
        except BaseException:
            os.close(fd)
            raise
        if os.fstat(fd).st_nlink == 0:
            os.close(fd)
            raise StoreError(f"{self.path} was removed by another process; run it again")
        return fd

    def _look(self) -> None:
        names = set(os.listdir(self._lock))
        if MANIFEST in names:
            found = read_manifest(self.path)
            wanted = self._job.manifest
            require_source(found, wanted.source, wanted.quant, self.path)
            self.complete = found
            if JOURNAL in names:  # killed between the last two steps
                os.unlink(JOURNAL, dir_fd=self._lock)
            return
        if JOURNAL in names:
            self._continue()
        elif names - {_temporary(JOURNAL)}:
            first = min(names)
            raise StoreError(
                f"{self.path} exists and is not a packed model (it has {first}); nothing in it "
                "was touched, choose another directory"
            )
        self._check_space()
        fresh = JOURNAL not in names
        if fresh:
            # Before the bundles: what a kill leaves behind must be known for ours.
            line = json.dumps(self._job.header()) + "\n"
            _replace(self._lock, JOURNAL, line.encode())
        self._reserve(fresh)
        self._journal = os.open(
            JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=self._lock
        )

    def _continue(self) -> None:
        """Take over what an unfinished run has done."""
        journal = self.path / JOURNAL
        if not journal.is_file():  # to open a pipe would wait for a writer
            raise StoreError(f"{journal} is no file; delete {self.path} to start anew")
        raw = journal.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            header, *lines = [json.loads(line) for line in whole.splitlines()]
            found = {"source": "?", "quant": "?", "offload": "?", "plan": "?", **header}
            finished = [
                Finished(
                    count(checksum, "a checksum"),
                    note,
                    base64.b64decode("".join(crcs), validate=True),
                )
                for _, checksum, note, *crcs in lines
            ]
            numbers = [count(number, "a block's number") for number, *_ in lines]
        except (ValueError, TypeError, RecursionError) as e:
            raise StoreError(f"{journal} is damaged ({e}); delete {self.path} to start anew") from e
        want = self._job.header()
        if (found.get("fingerprint"), found["quant"]) != (want["fingerprint"], want["quant"]):
            raise StoreError(
                f"{self.path} is an unfinished pack of {found['source']} as {found['quant']}, "
                f"wanted is {want['source']} as {want['quant']}; choose another directory, or "
                "delete that one yourself"
            )
        if found["plan"] != want["plan"]:
            raise StoreError(
                f"{self.path} is an unfinished pack by offload {found['offload']}, which lays "
                f"blocks out in another way than this one ({want['offload']}); delete it to start "
                "anew"
            )
        if numbers != list(range(len(numbers))) or len(numbers) > len(self._blocks):
            raise StoreError(
                f"{self.path / JOURNAL} is damaged: its blocks are not in order; delete "
                f"{self.path} to start anew"
            )
        self._check_finished(finished)
        if len(whole) < len(raw):  # the line that a kill has cut
            os.truncate(self.path / JOURNAL, len(whole))
        self.finished = finished
        log.info("%s: %d of %d blocks are done", self.path, len(finished), len(self._blocks))

    def _check_finished(self, finished: Sequence[Finished]) -> None:
        """Raise StoreError unless what the journal names can be there: a bundle that went missing
        would be made anew, with zeros for the blocks that were in it."""
        for block, done in zip(self._blocks, finished, strict=False):
            want = 4 * (block.spec().slot_nbytes // ALIGN)
            if done.page_crcs and len(done.page_crcs) != want:
                raise StoreError(
                    f"{self.path / JOURNAL} is damaged: block {block.name} has "
                    f"{len(done.page_crcs)} bytes of checksums for its pages, not {want}; delete "
                    f"{self.path} to start anew"
                )
        for number in sorted({block.file for block in self._blocks[: len(finished)]}):
            name, nbytes = self._bundles[number]
            check_bundle(self.path / name, nbytes)

    @property
    def _blocks(self) -> Sequence[Block]:
        return self._job.manifest.blocks

    @property
    def _bundles(self) -> list[tuple[str, int]]:
        return [(bundle_name(i), n) for i, n in enumerate(self._job.manifest.files)]

    def _check_space(self) -> None:
        """Refuse to begin what the disk has no room for."""
        missing = self._job.extra_bytes
        for name, nbytes in self._bundles:
            try:
                missing += max(0, nbytes - os.stat(name, dir_fd=self._lock).st_blocks * 512)
            except FileNotFoundError:
                missing += nbytes
        disk = os.fstatvfs(self._lock)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and missing > free:
            self._remove_if_empty()
            raise StoreError(
                f"{self.path} has too little space: the pack needs {format_bytes(missing)} "
                f"({missing} bytes) more, {format_bytes(free)} ({free} bytes) are free; free "
                f"{format_bytes(missing - free)} or choose another disk"
            )

    def _reserve(self, fresh: bool) -> None:
        """Take the space for everything. ``fresh``: without it, nothing of this pack stays."""
        made = [JOURNAL] if fresh else []
        try:
            for name, nbytes in self._bundles:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                new = not os.path.lexists(self.path / name)
                fd = os.open(name, flags, 0o600, dir_fd=self._lock)
                if new:
                    made.append(name)
                try:
                    info = os.fstat(fd)
                    if info.st_size != nbytes or info.st_blocks * 512 < nbytes:
                        reserve(
                            fd, nbytes, os.fspath(self.path),
                            smaller="smaller files (offload pack --bundle-size)",
                        )  # fmt: skip
                        os.ftruncate(fd, nbytes)
                finally:
                    os.close(fd)
            os.fsync(self._lock)
        except BaseException as e:
            for name in reversed(made):  # this call's own, still without a byte; the journal last
                os.unlink(name, dir_fd=self._lock)
            self._remove_if_empty()
            if isinstance(e, OSError):
                raise StoreError(f"cannot make the bundles of {self.path}: {e.strerror}") from e
            raise

    def _remove_if_empty(self) -> None:
        try:
            self.path.rmdir()
        except OSError as e:
            log.debug("%s stays: %s", self.path, e.strerror)

    # Blocks

    def begin(self) -> None:
        """Start the first block that is not finished; its bytes come with ``write``."""
        block = self._next()
        if self._open is None or self._open.number != block.file:
            self._finish_file()
            name = self.path / bundle_name(block.file)
            file = DirectFile.open(name, writable=True, syscalls=self._syscalls)
            self._open = _Open(block.file, file, block.offset)
        if self._open.at != block.offset:
            raise ValueError(f"block {block.name} is at {block.offset}, not {self._open.at}")
        self._sums = PageSums(pages=self._job.manifest.read_by_row(block))

    def _next(self) -> Block:
        if self._journal < 0:
            raise ClosedError(f"{self.path} is closed, or complete")
        if len(self.finished) == len(self._blocks):
            raise StoreError(f"{self.path} has all of its {len(self._blocks)} blocks")
        return self._blocks[len(self.finished)]

    def write(self, data: memoryview) -> None:
        """Add bytes to the block that was begun. What a disk error leaves is written again."""
        now = self._current()
        while len(data):
            n = min(len(data), BUFFER_BYTES - now.fill)
            self._buffer[now.fill : now.fill + n] = data[:n]
            now.fill += n
            data = data[n:]
            if now.fill == BUFFER_BYTES:
                self._flush()

    def _current(self) -> _Open:
        if self._open is None or self._sums is None:
            raise ClosedError(f"{self.path}: no block was begun")
        return self._open

    def _flush(self) -> None:
        now, sums = self._current(), self._sums
        if sums is not None and now.fill:
            sums.update(self._buffer[: now.fill])
            now.file.write(now.at, self._buffer[: now.fill])
            now.at += now.fill
            now.unsynced += now.fill
            now.fill = 0

    def end(self, note: Any = None) -> None:
        """The block is whole; ``note`` (JSON) is kept with it in the journal."""
        now, block, sums = self._current(), self._next(), self._sums
        have = now.at + now.fill - block.offset
        if have != block.nbytes or sums is None:
            raise ValueError(f"block {block.name}: {have} bytes were written, not {block.nbytes}")
        padding = align_up(now.fill) - now.fill
        self._buffer[now.fill : now.fill + padding] = bytes(padding)
        now.fill += padding
        self._flush()
        self._sums = None
        line = [len(self.finished), sums.value(), note]
        crcs = bytes(sums.pages or b"")
        if crcs:
            line.append(base64.b64encode(crcs).decode())
        now.pending.append(json.dumps(line, separators=(",", ":")) + "\n")
        self.finished.append(Finished(sums.value(), note, crcs))
        if now.unsynced >= self._sync_bytes:
            self.sync()

    def sync(self) -> None:
        """Have the finished blocks on the disk, and the journal say so."""
        now = self._open
        if now is None or not now.pending:
            return
        now.file.sync()
        # Taken out before they are written: a signal may raise in between, and close() comes here
        # again. A block that is not in the journal is written again, one that is there twice
        # would be damage.
        lines, now.pending = "".join(now.pending).encode(), []
        try:
            if os.write(self._journal, lines) != len(lines):
                raise StoreError(f"cannot write {self.path / JOURNAL}: the disk is full")
            os.fdatasync(self._journal)
        except OSError as e:
            raise StoreError(f"cannot write {self.path / JOURNAL}: {e.strerror}") from e
        now.unsynced = 0

    def _finish_file(self) -> None:
        if self._open is not None:
            self.sync()
            self._open.file.close()
            self._open = None

    # The end

    def commit(self, extras: Mapping[str, bytes], **facts: Any) -> Manifest:
        """Write ``extras`` (name -> content) and then the manifest, with ``facts`` replaced in it.

        Raises:
            StoreError: a block is missing, or the disk failed; run it again then.
        """
        missing = len(self._blocks) - len(self.finished)
        if missing:
            raise StoreError(f"{self.path}: {missing} of {len(self._blocks)} blocks are missing")
        self._finish_file()
        blocks = with_checksums(self._blocks, ((f.checksum, f.page_crcs) for f in self.finished))
        config = config_digest(extras.get("config.json", b""))
        manifest = replace(self._job.manifest, blocks=blocks, config=config, **facts)
        try:
            for name, content in extras.items():
                _replace(self._lock, name, content)
            _replace(self._lock, MANIFEST, dump(manifest))
            os.unlink(JOURNAL, dir_fd=self._lock)
            os.fsync(self._lock)
        except OSError as e:
            raise StoreError(f"cannot finish {self.path}: {e.strerror}; run it again") from e
        self.complete = manifest
        return manifest

    def close(self) -> None:
        """Keep what is finished, let the lock go. Idempotent."""
        try:
            if self._open is not None and self._journal >= 0:
                self.sync()
        except StoreError as e:
            # The blocks since the last sync are written again; whatever stopped us is raised.
            log.warning("%s", e)
        finally:
            if self._open is not None:
                self._open.file.close()
                self._open = None
            for fd in (self._journal, self._lock):
                if fd >= 0:
                    os.close(fd)
            self._journal = self._lock = -1
            self._sums = None
            self._memory.close()

    def __enter__(self) -> PackDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _temporary(name: str) -> str:
    return f".{name}.tmp"


def _replace(folder: int, name: str, content: bytes) -> None:
    """Make ``name`` hold ``content``, whole or not at all, and on the disk; it may be in a folder
    of its own."""
    inner, _, last = name.rpartition("/")
    if inner:
        with contextlib.suppress(FileExistsError):
            os.mkdir(inner, 0o700, dir_fd=folder)
        fd = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            _replace(fd, last, content)
        finally:
            os.close(fd)
        return
    temporary = _temporary(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        rest = memoryview(content)
        while len(rest):
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
