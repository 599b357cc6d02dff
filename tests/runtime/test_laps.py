"""Passes that repeat: the same bytes as passes that are decided, and every wait is needed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from executor_support import UNITS, Toy, WrongBytesError
from fake_card import FakeCard

from offload.blocks import Tier
from offload.errors import ClosedError, DeviceError
from offload.runtime.arena import Arena
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.executor import Executor
from offload.runtime.race import RaceError
from offload.runtime.timeline import Recorder
from offload.runtime.transfers import Transfers
from offload.scheduler.timeline import H2D

ROOM = 2**20


def make(extra: int = 0) -> Toy:
    """All in RAM, and the least above it (``extra`` bytes more)."""
    return Toy.make("sim", ram=ROOM, extra=extra)


def laps(executor: Executor) -> Any:
    found = executor._laps
    assert found is not None
    return found


def settled(executor: Executor) -> None:
    executor.settle()
    assert executor.held() == []
    executor.validate()


def order(*passes: Sequence[int]) -> list[int]:
    return [u for one in passes for u in one]


ALL = list(range(UNITS))


@pytest.mark.parametrize("extra", [0, 8192, 24_576])
def test_every_unit_sees_its_own_bytes(extra: int) -> None:
    toy = make(extra)
    for seed in range(8):
        with toy.open(seed=seed) as executor:
            toy.run(executor, passes=7, seed=seed)
            assert laps(executor).repeating
            assert executor.repeated == 5 * UNITS
            settled(executor)
            assert not laps(executor).repeating
        assert executor.live_leases() == 0
        executor.device.check()


def test_copies_are_those_that_were_decided_before() -> None:
    """One of each streamed block in a pass, and what went when the first one was laid out."""
    toy = make()
    each = sum(toy.blocks[b].slot_nbytes for u in ALL for b in toy.streamed(u))
    ring = toy.plan.tiers[Tier.DEVICE].ring_bytes
    with toy.open() as executor:
        toy.run(executor, passes=4)
        before = executor.stats.h2d_bytes
        toy.run(executor, passes=10)
        assert executor.stats.h2d_bytes == before + 10 * each
        assert before <= 4 * each + 3 * ring


@pytest.mark.parametrize(
    "strange",
    [[2], [0, 0], [5, 4, 3, 2, 1, 0], [0, 1, 1, 2, 3, 4, 5], [3, 4, 5] * 5, [1, 1]],
    ids=str,
)
def test_another_order_is_decided_again_and_then_repeated_again(strange: list[int]) -> None:
    toy = make()
    for seed in range(4):
        with toy.open(seed=seed) as executor:
            toy.run(executor, passes=4)
            # In the middle of a pass, too.
            for start in (0, 1, 4):
                toy.run_units(executor, order(ALL, ALL, ALL, ALL[:start], strange, ALL[start:]))
            toy.run_units(executor, order(ALL, ALL, ALL, ALL))
            assert laps(executor).repeating
            settled(executor)
            toy.run(executor, passes=2)
            settled(executor)
        executor.device.check()


def test_a_unit_that_runs_keeps_its_bytes_when_another_comes_inside_of_it() -> None:
    toy = make(16_384)
    for inner in (0, 2, 5):
        for seed in range(3):
            with toy.open(seed=seed) as executor:
                toy.run_units(executor, order(ALL, ALL, ALL, [0, 1]))
                assert laps(executor).repeating
                outer = executor.enter("u2", toy.streamed(2))
                if inner != 2:  # its own bytes are there already
                    toy.run_units(executor, [inner])
                assert not laps(executor).repeating or inner == 2
                for block in toy.streamed(2):
                    toy.check(block, executor.views(block))
                executor.leave(outer, toy.streamed(2))
                toy.run_units(executor, order(ALL[3:], ALL, ALL, ALL))
                settled(executor)
            executor.device.check()


def test_a_part_that_goes_round_behind_another_is_repeated_every_time() -> None:
    """As a decoder behind its encoder, also where the whole is what came before."""
    toy = make()
    with toy.open() as executor:
        for _ in range(6):
            before = laps(executor).repeated
            toy.run_units(executor, [0, 1, 2, *[3, 4, 5] * 6])
            assert laps(executor).repeating
            assert laps(executor).repeated >= before + 2 * 3
        toy.run(executor, passes=4)
        settled(executor)
    executor.device.check()


@pytest.mark.parametrize("repeating", [False, True])
@pytest.mark.parametrize("inner", [[1, 2], [1, 2, 3, 4], [3, 1, 3]], ids=str)
def test_units_that_go_round_inside_of_another_are_decided(
    inner: list[int], repeating: bool
) -> None:
    """The one that they run in holds its bytes: there is no ring to lay passes out in."""
    toy = make(24_576)
    with toy.open() as executor:
        toy.run(executor, passes=4 if repeating else 1)
        outer = executor.enter("u0", toy.streamed(0))
        toy.run_units(executor, inner * 5)
        assert not laps(executor).repeating
        for block in toy.streamed(0):
            toy.check(block, executor.views(block))
        executor.leave(outer, toy.streamed(0))
        toy.run(executor, passes=4)
        assert laps(executor).repeating
        settled(executor)
    executor.device.check()


def run_seeds(toy: Toy, units: Sequence[int]) -> None:
    for seed in range(8):
        with toy.open(seed=seed) as executor:
            toy.run_units(executor, units)
            settled(executor)


EDGES = ("repeated-slot-free", "repeated-block-ready")


@pytest.mark.parametrize("edge", EDGES)
def test_each_order_is_missed_when_it_is_gone(monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    toy = make()
    whole = Transfers.order

    def weak(self: Transfers, name: str, waiter: str, event: Any) -> None:
        if name != edge:
            whole(self, name, waiter, event)

    monkeypatch.setattr(Transfers, "order", weak)
    with pytest.raises((RaceError, WrongBytesError)):
        run_seeds(toy, order(*[ALL] * 6))


def test_what_was_done_without_leases_comes_before_what_is_done_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The books are put back behind all that was queued: without that the race is seen where a step
    has ended behind which nothing is asked for."""
    toy = make(57_344)
    again = [u for left in range(UNITS) for u in order(ALL, ALL, ALL, ALL, ALL[:left], [3])]
    run_seeds(toy, again)
    monkeypatch.setattr(Arena, "all_after", lambda *_: None)
    with pytest.raises((RaceError, WrongBytesError)):
        run_seeds(toy, again)


