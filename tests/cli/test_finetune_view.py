"""What ``offload finetune`` shows while it runs: on a terminal, in a log."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from offload.cli import finetune_text as say
from offload.cli.finetune_view import LOG_EVERY_S, View
from offload.train.reports import CommitReport, EvalReport, StepReport


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_step(n: int, of: int = 100, **more: Any) -> StepReport:
    fields: dict[str, Any] = {
        "step": n, "of": of, "epoch": 0.1, "loss": 2.0, "grad_norm": 0.123456, "lr": 9.7e-6,
        "tokens": 4096, "label_tokens": 4000, "seconds": 2.0, "read_bytes": 2**30,
        "lanes": {"compute": 1.8, "ssd": 1.0, "update": 0.4},
    }  # fmt: skip
    return StepReport(**(fields | more))


def on_terminal(width: int) -> tuple[View, Clock, io.StringIO]:
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    return View(console, clock), clock, file


def test_the_live_line_and_what_a_narrow_terminal_leaves_out() -> None:
    view, clock, _ = on_terminal(200)
    assert view.line().plain == "starting: 0.00 s"
    view.step(a_step(1))
    full = (
        "step 1/100 · loss 2.0000 · lr 9.7e-06 · grad norm 0.1235 · 2,048 tok/s · "
        "compute 90%, ssd 50%, update 20% · 512.0 MiB/s · 3 min 18 s left"
    )
    assert view.line().plain == full
    clock.now = 42.0
    assert view.line().plain == f"{full} · step 2: 42 s"
    for width, line in (
        (100, "step 1/100 · loss 2.0000 · lr 9.7e-06 · grad norm 0.1235 · 2,048 tok/s · "
              "3 min 18 s left"),
        (60, "step 1/100 · loss 2.0000 · lr 9.7e-06 · 3 min 18 s left"),
        (30, "step 1/100 · loss 2.0000"),
        (12, "step 1/100 "),
    ):  # fmt: skip
        narrow, _, _ = on_terminal(width)
        narrow.step(a_step(1))
        assert narrow.line().plain == line
        assert len(line) < width


def test_the_loss_is_smoothed_and_the_stop_is_seen() -> None:
    view, _, file = on_terminal(200)
    view.step(a_step(1, loss=2.0))
    view.step(a_step(2, loss=4.0))
    assert "loss 3.05" in view.line().plain
    view.stopping("soon")
    assert view.line().plain.endswith(" · stopping · step 3: 0.00 s")
    assert "stop: soon" in file.getvalue()
    view.phase("writing the model", 2**29, 2**30)
    assert view.line().plain == "stopping · writing the model 512.0 MiB of 1.0 GiB (50%)"
    view.phase("writing the model", 2**30, 2**30)
    assert "writing the model: 1.0 GiB, done" in file.getvalue()
    assert "loss 3.05" in view.line().plain


def test_a_terminal_keeps_events_and_takes_the_live_line_away() -> None:
    view, _, file = on_terminal(100)
    with view:
        view.step(a_step(1))
        view.evaluated(EvalReport(step=1, loss=800.0, label_tokens=5, seconds=1.0, best=False))
        view.committed(CommitReport(step=1, seconds=70.0))
    shown = file.getvalue()
    assert "eval: step 1 · loss 800.0000 · perplexity beyond numbers · 5 tokens · 1.00 s" in shown
    assert "commit: step 1 is safe, 1 min 10 s" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back
    assert shown.endswith("\x1b[2K")  # the live line is erased


def test_a_log_has_a_line_now_and_then_and_of_the_last_step() -> None:
    file, clock = io.StringIO(), Clock()
    view = View(Console(file=file, width=160), clock)
    with view:
        for n in range(1, 101):
            clock.now += LOG_EVERY_S / 4
            view.step(a_step(n))
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in file.getvalue().splitlines()]
    assert steps == [*range(1, 101, 4), 100]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"), (9.99, "9.99 s"), (59.4, "59 s"), (59.6, "1 min 00 s"),
        (3599.7, "1 h 00 min"), (3661, "1 h 01 min"), (86399, "1 d 00 h"), (273600, "3 d 04 h"),
    ],
)  # fmt: skip
def test_times_as_people_say_them(seconds: float, text: str) -> None:
    assert say.duration(seconds) == text


def test_a_peak_over_the_budget_is_said() -> None:
    assert say.memory_text(5 * 2**30, 4 * 2**30) == (
        "peak RSS 5.0 GiB above the process, 125.0% of the budget 4.0 GiB (over by 1.0 GiB)"
    )
    # What a simulated device may take is RAM as well.
    assert say.memory_text(5 * 2**30, 4 * 2**30, 2**30) == (
        "peak RSS 5.0 GiB above the process, 100.0% of the budget 4.0 GiB and 1.0 GiB of the "
        "simulated device"
    )
