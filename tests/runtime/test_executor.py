"""The executor: right bytes at every interleaving, errors where they are waited for, no leaks."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from executor_support import UNITS, BrokenStore, Toy, WrongBytesError

from offload.blocks import Tier
from offload.errors import ClosedError, SchedulerError, StoreError, WatchdogError
from offload.io.faults import Fault, FaultyStore
from offload.io.store import Receipt, Span
from offload.io.wrappers import LatencyStore, MeteredStore
from offload.runtime.executor import Executor
from offload.runtime.race import RaceError
from offload.runtime.transfers import Transfers
from offload.scheduler.residency import Residency

DEVICES = ("null", "sim")


def settled(executor: Executor) -> None:
    """Nothing is held, every invariant holds, nothing raced."""
    executor.settle()
    assert executor.held() == []
    executor.validate()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra", [0, 40_000, 2**20])
def test_compute_sees_the_blocks_own_bytes(device: str, experts: bool, extra: int) -> None:
    toy = Toy.make(device, experts=experts, extra=extra)
    for seed in range(6):
        with toy.open(LatencyStore(toy.store(), seconds=0.0005), seed) as executor:
            toy.run(executor, seed=seed)
            settled(executor)
            weights = sum(b.payload_nbytes for b in toy.blocks.values() if not b.group)
            if extra < 2**20:
                assert executor.stats.payload_read_bytes > 2 * weights  # it does stream
        assert executor.live_leases() == 0
        assert executor.device.acquired_memory() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_used_once_a_pass_is_read_once_a_pass(device: str) -> None:
    toy = Toy.make(device)
    store = MeteredStore(toy.store())
    with toy.open(store) as executor:
        toy.run(executor, passes=4)
        settled(executor)
        streamed = {b for u in range(UNITS) for b in toy.streamed(u)}
        lower = toy.plan.tiers[Tier.RAM].pinned
        for block in streamed - set(lower):
            assert 4 <= store.reads()[block] <= 5, block  # the next pass's prefetch has begun


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_error_surfaces_where_it_is_waited_for(device: str) -> None:
    toy = Toy.make(device)
    store = BrokenStore(toy.store())
    victim = toy.some_streamed()
    with toy.open(store) as executor:
        toy.run(executor, passes=1)
        executor.settle()
        store.broken = {victim}
        for _ in range(3):
            with pytest.raises(StoreError, match=f"bad sector.*block {victim}; story of") as caught:
                toy.run(executor, passes=2)
            assert str(caught.value).count("bad sector") == 1
            settled(executor)
        assert store.failed < 20, "hammering a bad sector"
        store.broken = set()
        toy.run(executor)  # it was transient: the same executor goes on
        settled(executor)
    assert executor.live_leases() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.SHORT_READ])
def test_a_failed_prefetch_is_logged_and_tried_again(
    device: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy.make(device, extra=16384)
    faulty = FaultyStore(toy.store())
    with toy.open(faulty) as executor:
        toy.run(executor, passes=1)
        executor.settle()
        faulty.inject(fault, toy.some_streamed())
        toy.run(executor, passes=2)
        assert [f for _, _, f in faulty.injected] == [fault]
        settled(executor)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert toy.some_streamed() in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_error_of_an_expert(device: str) -> None:
    toy = Toy.make(device, experts=True)
    store = BrokenStore(toy.store())
    with toy.open(store) as executor:
        toy.run_units(executor, [0])
        store.broken = {b for b in toy.blocks if b.startswith("g1#")}
        for _ in range(3):
            with pytest.raises(StoreError, match="g1#"):
                toy.run_units(executor, [1])
            settled(executor)
        assert store.failed < 30, "hammering a bad sector"
        store.broken = set()
        toy.run(executor)
        settled(executor)
    assert executor.live_leases() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_pinned_weights_that_cannot_be_read_end_the_start(device: str) -> None:
    toy = Toy.make(device, extra=2**20)
    faulty = FaultyStore(toy.store())
    faulty.inject(Fault.EIO)
    with pytest.raises(StoreError), toy.open(faulty):
        pytest.fail("started without its weights")


def test_rows_that_cannot_be_read() -> None:
    toy = Toy.make("null")
    faulty = FaultyStore(toy.store())
    with toy.open(faulty, watchdog_s=0.05) as executor:
        executor.settle()
        rows = bytearray(20)
        faulty.inject(Fault.EIO)
        with pytest.raises(StoreError, match="u0/0"):
            executor.read_rows("u0/0", [Span(10, 0, 20)], memoryview(rows))
        faulty.inject(Fault.HANG)
        with pytest.raises(WatchdogError, match="1 rows of u0/0"):
            executor.read_rows("u0/0", [Span(10, 0, 20)], memoryview(rows))
        faulty.release()
        executor.read_rows("u0/0", [Span(10, 0, 20)], memoryview(rows))
        assert bytes(rows) == toy.contents["u0/0"][10:30]
        assert executor.stats.row_reads == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_hanging_disk_trips_the_watchdog_and_close_returns(device: str) -> None:
    toy = Toy.make(device)
    faulty = FaultyStore(toy.store())
    with toy.open(faulty, watchdog_s=0.4) as executor:
        toy.run(executor, passes=1)
        executor.settle()
        faulty.inject(Fault.HANG, toy.some_streamed())
        with pytest.raises(WatchdogError, match=r"0 s for u.*story of u"):
            toy.run(executor, passes=2)
        faulty.release()
        toy.run(executor)  # the disk has come back
        settled(executor)
        faulty.inject(Fault.HANG, toy.some_streamed())
        with pytest.raises(WatchdogError):
            toy.run(executor, passes=2)
    # Left hanging: close() has waited for its watchdog, then for the store, which let it go.
    assert executor.live_leases() == 0


# -- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_close_during_prefetch(device: str, caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    toy = Toy.make(device)
    for n in range(8):
        metered = MeteredStore(LatencyStore(toy.store(), seconds=0.002))
        with toy.open(metered, n) as executor:
            toy.run_units(executor, [u % UNITS for u in range(n)])
        assert executor.live_leases() == 0
        with pytest.raises(ClosedError):
            executor.enter("u0", toy.streamed(0))
        executor.close()
    assert set(threading.enumerate()) <= before
    assert not caplog.records


class GatedStore:
    """Reads of one block wait for the gate."""

    def __init__(self, toy: Toy, block: str) -> None:
        self._inner = toy.store()
        self._block = block
        self.gate = threading.Event()
        self.reached = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, block_id: str, dst: memoryview, *, priority: int = 0) -> Future[Receipt]:
        if block_id != self._block:
            return self._inner.read_into(block_id, dst, priority=priority)
        outer: Future[Receipt] = Future()

        def work() -> None:
            self.reached.set()
            self.gate.wait(60)
            outer.set_result(self._inner.read_into(block_id, dst, priority=priority).result())

        threading.Thread(target=work).start()
        return outer


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("device", DEVICES)
def test_who_waits_while_another_thread_closes_gets_an_error(device: str) -> None:
    toy = Toy.make(device)
    store = GatedStore(toy, toy.some_streamed())
    with toy.open(store) as executor:
        waiter, errors = in_thread(lambda: toy.run(executor))
        assert store.reached.wait(60)
        closer, failed = in_thread(executor.close)
        waiter.join(60)
        assert [type(e) for e in errors] == [ClosedError]
        store.gate.set()
        closer.join(60)
        assert failed == []
    assert executor.live_leases() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_close_waits_for_the_unit_that_runs(device: str) -> None:
    toy = Toy.make(device)
    unit = next(u for u in range(UNITS) if toy.streamed(u))
    blocks = toy.streamed(unit)
    with toy.open() as executor:
        ticket = executor.enter(f"u{unit}", blocks)
        closer, failed = in_thread(executor.close)
        with executor._changed:
            assert executor._changed.wait_for(lambda: executor.closed, 60)
        for block in blocks:  # memory is still there
            toy.check(block, executor.views(block))
        assert closer.is_alive()
        executor.leave(ticket, blocks)
        closer.join(60)
        assert not closer.is_alive()
        assert failed == []


@pytest.mark.parametrize("device", DEVICES)
def test_close_does_not_wait_for_its_own_thread(device: str) -> None:
    """After a Ctrl-C in a layer nobody gives its blocks back."""
    toy = Toy.make(device)
    unit = next(u for u in range(UNITS) if toy.streamed(u))
    with toy.open(watchdog_s=1e6) as executor:
        executor.enter(f"u{unit}", toy.streamed(unit))
    assert executor.live_leases() == 0


# -- learning another order -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_another_cycle_than_planned_is_learnt(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the last three units go round, as a decoder does after its encoder."""
    toy = Toy.make(device)
    with toy.open() as executor, caplog.at_level(logging.INFO):
        toy.run(executor, passes=1)
        toy.run_units(executor, [3, 4, 5] * 5)
        settled(executor)
        assert "a cycle of 3 units now" in caplog.text
        toy.run(executor, passes=3)  # and back
        settled(executor)


