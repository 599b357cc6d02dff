"""Passes that are laid out once: an oracle runs them, and looks at every byte of the ring."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.blocks import ALIGN
from offload.scheduler.laps import Copy, Stage, lay_out

PAGE = ALIGN
BASE = 7 * PAGE


def steps_of(
    sizes: Sequence[Sequence[int]],
) -> tuple[list[tuple[str, tuple[str, ...]]], dict[str, int]]:
    """Units u0, u1, ... with blocks of so many pages."""
    steps, nbytes = [], {}
    for i, pages in enumerate(sizes):
        blocks = tuple(f"u{i}/{j}" for j in range(len(pages)))
        nbytes |= {b: n * PAGE for b, n in zip(blocks, pages, strict=True)}
        steps.append((f"u{i}", blocks))
    return steps, nbytes


def run(stages: Sequence[Stage], nbytes: dict[str, int], capacity: int, laps: int) -> list[int]:
    """Run laps as the runtime does, the copies as early as their conditions allow. Raises
    AssertionError where a step would find other bytes than its own, or a copy would overwrite what
    is still to be used. Returns, of each step of the last lap, how many steps before it its last
    copy could begin."""
    n = len(stages)
    memory: dict[
        int, tuple[str, int]
    ] = {}  # page -> the block that was copied there, for which use
    done = -1  # the last step that has run
    uses = dict.fromkeys(nbytes, 0)
    ahead: list[int] = []
    asked_before: dict[str, int] = {}

    def ask(copy: Copy, now: int) -> None:
        assert copy.offset >= BASE
        assert copy.offset + nbytes[copy.block] <= BASE + capacity
        # The next use of the block that has no copy yet.
        use = asked_before.get(copy.block, -1) + 1
        asked_before[copy.block] = use
        step = use * n + copy.step
        assert step > now, f"{copy.block} is asked for behind its own use"
        # What it waits for has been queued: its last time is at or before ``now``.
        last = [now - (now - j) % n for j in copy.after]
        assert all(at <= now for at in last)
        for page in range(copy.offset, copy.offset + nbytes[copy.block], PAGE):
            if page in memory:
                owner, its = memory[page]
                used_at = its * n + stage_of[owner]
                assert used_at <= now, f"{copy.block} overwrites {owner}, which is still to be used"
                assert used_at in last or any(used_at < at for at in last), (copy, owner)
            memory[page] = copy.block, use
        began[copy.block] = max(last, default=-1)

    stage_of = {c.block: c.step for stage in stages for c in stage.then}
    began: dict[str, int] = {}
    first = [c for stage in stages for c in stage.then if c.early]
    for copy in sorted(first, key=lambda c: c.step):
        ask(copy, -1)
    for step in range(laps * n):
        stage = stages[step % n]
        for block, offset in stage.places:
            for page in range(offset, offset + nbytes[block], PAGE):
                assert memory.get(page) == (block, uses[block]), (block, page)
            uses[block] += 1
        if stage.places and step >= (laps - 1) * n:
            ahead.append(step - max(began[b] for b, _ in stage.places))
        done = step
        for copy in stage.then:
            ask(copy, done)
    return ahead


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=9),
    st.integers(0, 30),
)
def test_every_step_finds_its_own_bytes_in_every_lap(sizes: list[list[int]], extra: int) -> None:
    steps, nbytes = steps_of(sizes)
    largest = max(sum(s) for s in sizes)
    capacity = (largest + extra) * PAGE
    stages = lay_out(steps, nbytes, BASE, capacity)
    if sum(nbytes.values()) <= capacity:
        assert stages is None
        return
    assert stages is not None
    assert [s.unit for s in stages] == [u for u, _ in steps]
    run(stages, nbytes, capacity, 4)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_copies_begin_as_many_steps_ahead_as_the_ring_has_room_for(k: int) -> None:
    steps, nbytes = steps_of([[4]] * (3 * k))
    stages = lay_out(steps, nbytes, BASE, 4 * k * PAGE)
    assert stages is not None
    assert min(run(stages, nbytes, 4 * k * PAGE, 4)) >= k


@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_end_of_a_lap_costs_little_where_it_does_not_fit_the_ring(k: int) -> None:
    """Each lap has the same layout, so where its steps are no multiple of the ring's, some copies
    begin later than the ring would have room for."""
    for n in range(2 * k, 4 * k):
        steps, nbytes = steps_of([[4]] * n)
        stages = lay_out(steps, nbytes, BASE, 4 * k * PAGE)
        assert stages is not None
        ahead = sorted(run(stages, nbytes, 4 * k * PAGE, 4))
        assert ahead[0] >= 1
        assert ahead[n // 2] >= min(k, 2)


def test_projections_of_a_layer_overlap_in_a_ring_of_two_of_the_largest() -> None:
    """As a plan of a dense model has it: q, k, v, o and three larger ones. No copy waits for the
    step right before its own."""
    steps, nbytes = steps_of([[5], [1], [1], [5], [16], [16], [16]] * 3)
    stages = lay_out(steps, nbytes, BASE, 32 * PAGE)
    assert stages is not None
    assert min(run(stages, nbytes, 32 * PAGE, 4)) >= 2


def test_what_cannot_repeat_is_refused() -> None:
    steps, nbytes = steps_of([[4], [4], [4]])
    assert lay_out(steps, nbytes, BASE, 12 * PAGE) is None  # all of it stays
    assert lay_out(steps, nbytes, BASE, 3 * PAGE) is None  # a step has no room
    assert lay_out([*steps, steps[0]], nbytes, BASE, 8 * PAGE) is None  # a block comes twice
