"""Both engines keep the same promises: order, bounds, cancellation, errors, ending."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path

import pytest
from io_support import failing, filled

from offload.errors import ClosedError, OffloadError, StoreError
from offload.io.engines import (
    DEFAULT_ENGINE,
    AiofilesEngine,
    Engine,
    Job,
    PreadEngine,
    make_engine,
)
from offload.io.files import DirectFile, Syscalls, TransferError
from offload.io.memory import AlignedBuffer
from offload.io.store import DEMAND, PREFETCH

Make = Callable[[int], Engine]


@pytest.fixture
def make(engine_name: str) -> Iterator[Make]:
    made: list[Engine] = []

    def build(queue_depth: int) -> Engine:
        made.append(make_engine(engine_name, queue_depth))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


class Gate:
    """Holds workers until opened."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.inside.release()
        assert self.opened.wait(timeout=30)

    def hold(self, engine: Engine, workers: int) -> list[Future[None]]:
        futures = [engine.submit(self) for _ in range(workers)]
        for _ in futures:
            assert self.inside.acquire(timeout=30)
        return futures


def test_choice() -> None:
    assert DEFAULT_ENGINE == "aiofiles"
    for name, kind in (("aiofiles", AiofilesEngine), ("threads", PreadEngine)):
        engine = make_engine(name, 2)
        assert isinstance(engine, kind)
        assert (engine.name, engine.queue_depth) == (name, 2)
        engine.close()
    with pytest.raises(StoreError, match=r"io_uring.*choose aiofiles or threads"):
        make_engine("io_uring")
    with pytest.raises(ValueError, match="at least 1"):
        make_engine("threads", 0)


def test_reads_and_writes(make: Make, big_file: Path) -> None:
    engine = make(2)
    with DirectFile.open(big_file, writable=True) as file, AlignedBuffer(8192) as buf:
        assert engine.read(file, 4096, buf).result(timeout=30) == 8192
        assert bytes(buf) == b"\x02" * 4096 + b"\x03" * 4096
        assert engine.read(file, 16384, buf).result(timeout=30) == 4196
        buf[:] = b"\x42" * 8192
        assert engine.write(file, 0, buf).result(timeout=30) == 8192
        assert big_file.read_bytes()[:8192] == b"\x42" * 8192


def test_demand_overtakes_prefetch_and_each_keeps_its_order(make: Make) -> None:
    engine, gate, seen = make(1), Gate(), []
    gate.hold(engine, 1)
    jobs = [
        engine.submit(lambda i=i, p=p: seen.append((p, i)), p)
        for i in range(20)
        for p in (PREFETCH, DEMAND)
    ]
    gate.opened.set()
    wait(jobs, timeout=30)
    assert seen == [(p, i) for p in (DEMAND, PREFETCH) for i in range(20)]


def test_writes_queue_behind_demand(make: Make, big_file: Path) -> None:
    engine, gate, seen = make(1), Gate(), []
    gate.hold(engine, 1)
    with DirectFile.open(big_file, writable=True) as file, filled(b"\1" * 4096) as buf:
        written = engine.write(file, 0, buf)
        written.add_done_callback(lambda _: seen.append("write"))
        demand = engine.submit(lambda: seen.append("demand"), DEMAND)
        gate.opened.set()
        wait([written, demand], timeout=30)
    assert seen == ["demand", "write"]


@pytest.mark.parametrize("depth", [1, 3])
def test_runs_queue_depth_jobs_at_once_and_no_more(make: Make, depth: int) -> None:
    engine, gate = make(depth), Gate()
    gate.hold(engine, depth)  # so many do run at once
    ran = threading.Event()
    extra = engine.submit(ran.set)
    assert not ran.is_set()
    assert extra.cancel(), "one more than the depth had been started"
    gate.opened.set()


