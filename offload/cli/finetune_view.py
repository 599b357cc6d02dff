"""What a person sees of a fine-tuning run: a live line on a terminal, log lines elsewhere.

Everything goes to stderr. The live line is redrawn by rich's thread twice a second, so that a step
of minutes is seen to live; the training thread only leaves its figures here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from offload.cli import console as consoles
from offload.cli import finetune_text as say
from offload.train.plots import Mean
from offload.train.reports import CommitReport, EndReport, EvalReport, StepReport
from offload.units import format_bytes

LOG_EVERY_S = 10.0
"""Between two log lines where there is no terminal; a slower step has a line of its own."""


class View:
    """A listener that shows; a context.

    Args:
        console: where to; None: stderr.
        clock: seconds; for tests.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or consoles.err()
        self._clock = clock
        self._began = clock()
        self._mean, self._pace = Mean(), Mean()
        self.loss: float | None = None
        """Smoothed, of the last step."""
        self._parts: dict[str, str] = {}
        self._next = ""
        self._phase = ""
        self._phase_name = ""
        self._stopping = ""
        self._logged: float | None = None
        self._live = Live(
            console=self._console,
            get_renderable=self.line,
            refresh_per_second=2,
            transient=True,
        )

    def __enter__(self) -> View:
        self._began = self._clock()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def line(self) -> Text:
        """The live line as of now, within the terminal's width."""
        spent = say.duration(self._clock() - self._began)
        now = self._phase or (f"{self._next}: {spent}" if self._next else f"starting: {spent}")
        head = f"{self._stopping}{say.DOT}{now}" if self._stopping else now
        width = self._console.width - 1
        if self._phase or not self._parts:
            return Text(head[:width])
        # Steps of seconds need no clock of their own.
        slow = self._clock() - self._began > 3 or bool(self._stopping)
        parts = self._parts | ({"now": head} if slow else {})
        return Text(say.fit(parts, width)[:width])

    def say(self, label: str, text: str, style: str = "dim") -> None:
        """One line that stays; folded on a terminal only."""
        line = Text.assemble((f"{label}: ", style), text)
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def stopping(self, what: str) -> None:
        """A signal asked for the end; called from another thread than the training's."""
        self._stopping = "stopping"
        self.say("stop", what, "yellow")

    def note(self, text: str) -> None:
        self.say("note", text)

    def phase(self, what: str, done: int, total: int) -> None:
        if done >= total:
            self._phase = self._phase_name = ""
            self.say(what, f"{format_bytes(total)}, done")
        else:
            share = done / total
            self._phase = f"{what} {format_bytes(done)} of {format_bytes(total)} ({share:.0%})"
            if not self._console.is_terminal and self._phase_name != what:
                self.say(what, f"{format_bytes(total)}")
            self._phase_name = what

    def step(self, report: StepReport) -> None:
        left = self._pace.add(report.seconds) * (report.of - report.step)
        self.loss = self._mean.add(report.loss)
        self._parts = say.step_parts(report, self.loss, left)
        self._next = f"step {report.step + 1}" if report.step < report.of else "ending"
        self._began = self._clock()
        self._phase = self._phase_name = ""
        if self._console.is_terminal:
            return
        # The loss of the step itself: a log is read by programs, too, and they can smooth.
        due = self._logged is None or self._began - self._logged >= LOG_EVERY_S
        if due or report.step == report.of:
            self._logged = self._began
            parts = say.step_parts(report, report.loss, left)
            self._console.print(Text(say.DOT.join(parts.values())), soft_wrap=True)

    def evaluated(self, report: EvalReport) -> None:
        self._began = self._clock()
        self.say("eval", say.eval_line(report))

    def committed(self, report: CommitReport) -> None:
        self.say("commit", say.commit_line(report))

    def ended(self, report: EndReport) -> None:
        """Nothing: the command's last lines come when everything is closed."""
