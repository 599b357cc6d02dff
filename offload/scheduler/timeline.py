"""What every lane did when: spans, lanes of text, and how much of the I/O was hidden.

The simulator and the real run tell the same story in the same words (``Record``), so one reader
draws both. Times are in seconds from any common zero.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PASSES = "passes"
"""One span for each pass: a token, or a prompt."""
READ, WRITE, H2D, D2H = "read", "write", "h2d", "d2h"
COMPUTE, EXPERTS, CPU, UPDATE, WAITS = "compute", "experts", "cpu", "update", "waits"
UPDATE_AWAY = "update away"
"""Tiles of states from when they are sent to a device until they are back."""

LANES = (PASSES, READ, WRITE, H2D, D2H, COMPUTE, EXPERTS, CPU, UPDATE, UPDATE_AWAY, WAITS)
"""In the order in which they are shown. ``waits``: the computing thread stands still."""
TITLES = {
    PASSES: "passes",
    READ: "disk read",
    WRITE: "disk write",
    H2D: "RAM to device",
    D2H: "device to RAM",
    COMPUTE: "compute",
    EXPERTS: "experts",
    CPU: "CPU beside",
    UPDATE: "update",
    UPDATE_AWAY: "update on the device",
    WAITS: "waits",
}
MOVING = (READ, WRITE, H2D, D2H)
WORKING = (COMPUTE, EXPERTS, CPU)

Record = Callable[[str, str, float, float, int], None]
"""(lane, what, from, to, bytes)."""


class Span(NamedTuple):
    """``name`` had ``lane`` from ``start_s`` to ``end_s``."""

    lane: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans by lane, sorted; those of a lane do not overlap (see ``arrange``)."""

    lanes: Mapping[str, Sequence[Span]]
    dropped: int = 0
    """Older spans that there was no room for."""

    @property
    def start_s(self) -> float:
        """When the first span begins; 0 without any."""
        return min((s[0].start_s for s in self.lanes.values() if s), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last span ends; 0 without any."""
        return max((s[-1].end_s for s in self.lanes.values() if s), default=0.0)

    def between(self, start_s: float, end_s: float) -> Timeline:
        """What happened in a part of the time, cut at its ends."""
        return Timeline(
            {
                lane: [
                    s._replace(start_s=max(s.start_s, start_s), end_s=min(s.end_s, end_s))
                    for s in spans
                    if s.start_s < end_s and s.end_s > start_s
                ]
                for lane, spans in self.lanes.items()
            },
            self.dropped,
        )

    def shifted(self, by_s: float) -> Timeline:
        """The same, later."""
        return Timeline(
            {
                lane: [s._replace(start_s=s.start_s + by_s, end_s=s.end_s + by_s) for s in spans]
                for lane, spans in self.lanes.items()
            },
            self.dropped,
        )

    def busy_s(self, *lanes: str) -> float:
        """Seconds in which at least one of the lanes worked."""
        return sum(end - start for start, end in self._union(lanes))

    def nbytes(self, lane: str) -> int:
        """Bytes that a lane moved."""
        return sum(s.nbytes for s in self.lanes.get(lane, ()))

    def hidden(self) -> float | None:
        """The share of the time in which something moves in which a thread computes, too; None if
        nothing moves."""
        moving, working = self._union(MOVING), self._union(WORKING)
        total = sum(end - start for start, end in moving)
        if total <= 0:
            return None
        both = 0.0
        starts = [start for start, _ in working]
        ends = [end for _, end in working]
        for start, end in moving:
            for i in range(bisect_right(ends, start), bisect_left(starts, end)):
                both += max(0.0, min(end, ends[i]) - max(start, starts[i]))
        return min(1.0, both / total)

    def text(self, columns: int = 72) -> list[str]:
        """Lanes as lines of ``columns`` characters: how busy each was in each slice of time."""
        start, total = self.start_s, self.end_s - self.start_s
        if total <= 0:
            return []
        each = total / columns
        lines = []
        for lane, spans in self.lanes.items():
            if not spans or lane == PASSES:
                continue
            share = [0.0] * columns
            for span in spans:
                first = (span.start_s - start) / each
                last = (span.end_s - start) / each
                for i in range(int(first), min(columns - 1, int(last)) + 1):
                    share[i] += max(0.0, min(last, i + 1) - max(first, i))
            bar = "".join(
                _SHADES[min(len(_SHADES) - 1, round(x * (len(_SHADES) - 1)))] for x in share
            )
            busy = sum(s.end_s - s.start_s for s in spans) / total
            lines.append(f"{TITLES.get(lane, lane):>13} |{bar}| {busy:4.0%}")
        return lines

    def _union(self, lanes: Iterable[str]) -> list[tuple[float, float]]:
        spans = sorted((s.start_s, s.end_s) for lane in lanes for s in self.lanes.get(lane, ()))
        out: list[tuple[float, float]] = []
        for start, end in spans:
            if out and start <= out[-1][1]:
                out[-1] = (out[-1][0], max(end, out[-1][1]))
            else:
                out.append((start, end))
        return out


_SHADES = " .:-=+*#%@"


def arrange(spans: Iterable[Span], dropped: int = 0) -> Timeline:
    """Spans sorted into lanes. Requests of a lane that were under way together are laid one behind
    the other, in the order in which they ended: the lane is busy at the same times, and a drawing
    needs one row."""
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    return Timeline({lane: _laid(found) for lane, found in lanes.items() if found}, dropped)


def _laid(spans: list[Span]) -> list[Span]:
    out: list[Span] = []
    together: list[Span] = []  # without a gap
    end = float("-inf")

    def lay() -> None:
        start = together[0].start_s
        for span in sorted(together, key=lambda s: s.end_s):
            out.append(span._replace(start_s=start))
            start = span.end_s
        together.clear()

    for span in sorted(spans, key=lambda s: s.start_s):
        if together and span.start_s >= end:
            lay()
        together.append(span)
        end = max(end, span.end_s)
    if together:
        lay()
    return out
