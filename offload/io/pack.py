"""A store in one file: blocks at page-aligned offsets, private until it is published.

The file has no name at first. It is readable by its owner only and gone when the process ends,
however it ends. ``commit`` gives it a name in one step:

    blocks, each at a multiple of 4096 | index (JSON, padded to 4096) | footer (one page)

The footer holds the lengths of both parts and the SHA-256 of the index. It is written last and
the name is given after the data is on the disk, so a file with a name and a right footer is
complete; whatever else is found under that name is refused.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import secrets
import struct
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from offload.blocks import ALIGN, BlockKind, BlockSpec, TensorSpec, align_up
from offload.errors import ClosedError, StoreError
from offload.io.engines import Engine
from offload.io.files import DirectFile, Syscalls
from offload.io.memory import AlignedBuffer, Staging, address, copy
from offload.io.ranges import Piece, Request, plan_requests
from offload.io.store import DEMAND, PREFETCH, Receipt, Span
from offload.io.transfer import (
    FileStore,
    Moved,
    Settle,
    check_room,
    check_spans,
    check_target,
    failed,
)
from offload.units import format_bytes

log = logging.getLogger(__name__)

_MAGIC = b"offload\x00pack\x00\x01\r\n"
_FOOTER = struct.Struct("<16sQQ32s")  # magic, bytes of blocks, bytes of index, its SHA-256
_COPY_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class _Slot(NamedTuple):
    spec: BlockSpec
    offset: int


class PackStore(FileStore):
    """Blocks in one file. Make one with ``create`` (writable) or ``open`` (read-only).

    A buffer as long as the block's slot at an aligned address is moved without a copy; of a
    shorter one the last request goes through the staging. What lies behind the block's end in a
    slot-long buffer is written too and never read back as part of the block.
    """

    def __init__(
        self,
        file: DirectFile,
        slots: Iterable[_Slot],
        engine: Engine,
        staging: Staging,
        *,
        checksums: dict[str, int | None],
        linkable: bool = False,
        sealed: bool = True,
        verify: bool = False,
    ) -> None:
        """Use ``create`` or ``open`` instead. ``checksums`` has the blocks that can be read."""
        super().__init__(engine, staging)
        self._files = [file]
        self._offsets: dict[str, int] = {}
        for slot in slots:
            self._specs[slot.spec.id] = slot.spec
            self._offsets[slot.spec.id] = slot.offset
        self._data_bytes = sum(s.slot_nbytes for s in self._specs.values())
        self._ready = checksums
        self._writing: set[str] = set()
        self._linkable = linkable
        self._sealed = sealed
        self._summing = False
        self._verify = verify

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        specs: Iterable[BlockSpec],
        engine: Engine,
        staging: Staging,
        *,
        checksums: bool = False,
        syscalls: Syscalls | None = None,
    ) -> PackStore:
        """A private, nameless file in ``directory`` with room for all ``specs``.

        Args:
            checksums: keep a CRC-32 of every block that is written; about 1 s per GB of one core.

        Raises:
            StoreError: the directory cannot be used, or the disk has too little space.
            ValueError: two blocks have the same id.
        """
        slots, end = _lay_out(specs)
        fd, linkable = _nameless(directory)
        name = f"{os.fspath(directory)}/(private file)"
        try:
            _reserve(fd, end, os.fspath(directory))
        except BaseException:
            os.close(fd)
            raise
        file = DirectFile(fd, name, syscalls=syscalls)
        try:
            store = cls(file, slots, engine, staging, checksums={}, linkable=linkable, sealed=False)
        except BaseException:
            file.close()
            raise
        store._summing = checksums
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        engine: Engine,
        staging: Staging,
        *,
        expect_meta: Mapping[str, Any] | None = None,
        verify: bool = False,
    ) -> PackStore:
        """Open a committed pack.

        Args:
            expect_meta: what ``commit`` was given; None accepts any.
            verify: compare every whole block that is read with its checksum.

        Raises:
            StoreError: the file is missing, incomplete, damaged, not a pack, made from something
                else than ``expect_meta`` says, or has no checksums to verify.
        """
        file = DirectFile.open(path)
        try:
            slots, checksums, meta = _read_index(file)
            if expect_meta is not None:
                _compare_meta(file.path, _normal(expect_meta), meta)
            if verify and None in checksums.values():
                raise StoreError(f"{file.path} was written without checksums; nothing to verify")
            return cls(file, slots, engine, staging, checksums=checksums, verify=verify)
        except BaseException:
            file.close()
            raise

    @property
    def writable(self) -> bool:
        return not self._sealed

    def _pieces(self, spec: BlockSpec) -> list[Piece]:
        return [Piece(0, self._offsets[spec.id], 0, spec.nbytes)]

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_target(spec, dst)
        if (missing := self._unreadable(block_id)) is not None:
            return failed(missing)
        settle = self._verifier(spec, view) if self._verify else None
        return self._read_block(spec, self._pieces(spec), view, priority, settle)

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_spans(spec, spans, dst)
        if (missing := self._unreadable(block_id)) is not None:
            return failed(missing)
        return self._read_spans(spec, self._pieces(spec), spans, view, priority)

    def _unreadable(self, block_id: str) -> StoreError | None:
        with self._idle:
            if block_id in self._ready or self._closed:
                return None
            state = (
                "is being written"
                if block_id in self._writing
                else ("was never written, or its last write failed")
            )
        return StoreError(f"block {block_id} cannot be read: it {state}")

    def _verifier(self, spec: BlockSpec, view: memoryview) -> Settle:
        want = self._ready[spec.id]

        def verify(error: BaseException | None) -> None:
            if error is None and (got := zlib.crc32(view[: spec.nbytes])) != want:
                raise StoreError(
                    f"{self._files[0].path} is damaged: the {spec.nbytes} bytes at offset "
                    f"{self._offsets[spec.id]} have CRC-32 {got:#010x}, written was {want:#010x}; "
                    "delete the file to have it made again"
                )

        return verify

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_room(block_id, src, spec.nbytes)
        with self._idle:
            if self._sealed:
                return failed(StoreError(f"block {block_id}: the pack is committed, read-only"))
            if block_id in self._writing:
                return failed(StoreError(f"block {block_id} is being written already"))
            self._writing.add(block_id)
            had = block_id in self._ready
            before = self._ready.pop(block_id, None)

        def settle(error: BaseException | None) -> None:
            # A write that did not begin (cancelled, store closed) has left the old bytes alone;
            # one that failed half-way has not, and the block is unreadable until written again.
            crc = None
            if error is None and self._summing:
                crc = zlib.crc32(view[: spec.nbytes])
            with self._idle:
                self._writing.discard(block_id)
                if error is None:
                    self._ready[block_id] = crc
                elif had and isinstance(error, (CancelledError, ClosedError)):
                    self._ready[block_id] = before

        requests = plan_requests(
            self._pieces(spec),
            request_bytes=self._staging.chunk_bytes,
            room=min(view.nbytes, spec.slot_nbytes),
        )
        base = address(view)
        transfer, is_open = self._start(f"block {block_id}", view, spec.payload_nbytes, settle)
        if is_open:
            jobs = [partial(self._put, r, view, base) for r in requests]
            transfer.run(self._engine, jobs, PREFETCH)
        return transfer.future

    def _put(self, request: Request, view: memoryview, base: int) -> Moved:
        file, at = self._files[0], request.direct
        if base % ALIGN == 0 and at is not None:
            return Moved(file.write(request.offset, view[at : at + request.nbytes]), 0)
        with self._staging.chunk(PREFETCH) as chunk:
            (part,) = request.copies  # a block is one piece, and starts where its pages do
            copy(chunk.address, base + part.dst, part.nbytes)
            ctypes.memset(chunk.address + part.nbytes, 0, request.nbytes - part.nbytes)
            physical = file.write(request.offset, chunk.view[: request.nbytes])
        return Moved(physical, part.nbytes)

    def commit(self, path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Publish the file as ``path``, replacing what is there; from now on it is read-only.

        Blocks the caller until everything is on the disk. After a crash in the middle ``path`` is
        what it was before or complete; after an error the store can be written and committed
        again, unless only the last step, syncing the folder, has failed.

        Args:
            meta: what the blocks were made from; anything JSON can hold.

        Raises:
            StoreError: a block is missing or being written, or the disk failed or is full.
            ClosedError: the store is closed.
        """
        target = Path(path)
        index = self._index(_normal(meta))
        try:
            self._publish(target, index)
        except OSError as e:
            raise StoreError(f"cannot publish {target}: {e.strerror}") from e
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()
        log.info("published %s with %d blocks", target, len(self._specs))

    def _index(self, meta: Any) -> bytes:
        """The index; seals the store and keeps ``close`` waiting."""
        with self._idle:
            if self._closed:
                raise ClosedError("the store is closed")
            if self._sealed:
                raise StoreError("the pack is committed already")
            missing = [i for i in self._specs if i not in self._ready]
            if missing:
                raise StoreError(
                    f"{len(missing)} of {len(self._specs)} blocks are not written yet, "
                    f"{missing[0]} first; write them before committing"
                )
            blocks = [_to_json(s, self._offsets[i], self._ready[i]) for i, s in self._specs.items()]
            index = json.dumps({"meta": meta, "blocks": blocks}, separators=(",", ":")).encode()
            self._sealed = True
            self._in_flight += 1
        return index

    def _publish(self, target: Path, index: bytes) -> None:
        named = False
        try:
            self._write_index(index)
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._give_name(folder, target)
                named = True
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            # Once it has its name the file is what others may have opened: never written again.
            self._sealed = named
            raise

    def _write_index(self, index: bytes) -> None:
        file, index_bytes = self._files[0], align_up(len(index))
        footer = _FOOTER.pack(_MAGIC, self._data_bytes, len(index), hashlib.sha256(index).digest())
        with AlignedBuffer(index_bytes + ALIGN) as tail:
            tail[: len(index)] = index
            tail[index_bytes : index_bytes + len(footer)] = footer
            os.ftruncate(file.fileno(), self._data_bytes)
            file.write(self._data_bytes, tail)
        file.sync()

    def _give_name(self, folder: int, target: Path) -> None:
        # A link cannot replace a name, a rename can: so link under a new name, then rename.
        temp = f".{target.name}.{secrets.token_hex(8)}"
        try:
            if not (self._linkable and self._link(folder, temp)):
                self._copy_to(folder, temp)
            os.replace(temp, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            try:
                os.unlink(temp, dir_fd=folder)
            except FileNotFoundError:
                log.debug("%s was not made", temp)
            raise

    def _link(self, folder: int, temp: str) -> bool:
        """Give the nameless file a name; False where the system cannot (other disk, no /proc)."""
        try:
            # With a dir_fd Python calls linkat(AT_SYMLINK_FOLLOW); without, link(), which would
            # link the symbolic link in /proc itself.
            os.link(
                f"/proc/self/fd/{self._files[0].fileno()}",
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

    def _copy_to(self, folder: int, temp: str) -> None:
        source = self._files[0]
        fd = os.open(
            temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        try:
            size = os.fstat(source.fileno()).st_size
            _reserve(fd, size, "the target directory")
            with AlignedBuffer(_COPY_BYTES) as buf:
                for at in range(0, size, _COPY_BYTES):
                    part = buf[: min(_COPY_BYTES, size - at)]
                    source.read(at, part)
                    _write_all(fd, at, part)
                    part.release()
            os.fsync(fd)
        finally:
            os.close(fd)


def _lay_out(specs: Iterable[BlockSpec]) -> tuple[list[_Slot], int]:
    slots: list[_Slot] = []
    seen: set[str] = set()
    end = 0
    for spec in specs:
        if spec.id in seen:
            raise ValueError(f"two blocks are called {spec.id}")
        seen.add(spec.id)
        slots.append(_Slot(spec, end))
        end += spec.slot_nbytes
    return slots, end


def _nameless(directory: str | os.PathLike[str]) -> tuple[int, bool]:
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


def _reserve(fd: int, nbytes: int, directory: str) -> None:
    """Check the free space and take it."""
    disk = os.fstatvfs(fd)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and nbytes > free:
        raise _too_small(nbytes, free, directory)
    if nbytes == 0:
        return
    # Not os.posix_fallocate: where the filesystem cannot, glibc writes into every block instead,
    # which takes minutes for a large file; there we go on without a reservation.
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _too_small(nbytes, free, directory)
        log.debug("fallocate in %s: %s", directory, os.strerror(code))
        os.ftruncate(fd, nbytes)


def _too_small(nbytes: int, free: int, directory: str) -> StoreError:
    return StoreError(
        f"{directory} has too little space: the blocks need {format_bytes(nbytes)} "
        f"({nbytes} bytes), {format_bytes(free)} ({free} bytes) are free; "
        "free some or choose another directory"
    )


def _write_all(fd: int, offset: int, part: memoryview) -> None:
    done = 0
    while done < part.nbytes:
        done += os.pwrite(fd, part[done:], offset + done)


def _normal(meta: Mapping[str, Any]) -> Any:
    """``meta`` as it looks after a trip through JSON."""
    return json.loads(json.dumps(dict(meta), allow_nan=False))


def _compare_meta(path: str, expected: dict[str, Any], found: Any) -> None:
    if found == expected:
        return
    found = found if isinstance(found, dict) else {}
    key = next(k for k in sorted(expected.keys() | found.keys()) if expected.get(k) != found.get(k))
    raise StoreError(
        f"{path} was made from something else: its {key} is {found.get(key)!r}, "
        f"wanted is {expected.get(key)!r}; delete it to have it made again"
    )


def _to_json(spec: BlockSpec, offset: int, crc: int | None) -> list[Any]:
    tensors = [[t.name, t.dtype, list(t.shape), t.offset] for t in spec.tensors]
    return [spec.id, spec.kind.value, spec.group, spec.nbytes, offset, crc, tensors]


def _from_json(item: Any) -> tuple[_Slot, int | None]:
    block_id, kind, group, nbytes, offset, crc, tensors = item
    spec = BlockSpec(
        id=block_id,
        kind=BlockKind(kind),
        tensors=tuple(
            TensorSpec(name=n, dtype=d, shape=tuple(shape), offset=o) for n, d, shape, o in tensors
        ),
        nbytes=nbytes,
        group=group,
    )
    return _Slot(spec, offset), crc


def _read_index(file: DirectFile) -> tuple[list[_Slot], dict[str, int | None], Any]:
    def refuse(why: str) -> StoreError:
        return StoreError(
            f"{file.path} is not a complete pack: {why}; delete it to have it made again"
        )

    size = file.size
    if size % ALIGN or size < 2 * ALIGN:
        raise refuse(f"its length of {size} bytes is impossible")
    with AlignedBuffer(ALIGN) as page:
        file.read(size - ALIGN, page)
        magic, data_bytes, index_bytes, digest = _FOOTER.unpack_from(page)
    if magic != _MAGIC:
        raise refuse("it has no footer")
    if data_bytes % ALIGN or data_bytes + align_up(index_bytes) + ALIGN != size:
        raise refuse(
            f"{data_bytes} bytes of blocks and {index_bytes} of index do not make {size} bytes"
        )
    with AlignedBuffer(align_up(index_bytes)) as buf:
        file.read(data_bytes, buf)
        index = bytes(buf[:index_bytes])
    if hashlib.sha256(index).digest() != digest:
        raise refuse("its index does not match its checksum")
    try:
        content = json.loads(index)
        found = [_from_json(item) for item in content["blocks"]]
        meta = content["meta"]
    except (ValueError, TypeError, KeyError) as e:
        raise refuse(f"its index cannot be understood ({e!r})") from e
    end = 0
    for slot, _ in found:
        if slot.offset != end:
            raise refuse(f"block {slot.spec.id} is at {slot.offset}, not at {end}")
        end += slot.spec.slot_nbytes
    if end != data_bytes:
        raise refuse(f"blocks end at {end}, not at {data_bytes}")
    return [slot for slot, _ in found], {slot.spec.id: crc for slot, crc in found}, meta
