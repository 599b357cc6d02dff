"""Figures in files: every event a line, no step twice after a resume, nothing foreign touched."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import logging
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from offload.errors import OffloadError
from offload.train import plots
from offload.train.board import Board
from offload.train.metrics import JsonLines, Listeners, read_lines, step_figures
from offload.train.options import TrainOptions
from offload.train.plots import Curve, Mean, draw
from offload.train.reports import CommitReport, EndReport, EvalReport, Listener, StepReport


def step(n: int, loss: float = 2.0, of: int = 10) -> StepReport:
    return StepReport(
        step=n, of=of, epoch=n / of, loss=loss, grad_norm=0.5, lr=1e-5, tokens=100, label_tokens=90,
        seconds=2.0, lanes={"compute": 1.0, "ssd": 2.0}, read_bytes=3000, written_bytes=1000,
    )  # fmt: skip


def evaluated(n: int) -> EvalReport:
    return EvalReport(step=n, loss=1.5, label_tokens=50, seconds=0.5, best=True)


def end(last: int, steps: int = 1) -> EndReport:
    return EndReport(
        steps=steps, last_step=last, stopped="done", seconds=4.0, tokens=100, budget_bytes=10,
        peak_rss_bytes=9, read_bytes=1, written_bytes=1, output="/out",
    )  # fmt: skip


def options(tmp_path: Path) -> TrainOptions:
    return TrainOptions(model="m", data=tmp_path / "d", output=tmp_path / "o", ram=2**30)


def said(path: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in read_lines(path)]


def run(listener: Listener, first: int, last: int) -> None:
    for n in range(first, last + 1):
        listener.step(step(n))
        if n % 2 == 0:
            listener.committed(CommitReport(step=n, seconds=0.1))


def test_every_event_is_a_line_as_it_happens(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        lines.started(options(tmp_path), ["a plan"])
        lines.note("hello")
        lines.step(step(1))
        assert said(path) == [("start", 0), ("note", 0), ("step", 1)]
        lines.evaluated(evaluated(1))
        lines.phase("writing", 1, 2)
        lines.phase("writing", 2, 2)
        lines.ended(end(1))
    found = read_lines(path)
    assert [e["event"] for e in found] == ["start", "note", "step", "eval", "phase", "end"]
    assert found[0]["options"]["ram"] == 2**30
    assert found[0]["options"]["data"] == str(tmp_path / "d")
    assert found[0]["plan"] == ["a plan"]
    assert found[2]["tok_s"] == 50
    assert found[2]["utilisation"] == {"compute": 0.5, "ssd": 1.0}
    assert found[2]["ssd_bytes_per_s"] == 2000
    assert found[2] | dataclasses.asdict(step(1)) == found[2]
    assert found[3]["best"] is True
    assert found[5]["tok_s"] == 25
    assert all(e["time"] > 1e9 for e in found)


def test_what_is_not_finite_is_null_and_the_file_is_json(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        lines.step(dataclasses.replace(step(1, math.nan), grad_norm=math.inf, seconds=0.0))
    (found,) = [
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    ]
    assert found["loss"] is None
    assert found["grad_norm"] is None
    assert found["tok_s"] == 0


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    """Steps 5 and 6 were taken after the commit of step 4, and a kill cut a line."""
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        lines.started(options(tmp_path))
        run(lines, 1, 4)
        lines.step(step(5, loss=9.0))
        lines.note("after five")
        lines.step(step(6, loss=9.0))
    with path.open("a") as file:
        file.write('{"event": "step", "step": 7, "lo')
    before = path.read_bytes()
    with JsonLines(path, resume=True) as lines:
        lines.started(options(tmp_path))
        lines.note("resumed")
        assert path.read_bytes() == before  # it is not known yet which steps come again
        run(lines, 5, 7)
        lines.ended(end(7, 3))
    assert [n for event, n in said(path) if event == "step"] == [1, 2, 3, 4, 5, 6, 7]
    assert all(e["loss"] == 2.0 for e in read_lines(path) if e["event"] == "step")
    texts = [e for e in read_lines(path) if e["event"] == "note"]
    assert [(e["text"], e["step"]) for e in texts] == [("resumed", 4)]
    assert said(path)[-1] == ("end", 7)
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_an_evaluation_that_comes_again_replaces_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        run(lines, 1, 2)
        lines.evaluated(evaluated(2))
    with JsonLines(path, resume=True) as lines:
        lines.evaluated(evaluated(2))
        lines.step(step(3))
    assert said(path) == [("step", 1), ("step", 2), ("commit", 2), ("eval", 2), ("step", 3)]


def test_resuming_what_is_done_only_ends(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        run(lines, 1, 2)
    with JsonLines(path, resume=True) as lines:
        lines.ended(end(2, 0))
    assert said(path) == [("step", 1), ("step", 2), ("commit", 2), ("end", 2)]


def test_a_resumed_run_that_fails_before_its_first_step_drops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        run(lines, 1, 3)
    with JsonLines(path, resume=True) as lines:
        lines.note("reading")
    assert said(path) == [("step", 1), ("step", 2), ("commit", 2), ("step", 3), ("note", 3)]


def test_a_new_run_replaces_an_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        run(lines, 1, 3)
    with JsonLines(path) as lines:
        run(lines, 1, 1)
    assert said(path) == [("step", 1)]
    for text, line in (
        ('{"text": "my data"}\n', 1),
        ('{"event": "step", "step": 1}\nnot json\n', 2),
        ('{"text": "no newline"}', 1),
        ("[1]\n", 1),
    ):
        path.write_text(text)
        for resume in (False, True):
            with pytest.raises(OffloadError, match=f"line {line} is not a line of metrics"):
                JsonLines(path, resume=resume)
        assert path.read_text() == text


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Figures belong where it leads, and it stays a link."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for _ in range(2):
        with JsonLines(tmp_path / "link") as lines:
            lines.step(step(1))
        assert (tmp_path / "link").is_symlink()
        assert len(read_lines(tmp_path / "file")) == 1


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="cannot be written"):
        JsonLines(tmp_path / "no" / "m.jsonl")


def test_a_full_disk_costs_figures_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.step(step(1))

    class Full:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    assert lines._file is not None
    lines._file.close()
    lines._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        run(lines, 2, 4)
        lines.close()
    assert lines.failed
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert "from step 2 on" in record.getMessage()
    assert said(lines.path) == [("step", 1)]


def test_several_listeners_hear_everything_in_their_order() -> None:
    heard: list[tuple[str, str]] = []

    class Ear:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, event: str) -> Any:
            return lambda *_: heard.append((self.name, event))

    both = Listeners(Ear("a"), Ear("b"))  # type: ignore[arg-type]
    both.note("x")
    both.phase("x", 1, 2)
    both.step(step(1))
    both.evaluated(evaluated(1))
    both.committed(CommitReport(step=1, seconds=0))
    both.ended(end(1))
    events = ("note", "phase", "step", "evaluated", "committed", "ended")
    assert heard == [(name, event) for event in events for name in ("a", "b")]


class Writer:
    """What a board needs of TensorBoard's."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, **settings: Any) -> None:
        self.settings, self.scalars, self.closed = settings, [], False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, at: int) -> None:
        self.scalars.append((name, value, at))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_the_board_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    board = Board.if_installed(tmp_path / "b", asked=False)
    assert board is not None
    with board:
        board.note("no figure")
        assert Writer.made == []
        run(board, 5, 6)
        board.evaluated(evaluated(6))
        board.ended(end(6))
    (writer,) = Writer.made
    # What the process before wrote about step 5 and later is hidden.
    assert writer.settings == {"log_dir": str(tmp_path / "b"), "purge_step": 5}
    assert writer.closed
    assert ("train/loss", 2.0, 5) in writer.scalars
    assert ("speed/busy_ssd", step_figures(step(6))["utilisation"]["ssd"], 6) in writer.scalars
    assert ("eval/loss", 1.5, 6) in writer.scalars


