"""Single stories of ``Residency``: each was a bug once, or is a promise with a number in it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from residency_oracle import Harness, make_plan
from test_residency_machine import plans

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.plan import Plan
from offload.scheduler.residency import Fetch
from offload.scheduler.trace import Step, Trace

RAM, DEVICE = Tier.RAM, Tier.DEVICE


# -- in trace order ----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(plans(shared=False), st.sampled_from([min, max, lambda fs: fs[0], lambda fs: fs[-1]]))
def test_in_order_no_use_reads_twice(plan: Plan, pick: object) -> None:
    """However small the ring. (A block that several steps share may lie where the next step
    cannot fit around it: then that step starts over.)"""
    h = Harness(plan)
    h.settle(pick)
    for _ in range(4):
        for step in plan.trace:
            ticket = h.need(step.unit, step.blocks)
            h.settle(pick)
            h.done(ticket)
            h.settle(pick)
    assert all(n <= 4 + 1 for n in h.oracle.fetches.values())  # one pass of them lies ahead


@pytest.mark.parametrize("top", [RAM, DEVICE])
def test_with_room_for_two_steps_compute_never_waits(top: Tier) -> None:
    steps = [(f"u{i}", [f"u{i}a", f"u{i}b"]) for i in range(5)]
    pages = {b: 1 + len(u) % 2 for u, bs in steps for b in bs}
    h = Harness(make_plan(steps, pages, top=top, ring={RAM: 8, DEVICE: 8}))
    h.settle()
    for _ in range(3):
        for unit, blocks in steps:
            assert h.residency.expects(unit)
            ticket = h.need(unit, blocks)
            assert ticket in h.ready
            h.settle()
            h.done(ticket)
    assert not any(f.demand for f in h.oracle.latest if isinstance(f, Fetch))


def test_a_ring_that_holds_the_whole_cycle_reads_once() -> None:
    steps = [(f"u{i}", [f"w{i}"]) for i in range(4)]
    h = Harness(make_plan(steps, {f"w{i}": 1 for i in range(4)}, ring={RAM: 4}))
    for _ in range(5):
        for unit, blocks in steps:
            h.run_unit(unit, blocks)
    assert set(h.oracle.fetches.values()) == {1}


# -- two units at once -------------------------------------------------------------------------


@pytest.mark.parametrize("top", [RAM, DEVICE])
def test_two_waiting_units_do_not_hold_what_the_other_lacks(top: Tier) -> None:
    pages = dict.fromkeys("abcd", 1)
    plan = make_plan([("x", "ab"), ("y", "cd")], pages, top=top, ring={RAM: 2, DEVICE: 2})
    h = Harness(plan)
    h.settle()  # a and b are there
    first = h.need("y", "cd")
    second = h.need("x", "ab")
    h.settle()
    assert first in h.ready
    assert second not in h.ready
    h.done(first)
    h.settle()
    assert second in h.ready


def test_a_unit_behind_gives_its_blocks_to_the_first() -> None:
    pages = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1}
    h = Harness(make_plan([("x", "a")], pages, ring={RAM: 3}))
    h.settle()
    running = h.need("x", "a")
    first = h.need("y", "dc")  # waits for room beside a
    second = h.need("z", "ab")  # holds a, which now runs, and waits behind
    h.settle()
    h.done(running)
    h.settle()
    assert first in h.ready
    h.done(first)
    h.settle()
    assert second in h.ready


def test_waiting_for_a_running_unit_reads_nothing_again() -> None:
    """Its own gaps are too narrow, but so they stay until the other has run."""
    pages = {"p": 1, "a": 1, "b": 2}
    h = Harness(make_plan([("x", "p")], pages, ring={RAM: 3}))
    h.settle()
    running = h.need("x", "p")
    waiting = h.need("y", "ab")
    h.settle()
    h.settle()
    assert h.oracle.fetches["a", RAM] <= 1
    h.done(running)
    h.settle()
    assert waiting in h.ready


def test_starts_over_when_its_own_blocks_are_in_the_way() -> None:
    pages = {"p": 1, "a": 1, "b": 1, "big": 2}
    h = Harness(make_plan([("x", "p")], pages, ring={RAM: 3}))
    h.settle()
    running = h.need("x", "p")  # at page 0; a goes to page 1: no room for big on either side
    waiting = h.need("y", ["a", "big"])
    h.settle()
    h.done(running)
    h.settle()
    assert waiting in h.ready


def test_a_block_named_twice_is_let_go() -> None:
    h = Harness(make_plan([("x", "a")], {"a": 1}, ring={RAM: 1}))
    ticket = h.need("x", ["a", "a"])
    h.settle()
    h.done(ticket)
    assert h.residency.held() == []


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [RAM, DEVICE])
def test_a_pinned_block_that_failed_is_brought_when_it_is_needed(tier: Tier) -> None:
    plan = make_plan([("x", "a")], {"a": 1}, top=DEVICE, ring={RAM: 1}, pinned={DEVICE: "a"})
    h = Harness(plan)
    if tier == DEVICE:
        h.arrive("a", RAM)
    h.fail("a", tier)
    assert h.residency.loading() == ["a"]
    h.settle()
    assert h.residency.loading() == ["a"]
    h.run_unit("x", "a")
    assert h.residency.loading() == []


@pytest.mark.parametrize("top", [RAM, DEVICE])
def test_a_pinned_expert_that_failed_is_brought_when_it_is_acquired(top: Tier) -> None:
    plan = make_plan([], {"e": 1}, top=top, ring={RAM: 1}, pinned={top: "e"}, experts={"g": "e"})
    h = Harness(plan)
    h.fail("e", RAM)
    h.run_experts("g", "e")


@pytest.mark.parametrize("top", [RAM, DEVICE])
def test_nothing_is_read_again_before_compute_asks(top: Tier) -> None:
    slots = {RAM: 1, DEVICE: 1}
    plan = make_plan(
        [("x", "a"), ("y", "b")],
        {"a": 1, "b": 1, "e": 1},
        top=top,
        ring={RAM: 2, DEVICE: 2},
        experts={"g": "e"},
        slots=slots,
    )
    h = Harness(plan)
    h.settle()
    h.route("g", "e")
    h.fail("e", RAM)
    assert not h.oracle.flights
    assert not h.acquire("e")
    assert ("e", RAM) in h.oracle.flights
    h.settle()
    assert h.acquire("e")
    h.release("e")

    ticket = h.need("z", "ab")
    assert ticket in h.ready
    h.done(ticket)
    h.run_unit("x", "a")


def test_a_unit_that_gave_up_is_where_the_trace_goes_on() -> None:
    steps = [(f"u{i}", [f"w{i}"]) for i in range(4)]
    h = Harness(make_plan(steps, {f"w{i}": 1 for i in range(4)}, ring={RAM: 2}))
    h.fail("w0", RAM)
    ticket = h.need("u0", ["w0"])
    h.fail("w0", RAM)
    assert ticket in h.broken
    h.done(ticket)
    assert h.residency.expects("u0")
    h.run_unit("u0", ["w0"])
    assert h.residency.expects("u1")


# -- the order changes -------------------------------------------------------------------------


def test_decoder_only_cycle_after_retrace_reads_no_encoder() -> None:
    steps = [(f"enc{i}", [f"e{i}"]) for i in range(3)] + [(f"dec{i}", [f"d{i}"]) for i in range(3)]
    pages = {b: 1 for _, bs in steps for b in bs}
    h = Harness(make_plan(steps, pages, ring={RAM: 2}))
    for unit, blocks in steps:
        h.run_unit(unit, blocks)
    h.note(h.residency.retrace(Trace([Step(unit=u, blocks=tuple(b)) for u, b in steps[3:]])))
    h.settle()
    before = h.oracle.fetches.copy()
    for _ in range(3):
        for unit, blocks in steps[3:]:
            h.run_unit(unit, blocks)
    assert not any(b.startswith("e") for b, _ in h.oracle.fetches - before)


def test_ram_goes_back_for_a_block_that_left_the_device() -> None:
    """A shared block was above when RAM's pointer came by, and is gone when its turn comes."""
    steps = [("u0", "s"), ("u1", "ab"), ("u2", "s"), ("u3", "cd")]
    pages = dict.fromkeys("sabcd", 1)
    h = Harness(make_plan(steps, pages, top=DEVICE, ring={RAM: 2, DEVICE: 2}))
    h.settle()
    for _ in range(3):
        for unit, blocks in steps:
            ticket = h.need(unit, blocks)
            h.settle()
            h.done(ticket)
            h.settle()
            assert not any(f.demand for f in h.oracle.latest if isinstance(f, Fetch))