# -- every edge is needed ---------------------------------------------------------------------

EDGES = ("host-slot-free", "host-block-ready", "device-slot-free", "block-ready")


def _without_edge(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    order = Transfers.order

    def weak(self: Transfers, edge: str, waiter: str, event: Any) -> None:
        if edge != gone:
            order(self, edge, waiter, event)

    monkeypatch.setattr(Transfers, "order", weak)


def _run_seeds(toy: Toy, seeds: Sequence[int]) -> None:
    for seed in seeds:
        with toy.open(LatencyStore(toy.store(), seconds=0.0005), seed) as executor:
            toy.run(executor, seed=seed)
            settled(executor)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("edge", EDGES)
def test_each_order_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, edge: str, experts: bool
) -> None:
    toy = Toy.make("sim", experts=experts)
    _run_seeds(toy, range(4))
    _without_edge(monkeypatch, edge)
    with pytest.raises((RaceError, WrongBytesError)):
        _run_seeds(toy, range(8))


@pytest.mark.parametrize("device", DEVICES)
def test_the_wait_for_residency_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    toy = Toy.make(device)
    monkeypatch.setattr(Residency, "missing", lambda self, ticket: [])
    with pytest.raises((SchedulerError, WrongBytesError, KeyError)):
        _run_seeds(toy, range(8))


