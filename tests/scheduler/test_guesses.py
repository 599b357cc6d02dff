"""Experts read on a guess: when, into which slots, and what becomes of right and wrong ones."""

from __future__ import annotations

import pytest
from residency_oracle import Harness, make_plan

from offload.blocks import Tier
from offload.errors import SchedulerError
from offload.scheduler.guesses import MOST_SPARE, guess_count, spare_slots

RAM, DEVICE = Tier.RAM, Tier.DEVICE
A = [f"a{i}" for i in range(8)]
B = [f"b{i}" for i in range(8)]
C = [f"c{i}" for i in range(8)]


def harness(slots: int = 12, *, top: Tier = RAM, top_k: int = 16) -> Harness:
    """Two layers of eight experts; a token uses more than the slots hold: some are spare."""
    return Harness(
        make_plan(
            [],
            dict.fromkeys([*A, *B], 1),
            top=top,
            ring={},
            experts={"a": A, "b": B},
            slots={RAM: slots, DEVICE: slots},
            guess_top_k=top_k,
        )
    )


def three_layers(slots: int = 12, top_k: int = 7) -> Harness:
    layers = {"a": A, "b": B, "c": C}
    plan = make_plan([], dict.fromkeys([*A, *B, *C], 1), ring={}, experts=layers,
                     slots={RAM: slots}, guess_top_k=top_k)  # fmt: skip
    return Harness(plan)


def run(h: Harness, group: str, experts: list[str], ahead: list[str] | None = None) -> None:
    """A layer, and the guess of the next one once this one is routed."""
    h.route(group, experts)
    if ahead is not None:
        h.guess("b" if group == "a" else "a", ahead)
    for e in experts:
        if not h.acquire(e):
            h.settle()
            assert h.acquire(e)
        h.release(e)
    h.note(h.residency.end_route())


def reads(h: Harness) -> int:
    return sum(h.oracle.fetches.values())


def test_a_right_guess_is_there_and_counts_as_a_miss() -> None:
    h = harness(12, top_k=7)
    run(h, "a", A[:2], B[:2])
    h.settle()
    assert h.residency.guessed == (2, 0)
    before = reads(h)
    h.route("b", B[:3])
    assert h.acquire(B[0])
    assert h.acquire(B[1])
    assert not h.acquire(B[2])
    h.settle()
    assert reads(h) == before + 1
    assert h.residency.guessed == (2, 2)
    assert (h.residency.hits, h.residency.misses) == (0, 5)


def test_a_guess_waits_until_the_disk_has_nothing_else() -> None:
    h = harness(12, top_k=7)
    h.route("a", A[:4])
    h.guess("b", B[:2])
    assert {b for b, _ in h.oracle.flights} == set(A[:4])
    h.arrive(A[0], RAM)
    # The last demands are on their way: the queue must not run dry.
    assert {b for b, _ in h.oracle.flights} == {A[1], A[2], A[3], B[0]}
    h.arrive(A[1], RAM)
    assert {b for b, _ in h.oracle.flights} == {A[2], A[3], B[0], B[1]}


def test_a_wrong_guess_makes_way_at_once() -> None:
    h = harness(12, top_k=7)
    run(h, "a", A[:2], B[:2])
    h.settle()
    free = len(h.residency._stock.top.slots)
    h.route("b", B[4:5])
    assert h.residency.where(B[0]) is None
    assert h.residency.where(B[1]) is None
    assert len(h.residency._stock.top.slots) == free + 2 - 1
    assert h.residency.guessed == (2, 0)


def test_a_wrong_guess_in_flight_makes_way_when_it_arrives() -> None:
    h = harness(12, top_k=7)
    h.route("a", A[:1])
    h.guess("b", B[:1])
    assert (B[0], RAM) in h.oracle.flights
    h.route("b", B[1:2])
    h.arrive(B[0], RAM)
    assert h.residency.where(B[0]) is None


def test_a_wrong_guess_in_flight_may_be_wanted_later() -> None:
    h = harness(12, top_k=7)
    h.route("a", A[:1])
    h.guess("b", B[:1])
    h.route("b", B[1:2])
    h.route("b", B[:1])  # before it has arrived
    h.settle()
    assert h.acquire(B[0])
    assert h.oracle.fetches[B[0], RAM] == 1


def test_no_guess_takes_the_slot_of_what_is_used() -> None:
    h = harness(5, top_k=3)  # the least that spares a slot: one
    h.route("a", A[:5])
    h.settle()
    assert all(h.acquire(e) for e in A[:5])
    h.guess("b", B[:2])
    assert not h.oracle.flights
    h.release_all()
    h.note(h.residency.end_route())
    h.guess("b", B[:2])
    assert {b for b, _ in h.oracle.flights} == {B[0]}


def test_a_failed_guess_is_read_when_it_is_needed() -> None:
    h = harness(12, top_k=7)
    h.route("a", A[:1])
    h.guess("b", B[2:3])
    h.fail(B[2], RAM)
    assert not {b for b, _ in h.oracle.flights} & {B[2]}, "read again unasked"
    h.settle()
    run(h, "b", B[2:3])
    assert h.oracle.fetches[B[2], RAM] == 2


