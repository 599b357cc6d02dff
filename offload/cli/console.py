"""What is drawn with rich: tables, progress, and notes. Imported only when a command runs.

stdout carries results, stderr everything else; on anything but a terminal there are neither
progress bars nor colours.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from offload.cli.signals import raise_received
from offload.units import format_bytes

WIDE = 160
"""Columns when the output is no terminal: a file should not be folded at 80."""

ByteProgress = Callable[[str, int, int], None]
"""``progress(what, done_bytes, total_bytes)``."""

_VERBS = {"load": "loading", "convert": "converting", "write": "writing"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with 1 here; a closed pipe ends every command in the same way."""
        raise BrokenPipeError


def out() -> Console:
    """The console of results."""
    return _console(stderr=False)


def err() -> Console:
    """The console of everything else."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    # What is printed is file names and models' words: nothing in it is markup, and ":x:" no emoji
    # (whose table takes 2 MB to compile, in the middle of a run, where an environment is new).
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def note(text: str, label: str = "note") -> None:
    """One line on stderr; folded on a terminal only."""
    style = "yellow" if label == "warning" else "dim"
    console = err()
    line = Text.assemble((f"{label}: ", style), text)
    console.print(line, soft_wrap=not console.is_terminal)


def rows(lines: Iterable[Sequence[str]], *, heads: Sequence[str] = (), notes: bool = True) -> Table:
    """A table without borders: the first column left, the others right, notes (the last) dim."""
    lines = [tuple(line) for line in lines]
    table = Table(box=None, show_header=bool(heads), pad_edge=False, padding=(0, 2, 0, 0))
    width = len(heads) or max((len(line) for line in lines), default=0)
    for i in range(width):
        is_note = notes and i == width - 1
        table.add_column(
            heads[i] if heads else "",
            justify="left" if i == 0 or is_note else "right",
            style="dim" if is_note else None,
            header_style="bold",
            no_wrap=not is_note,
            overflow="fold",
        )
    for line in lines:
        # Plain Text: a file name with brackets is not markup.
        table.add_row(*(Text(cell) for cell in line))
    return table


def heading(text: str) -> Text:
    """A section's title."""
    return Text(text, style="bold")


@contextlib.contextmanager
def byte_progress() -> Iterator[ByteProgress]:
    """A bar on stderr with rate and time left; gone when it is done. A signal raises in it."""
    with _bar() as bar:
        tasks: dict[str, tuple[TaskID, float]] = {}

        def report(what: str, done: int, total: int) -> None:
            raise_received()
            now = time.perf_counter()
            if what not in tasks:
                tasks[what] = bar.add_task(_VERBS.get(what, what), total=total, info=""), now
            task, began = tasks[what]
            rate = done / (now - began) if now > began else 0.0
            left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
            info = f"{format_bytes(done)} of {format_bytes(total)}, {format_bytes(rate)}/s{left}"
            bar.update(task, completed=done, total=total, info=info)

        yield report


@contextlib.contextmanager
def share_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr for ``report(what, share of the whole)``. A signal raises in it."""
    with _bar() as bar:
        task = bar.add_task(title, total=1.0, info="")

        def report(what: str, share: float) -> None:
            raise_received()
            bar.update(task, completed=share, info=what)

        yield report


def _bar() -> Progress:
    console = err()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %", markup=False),
        TextColumn("{task.fields[info]}", markup=False),
        console=console,
        transient=True,
        refresh_per_second=5,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Callable[[], None]]:
    """Show ``text`` with a spinner until the yielded function is called, or the block ends."""
    console = err()
    if not console.is_terminal:
        yield lambda: None
        return
    status = console.status(Text(text), spinner="dots", refresh_per_second=4)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()
