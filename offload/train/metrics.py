"""The figures of a run in files: JSON lines, and TensorBoard's events.

One object per line and event, written as it happens. All have ``event``, ``step`` (that of the
event, or the last one before it) and ``time`` (seconds since 1970); figures that are not finite
are null. Sizes are in bytes, times in seconds.

==========  ===========================================================================
``start``   ``options`` (as given), ``plan`` (its lines), ``version``
``note``    ``text``
``step``    the fields of ``StepReport`` and ``tok_s``, ``ssd_bytes_per_s``,
            ``utilisation`` (busy share of each lane)
``eval``    the fields of ``EvalReport``
``commit``  the fields of ``CommitReport``
``phase``   ``what``, ``total``: something long that is no step is finished
``end``     the fields of ``EndReport`` and ``tok_s``: the last line of a process that ended
==========  ===========================================================================

A resumed run appends. What its predecessor wrote about steps after the commit that it resumes from
is dropped, as those steps are taken again: each step is in the file once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from offload.errors import OffloadError
from offload.io.whole_file import expanded
from offload.train.options import TrainOptions
from offload.train.reports import (
    CommitReport,
    EndReport,
    EvalReport,
    Listener,
    StepReport,
)
from offload.version import __version__

logger = logging.getLogger(__name__)

_HEAD = b'{"event": "'


def step_figures(report: StepReport) -> dict[str, Any]:
    """What is derived from a step's report, in one place for all who show it."""
    seconds = report.seconds
    return {
        "tok_s": report.tokens / seconds if seconds > 0 else 0.0,
        "ssd_bytes_per_s": (
            (report.read_bytes + report.written_bytes) / seconds if seconds > 0 else 0.0
        ),
        "utilisation": {
            lane: busy / seconds if seconds > 0 else 0.0 for lane, busy in report.lanes.items()
        },
    }