def test_no_job_is_forgotten(make: Make) -> None:
    """Workers go idle and are called again all the time while others submit."""
    engine = make(3)
    counted: list[int] = []

    def submit_many() -> None:
        for i in range(300):
            engine.submit(lambda i=i: counted.append(i)).result(timeout=30)

    threads = [threading.Thread(target=submit_many) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert sorted(counted) == sorted(list(range(300)) * 4)


def test_a_queued_job_can_be_cancelled_and_never_runs(make: Make) -> None:
    engine, gate, ran = make(1), Gate(), []
    gate.hold(engine, 1)
    queued = engine.submit(lambda: ran.append("queued"))
    last = engine.submit(lambda: ran.append("last"))
    assert queued.cancel()
    gate.opened.set()
    last.result(timeout=30)
    wait([queued], timeout=30)
    assert queued.cancelled()
    with pytest.raises(CancelledError):
        queued.result()
    assert ran == ["last"]


def test_a_running_job_resolves_only_after_its_thread_has_left(make: Make, big_file: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(timeout=30)
        return os.preadv(fd, bufs, offset)

    engine = make(1)
    with (
        DirectFile.open(big_file, syscalls=Syscalls(preadv=preadv)) as file,
        AlignedBuffer(4096) as buf,
    ):
        future = engine.read(file, 0, buf)
        assert inside.wait(timeout=30)
        assert not future.cancel()
        assert not future.done()
        go_on.set()
        assert future.result(timeout=30) == 4096
        assert bytes(buf) == b"\x01" * 4096


@pytest.mark.parametrize("verb", ["read", "write"])
def test_errors_carry_file_offset_and_errno(make: Make, big_file: Path, verb: str) -> None:
    engine = make(1)
    calls = Syscalls(preadv=failing(errno.EIO), pwritev=failing(errno.EIO))
    with (
        DirectFile.open(big_file, writable=True, syscalls=calls) as file,
        AlignedBuffer(4096) as buf,
    ):
        error = getattr(engine, verb)(file, 8192, buf).exception(timeout=30)
    assert isinstance(error, TransferError)
    assert (error.path, error.offset, error.errno) == (str(big_file), 8192, errno.EIO)


def test_eio_from_the_system_call(
    make: Make, big_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    engine = make(1)
    with (
        DirectFile.open(big_file, syscalls=Syscalls(preadv=os.preadv)) as file,
        AlignedBuffer(4096) as buf,
        pytest.raises(StoreError, match="Input/output error"),
    ):
        engine.read(file, 0, buf).result(timeout=30)


def test_a_file_that_shrinks_between_requests(make: Make, big_file: Path) -> None:
    engine = make(2)
    with DirectFile.open(big_file) as file, AlignedBuffer(4096) as buf:
        assert engine.read(file, 8192, buf).result(timeout=30) == 4096
        os.truncate(big_file, 5000)
        with pytest.raises(StoreError, match=r"shrank.*20580.*5000"):
            engine.read(file, 8192, buf).result(timeout=30)


@pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt(), MemoryError("no more")])
def test_a_worker_that_dies_fails_its_job_and_the_next_one_runs(
    make: Make, big_file: Path, death: BaseException
) -> None:
    def preadv(*_: object) -> int:
        raise death

    engine = make(1)
    with (
        DirectFile.open(big_file, syscalls=Syscalls(preadv=preadv)) as file,
        AlignedBuffer(4096) as buf,
    ):
        with pytest.raises(StoreError, match=type(death).__name__) as caught:
            engine.read(file, 4096, buf).result(timeout=30)
        assert str(big_file) in str(caught.value)
        with pytest.raises(StoreError, match=type(death).__name__):
            engine.submit(preadv).result(timeout=30)
    assert engine.submit(lambda: 7).result(timeout=30) == 7


def test_a_callback_that_dies_does_not_take_the_worker_along(make: Make) -> None:
    engine, gate = make(1), Gate()
    (held,) = gate.hold(engine, 1)

    def die(_: Future[None]) -> None:
        raise SystemExit(1)

    held.add_done_callback(die)
    gate.opened.set()
    assert engine.submit(lambda: 7).result(timeout=30) == 7


def test_a_dead_loop_fails_every_job() -> None:
    engine, gate = AiofilesEngine(1), Gate()
    (running,) = gate.hold(engine, 1)
    queued = [engine.submit(lambda: 1) for _ in range(5)]

    def die() -> None:
        raise SystemExit(1)

    engine._loop.call_soon_threadsafe(die)
    for future in queued:
        with pytest.raises(StoreError, match="died"):
            future.result(timeout=30)
    gate.opened.set()
    running.result(timeout=30)
    with pytest.raises(StoreError, match="died"):
        engine.submit(lambda: 1)
    engine.close()


def test_an_executor_that_refuses_fails_the_job() -> None:
    engine = AiofilesEngine(1)
    engine._pool.shutdown()
    with pytest.raises(StoreError, match="shutdown"):
        engine.submit(lambda: 1).result(timeout=30)
    engine.close()


def test_close_runs_what_was_accepted_and_refuses_the_rest(make: Make) -> None:
    engine, gate, seen = make(2), Gate(), []
    gate.hold(engine, 2)
    jobs = [engine.submit(lambda i=i: seen.append(i)) for i in range(10)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    assert closer.is_alive()
    gate.opened.set()
    closer.join(timeout=30)
    assert sorted(seen) == list(range(10))
    assert all(j.done() for j in jobs)
    with pytest.raises(ClosedError, match="closed"):
        engine.submit(lambda: 1)
    engine.close()


class Told(Job):
    """A job of its owner's: what became of it."""

    def __init__(self, log: list[object], name: str) -> None:
        self.log, self.name = log, name
        self.ended = threading.Event()

    def run(self) -> None:
        self.log.append(self.name)
        self.ended.set()

    def refuse(self, error: OffloadError) -> None:
        self.log.append(error)
        self.ended.set()


def test_an_owners_jobs_stand_in_the_same_line(make: Make) -> None:
    engine, gate, log = make(1), Gate(), list[object]()
    gate.hold(engine, 1)
    jobs = [Told(log, name) for name in ("ahead", "needed", "needed too")]
    engine.put(jobs[0], PREFETCH)
    engine.put(jobs[1])
    last = engine.submit(lambda: log.append("a future's"))
    engine.put(jobs[2])
    gate.opened.set()
    last.result(timeout=30)
    assert all(job.ended.wait(timeout=30) for job in jobs)
    assert log == ["needed", "a future's", "needed too", "ahead"]
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.put(jobs[0])
    assert len(log) == 4


def test_an_owners_job_that_dies_does_not_take_the_worker_along(make: Make) -> None:
    class Dies(Told):
        def run(self) -> None:
            raise SystemExit(1)

    engine = make(1)
    engine.put(Dies([], ""))
    assert engine.submit(lambda: 7).result(timeout=30) == 7


def test_a_dead_loop_refuses_an_owners_job() -> None:
    class Dies(Told):
        def refuse(self, error: OffloadError) -> None:
            super().refuse(error)
            raise SystemExit(1)  # nor do the others wait for one that cannot take it

    engine, gate, log = AiofilesEngine(1), Gate(), list[object]()
    gate.hold(engine, 1)
    jobs = [Dies(log, "first"), Told(log, "second")]
    for job in jobs:
        engine.put(job)

    def die() -> None:
        raise SystemExit(1)

    engine._loop.call_soon_threadsafe(die)
    assert all(job.ended.wait(timeout=30) for job in jobs)
    assert [type(told) for told in log] == [StoreError, StoreError]
    gate.opened.set()
    engine.close()


def test_close_with_cancelled_jobs_in_the_queue(make: Make) -> None:
    engine, gate = make(1), Gate()
    gate.hold(engine, 1)
    queued = [engine.submit(lambda: 1) for _ in range(5)]
    assert all(q.cancel() for q in queued)
    gate.opened.set()
    engine.close()
    assert not wait(queued, timeout=30).not_done


def test_an_idle_engine_keeps_no_buffer(make: Make) -> None:
    class Thing:
        def __call__(self) -> None:
            return None

    engine, thing = make(1), Thing()
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    engine.submit(thing).result(timeout=30)
    del thing
    gc.collect()
    assert gone.wait(timeout=30)  # the worker lets go just after it has resolved the future


def test_a_kept_error_keeps_no_buffer(make: Make, big_file: Path) -> None:
    engine = make(1)
    buf = AlignedBuffer(4096)
    with DirectFile.open(big_file, syscalls=Syscalls(preadv=failing(errno.EIO))) as file:
        error = engine.read(file, 0, buf.view).exception(timeout=30)
    engine.close()
    assert error is not None
    buf.close()  # BufferError while a frame of the traceback holds a view
