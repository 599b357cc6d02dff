"""One fine-tuning run on the command line: the plan, the work, what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.text import Text

from offload.cli import console
from offload.cli import finetune_text as say
from offload.cli.finetune_stop import stop_after_step
from offload.cli.finetune_view import View
from offload.cli.imports import imported
from offload.cli.planning import find_model
from offload.cli.signals import Interrupted
from offload.cli.threads import use_threads
from offload.cli.tracing import Tracing
from offload.errors import OffloadError
from offload.io.gguf_header import is_gguf
from offload.scheduler.timeline import Record
from offload.train.board import Board
from offload.train.metrics import JsonLines, Listeners, read_lines
from offload.train.options import TrainOptions
from offload.train.plots import Curve, draw
from offload.train.predicting import Prediction
from offload.train.reports import EndReport, Listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the flags ask for; checked, but for the contents of files."""

    options: TrainOptions
    json: Path | None
    plot: Path | None
    tensorboard: bool | None
    """None: if it is installed."""
    trace: Path | None = None
    trace_plot: Path | None = None


class Run(Protocol):
    """``offload.train.run.Run``, as far as it is used here."""

    record: Record | None
    prediction: Prediction | None

    def describe(self) -> list[str]: ...

    def train(self, listener: Listener, *, should_stop: Callable[[], bool]) -> EndReport: ...

    def close(self) -> None: ...


def run_finetune(wish: Wish) -> None:
    """Plan, train, report.

    Raises:
        OffloadError: the run cannot be done, or stopped by itself; what is committed stays.
        Interrupted: a signal came, and the step that ran then is committed.
    """
    options = wish.options
    _check_figures(wish)
    board = _board(wish)
    use_threads(options.threads)
    tracing = Tracing(wish.trace, wish.trace_plot)
    run = _prepare(options, tracing.ring_bytes)
    try:
        if tracing.recorder is not None:
            run.record = tracing.recorder.add
            tracing.title = f"offload finetune: {Path(options.model).name}"
            tracing.facts["plan"] = run.describe()
        plan = run.describe()
        err = console.err()
        for line in plan:
            err.print(Text(line), soft_wrap=not err.is_terminal)
        with tracing:
            end, loss, signum = _train(wish, run, plan, board)
    finally:
        run.close()
    console.note(say.stats_line(end, loss), "stats")
    for line in say.use_lines(end, options):
        console.out().print(Text(line), soft_wrap=True)
    if end.stopped == "interrupted":
        again = "the same command" + ("" if options.resume else " with --resume")
        console.note(f"stopped after step {end.last_step}; {again} continues there")
        if signum is not None:
            raise Interrupted(signum)


def _train(
    wish: Wish, run: Run, plan: list[str], board: Board | None
) -> tuple[EndReport, float | None, int | None]:
    """Train with all who listen.

    Returns:
        the report, the loss at the end (smoothed), and the signal that asked for the end.
    """
    curve = Curve()
    lines: JsonLines | None = None
    try:
        with contextlib.ExitStack() as stack:
            if wish.json is not None:
                lines = stack.enter_context(JsonLines(wish.json, resume=wish.options.resume))
                found = run.prediction
                lines.started(wish.options, plan, None if found is None else found.seconds)
            if board is not None:
                stack.enter_context(board)
            view = stack.enter_context(View())
            stop = stack.enter_context(stop_after_step(view.stopping))
            files = [listener for listener in (lines, board) if listener is not None]
            # The view last: what is shown is in the files.
            end = run.train(Listeners(*files, curve, view), should_stop=stop)
    except BaseException:
        # A loss that ran away is seen best in the plot; but the run's own error is what is said.
        try:
            _figures(wish, curve, lines)
        except OffloadError as error:
            console.note(str(error), "warning")
        raise
    _figures(wish, curve, lines)
    return end, view.loss, stop.signum


def _figures(wish: Wish, curve: Curve, lines: JsonLines | None) -> None:
    """Draw the plot, and say where the figures are."""
    if wish.json is not None and lines is not None:
        missing = " (not all: see above)" if lines.failed else ""
        console.note(f"figures are in {wish.json}{missing}", "metrics")
        if not lines.failed and wish.json.expanduser().is_file():
            # It has the steps of the processes that this one resumes, too.
            curve = Curve.of_lines(read_lines(wish.json))
    if wish.plot is not None and curve.loss:
        draw(wish.plot, curve, Path(wish.options.model).name)
        console.note(f"the losses are drawn in {wish.plot}", "plot")


def _prepare(options: TrainOptions, reserve: int) -> Run:
    from offload.train.preparing import prepare  # type: ignore[import-not-found,unused-ignore]

    if options.method == "lora" and (options.quant is not None or is_gguf(options.model)):
        find_model(options.model, options.quant)  # packed here, where it can be seen
    imported()
    run: Run = prepare(options, reserve=reserve) if reserve else prepare(options)
    return run


def _check_figures(wish: Wish) -> None:
    """Refuse, before anything is done, files that would be written over or be lost.

    Raises:
        OffloadError: one lies in the output, or is no metrics file.
    """
    output = wish.options.output.expanduser().resolve()
    named = (
        ("--json", wish.json), ("--plot", wish.plot), ("--trace", wish.trace),
        ("--trace-plot", wish.trace_plot),
    )  # fmt: skip
    files = {flag: path.expanduser().resolve() for flag, path in named if path is not None}
    for flag, file in files.items():
        if output in file.parents:
            raise OffloadError(
                f"{flag} {file} lies in --output {output}, which is made anew; give another place"
            )
    if "--json" in files and files["--json"].is_file():
        read_lines(files["--json"])


def _board(wish: Wish) -> Board | None:
    if wish.tensorboard is False:
        return None
    output = wish.options.output.expanduser().absolute()
    directory = output.parent / f"{output.name}.tensorboard"
    return Board.if_installed(directory, asked=wish.tensorboard is True)