class Listeners:
    """Several listeners as one; each hears everything, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self._all = listeners

    def note(self, text: str) -> None:
        for listener in self._all:
            listener.note(text)

    def phase(self, what: str, done: int, total: int) -> None:
        for listener in self._all:
            listener.phase(what, done, total)

    def step(self, report: StepReport) -> None:
        for listener in self._all:
            listener.step(report)

    def evaluated(self, report: EvalReport) -> None:
        for listener in self._all:
            listener.evaluated(report)

    def committed(self, report: CommitReport) -> None:
        for listener in self._all:
            listener.committed(report)

    def ended(self, report: EndReport) -> None:
        for listener in self._all:
            listener.ended(report)


class JsonLines:
    """Writes every event as a line of ``path``; a context.

    A file that cannot be written any more (a full disk) is no reason to lose the run: one warning
    is logged, ``failed`` is set, and the run goes on without.

    Args:
        path: the file; replaced unless ``resume``, if it holds metrics.
        resume: append to what is there. From which step on is known with the first event.

    Raises:
        OffloadError: the file holds something else, or cannot be opened.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.failed = False
        """Figures are missing in the file."""
        self._file: IO[bytes] | None = None
        """Without a buffer: what a full disk refused must not be written later, at any end."""
        self._closed = False
        self._waiting: list[dict[str, Any]] = []
        self._before: list[dict[str, Any]] = []
        self._step = 0
        if expanded(path).is_file():
            self._before = read_lines(path)  # refuses a file that is not ours
            if resume:
                return
            self._before = []
        try:
            self._open([])
        except OSError as error:
            raise OffloadError(f"metrics {path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what still waits, and close the file."""
        if self._closed:
            return
        if self._waiting:  # a resumed run without any event of a step: nothing comes again
            self._resume_after(max((int(e["step"]) for e in self._before), default=0))
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):  # every line was written, or has been warned about
                self._file.close()

    def started(
        self, options: TrainOptions, plan: Sequence[str] = (), step_s: float | None = None
    ) -> None:
        """The first line of a process. ``step_s``: predicted seconds of a step, if they are."""
        known = {name: _plain(value) for name, value in asdict(options).items()}
        self._put(
            "start",
            {
                "version": __version__, "options": known, "plan": list(plan),
                "predicted_step_s": step_s,
            },
        )  # fmt: skip

    def note(self, text: str) -> None:
        self._put("note", {"text": text})

    def phase(self, what: str, done: int, total: int) -> None:
        if done >= total:
            self._put("phase", {"what": what, "total": total})

    def step(self, report: StepReport) -> None:
        self._resume_after(report.step - 1)
        self._step = report.step
        self._put("step", {**asdict(report), **step_figures(report)})

    def evaluated(self, report: EvalReport) -> None:
        self._resume_after(report.step, again="eval")
        self._put("eval", asdict(report), report.step)

    def committed(self, report: CommitReport) -> None:
        self._resume_after(report.step, again="commit")
        # Its own step: a commit is told when later steps have been taken.
        self._put("commit", asdict(report), report.step)

    def ended(self, report: EndReport) -> None:
        self._resume_after(report.last_step)
        tok_s = report.tokens / report.seconds if report.seconds > 0 else 0.0
        self._put("end", {**asdict(report), "tok_s": tok_s}, report.last_step)

    def _resume_after(self, step: int, again: str = "") -> None:
        """Now that the first event says where the run continues: keep the lines up to ``step``.

        The event ``again`` of that very step comes a second time.
        """
        if self._file is not None or self.failed:
            return
        kept = [
            e
            for e in self._before
            if e["step"] < step or (e["step"] == step and e["event"] != again)
        ]
        self._step = step
        try:
            self._open(kept)
        except OSError as error:
            self._fail(error)
            return
        for event in self._waiting:
            self._write(event | {"step": step})
        self._waiting, self._before = [], []

    def _open(self, kept: list[dict[str, Any]]) -> None:
        path = expanded(self.path)
        if not path.exists() or path.is_file():  # else a pipe, /dev/stderr: nothing to replace
            _replace(path.resolve(), "".join(_line(e) for e in kept))
        self._file = path.open("ab", buffering=0)

    def _put(self, event: str, data: Mapping[str, Any], step: int | None = None) -> None:
        head = {"event": event, "step": self._step if step is None else step, "time": time.time()}
        entry = head | {k: v for k, v in data.items() if k not in head}
        if self._file is None:
            self._waiting.append(entry)
        else:
            self._write(entry)

    def _write(self, event: dict[str, Any]) -> None:
        if self.failed or self._file is None:
            return
        rest = memoryview(_line(event).encode())
        done = 0
        try:
            while done < len(rest):  # a disk that is nearly full takes a part
                done += self._file.write(rest[done:]) or 0
        except OSError as error:
            if done:
                self._take_back(done)
            self._fail(error)

    def _take_back(self, nbytes: int) -> None:
        """Cut off the beginning of a line that cannot be finished, so that all lines are JSON."""
        assert self._file is not None
        with contextlib.suppress(OSError):  # a pipe keeps what it was given
            end = os.fstat(self._file.fileno()).st_size
            os.ftruncate(self._file.fileno(), max(0, end - nbytes))

    def _fail(self, error: OSError) -> None:
        self.failed = True
        logger.warning(
            "%s cannot be written (%s): figures from step %d on are missing there; the run goes on",
            self.path,
            error.strerror,
            self._step,
        )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics file. A last line that a kill cut short is left out.

    Raises:
        OffloadError: it cannot be read, or holds something else; says in which line.
    """
    try:
        lines = expanded(path).read_bytes().split(b"\n")
    except OSError as error:
        raise OffloadError(f"metrics {path} cannot be read: {error.strerror}") from error
    *whole, tail = lines
    found = []
    for number, line in enumerate(whole, 1):
        try:
            event = json.loads(line)
            # Resuming drops by these two: without them nothing here is ours.
            _ = (int(event["step"]), str(event["event"]))
        except (ValueError, TypeError, KeyError):
            raise _foreign(path, number) from None
        found.append(event)
    if not (tail.startswith(_HEAD) or _HEAD.startswith(tail)):
        raise _foreign(path, len(lines))
    return found


def _foreign(path: Path, number: int) -> OffloadError:
    return OffloadError(
        f"{path} line {number} is not a line of metrics, and the file would be written over; give "
        "another file"
    )


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(_plain(event), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """As JSON knows it: paths as text, what is not finite as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _replace(path: Path, text: str) -> None:
    """A reader, and whoever resumes after a kill, sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
