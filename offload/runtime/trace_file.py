"""A timeline as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Google's "Trace Event Format": complete events (``ph`` X) with ``ts`` and ``dur`` in
microseconds, one thread for each lane, metadata events (M) with their names and order, and flow
events (s, t, f) that join the stations of a block: read, copied up, computed with.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.io.whole_file import PRIVATE, whole_file
from offload.scheduler.timeline import (
    EXPERTS,
    H2D,
    LANES,
    PASSES,
    READ,
    TITLES,
    WAITS,
    Span,
    Timeline,
)

_PID = 1
_STATIONS = (READ, H2D, EXPERTS)
"""Where a block is seen under its own name, in the order in which it gets there."""


def events(timeline: Timeline, process: str) -> Iterator[dict[str, Any]]:
    """The trace's events in the order in which they are written."""
    yield _meta("process_name", 0, {"name": process})
    for tid, lane in enumerate(LANES):
        if lane in timeline.lanes:
            yield _meta("thread_name", tid, {"name": TITLES[lane]})
            yield _meta("thread_sort_index", tid, {"sort_index": tid})
    for tid, lane in enumerate(LANES):
        for span in timeline.lanes.get(lane, ()):
            event = {
                "name": span.name,
                "cat": lane,
                "ph": "X",
                "pid": _PID,
                "tid": tid,
                "ts": _us(span.start_s),
                "dur": _us(span.end_s - span.start_s),
            }
            if lane not in (WAITS, PASSES):
                event["args"] = {"block": span.name, "bytes": span.nbytes}
            yield event
    yield from _flows(timeline)


def _flows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Each read of a block, joined with what is done with it until it is read again."""
    seen: dict[str, list[tuple[float, int, Span]]] = {}
    for order, lane in enumerate(_STATIONS):
        for span in timeline.lanes.get(lane, ()):
            seen.setdefault(span.name, []).append((span.start_s, order, span))
    numbers = itertools.count(1)
    for found in seen.values():
        found.sort(key=lambda x: x[:2])
        journey: list[Span] = []
        for _, order, span in found:
            if order == 0:
                yield from _flow(journey, next(numbers))
                journey = []
            journey.append(span)
        yield from _flow(journey, next(numbers))


def _flow(journey: list[Span], number: int) -> Iterator[dict[str, Any]]:
    if len(journey) < 2:
        return
    for i, span in enumerate(journey):
        phase = "s" if i == 0 else "f" if i == len(journey) - 1 else "t"
        event = {
            "name": span.name,
            "cat": "block",
            "ph": phase,
            "id": number,
            "pid": _PID,
            "tid": LANES.index(span.lane),
            # Bound to the slice that is open then: not at its very end.
            "ts": _us(span.start_s if i else (span.start_s + span.end_s) / 2),
        }
        if phase == "f":
            event["bp"] = "e"
        yield event


def _meta(kind: str, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PID, "tid": tid, "ts": 0, "args": dict(args)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def write(path: Path, timeline: Timeline, process: str, facts: Mapping[str, Any]) -> None:
    """Write the trace (mode 0600): a reader sees the old file or the whole new one.

    Args:
        process: the title of the trace.
        facts: what else to say; shown by Perfetto as the trace's metadata.

    Raises:
        OffloadError: it cannot be written.
    """
    other = {**facts, "dropped_spans": timeline.dropped, "clock": "since the first span"}
    try:
        with whole_file(path, PRIVATE) as file:
            facts_text = json.dumps(other, allow_nan=False)
            file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {facts_text}'.encode())
            file.write(b',\n"traceEvents": [')
            for i, event in enumerate(events(timeline, process)):
                file.write(b",\n" if i else b"\n")
                file.write(json.dumps(event, allow_nan=False).encode())
            file.write(b"\n]}\n")
    except OSError as error:
        raise OffloadError(f"--trace {path} cannot be written: {error.strerror}") from error
