"""A timeline as a picture: lanes over time, as a PNG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from pathlib import Path

from offload.errors import OffloadError
from offload.io.whole_file import PRIVATE, whole_file
from offload.scheduler.timeline import (
    COMPUTE,
    CPU,
    D2H,
    EXPERTS,
    H2D,
    LANES,
    PASSES,
    READ,
    TITLES,
    UPDATE,
    UPDATE_AWAY,
    WAITS,
    WRITE,
    Timeline,
)

# Okabe and Ito's colours, which colour-blind people tell apart: I/O cold, work warm.
_COLOURS = {
    PASSES: "#bbbbbb", READ: "#0072B2", WRITE: "#56B4E9", H2D: "#009E73", D2H: "#66c2a5",
    COMPUTE: "#E69F00", EXPERTS: "#D55E00", CPU: "#CC79A7", UPDATE: "#F0E442",
    UPDATE_AWAY: "#B8AE1E", WAITS: "#000000",
}  # fmt: skip

_WIDTH = 4000
"""Gaps between spans of less than one part in so many of the time are drawn over: a picture has no
room for them, and a million rectangles take minutes."""

_LEAST = 1500
"""A bar is at least one part in so many wide: about a pixel, or nobody would see it."""


def draw(path: Path, timeline: Timeline, title: str) -> None:
    """Draw the lanes; the last passes only, where there are many.

    Raises:
        OffloadError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no window, whatever the environment says
    from matplotlib import pyplot as plt

    shown, what = _latest(timeline)
    start, end = shown.start_s, shown.end_s
    scale, unit = (1.0, "s") if end - start >= 10 else (1e3, "ms")
    least = (end - start) / _LEAST
    lanes = [lane for lane in LANES if shown.lanes.get(lane)]
    figure, axes = plt.subplots(figsize=(14, 1.4 + 0.55 * len(lanes)), layout="constrained")
    for row, lane in enumerate(lanes):
        bars = [(s.start_s, s.end_s) for s in shown.lanes[lane]]
        if lane != PASSES:
            bars = _joined(bars, (end - start) / _WIDTH)
        axes.broken_barh(
            [((a - start) * scale, max(b - a, least) * scale) for a, b in bars],
            (row - 0.4, 0.8),
            facecolors=_COLOURS[lane],
            edgecolor="white" if lane == PASSES else None,
            linewidth=1.0 if lane == PASSES else 0,
        )
    total = end - start
    labels = [
        f"{TITLES[lane]}\n{shown.busy_s(lane) / total:.0%}" if lane != PASSES and total else lane
        for lane in lanes
    ]
    axes.set_yticks(range(len(lanes)), labels)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(total * scale, 1e-9))
    axes.set_xlabel(f"{unit}{what}")
    hidden = shown.hidden()
    said = "" if hidden is None else f" — {hidden:.0%} of the I/O time hides behind compute"
    axes.set_title(f"{title}{said}", fontsize=11)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    try:
        _save(path, figure)
    except OSError as error:
        raise OffloadError(f"--trace-plot {path} cannot be written: {error.strerror}") from error
    finally:
        plt.close(figure)


PASSES_SHOWN = 4
"""More are too narrow to see anything in."""


def _latest(timeline: Timeline) -> tuple[Timeline, str]:
    """The part to draw, and how to say which."""
    passes = timeline.lanes.get(PASSES, ())
    if len(passes) <= PASSES_SHOWN:
        return timeline, ""
    kept = passes[-PASSES_SHOWN:]
    return (
        timeline.between(kept[0].start_s, kept[-1].end_s),
        f" (the last {PASSES_SHOWN} of {len(passes)} passes)",
    )


def _joined(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in spans:
        if out and start - out[-1][1] < gap:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _save(path: Path, figure: object) -> None:
    with whole_file(path, PRIVATE) as file:
        figure.savefig(file, format="png", dpi=110)  # type: ignore[attr-defined]
