"""Which pages to read for scattered pieces of files, and where their bytes go. Pure.

Three steps: take the enclosing pages of every piece; merge neighbours; cut what is longer than a
request, or would bounce more than a buffer holds. Merging only where pages touch or overlap keeps

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


class Part(NamedTuple):
    """Consecutive pages of a request: ``nbytes`` go to offset ``at`` of the target, or None for a
    buffer from which the wanted bytes are copied."""

    nbytes: int
    at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One transfer of whole pages; all numbers in bytes.

    Attributes:
        file: number of the file.
        offset, nbytes: what is read, multiples of 4096. The end may lie behind the end of file.
        copies: where the wanted bytes go when the request is read into a buffer of its own.
        parts: the request in pages that may be read in place, so that every wanted byte is
            already where it belongs and no other piece is overwritten, and pages that may not.
        bounced: where the wanted bytes of the latter go, when ``parts`` is followed and those
            pages are read one behind the other into a buffer of ``bounce_bytes``.
    """

    file: int
    offset: int
    nbytes: int
    copies: tuple[Copy, ...]
    parts: tuple[Part, ...]
    bounced: tuple[Copy, ...]

    @property
    def direct(self) -> int | None:
        """Offset in the target at which the whole request may be read in place, or None."""
        return self.parts[0].at if len(self.parts) == 1 else None

    @property
    def bounce_bytes(self) -> int:
        """Bytes of the pages that are not read in place."""
        return sum(p.nbytes for p in self.parts if p.at is None)

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.nbytes

    @property
    def payload_bytes(self) -> int:
        """Wanted bytes among those that are read; one wanted twice counts twice."""
        return sum(c.nbytes for c in self.copies)


def plan_requests(
    pieces: Iterable[Piece],
    *,
    request_bytes: int,
    room: int,
    gap_bytes: int = 0,
    bounce_bytes: int | None = None,
) -> list[Request]:
    """Requests that bring all ``pieces``, ordered by file and offset.

    Sources may overlap (one row wanted twice is read once), targets may not.

    Args:
        request_bytes: the longest request, a positive multiple of 4096.
        room: length of the target; nothing is placed behind it.
        gap_bytes: merge ranges that leave at most this many unwanted bytes between their pages.
        bounce_bytes: the most ``Request.bounce_bytes``, a positive multiple of 4096; None: as long
            as the request. Where more of a request bounces it is cut into ones of this length.

    Raises:
        ValueError: a target is taken twice or lies outside the room; a negative number.
    """
    bounce_bytes = request_bytes if bounce_bytes is None else bounce_bytes
    for name, nbytes in (("request_bytes", request_bytes), ("bounce_bytes", bounce_bytes)):
        if nbytes < ALIGN or nbytes % ALIGN:
            raise ValueError(f"{name} must be a positive multiple of {ALIGN}: {nbytes}")
    wanted = sorted(p for p in pieces if p.nbytes)
    targets = _targets(wanted, room)
    out: list[Request] = []
    first = 0
    for start, end, last in _ranges(wanted, gap_bytes):
        for request, active in _cut(wanted[first:last], start, end, request_bytes, targets, room):
            if request.bounce_bytes <= bounce_bytes:
                out.append(request)
            else:
                finer = _cut(active, request.offset, request.end, bounce_bytes, targets, room)
                out += (r for r, _ in finer)
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
) -> Iterable[tuple[Request, list[Piece]]]:
    """Cut one range into requests of nearly equal length, each with the pieces from it on.

    Equal, not full ones and a rest: an unaligned tensor of 4 MiB spans 4 MiB and a page, and a
    second request for that page alone costs as much latency as the first.
    """
    n_requests = -(-(end - start) // request_bytes)
    step = align_up(-(-(end - start) // n_requests))
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
            parts = _parts(copies, stop - offset, targets, room)
            request = Request(
                file=pieces[0].file,
                offset=offset,
                nbytes=stop - offset,
                copies=tuple(copies),
                parts=parts,
                bounced=tuple(_bounced(copies, parts)),
            )
            yield request, pieces[active:]


class _Window(NamedTuple):
    """Pages ``[start, end)`` of a request, all of whose wanted bytes move by ``shift``."""

    start: int
    end: int
    shift: int
    copies: list[Copy]


def _parts(
    copies: list[Copy], nbytes: int, targets: list[tuple[int, int]], room: int
) -> tuple[Part, ...]:
    """Which pages of a request can be read straight to where they belong.

    That takes a target that lies in its pages as the source does in its own; then all pages go in
    place but those at the edges that hold bytes of another piece, in the file or in the target.
    """
    out: list[Part] = []
    done = 0
    for window in _windows(copies):
        start, end = _trim(window, targets, room)
        if start < end:
            if done < start:
                out.append(Part(start - done, None))
            out.append(Part(end - start, start + window.shift))
            done = end
    if done < nbytes:
        out.append(Part(nbytes - done, None))
    return tuple(out)


def _windows(copies: list[Copy]) -> list[_Window]:
    """The enclosing pages of neighbours that move alike, without the pages they share."""
    out: list[_Window] = []
    stop = 0
    for c in copies:
        if c.src < stop:
            return []  # the same bytes go to two places: both are copies of a buffer
        stop = c.src + c.nbytes
        shift = c.dst - c.src
        if out and out[-1].shift == shift:
            out[-1].copies.append(c)
            out[-1] = out[-1]._replace(end=align_up(stop))
            continue
        start, end = c.src // ALIGN * ALIGN, align_up(stop)
        if out and out[-1].end > start:
            shared = out[-1].end
            out[-1] = out[-1]._replace(end=start)
            # Kept even if nothing is left of it: its end says which page is taken.
            out.append(_Window(min(shared, end), end, shift, [c]))
        else:
            out.append(_Window(start, end, shift, [c]))
    return [w for w in out if w.shift % ALIGN == 0 and w.start < w.end]


def _trim(window: _Window, targets: list[tuple[int, int]], room: int) -> tuple[int, int]:
    """The pages of a window that overwrite nothing that others bring, and fit."""
    start, end, shift, copies = window

    def free(a: int, b: int) -> bool:
        if a + shift < 0 or b + shift > room:
            return False
        # Every wanted byte of these pages of the target must come from this very window.
        wanted = sum(
            min(hi, b + shift) - max(lo, a + shift)
            for lo, hi in _within(targets, a + shift, b + shift)
        )
        own = sum(max(0, min(c.src + c.nbytes, b) - max(c.src, a)) for c in copies)
        return wanted == own

    if start < end and not free(start, start + ALIGN):
        start += ALIGN
    if start < end and not free(end - ALIGN, end):
        end -= ALIGN
    return (start, end) if start < end and free(start, end) else (0, 0)


def _bounced(copies: list[Copy], parts: tuple[Part, ...]) -> Iterable[Copy]:
    """The copies out of the pages that are not read in place, packed one behind the other."""
    at = packed = 0
    for part in parts:
        end = at + part.nbytes
        if part.at is None:
            for c in copies:
                lo, hi = max(c.src, at), min(c.src + c.nbytes, end)
                if lo < hi:
                    yield Copy(packed + lo - at, c.dst + lo - c.src, hi - lo)
            packed += part.nbytes
        at = end


def _within(targets: list[tuple[int, int]], start: int, end: int) -> Iterable[tuple[int, int]]:
    i = bisect_left(targets, (start, start))
    if i and targets[i - 1][1] > start:
        i -= 1
    while i < len(targets) and targets[i][0] < end:
        yield targets[i]
        i += 1
