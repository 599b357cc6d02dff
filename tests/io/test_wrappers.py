"""Wrappers: late, counted, failing; each still a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from io_support import SPECS, content_of, filled, payload, read_block, write_block

from offload.errors import ClosedError, StoreError
from offload.io.faults import Fault, FaultyStore
from offload.io.files import TransferError
from offload.io.memory import AlignedBuffer, Staging
from offload.io.store import Span
from offload.io.stores import MemoryStore
from offload.io.wrappers import LatencyStore, MeteredStore

BY_ID = {s.id: s for s in SPECS}
CONTENTS = {s.id: content_of(s) for s in SPECS}


def memory() -> MemoryStore:
    return MemoryStore(SPECS, CONTENTS)


def test_latency_is_kept() -> None:
    store = LatencyStore(memory(), seconds=0.05)
    start_s = time.monotonic()
    assert read_block(store, "page") == payload(BY_ID["page"], CONTENTS["page"])
    assert time.monotonic() - start_s >= 0.05
    store.close()


def test_latency_does_not_hold_the_caller_and_closing_delivers() -> None:
    store = LatencyStore(memory(), seconds=3600)
    with AlignedBuffer(4096) as buf:
        futures = [store.read_into("page", buf) for _ in range(20)]
        assert not any(f.done() for f in futures)
        store.close()
        assert [f.result(timeout=30).payload_bytes for f in futures] == [4096] * 20


def test_the_lane_is_shared() -> None:
    store = LatencyStore(memory(), bytes_per_s=4096 / 0.02)
    start_s = time.monotonic()
    with AlignedBuffer(4096) as buf:
        futures = [store.read_into("page", buf) for _ in range(5)]
        order: list[int] = []
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: order.append(i))
        wait(futures, timeout=30)
    assert time.monotonic() - start_s >= 5 * 0.02
    assert order == sorted(order)
    store.close()


def test_meter_counts_before_the_future_is_done() -> None:
    faulty = FaultyStore(memory())
    store = MeteredStore(faulty)
    for n in range(1, 20):
        read_block(store, "odd")
        assert store.totals.reads == n
    write_block(store, "small", CONTENTS["small"])
    with AlignedBuffer(4096) as buf:
        store.read_spans_into("odd", [Span(0, 0, 100)], buf).result(timeout=30)
    faulty.inject(Fault.EIO)
    with pytest.raises(StoreError):
        read_block(store, "page")
    with pytest.raises(KeyError):
        store.read_into("nobody", memoryview(b""))
    totals = store.totals
    assert (totals.reads, totals.writes, totals.failures) == (20, 1, 1)
    assert totals.payload_bytes == 19 * BY_ID["odd"].payload_nbytes + 100 + 42
    assert store.reads() == {"odd": 20}
    assert store.writes() == {"small": 1}
    store.close()


def test_busy_time_is_a_union() -> None:
    faulty = FaultyStore(memory())
    store = MeteredStore(faulty)
    faulty.inject(Fault.HANG, times=2)
    with AlignedBuffer(4096) as buf:
        start_s = time.perf_counter()
        futures = [store.read_into("page", buf) for _ in range(2)]
        threading.Event().wait(0.05)
        faulty.release()
        wait(futures, timeout=30)
        elapsed_s = time.perf_counter() - start_s
        assert 0.05 <= store.totals.busy_s <= elapsed_s  # twice that if it were a sum
        idle_s = store.totals.busy_s
        threading.Event().wait(0.01)
        assert store.totals.busy_s == idle_s
    store.close()


def faulty() -> FaultyStore:
    return FaultyStore(memory())


def test_io_error() -> None:
    store = faulty()
    store.inject(Fault.EIO, "odd")
    assert read_block(store, "page") == payload(BY_ID["page"], CONTENTS["page"])
    with pytest.raises(TransferError, match=r"block odd: cannot read 70334 bytes.*injected"):
        read_block(store, "odd")
    assert read_block(store, "odd") == payload(BY_ID["odd"], CONTENTS["odd"])
    assert store.injected == [("read", "odd", Fault.EIO)]
    store.close()


def test_full_disk_hits_writes_only_and_keeps_the_old_block() -> None:
    store = faulty()
    store.inject(Fault.ENOSPC)
    read_block(store, "page")
    with pytest.raises(TransferError, match="No space left"):
        write_block(store, "page", content_of(BY_ID["page"], 1))
    assert read_block(store, "page") == payload(BY_ID["page"], CONTENTS["page"])
    store.close()


def test_short_read() -> None:
    store = faulty()
    store.inject(Fault.SHORT_READ)
    with filled(b"\x99" * 4096) as buf:
        with pytest.raises(StoreError, match="short read, 2048 of 4096"):
            store.read_into("page", buf).result(timeout=30)
        assert bytes(buf) == CONTENTS["page"][:2048] + b"\x99" * 2048
    store.close()


def test_bit_flip() -> None:
    store = faulty()
    store.inject(Fault.BIT_FLIP, times=2)
    with AlignedBuffer(BY_ID["odd"].slot_nbytes) as buf:
        store.read_into("odd", buf).result(timeout=30)
        assert (
            different_bits(payload(BY_ID["odd"], buf), payload(BY_ID["odd"], CONTENTS["odd"])) == 1
        )
        store.read_spans_into("odd", [Span(100, 8, 50)], buf).result(timeout=30)
        assert different_bits([bytes(buf[8:58])], [CONTENTS["odd"][100:150]]) == 1
    store.close()


def different_bits(a: list[bytes], b: list[bytes]) -> int:
    pairs = zip(b"".join(a), b"".join(b), strict=True)
    return sum((x ^ y).bit_count() for x, y in pairs)


def test_torn_write() -> None:
    store = faulty()
    store.inject(Fault.TORN_WRITE)
    new = content_of(BY_ID["page"], 1)
    write_block(store, "page", new)
    (got,) = read_block(store, "page")
    assert got[:2048] == new[:2048]
    assert all(x != y for x, y in zip(got[2048:], new[2048:], strict=True))
    store.close()


def test_hang_until_released() -> None:
    store = faulty()
    store.inject(Fault.HANG)
    with filled(b"\x99" * 4096) as buf:
        future = store.read_into("page", buf)
        assert not future.cancel()
        assert not future.done()
        assert bytes(buf) == b"\x99" * 4096
        store.release()
        future.result(timeout=30)
        assert bytes(buf) == CONTENTS["page"]
        store.inject(Fault.HANG)
        future = store.read_into("page", buf)
        store.close()
        assert future.done()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_chance_is_repeatable(seed: int) -> None:
    def run() -> list[tuple[str, str, Fault]]:
        store = FaultyStore(memory(), seed=seed, rates={Fault.EIO: 0.3, Fault.BIT_FLIP: 0.2})
        for _ in range(20):
            try:
                read_block(store, "page")
            except StoreError:
                continue
        store.close()
        return store.injected

    first = run()
    assert run() == first
    assert len({len(first), 20}) == 2, "not every call fails"


def test_cancel_reaches_the_inner_store() -> None:
    class Pending(MemoryStore):
        """A store whose transfers wait in a queue for ever."""

        def read_into(self, *_: object, **__: object) -> object:  # type: ignore[override]
            return Future()

    wraps: list[Callable[[MemoryStore], object]] = [MeteredStore, LatencyStore]
    for wrap in wraps:
        store = wrap(Pending(SPECS))
        with AlignedBuffer(4096) as buf:
            future = store.read_into("page", buf)  # type: ignore[attr-defined]
            assert not future.done()
            assert future.cancel()
            assert future.cancelled()
            assert not wait([future], timeout=30).not_done
        store.close()  # type: ignore[attr-defined]


# Staging


def test_staging() -> None:
    staging = Staging(2, 8192)
    assert staging.total_bytes == 16384
    with staging.chunk() as a, staging.chunk() as b:
        assert a.address % 4096 == b.address % 4096 == 0
        assert abs(a.address - b.address) == 8192
        assert len(a.view) == 8192
    staging.close()
    staging.close()
    with pytest.raises(ClosedError, match="closed"), staging.chunk():
        pass
    for chunks, size in ((0, 4096), (1, 0), (1, 5000)):
        with pytest.raises(ValueError, match="staging"):
            Staging(chunks, size)


def test_staging_serves_demand_first() -> None:
    staging = Staging(1, 4096)
    order: list[int] = []

    def borrow(priority: int) -> None:
        with staging.chunk(priority):
            order.append(priority)

    with staging.chunk():
        threads = []
        for n, priority in enumerate((1, 1, 0), start=1):
            threads.append(threading.Thread(target=borrow, args=(priority,)))
            threads[-1].start()
            while len(staging._waiting) < n:
                time.sleep(0)
    for t in threads:
        t.join(timeout=30)
    assert order == [0, 1, 1]
    staging.close()


def test_two_chunks_returned_at_once_serve_two() -> None:
    staging = Staging(2, 4096)
    taken = [staging._take(0), staging._take(0)]
    served = threading.Semaphore(0)

    def borrow(priority: int) -> None:
        with staging.chunk(priority):
            served.release()
            both.wait(timeout=30)

    both = threading.Barrier(2)
    threads = []
    for n, priority in enumerate((1, 0), start=1):  # the second in line is the first to wake
        threads.append(threading.Thread(target=borrow, args=(priority,)))
        threads[-1].start()
        while len(staging._waiting) < n:
            time.sleep(0)
    with staging._changed:
        staging._free.extend(taken)
        staging._changed.notify_all()
    for _ in threads:
        assert served.acquire(timeout=30)
    for t in threads:
        t.join(timeout=30)
    staging.close()


def test_closing_the_staging_waits_for_its_chunks() -> None:
    staging = Staging(1, 4096)
    with staging.chunk() as chunk:
        closer = threading.Thread(target=staging.close)
        closer.start()
        closer.join(timeout=0.1)
        assert closer.is_alive()
        chunk.view[0] = 1  # still mapped
    closer.join(timeout=30)
    assert not closer.is_alive()
