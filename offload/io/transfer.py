"""A block's transfer: many requests, one future, and a buffer that is let go in time.

What the stores on files share: ``Transfer`` gathers the requests of one block, ``FileStore`` moves
bytes between whole pages of files and the caller's memory, in place where the alignment allows and
else with one copy through a chunk of the staging; one request may do both, page by page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import NamedTuple

from offload.blocks import ALIGN, BlockSpec
from offload.errors import ClosedError, OffloadError, StoreError
from offload.io.engines import Engine, Job, to_tell
from offload.io.files import DirectFile
from offload.io.memory import Staging, address, byte_view, copy
from offload.io.ranges import Part, Piece, Request, plan_requests
from offload.io.store import Receipt, Span

PLANS_KEPT, PLAN_BYTES = 4096, 2048
"""Blocks whose requests and payload are remembered, and about what that takes for each: planning an
expert's takes 80 µs, which the first byte of a routed expert would wait for."""


class Moved(NamedTuple):
    """What one request did, in bytes."""

    physical: int
    copied: int


Check = Callable[[int, memoryview], None]
"""Called with the offset in the file and the pages that a request brought; may raise."""

Settle = Callable[[BaseException | None], None]
"""Called once per transfer before its future resolves, with its error or None; may raise one."""


class Transfer:
    """Collects the requests of one block into one future.

    The future turns *running* when the first request starts, so ``cancel()`` works exactly as
    long as no thread has touched the buffer. It resolves after the last request has ended, also
    when an early one failed; those that had not started by then are skipped.
    """

    def __init__(
        self,
        title: str,
        view: memoryview,
        payload_bytes: int,
        settle: Settle | None = None,
        landed: Callable[[], None] | None = None,
    ) -> None:
        """``landed`` is called when the future is done, before what its owner has it call."""
        self.future: Future[Receipt] = Future()
        self._view = view
        self._title = title
        self._payload_bytes = payload_bytes
        self._settle = settle
        self._lock = threading.Lock()
        self._left = 0
        self._running: bool | None = None
        self._start_s = 0.0
        self._requests = self._physical = self._copied = 0
        self._error: BaseException | None = None
        # No method of ours: the future would keep us and we the future, for the garbage search.
        self.future.add_done_callback(partial(_is_done, view, settle, landed))

    def run(self, engine: Engine, jobs: Sequence[Callable[[], Moved]], priority: int) -> None:
        """Submit ``jobs``; an engine that refuses them fails the transfer."""
        self._left = len(jobs)
        if not jobs:  # a block without bytes
            self._left = 1
            self._ended(None, None)
        for i, job in enumerate(jobs):
            try:
                engine.put(_Request(self, job), priority)
            except OffloadError as e:
                for _ in jobs[i:]:
                    self._ended(None, e)
                return

    def fail(self, error: OffloadError) -> None:
        """Resolve with ``error`` instead of running anything."""
        self._left = 1
        self._ended(None, error)

    def _claim(self) -> bool:
        """Whether the future is ours to resolve: not cancelled before the first request."""
        if self._running is None:
            self._running = self.future.set_running_or_notify_cancel()
            self._start_s = time.perf_counter()
        return self._running

    def perform(self, job: Callable[[], Moved]) -> None:
        """Run one of the jobs, unless there is nobody for it any more. Raises nothing."""
        with self._lock:
            wanted = self._claim() and self._error is None
        moved, error = None, None
        if wanted:
            try:
                moved = job()
            except BaseException as e:  # noqa: BLE001 - whatever ends it, its waiter must know
                error = to_tell(e)
        self._ended(moved, error)

    def refuse(self, error: OffloadError) -> None:
        """One of the jobs will not run."""
        self._ended(None, error)

    def _ended(self, moved: Moved | None, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            if moved is not None:
                self._requests += 1
                self._physical += moved.physical
                self._copied += moved.copied
            if error is not None and self._error is None:
                self._error = error
            if self._left or not self._claim():
                return
        self._resolve(time.perf_counter() - self._start_s)

    def _resolve(self, seconds: float) -> None:
        error = self._error
        if self._settle is not None:
            try:
                self._settle(error)
            except Exception as e:  # noqa: BLE001 - the future must resolve whatever happens
                error = e
        # Before the future is done: its owner may unmap the memory at once.
        self._view.release()
        if error is None:
            receipt = Receipt(
                payload_bytes=self._payload_bytes,
                physical_bytes=self._physical,
                copied_bytes=self._copied,
                requests=self._requests,
                seconds=seconds,
            )
            self.future.set_result(receipt)
        elif isinstance(error, ClosedError):
            self.future.set_exception(error)
        else:
            wrapped = StoreError(f"{self._title}: {error}")
            wrapped.__cause__ = error
            self.future.set_exception(wrapped)


class _Request(Job):
    """One request of a transfer, in an engine's line."""

    __slots__ = ("job", "transfer")

    def __init__(self, transfer: Transfer, job: Callable[[], Moved]) -> None:
        self.transfer = transfer
        self.job = job

    def run(self) -> None:
        self.transfer.perform(self.job)

    def refuse(self, error: OffloadError) -> None:
        self.transfer.refuse(error)


def _is_done(
    view: memoryview,
    settle: Settle | None,
    landed: Callable[[], None] | None,
    future: Future[Receipt],
) -> None:
    try:
        if future.cancelled():
            if settle is not None:
                settle(CancelledError())
            view.release()
    finally:
        if landed is not None:
            landed()


class FileStore:
    """Base of the stores on files: checks arguments, runs requests, closes in order.

    The engine and the staging are the caller's, often shared by several stores; ``close`` leaves
    them open. What goes in place does so in requests of ``request_bytes`` (None: of a chunk), of
    which no more than a chunk goes through the staging.
    """

    def __init__(self, engine: Engine, staging: Staging, request_bytes: int | None = None) -> None:
        if staging.chunks < engine.queue_depth:
            # With fewer, workers would queue for chunks instead of jobs for workers, and a
            # demand behind waiting prefetches would not be served first.
            raise ValueError(
                f"the staging has {staging.chunks} chunks, the engine runs {engine.queue_depth} "
                "requests at once: give it as many chunks"
            )
        self._request_bytes = staging.chunk_bytes if request_bytes is None else request_bytes
        if self._request_bytes < ALIGN or self._request_bytes % ALIGN:
            raise ValueError(f"requests of {request_bytes} bytes: not a multiple of {ALIGN}")
        self._engine = engine
        self._staging = staging
        self._specs: dict[str, BlockSpec] = {}
        self._files: list[DirectFile] = []
        self._plans: dict[tuple[str, int], tuple[list[Request], int]] = {}
        self._idle = threading.Condition()
        self._in_flight = 0
        self._closed = False

    @property
    def modes(self) -> dict[str, str]:
        """``"direct"`` or ``"buffered"`` per file."""
        return {f.path: f.mode for f in self._files}

    def ids(self) -> Iterable[str]:
        return self._specs.keys()

    def spec(self, block_id: str) -> BlockSpec:
        return self._specs[block_id]

    def _start(
        self,
        title: str,
        view: memoryview,
        payload_bytes: int,
        settle: Settle | None = None,
    ) -> tuple[Transfer, bool]:
        """A transfer that ``close`` waits for, and whether the store is open (else it failed)."""
        transfer = Transfer(title, view, payload_bytes, settle, self._landed)
        with self._idle:
            is_open = not self._closed
            self._in_flight += 1
        if not is_open:
            transfer.fail(ClosedError(f"{title}: the store is closed"))
        return transfer, is_open

    def _landed(self) -> None:
        with self._idle:
            self._in_flight -= 1
            self._idle.notify_all()

    def _read_block(
        self,
        spec: BlockSpec,
        pieces: Callable[[str], Sequence[Piece]],
        view: memoryview,
        priority: int,
        settle: Settle | None = None,
    ) -> Future[Receipt]:
        """Read a whole block; its padding and the rest of its slot may be overwritten. ``pieces``:
        asked for once per block."""
        room = min(view.nbytes, spec.slot_nbytes)
        known = self._plans.get((spec.id, room))
        if known is None:
            requests = plan_requests(
                pieces(spec.id),
                request_bytes=self._request_bytes,
                room=room,
                bounce_bytes=self._staging.chunk_bytes,
            )
            known = requests, spec.payload_nbytes
            if len(self._plans) < PLANS_KEPT:
                self._plans[spec.id, room] = known
        requests, payload_bytes = known
        return self._read(spec, requests, True, view, payload_bytes, priority, settle)

    def _read_spans(
        self,
        spec: BlockSpec,
        pieces: Sequence[Piece],
        spans: Sequence[Span],
        view: memoryview,
        priority: int,
        check: Check | None = None,
    ) -> Future[Receipt]:
        """Read the parts of ``pieces`` (a whole block's) that ``spans`` ask for, nothing else.

        ``check`` sees the whole pages they lie in before they are copied.
        """
        parts = [
            Piece(p.file, p.src + lo - p.dst, s.dst + lo - s.src, hi - lo)
            for s in spans
            for p in pieces
            if (lo := max(s.src, p.dst)) < (hi := min(s.src + s.nbytes, p.dst + p.nbytes))
        ]
        requests = plan_requests(parts, request_bytes=self._staging.chunk_bytes, room=view.nbytes)
        # Never in place: what lies around the wanted bytes in the caller's buffer is the caller's.
        nbytes = sum(p.nbytes for p in parts)
        return self._read(spec, requests, False, view, nbytes, priority, check=check)

    def _read(
        self,
        spec: BlockSpec,
        requests: Sequence[Request],
        in_place: bool,
        view: memoryview,
        payload_bytes: int,
        priority: int,
        settle: Settle | None = None,
        check: Check | None = None,
    ) -> Future[Receipt]:
        base = address(view)
        transfer, is_open = self._start(f"block {spec.id}", view, payload_bytes, settle)
        if is_open:
            jobs = [
                partial(self._fetch, r, in_place, view, base, priority, check) for r in requests
            ]
            transfer.run(self._engine, jobs, priority)
        return transfer.future

    def _fetch(
        self,
        request: Request,
        in_place: bool,
        view: memoryview,
        base: int,
        priority: int,
        check: Check | None,
    ) -> Moved:
        file = self._files[request.file]
        parts, copies = request.parts, request.bounced
        if not in_place:
            parts, copies = (Part(request.nbytes, None),), request.copies
        if not copies:
            bufs = [view[at : at + n] for n, at in parts if at is not None]
            return Moved(file.read(request.offset, *bufs), 0)
        with self._staging.chunk(priority) as chunk:
            bufs, packed = [], 0
            for n, at in parts:
                if at is None:
                    bufs.append(chunk.view[packed : packed + n])
                    packed += n
                else:
                    bufs.append(view[at : at + n])
            physical = file.read(request.offset, *bufs)
            if check is not None:
                check(request.offset, chunk.view[: request.nbytes])
            for c in copies:
                copy(base + c.dst, chunk.address + c.src, c.nbytes)
        return Moved(physical, sum(c.nbytes for c in copies))

    def close(self) -> None:
        """Wait for what is in flight, then close the files. Idempotent."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._in_flight == 0)
        for file in self._files:
            file.close()


def failed(error: OffloadError) -> Future[Receipt]:
    """A future that has failed already."""
    future: Future[Receipt] = Future()
    future.set_running_or_notify_cancel()
    future.set_exception(error)
    return future


def check_target(spec: BlockSpec, dst: memoryview) -> memoryview:
    """A flat view of ``dst`` that may hold block ``spec``.

    Raises:
        ValueError: too short, read-only, not contiguous or not at a 4096-aligned address.
    """
    if dst.readonly:
        raise ValueError(f"block {spec.id}: the buffer is read-only")
    view = check_room(spec.id, dst, spec.nbytes)
    at = address(view)
    if at % ALIGN:
        raise ValueError(f"block {spec.id}: the buffer's address {at:#x} is not {ALIGN}-aligned")
    return view


def check_spans(spec: BlockSpec, spans: Sequence[Span], dst: memoryview) -> memoryview:
    """A flat view of ``dst`` that has room for ``spans`` of block ``spec``.

    Raises:
        ValueError: a span lies outside the block or the buffer.
    """
    for s in spans:
        if min(s) < 0 or s.src + s.nbytes > spec.nbytes:
            raise ValueError(f"block {spec.id} has {spec.nbytes} bytes, {s} lies outside")
    if dst.readonly:
        raise ValueError(f"block {spec.id}: the buffer is read-only")
    return check_room(spec.id, dst, max((s.dst + s.nbytes for s in spans), default=0))


def check_room(block_id: str, buf: memoryview, nbytes: int) -> memoryview:
    """A flat view of ``buf``, which must have at least ``nbytes``, else ValueError."""
    if buf.nbytes < nbytes:
        raise ValueError(f"block {block_id}: {nbytes} bytes, but the buffer has {buf.nbytes}")
    return byte_view(buf)
