"""``--trace``: the timeline of a run as a file, and as a picture."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import OffloadError

if TYPE_CHECKING:
    from offload.runtime.timeline import Recorder
    from offload.scheduler.timeline import Timeline

logger = logging.getLogger(__name__)

PICTURE = "--trace-plot"


def check_picture(picture: Path | None) -> None:
    """Refuse what cannot be drawn now, not after the run.

    Raises:
        OffloadError: matplotlib is missing.
    """
    if picture is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise OffloadError(
            f"{PICTURE} needs matplotlib; pip install 'offload[plot]', or drop {PICTURE}"
        )


class Tracing:
    """The flags of one run, and its recorder if they ask for one. A context around the run: what
    was recorded is written at its end, also after an error or a signal."""

    def __init__(self, trace: Path | None, picture: Path | None) -> None:
        self._trace, self._picture = trace, picture
        self.recorder: Recorder | None = None
        self.facts: dict[str, Any] = {}
        self.title = "offload"
        if trace is not None or picture is not None:
            from offload.runtime.timeline import Recorder

            self.recorder = Recorder()

    @property
    def ring_bytes(self) -> int:
        """Memory that the recording takes, which the budget has to cover."""
        return 0 if self.recorder is None else self.recorder.ring_bytes

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.recorder is None:
            return
        if kind is not None:
            self.facts["ended_with"] = kind.__name__
        try:
            write(self.recorder.timeline(), self._trace, self._picture, self.title, self.facts)
        except OffloadError as error:
            if kind is None:
                raise
            # The error that ended the run is the one to say; this one comes before it.
            logger.error("%s", error)


def write(
    timeline: Timeline,
    trace: Path | None,
    picture: Path | None,
    title: str,
    facts: Mapping[str, Any],
) -> None:
    """Write what is asked for, and say so.

    Raises:
        OffloadError: a file cannot be written.
    """
    from offload.cli import console

    lost = f", the {timeline.dropped} oldest spans not among them" if timeline.dropped else ""
    if trace is not None:
        from offload.runtime.trace_file import write as write_file

        write_file(trace, timeline, title, facts)
        console.note(f"{trace}: open it in ui.perfetto.dev{lost}", "trace")
    if picture is not None:
        from offload.cli.trace_plot import draw

        draw(picture, timeline, title)
        console.note(f"{picture}{lost}", "trace")
