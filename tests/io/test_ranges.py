"""Range planning against an oracle that moves one byte at a time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.blocks import ALIGN, align_up
from offload.io.ranges import Copy, Part, Piece, Request, plan_requests

FILE_BYTES = 100_000


@st.composite
def scattered(draw: st.DrawFn) -> tuple[list[Piece], int]:
    """Pieces with any sources and disjoint targets, and the target's length."""
    congruent = draw(st.booleans())
    pieces, at = [], 0
    for _ in range(draw(st.integers(0, 8))):
        n = draw(st.one_of(st.integers(0, 300), st.integers(0, 30_000)))
        at += draw(st.sampled_from([0, 1, 64, 4096, 5000]))
        src = draw(st.integers(0, FILE_BYTES - n))
        if congruent:  # what makes reading in place possible
            src = min(src - src % ALIGN + at % ALIGN, FILE_BYTES - n)
        pieces.append(Piece(draw(st.integers(0, 1)), src, at, n))
        at += n
    return draw(st.permutations(pieces)), at + draw(st.sampled_from([0, 1, 4096, 10_000]))


def run(requests: list[Request], files: list[bytes], room: int, in_place: bool) -> bytearray:
    """Carry the requests out as a store does: in place where allowed, else with copies."""
    target = bytearray(room)
    for r in requests:
        chunk = files[r.file][r.offset : r.offset + r.nbytes].ljust(r.nbytes, b"\xee")
        if not in_place:
            for c in r.copies:
                target[c.dst : c.dst + c.nbytes] = chunk[c.src : c.src + c.nbytes]
            continue
        at, bounce = 0, bytearray()
        for part in r.parts:
            pages = chunk[at : at + part.nbytes]
            at += part.nbytes
            if part.at is None:
                bounce += pages
            else:
                target[part.at : part.at + part.nbytes] = pages
        assert (at, len(bounce)) == (r.nbytes, r.bounce_bytes)
        for c in r.bounced:
            target[c.dst : c.dst + c.nbytes] = bounce[c.src : c.src + c.nbytes]
    assert len(target) == room
    return target


FILES = [random.Random(i).randbytes(FILE_BYTES) for i in range(2)]


@settings(deadline=None, max_examples=400)
@given(
    case=scattered(),
    request_bytes=st.sampled_from([4096, 8192, 20480, 1 << 20]),
    in_place=st.booleans(),
    order=st.randoms(use_true_random=False),
    gap_bytes=st.sampled_from([0, 0, 1, 4096, 20_000]),
    bounce_bytes=st.sampled_from([None, 4096, 12_288, 1 << 20]),
)
def test_brings_every_byte(
    case: tuple[list[Piece], int],
    request_bytes: int,
    in_place: bool,
    order: random.Random,
    gap_bytes: int,
    bounce_bytes: int | None,
) -> None:
    pieces, room = case
    requests = plan_requests(
        pieces,
        request_bytes=request_bytes,
        room=room,
        gap_bytes=gap_bytes,
        bounce_bytes=bounce_bytes,
    )
    order.shuffle(requests)  # workers finish in any order
    got = run(requests, FILES, room, in_place)
    for p in pieces:
        for i in range(p.nbytes):
            assert got[p.dst + i] == FILES[p.file][p.src + i]