# -- experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [RAM, DEVICE])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_route_longer_than_the_slots_runs_in_waves(top: Tier, slots: int) -> None:
    experts = [f"e{i}" for i in range(7)]
    h = Harness(
        make_plan(
            [],
            dict.fromkeys(experts, 1),
            top=top,
            ring={},
            experts={"g": experts},
            slots={RAM: slots, DEVICE: slots},
        )
    )
    h.run_experts("g", experts)
    # In order of use, each is read once: what comes later never displaces what comes first.
    assert all(h.oracle.fetches[e, RAM] == 1 for e in experts)
    assert (h.residency.hits, h.residency.misses) == (0, 7)


def test_experts_may_be_acquired_in_another_order() -> None:
    h = Harness(
        make_plan([], dict.fromkeys("abc", 1), ring={}, experts={"g": "abc"}, slots={RAM: 1})
    )
    h.route("g", "abc")
    for e in "cab":
        if not h.acquire(e):
            h.settle()
            assert h.acquire(e)
        h.release(e)


def test_all_experts_of_a_layer_come_up_through_one_ram_slot() -> None:
    experts = "abcd"
    h = Harness(
        make_plan(
            [],
            dict.fromkeys(experts, 1),
            top=DEVICE,
            ring={},
            experts={"g": experts},
            slots={RAM: 1, DEVICE: 4},
        )
    )
    h.route("g", experts)
    h.settle()
    assert h.acquire_all(experts)
    h.release_all()
    assert h.residency.held() == []


