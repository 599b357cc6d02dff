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
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

from offload.blocks import ALIGN, BlockSpec
from offload.errors import ClosedError, StoreError
from offload.io.engines import Engine
from offload.io.files import DirectFile, Syscalls
from offload.io.memory import Staging, address, copy
from offload.io.pack_format import (
    Slot,
    compare_meta,
    lay_out,
    normal_meta,
    read_index,
    write_index,
)
from offload.io.private import give_name, nameless_file, reserve
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

log = logging.getLogger(__name__)


class PackStore(FileStore):
    """Blocks in one file. Make one with ``create`` (writable) or ``open`` (read-only).

    A buffer as long as the block's slot at an aligned address is moved without a copy; of a
    shorter one the last request goes through the staging. What lies behind the block's end in a
    slot-long buffer is written too and never read back as part of the block.
    """

    def __init__(
        self,
        file: DirectFile,
        slots: Iterable[Slot],
        engine: Engine,
        staging: Staging,
        *,
        checksums: dict[str, int | None],
        linkable: bool = False,
        sealed: bool = True,
        verify: bool = False,
        request_bytes: int | None = None,
    ) -> None:
        """Use ``create`` or ``open`` instead. ``checksums`` has the blocks that can be read."""
        super().__init__(engine, staging, request_bytes)
        self._files = [file]
        self._offsets: dict[str, int] = {}
        for slot in slots:
            self._specs[slot.spec.id] = slot.spec
            self._offsets[slot.spec.id] = slot.offset
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
        request_bytes: int | None = None,
        syscalls: Syscalls | None = None,
    ) -> PackStore:
        """A private, nameless file in ``directory`` with room for all ``specs``.

        Args:
            checksums: keep a CRC-32 of every block that is written; about 1 s per GB of one core.
            request_bytes: the longest request for what is moved in place; None: as long as a chunk
                of the staging.

        Raises:
            StoreError: the directory cannot be used, or the disk has too little space.
            ValueError: two blocks have the same id.
        """
        slots, end = lay_out(specs)
        fd, linkable = nameless_file(directory)
        name = f"{os.fspath(directory)}/(private file)"
        try:
            reserve(fd, end, os.fspath(directory))
        except BaseException:
            os.close(fd)
            raise
        file = DirectFile(fd, name, syscalls=syscalls)
        try:
            store = cls(
                file,
                slots,
                engine,
                staging,
                checksums={},
                linkable=linkable,
                sealed=False,
                request_bytes=request_bytes,
            )
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
            slots, checksums, meta = read_index(file)
            if expect_meta is not None:
                compare_meta(file.path, normal_meta(expect_meta), meta)
            if verify and None in checksums.values():
                raise StoreError(f"{file.path} was written without checksums; nothing to verify")
            return cls(file, slots, engine, staging, checksums=checksums, verify=verify)
        except BaseException:
            file.close()
            raise

    @property
    def writable(self) -> bool:
        return not self._sealed

    def _pieces(self, block_id: str) -> list[Piece]:
        return [Piece(0, self._offsets[block_id], 0, self._specs[block_id].nbytes)]

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_target(spec, dst)
        if (missing := self._unreadable(block_id)) is not None:
            return failed(missing)
        settle = self._verifier(spec, view) if self._verify else None
        return self._read_block(spec, self._pieces, view, priority, settle)

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_spans(spec, spans, dst)
        if (missing := self._unreadable(block_id)) is not None:
            return failed(missing)
        return self._read_spans(spec, self._pieces(spec.id), spans, view, priority)

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

        base, room = address(view), min(view.nbytes, spec.slot_nbytes)
        in_place = base % ALIGN == 0 and room == spec.slot_nbytes
        requests = plan_requests(
            self._pieces(spec.id),
            request_bytes=self._request_bytes if in_place else self._staging.chunk_bytes,
            room=room,
        )
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
        wanted = normal_meta(meta)
        self._seal()
        try:
            self._publish(target, wanted)
        except OSError as e:
            raise StoreError(f"cannot publish {target}: {e.strerror}") from e
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()
        log.info("published %s with %d blocks", target, len(self._specs))

    def _seal(self) -> None:
        """Refuse writes from now on, and keep ``close`` waiting."""
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
            self._sealed = True
            self._in_flight += 1

    def _publish(self, target: Path, meta: dict[str, Any]) -> None:
        named = False
        try:
            slots = [Slot(s, self._offsets[i]) for i, s in self._specs.items()]
            write_index(self._files[0], slots, self._ready, meta)
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                give_name(self._files[0], self._linkable, folder, target)
                named = True
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            # Once it has its name the file is what others may have opened: never written again.
            self._sealed = named
            raise
