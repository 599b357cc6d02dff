"""Two engines that run blocking I/O on a bounded number of threads, by priority.

``PreadEngine`` has plain threads that take jobs from one heap. ``AiofilesEngine`` has an asyncio
loop that hands the same jobs to an executor through aiofiles. aiofiles has no ``pread``, and its
file objects share one position, so what is wrapped is the positioned transfer itself
(``aiofiles.os.wrap``) and not an open handle per request in flight.

Both run the same jobs, hence they agree on all that matters to a buffer's owner: a queued job
can be cancelled, a running one resolves after its thread has left the buffer, and the future is
resolved by that very thread, not one hop later. A job may be its owner's own (``put``): with a
future of the engine's beside the owner's a routed expert's read took 15 µs to hand over, now 6 (155
and 95 in caches that kernels have filled), and each left a cycle to the garbage search.

io_uring was tried, with registered buffers, too: 3.2 against 3.0 GB/s on a disk of that rate, and 8
against 13 ms of processor time per GB. That is what is left to gain once buffers are on huge pages,
without which either reads a third of that.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from aiofiles.os import wrap

from offload.errors import ClosedError, OffloadError, StoreError
from offload.io.files import DirectFile, TransferError
from offload.io.store import DEMAND, PREFETCH
from offload.io.workers import NO_THREAD, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_ENGINE = "aiofiles"
DEFAULT_QUEUE_DEPTH = 4
DEFAULT_REQUEST_BYTES = 4 << 20

LINGER_S = 0.1
"""How long a worker waits for more before its call ends: longer than computing leaves the disk
without work, shorter than anyone would notice at the end of a program."""


class Engine(Protocol):
    """Runs at most ``queue_depth`` jobs at once: DEMAND before PREFETCH, first come first."""

    name: str
    queue_depth: int

    def submit(self, work: Callable[[], T], priority: int = DEMAND) -> Future[T]:
        """Run blocking ``work`` on a worker.

        ``cancel()`` on the future succeeds only while the job is queued. Errors arrive through
        the future as ``OffloadError``; what is not one is wrapped in a ``StoreError``.

        Raises:
            ClosedError: after ``close``.
        """
        ...

    def put(self, job: Job, priority: int = DEMAND) -> None:
        """As ``submit``, of a job that tells its owner itself how it has ended.

        Raises:
            ClosedError: after ``close``.
        """
        ...

    def read(
        self, file: DirectFile, offset: int, buf: memoryview, priority: int = DEMAND
    ) -> Future[int]:
        """``DirectFile.read`` on a worker; errors carry file, offset and errno."""
        ...

    def write(self, file: DirectFile, offset: int, buf: memoryview) -> Future[int]:
        """``DirectFile.write`` on a worker, queued with the prefetches."""
        ...

    def close(self) -> None:
        """Run what was accepted, then end the threads. Idempotent.

        Not to be called from a job or a completion callback: it would wait for itself.
        """
        ...


class Job(ABC):
    """One piece of work in an engine's line, ordered by priority and arrival."""

    __slots__ = ("key",)
    key: tuple[int, int]

    def __lt__(self, other: Job) -> bool:
        return self.key < other.key

    @abstractmethod
    def run(self) -> None:
        """Do it, on a worker. What goes wrong with it is for its owner: nothing is raised."""

    @abstractmethod
    def refuse(self, error: OffloadError) -> None:
        """It was accepted, and will not run."""