def test_no_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert Board.if_installed(tmp_path, asked=False) is None
    with pytest.raises(OffloadError, match="pip install tensorboard"):
        Board.if_installed(tmp_path, asked=True)


def test_a_mean_that_starts_without_a_pull() -> None:
    mean = Mean(0.9)
    assert mean.add(4.0) == pytest.approx(4.0)
    assert mean.add(4.0) == pytest.approx(4.0)
    # 0.1 of the new one over 0.271 of all: the weights of three steps.
    assert mean.add(1.0) == pytest.approx(4.0 - 3.0 * 0.1 / (1 - 0.9**3))


def test_the_curve_is_drawn_from_the_run_or_its_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, live = tmp_path / "m.jsonl", Curve()
    with JsonLines(path) as lines:
        both = Listeners(lines, live)
        run(both, 1, 9)
        both.evaluated(evaluated(9))
        both.note("x")
        both.ended(end(9))
        lines.step(step(10, math.nan))
    assert Curve.of_lines(read_lines(path)).loss == live.loss == dict.fromkeys(range(1, 10), 2.0)
    assert Curve.of_lines(read_lines(path)).eval_loss == live.eval_loss == {9: 1.5}
    draw(tmp_path / "p.png", live, "costs $5 and $6_")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    draw(tmp_path / "one.png", Curve(loss={1: 2.0}, lr={1: 0.0}))
    with pytest.raises(OffloadError, match="cannot be written"):
        draw(tmp_path / "no" / "p.png", live)


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plots.check_plot(None)
    with pytest.raises(OffloadError, match=r"pip install 'offload\[plot\]'"):
        draw(tmp_path / "p.png", Curve())