def test_closed_in_the_middle_of_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    toy = make()
    for n in range(UNITS):
        with toy.open(seed=n) as executor:
            toy.run_units(executor, order(ALL, ALL, ALL, ALL[:n]))
            assert laps(executor).repeating
        assert executor.live_leases() == 0
        assert executor.device.acquired_memory() == 0
        executor.device.check()
    assert not caplog.records


def test_closed_while_a_unit_runs() -> None:
    """As after a Ctrl-C in its forward: the thread that closes is the one that is in it."""
    toy = make()
    with toy.open() as executor:
        toy.run_units(executor, order(ALL, ALL, ALL, [0]))
        executor.enter("u1", toy.streamed(1))
    assert executor.live_leases() == 0
    executor.device.check()


def at_first_wait(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have it called once, where a unit that repeats is about to wait for its first block."""
    whole, left = Transfers.order, [call]

    def order(self: Transfers, name: str, waiter: str, event: Any) -> None:
        if name == "repeated-block-ready" and left:
            left.pop()()
        whole(self, name, waiter, event)

    monkeypatch.setattr(Transfers, "order", order)


def test_looked_at_while_a_unit_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = make()
    for n in range(UNITS):
        with toy.open(seed=n) as executor, monkeypatch.context() as patch:
            toy.run_units(executor, order(ALL, ALL, ALL, ALL[:n]))
            at_first_wait(patch, executor.held)
            toy.run_units(executor, order(ALL[n:], ALL, ALL, ALL))
            assert laps(executor).repeating
            settled(executor)
        executor.device.check()


def test_closed_by_another_thread_while_a_unit_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs to its end, the next one is refused, and nobody waits for longer."""
    toy = make()
    closers: list[threading.Thread] = []
    with toy.open(watchdog_s=1e6) as executor:
        toy.run(executor, passes=4)

        def close() -> None:
            closers.append(threading.Thread(target=executor.close))
            closers[0].start()
            with executor._changed:
                assert executor._changed.wait_for(lambda: executor.closed, 60)

        at_first_wait(monkeypatch, close)
        toy.run_units(executor, [0])
        closers[0].join(60)
        assert not closers[0].is_alive()
        with pytest.raises(ClosedError):
            toy.run_units(executor, [1])
    assert executor.live_leases() == 0
    executor.device.check()


@pytest.mark.parametrize("settles", [False, True])
def test_a_wait_that_fails_gives_the_unit_up(
    monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """Whoever has a handler of SIGINT of their own is interrupted in it, too."""
    toy = make()
    with toy.open() as executor:
        toy.run(executor, passes=4)

        def interrupt() -> None:
            if settles:
                executor.held()
            raise KeyboardInterrupt

        at_first_wait(monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            toy.run(executor, passes=1)
        settled(executor)
        toy.run(executor, passes=4)
        assert laps(executor).repeating
        settled(executor)
    executor.device.check()


def test_the_timeline_has_the_copies_and_the_waits() -> None:
    toy = make()
    recorder = Recorder(2**12)
    with toy.open(recorder=recorder) as executor:
        toy.run(executor, passes=8)
        assert laps(executor).repeating
        executor.settle()
        executor.device.h2d.record().wait()
    copies = recorder.timeline().lanes[H2D]
    of_one = [s for s in copies if s.name == toy.some_streamed()]
    assert 8 <= len(of_one) <= 10
    assert all(s.end_s >= s.start_s for s in copies)


def test_a_ctrl_c_in_the_very_moment_of_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = make()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    whole = Transfers.count_use

    def counts(self: Transfers, blocks: int) -> None:
        whole(self, blocks)
        if blocks > 0:
            signal.raise_signal(signal.SIGINT)

    try:
        with toy.open() as executor:
            toy.run(executor, passes=4)
            with monkeypatch.context() as patch:
                patch.setattr(Transfers, "count_use", counts)
                with pytest.raises(KeyboardInterrupt):
                    executor.enter("u0", toy.streamed(0))
            settled(executor)
            toy.run(executor, passes=4)
            settled(executor)
    finally:
        signal.signal(signal.SIGINT, before)


# -- a card -----------------------------------------------------------------------------------


def on_card(toy: Toy, card: FakeCard, **kwargs: Any) -> Executor:
    return Executor(toy.plan, toy.store(), CudaDevice(ROOM, api=card), **kwargs)


@pytest.mark.parametrize("refuse", [None, "not permitted"], ids=["pinned", "staged"])
def test_a_card_gets_the_same_bytes(refuse: str | None) -> None:
    toy = make()
    for seed in range(4):
        card = FakeCard(seed=seed, jitter_s=200e-6, refuse=refuse)
        executor = on_card(toy, card)
        executor.start()
        toy.run(executor, passes=8)
        assert laps(executor).repeating
        toy.run_units(executor, order([3, 0], ALL, ALL, ALL, ALL))
        assert laps(executor).repeating
        settled(executor)
        executor.close()
        card.end()


def test_the_host_asks_a_card_for_nothing_and_waits_for_nothing() -> None:
    """Only orders of streams, copies and events."""
    toy = make()
    card = FakeCard(jitter_s=0.0)
    executor = on_card(toy, card)
    executor.start()
    toy.run(executor, passes=4)
    assert laps(executor).repeating
    card.calls.clear()
    waits = dict(executor.stats.host_waits)
    toy.run(executor, passes=2)
    said = {call.partition(":")[0] for call in card.calls}
    assert said == {"copy", "record", "wait"}
    assert dict(executor.stats.host_waits) == waits
    executor.close()
    card.end()


def test_a_card_that_fails_says_which_block_it_was() -> None:
    toy = make()
    card = FakeCard()
    executor = on_card(toy, card)
    executor.start()
    toy.run(executor, passes=4)
    card.broken = True
    with pytest.raises(DeviceError, match=r"illegal memory access.*block u\d/\d"):
        toy.run(executor, passes=2)
    with pytest.raises(DeviceError):
        toy.run(executor, passes=1)
    executor.close()
    assert executor.live_leases() == 0


# -- experts, and passes that do not repeat ---------------------------------------------------


@pytest.mark.parametrize("extra", [0, 8192])
def test_the_host_waits_for_no_copy_of_what_stays_in_ram(extra: int) -> None:
    """Experts and units in any order: a card's compute waits by itself."""
    toy = Toy.make("sim", experts=True, ram=ROOM, extra=extra)
    for seed in range(4):
        card = FakeCard(seed=seed, jitter_s=300e-6)
        executor = on_card(toy, card)
        executor.start()
        waits = executor.stats.host_waits["block"]
        toy.run_units(executor, order(ALL, [5, 1, 3, 0], ALL, [2, 2]))
        assert executor.stats.host_waits["block"] == waits
        settled(executor)
        executor.close()
        card.end()
        assert executor.live_leases() == 0


def test_the_host_waits_where_the_bytes_in_ram_may_be_overwritten() -> None:
    """Those of a block that only passes RAM, as long as they are copied."""
    toy = Toy.make("sim", experts=True)
    card = FakeCard(jitter_s=300e-6)
    executor = on_card(toy, card)
    executor.start()
    toy.run(executor, passes=3)
    assert executor.stats.host_waits["block"] > 0
    settled(executor)
    executor.close()
    card.end()


def test_a_copy_that_fails_behind_its_promise_is_heard_of() -> None:
    toy = Toy.make("sim", experts=True, ram=ROOM)
    card = FakeCard(jitter_s=300e-6)
    executor = on_card(toy, card)
    executor.start()
    toy.run(executor, passes=1)
    card.broken = True
    with pytest.raises(DeviceError, match="illegal memory access"):
        toy.run(executor, passes=3)
    executor.close()
    assert executor.live_leases() == 0


def test_runs_of_experts_are_held_together() -> None:
    """All that were asked for, though none has ended its way up when the first is wanted."""
    toy = Toy.make("sim", experts=True, ram=ROOM, extra=40_000)
    card = FakeCard(jitter_s=300e-6)
    executor = on_card(toy, card)
    executor.start()
    names = [f"g1#{e}" for e in range(3)]
    executor.route("g1", names)
    assert len(executor.acquire_run(names, 8)) == 3
    executor.release_run(names)
    executor.end_route()
    settled(executor)
    executor.close()
    card.end()


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("edge", ["block-ready", "repeated-block-ready"])
def test_what_is_promised_is_waited_for_by_compute(
    monkeypatch: pytest.MonkeyPatch, edge: str, experts: bool
) -> None:
    """Without that wait a card's compute finds other bytes: nothing else orders it."""
    if experts and edge == "repeated-block-ready":
        pytest.skip("a routing decides: no pass repeats itself")
    toy = Toy.make("sim", experts=experts, ram=ROOM)
    whole = Transfers.order

    def weak(self: Transfers, name: str, waiter: str, event: Any) -> None:
        if name != edge:
            whole(self, name, waiter, event)

    monkeypatch.setattr(Transfers, "order", weak)
    with pytest.raises(WrongBytesError):
        on_cards(toy, range(8))


def on_cards(toy: Toy, seeds: Sequence[int]) -> None:
    for seed in seeds:
        card = FakeCard(seed=seed, jitter_s=500e-6)
        executor = on_card(toy, card)
        executor.start()
        try:
            toy.run(executor, passes=6, seed=seed)
        finally:
            executor.close()
            card.end()