class _Work(Job):
    """A call and the future of what it returns."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as e:  # noqa: BLE001 - whatever ends the work, its waiter must know
            self.future.set_exception(to_tell(e))
        else:
            self.future.set_result(result)

    def refuse(self, error: OffloadError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def to_tell(error: BaseException) -> OffloadError:
    """What the waiter of work that has raised ``error`` is told."""
    # Finished frames hold the buffers as locals; whoever keeps the error would keep them,
    # and an arena could not be unmapped.
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OffloadError):
        return error
    wrapped = StoreError(f"an I/O worker failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped


class _EngineBase:
    """The heap of waiting jobs, and what both engines do alike."""

    name = ""

    def __init__(self, queue_depth: int) -> None:
        if queue_depth < 1:
            raise ValueError(f"queue depth must be at least 1, got {queue_depth}")
        self.queue_depth = queue_depth
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # Apart, so that the end of each job does not wake every worker that has nothing to do.
        self._jobs = threading.Condition(lock)
        self._heap: list[Job] = []
        self._order = itertools.count()
        self._unfinished = 0
        self._closed = False
        self._dead: BaseException | None = None

    def _accept(self, job: Job, priority: int) -> None:
        """Under the lock."""
        if self._dead is not None:
            raise StoreError(f"the {self.name} engine died: {self._dead!r}") from self._dead
        if self._closed:
            raise ClosedError(f"the {self.name} engine is closed")
        job.key = priority, next(self._order)
        heapq.heappush(self._heap, job)
        self._unfinished += 1
        self._jobs.notify()

    def _take_first(self) -> Job | None:
        with self._changed:
            return heapq.heappop(self._heap) if self._heap else None

    def _run_first(self) -> None:
        """Run the job that is first in line now; raises nothing."""
        job = self._take_first()
        if job is None:
            return
        try:
            job.run()
        except BaseException:
            # Only a completion callback can raise here (SystemExit, say): the job is done.
            log.exception("a completion callback failed")
        finally:
            self._ended()

    def _fail_all(self, error: BaseException) -> None:
        """Fail what is queued."""
        told = to_tell(error)
        while (job := self._take_first()) is not None:
            try:
                job.refuse(told)
            except BaseException:
                log.exception("a completion callback failed")
            finally:
                self._ended()

    def _ended(self) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def put(self, job: Job, priority: int = DEMAND) -> None:
        raise NotImplementedError

    def submit(self, work: Callable[[], T], priority: int = DEMAND) -> Future[T]:
        job = _Work(work)
        self.put(job, priority)
        return job.future

    def read(
        self, file: DirectFile, offset: int, buf: memoryview, priority: int = DEMAND
    ) -> Future[int]:
        return self.submit(partial(_move, file.read, file.path, offset, buf), priority)

    def write(self, file: DirectFile, offset: int, buf: memoryview) -> Future[int]:
        return self.submit(partial(_move, file.write, file.path, offset, buf), PREFETCH)


def _move(call: Callable[[int, memoryview], int], path: str, offset: int, buf: memoryview) -> int:
    try:
        return call(offset, buf)
    except OffloadError:
        raise
    except BaseException as e:
        raise TransferError(
            f"{path}: a transfer of {buf.nbytes} bytes at offset {offset} failed: {e!r}",
            path=path,
            offset=offset,
            errno=getattr(e, "errno", None),
        ) from e


class PreadEngine(_EngineBase):
    """``queue_depth`` threads on one heap."""

    name = "threads"

    def __init__(self, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        super().__init__(queue_depth)
        # Daemons: an interpreter that ends without close() must not wait for an idle worker.
        self._threads = [
            threading.Thread(target=self._serve, name=f"offload-pread-{i}", daemon=True)
            for i in range(queue_depth)
        ]
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as e:
                if i == 0:
                    raise StoreError(NO_THREAD) from e
                log.info("the %s engine goes on with %d threads: %s", self.name, i, e)
                del self._threads[i:]
                break

    def put(self, job: Job, priority: int = DEMAND) -> None:
        with self._jobs:
            self._accept(job, priority)

    def _serve(self) -> None:
        while True:
            with self._jobs:
                self._jobs.wait_for(lambda: self._heap or self._closed)
                if not self._heap:
                    return
            self._run_first()  # nothing, if another worker was faster

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.notify_all()
        for thread in self._threads:
            thread.join()


class AiofilesEngine(_EngineBase):
    """An asyncio loop in a thread of its own; aiofiles runs the jobs on our executor.

    One awaited call runs jobs until there has been none for ``LINGER_S``, and up to
    ``queue_depth`` calls are under way. With a call per job the disk idled, after each request,
    until the loop had heard of its end and dispatched the next, and jobs chosen at dispatch could
    not be overtaken any more; with calls that end when the queue is empty, a layer's first expert
    waited for the way through the loop.
    """

    name = "aiofiles"

    def __init__(self, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        super().__init__(queue_depth)
        # Our own: the loop's default executor has as many threads as it likes and is shared.
        self._pool = Workers(queue_depth, "offload-aio-worker")
        self._loop = asyncio.new_event_loop()
        self._active = 0
        self._lingering = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="offload-aio-loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as e:
            self._loop.close()
            raise StoreError(NO_THREAD) from e

    def put(self, job: Job, priority: int = DEMAND) -> None:
        with self._jobs:  # the loop cannot be closed between the two
            self._accept(job, priority)
            if len(self._heap) > self._lingering and self._active < self.queue_depth:
                self._active += 1
                self._loop.call_soon_threadsafe(self._dispatch)

    def _serve(self) -> None:
        died: BaseException = StoreError("its loop stopped")
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_forever()
        except BaseException as e:
            log.exception("the aiofiles engine's loop died")
            died = e
        finally:
            with self._changed:
                if not self._closed or self._unfinished:
                    self._dead = died
                self._changed.notify_all()
                self._jobs.notify_all()
            self._fail_all(StoreError(f"the {self.name} engine died: {died!r}"))
            self._loop.run_until_complete(self._finish())
            self._pool.shutdown(wait=True)
            self._loop.close()

    def _dispatch(self) -> None:
        """Have one more worker. Runs on the loop."""
        task = self._loop.create_task(self._run())
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        try:
            await _drain(self, executor=self._pool)
        except Exception as e:
            if not isinstance(e, StoreError):  # which says all, to whoever waits
                log.exception("the executor refuses work")
            with self._changed:
                self._active -= 1  # first: what is submitted from now on tries again
            self._fail_all(e)

    async def _finish(self) -> None:
        """Let the calls that are under way end, those that are only scheduled included."""
        await asyncio.sleep(0)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _work(self) -> None:
        """Run jobs until none comes any more. Runs on the executor."""
        while True:
            with self._jobs:
                self._lingering += 1
                self._jobs.wait_for(
                    lambda: self._heap or self._closed or self._dead is not None, LINGER_S
                )
                self._lingering -= 1
                if not self._heap:
                    # Under the lock: submit() sees either this worker or the free place.
                    self._active -= 1
                    self._changed.notify_all()
                    return
            self._run_first()

    def close(self) -> None:
        with self._changed:
            first, self._closed = not self._closed, True
            self._jobs.notify_all()
            self._changed.wait_for(
                lambda: self._unfinished + self._active == 0 or self._dead is not None
            )
            if first and self._dead is None:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


_drain = wrap(AiofilesEngine._work)


_ENGINES: dict[str, type[PreadEngine] | type[AiofilesEngine]] = {
    "aiofiles": AiofilesEngine,
    "threads": PreadEngine,
}


def make_engine(name: str = DEFAULT_ENGINE, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> Engine:
    """The engine called ``"aiofiles"`` or ``"threads"``.

    Raises:
        StoreError: there is no engine of that name.
    """
    try:
        engine = _ENGINES[name]
    except KeyError:
        raise StoreError(
            f"there is no I/O engine {name!r}; choose {' or '.join(_ENGINES)}"
        ) from None
    return engine(queue_depth)