@settings(deadline=None, max_examples=300)
@given(
    case=scattered(),
    request_bytes=st.sampled_from([4096, 8192, 20480, 1 << 20]),
    bounce_bytes=st.sampled_from([None, 4096, 12_288, 1 << 20]),
)
def test_shape_of_requests(
    case: tuple[list[Piece], int], request_bytes: int, bounce_bytes: int | None
) -> None:
    pieces, room = case
    requests = plan_requests(
        pieces, request_bytes=request_bytes, room=room, bounce_bytes=bounce_bytes
    )
    wanted = {(p.file, (p.src + i) // ALIGN) for p in pieces for i in range(p.nbytes)}
    read = [(r.file, page) for r in requests for page in range(r.offset // ALIGN, r.end // ALIGN)]
    assert len(read) == len(set(read)), "a page is read twice"
    assert set(read) == wanted
    for r in requests:
        assert r.offset % ALIGN == r.nbytes % ALIGN == 0
        assert 0 < r.nbytes <= request_bytes
        assert r.bounce_bytes <= (bounce_bytes or request_bytes)
        for part in r.parts:
            assert part.nbytes > 0
            assert part.nbytes % ALIGN == 0
            if part.at is not None:
                assert part.at % ALIGN == 0
                assert 0 <= part.at <= room - part.nbytes
    physical = sum(r.nbytes for r in requests)
    assert physical <= sum(p.nbytes for p in pieces) + 8192 * len([p for p in pieces if p.nbytes])
    assert sum(r.payload_bytes for r in requests) == sum(p.nbytes for p in pieces)
    assert [(r.file, r.offset) for r in requests] == sorted((r.file, r.offset) for r in requests)


def test_touching_tensors_become_one_range() -> None:
    pieces = [Piece(0, 8 + 1000 * i, 1024 * i, 1000) for i in range(8)]
    (only,) = plan_requests(pieces, request_bytes=1 << 20, room=8192)
    assert (only.offset, only.nbytes, len(only.copies)) == (0, 8192, 8)
    assert only.direct is None


def test_neighbours_are_merged_over_a_gap_only_when_told() -> None:
    pieces = [Piece(0, 0, 0, 100), Piece(0, 8192, 100, 100)]
    assert len(plan_requests(pieces, request_bytes=1 << 20, room=200)) == 2
    (merged,) = plan_requests(pieces, request_bytes=1 << 20, room=200, gap_bytes=4096)
    assert merged.nbytes == 12288


def test_a_page_too_many_does_not_cost_a_tiny_request() -> None:
    requests = plan_requests([Piece(0, 8, 0, 4 << 20)], request_bytes=4 << 20, room=4 << 20)
    assert [r.nbytes for r in requests] == [(2 << 20) + 4096, 2 << 20]


def test_in_place_where_pages_agree_and_nobody_is_overwritten() -> None:
    page = [Piece(0, 4096, 0, 4000)]
    (direct,) = plan_requests(page, request_bytes=1 << 20, room=4096)
    assert direct.direct == 0
    (tight,) = plan_requests(page, request_bytes=1 << 20, room=4000)
    assert tight.direct is None
    (shifted,) = plan_requests([Piece(0, 4160, 0, 4000)], request_bytes=1 << 20, room=8192)
    assert shifted.direct is None
    shared = plan_requests([*page, Piece(1, 0, 4032, 64)], request_bytes=1 << 20, room=4096)
    assert [r.direct for r in shared] == [None, None]
    assert shared[0].copies == (Copy(0, 0, 4000),)


def test_a_long_tensor_is_read_in_place_but_for_the_page_it_shares() -> None:
    pieces = [Piece(0, 100, 100, 40_000), Piece(1, 0, 0, 100)]
    requests = plan_requests(pieces, request_bytes=16384, room=40_960)
    first, *rest = [r for r in requests if r.file == 0]
    assert first.parts == (Part(4096, None), Part(12288, 4096))
    assert first.bounced == (Copy(100, 100, 3996),)
    assert [r.direct for r in rest] == [16384, 32768]


def test_two_tensors_that_become_one_share_only_the_page_of_their_seam() -> None:
    # As an expert's gate and up, which lie apart in the file and side by side in memory.
    n = 5 * ALIGN
    pieces = [Piece(0, 1000, 1000, n), Piece(0, 80 * ALIGN + 1000, 1000 + n, n)]
    gate, up = plan_requests(pieces, request_bytes=1 << 20, room=12 * ALIGN)
    assert gate.parts == (Part(n, 0), Part(ALIGN, None))
    assert up.parts == (Part(ALIGN, None), Part(n, 6 * ALIGN))
    assert gate.bounced == (Copy(0, n, 1000),)
    assert up.bounced == (Copy(1000, 1000 + n, 3096),)


def test_bytes_that_go_to_two_places_are_copied() -> None:
    pieces = [Piece(0, 0, 0, 3 * ALIGN), Piece(0, ALIGN, 8 * ALIGN, ALIGN)]
    (only,) = plan_requests(pieces, request_bytes=1 << 20, room=9 * ALIGN)
    assert only.parts == (Part(3 * ALIGN, None),)
    assert only.bounced == only.copies


def test_only_what_would_bounce_too_much_is_cut_further() -> None:
    n = 64 * ALIGN
    in_place = Piece(0, 8, 8, n)
    copied = Piece(1, 8, align_up(8 + n) + 16, n)
    requests = plan_requests(
        [in_place, copied], request_bytes=1 << 20, room=131 * ALIGN, bounce_bytes=8 * ALIGN
    )
    assert [r.nbytes for r in requests if r.file == 0] == [65 * ALIGN]
    cut = [r for r in requests if r.file == 1]
    assert [r.nbytes // ALIGN for r in cut] == [8] * 8 + [1]
    assert all(r.direct is None for r in cut)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece(0, 0, 0, 10), Piece(0, 50, 9, 10)], "two pieces"),
        ([Piece(0, 0, 95, 10)], "end at 105"),
        ([Piece(0, -1, 0, 10)], "negative"),
        ([Piece(0, 0, 0, -10)], "negative"),
    ],
)
def test_refuses(pieces: list[Piece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_requests(pieces, request_bytes=4096, room=100)


def test_refuses_crooked_request_sizes() -> None:
    with pytest.raises(ValueError, match="4096"):
        plan_requests([], request_bytes=5000, room=0)
    with pytest.raises(ValueError, match="bounce_bytes"):
        plan_requests([], request_bytes=4096, room=0, bounce_bytes=0)
