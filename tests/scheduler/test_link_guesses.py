"""Experts that go up on a guess: when, in whose place, and what becomes of right and wrong ones."""

from __future__ import annotations

import random

import pytest
from residency_oracle import Harness, make_plan
from test_guesses import run

from offload.blocks import Tier
from offload.scheduler.link_guesses import LinkGuesses

RAM, DEVICE = Tier.RAM, Tier.DEVICE
A = [f"a{i}" for i in range(8)]
B = [f"b{i}" for i in range(8)]


def harness(slots: int, *, top_k: int = 2, ring: int = 0) -> Harness:
    """Two layers of eight experts, all of them in RAM, and some slots on the device."""
    names, dense = [*A, *B], [f"d{i}" for i in range(4)] if ring else []
    h = Harness(
        make_plan(
            [("u0", dense[:2]), ("u1", dense[2:])] if ring else [],
            dict.fromkeys([*names, *dense], 1),
            top=DEVICE,
            ring={RAM: 1, DEVICE: ring},
            pinned={RAM: [*names, *dense]},
            experts={"a": A, "b": B},
            slots={DEVICE: slots},
            guess_top_k=top_k,
        )
    )
    h.settle()
    return h


def guesses(h: Harness) -> LinkGuesses:
    found = h.residency._routes.guesses
    assert isinstance(found, LinkGuesses)
    return found


def up(h: Harness) -> set[str]:
    """What the device has or gets."""
    return set(h.oracle.spans[DEVICE])


def test_a_right_guess_is_in_its_slot_when_it_is_asked_for() -> None:
    h = harness(6)
    run(h, "a", A[:2], B[:2])
    h.settle()
    assert h.residency.guessed == (2, 0)
    h.route("b", B[:2])
    assert h.acquire(B[0])
    assert h.acquire(B[1])
    assert h.residency.guessed == (2, 2)
    assert h.residency.misses == 0, "nothing was read from disk"
    h.finish()


def test_a_guess_waits_for_an_idle_link_and_goes_alone() -> None:
    h = harness(6)
    h.route("a", A[:2])
    h.guess("b", B[:2])
    assert {b for b, _ in h.oracle.flights} == set(A[:2])
    h.arrive(A[0], DEVICE)
    assert {b for b, _ in h.oracle.flights} == {A[1]}
    h.arrive(A[1], DEVICE)
    assert {b for b, _ in h.oracle.flights} == {B[0]}
    h.arrive(B[0], DEVICE)
    assert {b for b, _ in h.oracle.flights} == {B[1]}


def test_dense_weights_on_their_way_go_first() -> None:
    h = harness(6, ring=2)
    ticket = h.need("u0", ["d0", "d1"])
    h.settle()
    h.done(ticket)  # the next unit's come up ahead
    assert {b for b, _ in h.oracle.flights} == {"d2", "d3"}
    h.guess("b", B[:1])
    assert B[0] not in up(h)
    h.arrive("d2", DEVICE)
    assert B[0] not in up(h)
    h.arrive("d3", DEVICE)
    assert {b for b, _ in h.oracle.flights} == {B[0]}


def test_what_is_on_disk_only_is_not_guessed() -> None:
    h = Harness(
        make_plan(
            [], dict.fromkeys([*A, *B], 1), top=DEVICE, ring={}, experts={"a": A, "b": B},
            slots={RAM: 6, DEVICE: 6}, guess_top_k=2,
        )
    )  # fmt: skip
    run(h, "a", A[:1], B[:2])
    h.settle()
    assert h.residency.guessed == (0, 0)
    assert not up(h) & set(B)


def test_a_guess_takes_the_place_of_a_less_likely_expert_only() -> None:
    """Three slots, all used. Layer a's experts in slots are hardly ever used again, or always."""
    for used_again, left in ((False, True), (True, False)):
        h = harness(3)
        rng = random.Random(0)
        for _ in range(60):
            some = A[:3] if used_again else rng.sample(A, 1)
            run(h, "a", some)
            h.settle()
        live = guesses(h)._live["a"]
        assert live > 0.9 if used_again else live < 0.5
        before = up(h)
        assert len(before) == 3
        h.guess("b", B[:1])
        assert (B[0] in up(h)) == left
        assert (len(before & up(h)) == 2) == left
        h.settle()
        h.finish()


def test_what_the_running_layer_uses_stays() -> None:
    h = harness(3)
    h.route("a", A[:3])
    h.settle()
    h.guess("b", B[:2])
    assert up(h) == set(A[:3])
    assert not h.oracle.flights
    h.finish()


def test_a_wrong_guess_makes_way_also_one_in_flight() -> None:
    h = harness(6)
    run(h, "a", A[:1], B[:2])
    assert B[0] in up(h)
    h.route("b", B[4:5])  # one has come or is on its way, the other has not begun
    h.settle()
    assert not up(h) & set(B[:2])
    assert h.residency.guessed[1] == 0
    h.finish()


def test_a_guess_that_fails_goes_up_when_it_is_needed() -> None:
    h = harness(6)
    run(h, "a", A[:1])
    h.settle()
    h.guess("b", B[:1])
    h.fail(B[0], DEVICE)
    assert not h.oracle.flights, "copied again unasked"
    run(h, "b", B[:1])
    assert h.oracle.fetches[B[0], DEVICE] == 2


def test_ranks_that_do_not_hold_are_not_copied() -> None:
    h = harness(6)
    for i in range(40):
        first, second, third = (B[(i + j) % 8] for j in range(3))
        run(h, "a", A[:1], [first, second])
        h.settle()
        run(h, "b", [first, third])
        h.settle()
    trust = guesses(h)._trust["b"]
    assert trust[0] > 0.9
    assert trust[1] < 0.1


@pytest.mark.parametrize("seed", range(10))
def test_any_guesses_at_any_time(seed: int) -> None:
    """Under the oracle: nothing that is used or wanted leaves, and nothing waits for ever."""
    rng = random.Random(seed)
    h = harness(rng.randint(3, 9))
    for _ in range(60):
        for group, mine, others in (("a", A, B), ("b", B, A)):
            chosen = sorted(rng.sample(mine, rng.randint(1, 2)))
            h.route(group, chosen)
            h.guess("b" if group == "a" else "a", rng.sample(others, 2))
            for e in chosen:
                while not h.acquire(e):
                    h.arrive(*rng.choice(sorted(h.oracle.flights)))
                while h.oracle.flights and rng.random() < 0.4:
                    h.arrive(*rng.choice(sorted(h.oracle.flights)))
                h.release(e)
            h.note(h.residency.end_route())
    h.settle()
    h.finish()
    guessed, right = h.residency.guessed
    assert guessed >= right
