"""The loss curve as a picture; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.io.whole_file import expanded
from offload.train.reports import CommitReport, EndReport, EvalReport, StepReport

_PNG = b"\x89PNG\r\n\x1a\n"

SMOOTHING = 0.9
"""Share of the mean before that stays with each step."""


@dataclass(slots=True)
class Curve:
    """What is drawn; a listener that collects it. Steps count from 1."""

    loss: dict[int, float] = field(default_factory=dict)
    lr: dict[int, float] = field(default_factory=dict)
    eval_loss: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of_lines(cls, events: Iterable[Mapping[str, Any]]) -> Curve:
        """From the lines of a metrics file, e.g. of the process that this one resumes."""
        curve = cls()
        for event in events:
            step = event["step"]
            if event["event"] == "step":
                curve._put(curve.loss, step, event["loss"])
                curve._put(curve.lr, step, event["lr"])
            elif event["event"] == "eval":
                curve._put(curve.eval_loss, step, event["loss"])
        return curve

    @staticmethod
    def _put(series: dict[int, float], step: int, value: float | None) -> None:
        if value is not None:  # a figure that was not finite
            series[step] = value

    def note(self, text: str) -> None:
        """Nothing to draw."""

    def phase(self, what: str, done: int, total: int) -> None:
        """Nothing to draw."""

    def step(self, report: StepReport) -> None:
        self.loss[report.step], self.lr[report.step] = report.loss, report.lr

    def evaluated(self, report: EvalReport) -> None:
        self.eval_loss[report.step] = report.loss

    def committed(self, report: CommitReport) -> None:
        """Nothing to draw."""

    def ended(self, report: EndReport) -> None:
        """Nothing to draw."""


class Mean:
    """A running mean that forgets; without the pull to 0 at its start (as Adam's moments)."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """The mean with ``value``."""
        self._sum = self._smoothing * self._sum + (1 - self._smoothing) * value
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        return self._sum / self._weight


def check_plot(path: Path | None) -> None:
    """Refuse before the run what would fail after it, and a file that is no picture.

    Raises:
        OffloadError: matplotlib is not installed, or ``path`` holds something else.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise OffloadError(
            "--plot needs matplotlib; pip install 'offload[plot]' (or matplotlib), or drop --plot"
        )
    path = expanded(path)
    if path.is_file() and path.stat().st_size and not _is_png(path):
        raise OffloadError(f"--plot {path} is a file and no PNG, and would be lost; give another")


def _is_png(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PNG)) == _PNG


def draw(path: Path, curve: Curve, title: str = "") -> None:
    """Write the losses, and the learning rate below them, as PNG.

    Raises:
        OffloadError: matplotlib is missing, or the file cannot be written.
    """
    check_plot(path)
    path = expanded(path)
    import matplotlib as mpl

    mpl.use("Agg")  # no window, whatever the environment says
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, layout="constrained", height_ratios=(4, 1)
    )
    try:
        steps, mean = sorted(curve.loss), Mean()
        # A point for a run of one step: a line through it would be invisible.
        mark = "." if len(steps) < 2 else ""
        losses = [curve.loss[s] for s in steps]
        top.plot(steps, losses, marker=mark, color="C0", alpha=0.3, linewidth=0.8, label="train")
        top.plot(steps, [mean.add(x) for x in losses], color="C0", label="train, smoothed")
        if curve.eval_loss:
            evals = sorted(curve.eval_loss)
            top.plot(evals, [curve.eval_loss[s] for s in evals], "o-", color="C1", label="eval")
        top.set_ylabel("loss per token (nats)")
        top.set_title(title, parse_math=False)  # a name with dollars is no formula
        top.legend()
        top.grid(alpha=0.2)
        bottom.plot(steps, [curve.lr[s] for s in steps], marker=mark, color="C2")
        bottom.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        bottom.grid(alpha=0.2)
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise OffloadError(f"--plot {path} cannot be written: {error.strerror or error}") from error
    finally:
        plt.close(figure)