@pytest.mark.parametrize("device", DEVICES)
def test_the_wait_for_an_expert_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    toy = Toy.make(device, experts=True)
    acquire = Residency.acquire
    monkeypatch.setattr(Residency, "acquire", lambda self, e: (True, acquire(self, e)[1]))
    with pytest.raises((SchedulerError, WrongBytesError, KeyError)):
        _run_seeds(toy, range(8))


@pytest.mark.parametrize("what", ["unit", "expert", "run"])
def test_a_ctrl_c_in_the_very_moment_of_entering(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised when the books are right again, and then nobody hears of what is held."""
    toy = Toy.make("null", experts=True)
    inner = Transfers.begin_use

    def begin_use(self: Transfers, blocks: Sequence[str]) -> None:
        inner(self, blocks)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with toy.open(toy.store()) as executor:
            group, blocks = "g1", toy.streamed(0)
            expert = "g1#2"

            def hold() -> None:
                if what == "unit":
                    executor.enter("u0", blocks)
                elif what == "expert":
                    executor.acquire(expert)
                else:
                    executor.acquire_run([expert], 1)

            if what != "unit":
                executor.route(group, [expert])
            with monkeypatch.context() as patch:
                patch.setattr(Transfers, "begin_use", begin_use)
                with pytest.raises(KeyboardInterrupt):
                    hold()
            if what != "unit":
                executor.end_route()
            assert executor.held() == []
            toy.run(executor)
            settled(executor)
    finally:
        signal.signal(signal.SIGINT, before)