def test_acquire_all_holds_all_or_none() -> None:
    h = Harness(
        make_plan([], dict.fromkeys("abc", 1), ring={}, experts={"g": "abc"}, slots={RAM: 2})
    )
    h.run_experts("g", "ab")
    assert not h.acquire_all("abc")
    assert h.residency.held() == []
    assert h.acquire_all("ba")
    assert sorted(h.residency.held()) == ["a", "b"]
    h.release_all()
    assert h.acquire_all("")


# -- refusals ----------------------------------------------------------------------------------


def harness() -> Harness:
    return Harness(
        make_plan(
            [("x", "a")],
            {"a": 1, "b": 2, "e": 1, "f": 1},
            ring={RAM: 2},
            experts={"g": "ef"},
            slots={RAM: 1},
        )
    )


def test_illegal_events_name_the_block_and_its_story() -> None:
    h = harness()
    r = h.residency
    h.settle()
    with pytest.raises(SchedulerError, match=r"a to RAM ended.*fetched ahead to RAM@0; arrived"):
        r.arrived("a", RAM)
    with pytest.raises(SchedulerError, match="none is in flight"):
        r.failed("a", RAM, "why")
    with pytest.raises(SchedulerError, match="b is not in RAM; story of b: no move lately"):
        r.arrived("b", RAM)
    with pytest.raises(SchedulerError, match="e is not in RAM"):
        r.release("e")
    h.run_experts("g", "e")
    with pytest.raises(SchedulerError, match="e is released but not held"):
        r.release("e")
    with pytest.raises(SchedulerError, match="ticket 7 is not held"):
        r.done(7)
    with pytest.raises(SchedulerError, match="ticket 7 is not held"):
        r.missing(7)
    r.validate()


def test_what_could_only_wait_for_ever_is_refused() -> None:
    r = harness().residency
    with pytest.raises(SchedulerError, match="x needs 12288 bytes at once, more than the RAM ring"):
        r.need("x", "ab")
    with pytest.raises(SchedulerError, match="x needs nope, which the plan does not know"):
        r.need("x", ["nope"])
    with pytest.raises(SchedulerError, match="no layer 'h'"):
        r.route("h", "e")
    with pytest.raises(SchedulerError, match="g routes to nope"):
        r.route("g", ["nope"])
    with pytest.raises(SchedulerError, match="a is acquired but is no expert"):
        r.acquire("a")
    r.validate()
    with pytest.raises(SchedulerError, match=r"expert e \(4096 bytes\) has no place in RAM"):
        Harness(make_plan([], {"e": 1}, ring={}, experts={"g": "e"}))
    with pytest.raises(SchedulerError, match="cannot pass the RAM ring of 0 bytes"):
        Harness(make_plan([], {"a": 1}, top=DEVICE, ring={}, pinned={DEVICE: "a"}))
    with pytest.raises(SchedulerError, match="cannot pass the RAM ring of 4096 bytes"):
        Harness(make_plan([], {"a": 2}, top=DEVICE, ring={RAM: 1, DEVICE: 2})).residency.need(
            "x", "a"
        )
