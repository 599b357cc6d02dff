"""A pass that repeats: where each block that streams lies, and when its copy may begin.

Where all that streams to the device lies in RAM for good, nothing but compute decides when a block
may come: a pass can be laid out once. Each step has an area of the ring, and a copy is asked for
when the last step that used any of its bytes has been queued. The state machine finds room as it
goes, where the same layout comes again after a dozen passes, if ever; here it is the same in each,
so a pass costs no decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from offload.blocks import ALIGN


@dataclass(frozen=True, slots=True)
class Copy:
    """A block's copy up in every lap.

    Attributes:
        step: that needs the block.
        offset: in the arena of the device.
        after: steps whose use of the same bytes has to be over: those behind ``step`` are of the
            lap before.
        early: of how many laps before the step's own this is asked for.
    """

    block: str
    step: int
    offset: int
    after: tuple[int, ...]
    early: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of every lap.

    Attributes:
        places: of its blocks, where they lie in the arena of the device.
        then: copies to be asked for when the step has been queued, in order.
    """

    unit: str
    places: tuple[tuple[str, int], ...]
    then: tuple[Copy, ...]


def lay_out(
    steps: Sequence[tuple[str, tuple[str, ...]]],
    nbytes: Mapping[str, int],
    base: int,
    capacity: int,
) -> tuple[Stage, ...] | None:
    """Every lap of ``steps`` (unit, its blocks that stream) in a ring at ``base``.

    Args:
        nbytes: of each block's slot.

    Returns:
        None: not so. All of it has room at once (then nothing streams), a block is used twice, or a
        step finds no room beside nothing.
    """
    sizes = [sum(nbytes[b] for b in dict.fromkeys(blocks)) for _, blocks in steps]
    every = [b for _, blocks in steps for b in dict.fromkeys(blocks)]
    if sum(sizes) <= capacity or len(set(every)) < len(every) or max(sizes) > capacity:
        return None
    areas = _areas(sizes, capacity)
    places: list[list[tuple[str, int]]] = [[] for _ in steps]
    then: list[list[Copy]] = [[] for _ in steps]
    latest = -len(steps)
    for i, (_, blocks) in enumerate(steps):
        at = areas[i]
        for block in dict.fromkeys(blocks):
            after = _before(i, at, at + nbytes[block], areas, sizes)
            # In the order of use, on a stream that works in order.
            latest = max(latest, max(after))
            early, asked = divmod(latest, len(steps))
            behind = tuple(sorted({j % len(steps) for j in after}))
            places[i].append((block, base + at))
            then[asked].append(Copy(block, i, base + at, behind, -early))
            at += nbytes[block]
    return tuple(
        # Copies for a step before this one are of the next lap.
        Stage(unit, tuple(lie), tuple(sorted(asked_for, key=lambda c: c.early)))
        for (unit, _), lie, asked_for in zip(steps, places, then, strict=True)
    )


MOST_PARTS = 8
"""Of a ring. One for the step that computes, one that is being filled, and so on."""

Owner = tuple[int, int, int]
"""[start, stop) in the ring, and the step that uses it; those of the next lap counted on."""


def _areas(sizes: Sequence[int], capacity: int) -> list[int]:
    """Where each step's blocks lie in every lap: of several ways that with the shortest laps."""
    best: tuple[int, list[int]] | None = None
    for parts in (*range(min(MOST_PARTS, capacity // max(sizes)), 1, -1), 0):
        areas = _in_parts(sizes, capacity, parts) if parts else _widest(sizes, capacity)
        took = _lap_time(areas, sizes)
        if best is None or took < best[0]:
            best = took, areas
        if took == sum(sizes):
            break  # the copies alone take that
    assert best is not None
    return best[1]


def _lap_time(areas: Sequence[int], sizes: Sequence[int]) -> int:
    """Of a lap behind others, if a step computes for as long as its copy takes."""
    n, copied, done = len(sizes), 0, [0] * len(sizes)
    before = (_before(i, areas[i], areas[i] + size, areas, sizes) for i, size in enumerate(sizes))
    last = [max(found, default=-n) % n for found in before]
    ends = []
    for _ in range(3):
        for i, size in enumerate(sizes):
            copied = max(copied, done[last[i]]) + size
            done[i] = max(copied, done[i - 1]) + size
        ends.append(done[-1])
    return ends[-1] - ends[-2]


def _in_parts(sizes: Sequence[int], capacity: int, parts: int) -> list[int]:
    """The ring in equal parts, one after the other: as many steps in each as it holds."""
    room = capacity // parts // ALIGN * ALIGN
    found, part, at = [], 0, 0
    for size in sizes:
        if at + size > room:
            part, at = (part + 1) % parts, 0
        found.append(part * room + at)
        at += size
    return found


def _widest(sizes: Sequence[int], capacity: int) -> list[int]:
    """Each step where it has most steps to the last use of the same bytes, and to the next one in
    the lap behind; of such places the one that leaves the longest run beside it: an end of the ring
    rather than its middle."""
    owners: list[Owner] = []
    n, found = len(sizes), [0] * len(sizes)
    # The steps that a full ring holds, twice: how far a step looks into the lap behind.
    reach = sum(1 for total in accumulate(sizes) if total <= 2 * capacity)
    for step, size in enumerate(sizes):
        if not size:
            continue
        near = range(min(step, max(0, step + reach - n)))
        after = [(found[j], found[j] + sizes[j], n + j) for j in near if sizes[j]]
        at = found[step] = _place(step, size, [*owners, *after], capacity, 2 * n)
        owners = [
            (x, y, s)
            for a, b, s in owners
            for x, y in ((a, min(b, at)), (max(a, at + size), b))
            if x < y
        ]
        owners.append((at, at + size, step))
    return found


def _place(step: int, size: int, owners: Sequence[Owner], capacity: int, far: int) -> int:
    def worth(at: int) -> tuple[int, int, int]:
        gaps = (abs(s - step) for a, b, s in owners if a < at + size and at < b)
        return min(gaps, default=far), max(at, capacity - at - size), -at

    edges = {0, capacity - size}
    edges |= {at for a, b, _ in owners for at in (b, a - size) if 0 <= at <= capacity - size}
    return max(edges, key=worth)


def _before(
    step: int, start: int, stop: int, areas: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """The steps that had bytes of [start, stop) last, from one lap before the step on; the step's
    own in the lap before is always the end of it."""
    n, left, found = len(areas), [(start, stop)], []
    for j in range(step - 1, step - n - 1, -1):
        a, b = areas[j % n], areas[j % n] + sizes[j % n]
        if all(y <= a or b <= x for x, y in left):
            continue
        found.append(j)
        left = [
            piece for x, y in left for piece in ((x, min(y, a)), (max(x, b), y))
            if piece[0] < piece[1]
        ]  # fmt: skip
        if not left:
            break
    return found


__all__ = ["Copy", "Stage", "lay_out"]
