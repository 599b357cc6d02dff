"""Which pages to read for scattered pieces of files, and where their bytes go. Pure.

Three steps: take the enclosing pages of every piece; merge neighbours; cut what is longer than a
request. Merging only where pages touch or overlap keeps

    physical bytes ≤ payload bytes + 2 · 4095 per range

because each byte of a page is read once and a range has at most two pages that it needs in part.
A wider gap trades bytes for fewer requests; it pays on disks with slow seeks, not on an SSD.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from offload.blocks import ALIGN, align_up


class Piece(NamedTuple):
    """Bytes to move: ``nbytes`` from offset ``src`` of file number ``file`` to offset ``dst``."""

    file: int
    src: int
    dst: int
    nbytes: int


class Copy(NamedTuple):
    """Bytes to move out of a request's buffer: from its offset ``src`` to the target's ``dst``."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One transfer of whole pages; all numbers in bytes.

    Attributes:
        file: number of the file.
        offset, nbytes: what is read, multiples of 4096. The end may lie behind the end of file.
        copies: where the wanted bytes go when the request is read into a buffer of its own.
        direct: offset in the target at which the whole request may be read in place, so that
            every copy is already where it belongs and no other piece is overwritten; or None.
    """

    file: int
    offset: int
    nbytes: int
    copies: tuple[Copy, ...]
    direct: int | None

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.nbytes

    @property
    def payload_bytes(self) -> int:
        """Wanted bytes among those that are read; one wanted twice counts twice."""
        return sum(c.nbytes for c in self.copies)


def plan_requests(
    pieces: Iterable[Piece], *, request_bytes: int, room: int, gap_bytes: int = 0
) -> list[Request]:
    """Requests that bring all ``pieces``, ordered by file and offset.

    Sources may overlap (one row wanted twice is read once), targets may not.

    Args:
        request_bytes: the longest request, a positive multiple of 4096.
        room: length of the target; nothing is placed behind it.
        gap_bytes: merge ranges that leave at most this many unwanted bytes between their pages.

    Raises:
        ValueError: a target is taken twice or lies outside the room; a negative number.
    """
    if request_bytes < ALIGN or request_bytes % ALIGN:
        raise ValueError(f"request_bytes must be a positive multiple of {ALIGN}: {request_bytes}")
    wanted = sorted(p for p in pieces if p.nbytes)
    targets = _targets(wanted, room)
    out: list[Request] = []
    first = 0
    for start, end, last in _ranges(wanted, gap_bytes):
        _cut(wanted[first:last], start, end, request_bytes, targets, room, out)
        first = last
    return out


def _targets(wanted: list[Piece], room: int) -> list[tuple[int, int]]:
    """The target intervals in order, checked to be disjoint and inside the room."""
    for p in wanted:
        if min(p) < 0:
            raise ValueError(f"negative number in {p}")
    targets = sorted((p.dst, p.dst + p.nbytes) for p in wanted)
    end = 0
    for start, stop in targets:
        if start < end:
            raise ValueError(f"two pieces go to offset {start} of the target")
        end = stop
    if end > room:
        raise ValueError(f"pieces end at {end}, the target has {room} bytes")
    return targets


def _ranges(wanted: list[Piece], gap_bytes: int) -> Iterable[tuple[int, int, int]]:
    """``(start, end, index behind the last piece)`` of merged page ranges."""
    i = 0
    while i < len(wanted):
        file, start = wanted[i].file, wanted[i].src // ALIGN * ALIGN
        end = align_up(wanted[i].src + wanted[i].nbytes)
        i += 1
        while i < len(wanted) and wanted[i].file == file:
            if wanted[i].src // ALIGN * ALIGN > end + gap_bytes:
                break
            end = max(end, align_up(wanted[i].src + wanted[i].nbytes))
            i += 1
        yield start, end, i


def _cut(
    pieces: list[Piece],
    start: int,
    end: int,
    request_bytes: int,
    targets: list[tuple[int, int]],
    room: int,
    out: list[Request],
) -> None:
    """Cut one range into requests of nearly equal length.

    Equal, not full ones and a rest: an unaligned tensor of 4 MiB spans 4 MiB and a page, and a
    second request for that page alone costs as much latency as the first.
    """
    parts = -(-(end - start) // request_bytes)
    step = align_up(-(-(end - start) // parts))
    active = 0
    for offset in range(start, end, step):
        stop = min(offset + step, end)
        while pieces[active].src + pieces[active].nbytes <= offset:
            active += 1  # sorted by start, so only a prefix can be dropped for good
        copies = []
        for p in pieces[active:]:
            if p.src >= stop:
                break
            lo, hi = max(p.src, offset), min(p.src + p.nbytes, stop)
            if lo < hi:
                copies.append(Copy(lo - offset, p.dst + lo - p.src, hi - lo))
        if copies:  # a piece inside a gap that was merged over may leave a request without any
            out.append(
                Request(
                    file=pieces[0].file,
                    offset=offset,
                    nbytes=stop - offset,
                    copies=tuple(copies),
                    direct=_direct(copies, stop - offset, targets, room),
                )
            )


def _direct(
    copies: list[Copy], nbytes: int, targets: list[tuple[int, int]], room: int
) -> int | None:
    """Where the request fits into the target as it is, or None."""
    at = copies[0].dst - copies[0].src
    if at % ALIGN or at < 0 or at + nbytes > room:
        return None
    if any(c.dst - c.src != at for c in copies):
        return None
    # Every wanted byte inside the window must come from this request, or reading in place would
    # overwrite what another request brought.
    inside = sum(min(hi, at + nbytes) - max(lo, at) for lo, hi in _within(targets, at, at + nbytes))
    return at if inside == sum(c.nbytes for c in copies) else None


def _within(targets: list[tuple[int, int]], start: int, end: int) -> Iterable[tuple[int, int]]:
    i = bisect_left(targets, (start, start))
    if i and targets[i - 1][1] > start:
        i -= 1
    while i < len(targets) and targets[i][0] < end:
        yield targets[i]
        i += 1