def test_nothing_is_read_on_a_guess_below_a_device_or_without_leave() -> None:
    for h in (harness(12, top=DEVICE, top_k=7), harness(12, top_k=0)):
        run(h, "a", A[:1], B[:2])
        h.settle()
        assert h.residency.guessed == (0, 0)
        assert not any(b in B for b, _ in h.oracle.fetches)


def test_unknown_layers_and_experts() -> None:
    h = harness(12, top_k=7)
    with pytest.raises(SchedulerError, match="no layer 'c'"):
        h.guess("c", [])
    h.guess("b", ["nobody"])
    assert not h.oracle.flights


def test_ranks_that_do_not_hold_are_not_read() -> None:
    """The gate's first choice is always right here and its second never; a layer is no other's."""
    h = harness(12, top_k=7)
    for i in range(40):
        first, second, third = (B[(i + j) % 8] for j in range(3))
        run(h, "a", A[:1], [first, second])
        h.settle()
        run(h, "b", [first, third], [A[0]])
        h.settle()
        assert h.residency.guessed[1] <= h.residency.guessed[0]
    guesses = h.residency._routes.guesses
    assert guesses._trust["b"][0] > 0.9
    assert guesses._trust["b"][1] < 0.1
    assert guesses._trust["a"][0] > 0.9
    read, right = h.residency.guessed
    assert right >= read - 2, "the second choice went on being read"


def test_the_layer_after_the_next_one() -> None:
    """Its guess stays while the next layer runs, and counts when its own is routed."""
    h = three_layers()
    h.route("a", A[:1])
    h.guess("b", B[:1])
    h.guess("c", C[:2], far=True)
    h.settle()
    assert h.residency.guessed == (3, 0)
    h.route("b", B[:1])
    assert h.residency.guessed == (3, 1)
    h.guess("c", C[1:3])  # from nearer: one is there, one is new
    h.settle()
    assert h.oracle.fetches[C[1], RAM] == 1
    assert all(h.residency.where(c) is not None for c in C[:3])
    h.route("c", C[1:3])
    assert h.residency.guessed == (4, 3)
    assert h.residency.where(C[0]) is None, "a wrong one makes way when its layer is routed"
    assert h.residency.misses == 4
    assert all(h.acquire(c) for c in C[1:3])


def test_a_far_guess_waits_until_the_disk_has_next_to_nothing() -> None:
    h = three_layers()
    h.route("a", A[:3])
    h.guess("b", B[:1])
    h.guess("c", C[:3], far=True)
    assert {b for b, _ in h.oracle.flights} == {*A[:3], B[0]}
    h.arrive(A[0], RAM)
    h.arrive(A[1], RAM)
    assert {b for b, _ in h.oracle.flights} == {A[2], B[0]}
    h.arrive(A[2], RAM)
    assert {b for b, _ in h.oracle.flights} == {B[0], C[0]}
    h.route("b", B[:2])  # what is needed comes before those that have not begun
    assert {b for b, _ in h.oracle.flights} == {B[0], C[0], B[1]}
    h.arrive(B[0], RAM)
    h.arrive(B[1], RAM)
    assert {b for b, _ in h.oracle.flights} == {C[0]}, "what was not begun is asked for anew"


def test_a_far_guess_of_a_layer_that_does_not_come() -> None:
    h = three_layers()
    h.route("a", A[:1])
    h.guess("c", C[:2], far=True)
    h.settle()
    h.route("b", B[:1])
    h.settle()
    h.route("a", A[1:2])
    assert all(h.residency.where(c) is None for c in C[:2])


def test_far_guesses_take_no_more_slots_than_are_spare() -> None:
    h = three_layers(12, top_k=7)
    spare = h.residency._routes.guesses._spare
    assert spare == 4
    h.route("a", A[:1])
    h.guess("b", B[:3])
    h.settle()
    h.guess("c", C[:5], far=True)
    h.settle()
    assert sum(h.residency.where(b) is not None for b in (*B, *C)) == spare


def test_far_ranks_are_counted_apart() -> None:
    """The far choice is always wrong, the near one right: only the far one is dropped."""
    h = three_layers()
    for i in range(30):
        used, other = C[i % 8], C[(i + 1) % 8]
        h.route("a", A[:1])
        h.guess("c", [other], far=True)
        h.settle()
        h.route("b", B[:1])
        h.guess("c", [used])
        h.settle()
        h.route("c", [used])
        h.settle()
    guesses = h.residency._routes.guesses
    assert guesses._trust["c"][0] > 0.8
    assert guesses._far_trust["c"][0] < 0.2
    read, right = h.residency.guessed
    assert read - right <= 2


@pytest.mark.parametrize(
    ("slots", "top_k", "spare"),
    [
        (0, {"a": 2}, 0),
        (9, {"a": 8}, 0),  # what one layer uses and one more
        (14, dict.fromkeys(range(14), 8), 4),
        (144, dict.fromkeys(range(14), 8), 8),  # as many as a layer uses
        (400, dict.fromkeys(range(14), 16), MOST_SPARE),
        (20, dict.fromkeys(range(8), 2), 1),  # more than a token's 16: each slot brings hits
        (15, dict.fromkeys(range(8), 2), 2),
        (5, {}, 0),
    ],
)
def test_spare_slots(slots: int, top_k: dict[str, int], spare: int) -> None:
    assert spare_slots(slots, top_k) == spare


def test_guess_count() -> None:
    assert [guess_count(k) for k in (1, 2, 4, 8)] == [1, 1, 3, 6]
