"""``Ring`` against a map of single bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.ring import Ring

CAPACITY, BASE = 24, 100


class ByteMap:
    """One cell per byte, searched by brute force."""

    def __init__(self) -> None:
        self.cells: list[int | None] = [None] * CAPACITY  # the owner's offset

    def fits(self, at: int, n: int) -> bool:
        return at + n <= CAPACITY and all(c is None for c in self.cells[at : at + n])

    def first(self, start: int, n: int) -> int | None:
        return next((BASE + a for a in range(start, CAPACITY) if self.fits(a, n)), None)

    def fill(self, offset: int, n: int) -> None:
        self.cells[offset - BASE : offset - BASE + n] = [offset] * n


def place(ring: Ring, nbytes: int) -> int | None:
    """A new range by next fit, if there is one."""
    for offset in ring.gaps(nbytes)[:1]:
        ring.take(offset, nbytes)
        return offset
    return None


@given(st.lists(st.one_of(st.integers(1, 12), st.integers(-30, -1)), max_size=60))
def test_next_fit_equals_a_byte_map(moves: list[int]) -> None:
    ring, bytemap, live, after = Ring(BASE, CAPACITY), ByteMap(), [], 0
    for move in moves:
        if move > 0:
            n = move
            want = bytemap.first(after, n)
            if want is None:
                want = bytemap.first(0, n)
            # Any gap at all is found, the nearest behind the latest range first.
            assert ring.gaps(n) == list(
                dict.fromkeys(
                    o for o in (bytemap.first(after, n), bytemap.first(0, n)) if o is not None
                )
            )
            assert place(ring, n) == want
            if want is not None:
                bytemap.fill(want, n)
                live.append(want)
                after = want + n - BASE
        elif live:
            offset = live.pop(move % len(live))
            ring.free(offset)
            bytemap.cells = [None if c == offset else c for c in bytemap.cells]
            if not live:
                after = 0
        assert ring.used == sum(c is not None for c in bytemap.cells)
        assert len(ring) == len(live)


@given(
    st.lists(st.tuples(st.integers(0, CAPACITY - 1), st.integers(1, 6)), max_size=4),
    st.lists(st.integers(1, 10), max_size=5),
)
def test_packs_says_whether_first_fit_succeeds(
    wishes: list[tuple[int, int]], sizes: list[int]
) -> None:
    bytemap, fixed = ByteMap(), []
    for at, n in wishes:
        if bytemap.fits(at, n):
            bytemap.fill(BASE + at, n)
            fixed.append((BASE + at, n))
    want = True
    for n in sizes:
        offset = bytemap.first(0, n)
        if offset is None:
            want = False
            break
        bytemap.fill(offset, n)
    ring = Ring(BASE, CAPACITY)
    assert ring.packs(fixed[::-1], sizes) == want
    assert ring.used == 0


def test_streaming_in_order_wastes_nothing() -> None:
    ring, live = Ring(0, 10), []
    for i in range(100):
        n = (3, 2, 5)[i % 3]
        while (offset := place(ring, n)) is None:
            ring.free(live.pop(0))
        live.append(offset)
        assert ring.used == 10 or i < 2


@pytest.mark.parametrize(("offset", "nbytes"), [(BASE, 0), (BASE - 1, 1), (BASE + CAPACITY, 1)])
def test_refuses_ranges_that_are_none(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="no range"):
        Ring(BASE, CAPACITY).take(offset, nbytes)


def test_refuses_what_is_taken_and_what_is_not() -> None:
    ring = Ring(BASE, CAPACITY)
    ring.take(BASE + 4, 4)
    for offset in (BASE + 1, BASE + 4, BASE + 7):
        with pytest.raises(ValueError, match="not free"):
            ring.take(offset, 4)
    with pytest.raises(KeyError):
        ring.free(BASE)
