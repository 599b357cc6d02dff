"""The figures of a run as TensorBoard's scalars."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.train.metrics import step_figures
from offload.train.reports import CommitReport, EndReport, EvalReport, StepReport

logger = logging.getLogger(__name__)


class Board:
    """Writes scalars under ``train/``, ``eval/`` and ``speed/`` into ``directory``; a context.

    A resumed run hides what its predecessor wrote about the steps that are taken again.
    """

    def __init__(self, directory: Path, make_writer: Any) -> None:
        self.directory = directory
        self._make = make_writer
        self._writer: Any = None

    @classmethod
    def if_installed(cls, directory: Path, *, asked: bool) -> Board | None:
        """A board, or None if TensorBoard cannot be imported and nobody asked for it.

        Imports it now, before a run measures what the bare process weighs.

        Raises:
            OffloadError: asked for, and not to be had.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # a broken install fails in any way it likes
            if asked:
                raise OffloadError(
                    f"--tensorboard: it cannot be imported ({error}); pip install tensorboard, or "
                    "drop --tensorboard"
                ) from error
            logger.info("no TensorBoard events: %s", error)
            return None
        return cls(directory, SummaryWriter)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all out; ends the writer's thread."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def note(self, text: str) -> None:
        """Nothing: notes are no figures."""

    def phase(self, what: str, done: int, total: int) -> None:
        """Nothing: the terminal's."""

    def step(self, report: StepReport) -> None:
        figures = step_figures(report)
        scalars = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/epoch": report.epoch,
            "speed/step_s": report.seconds,
            "speed/tok_s": figures["tok_s"],
            "speed/ssd_bytes_per_s": figures["ssd_bytes_per_s"],
            **{f"speed/busy_{lane}": share for lane, share in figures["utilisation"].items()},
        }
        self._add(report.step, scalars)

    def evaluated(self, report: EvalReport) -> None:
        self._add(report.step, {"eval/loss": report.loss})

    def committed(self, report: CommitReport) -> None:
        self._add(report.step, {"speed/commit_s": report.seconds})

    def ended(self, report: EndReport) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _add(self, step: int, scalars: dict[str, float]) -> None:
        if self._writer is None:
            # The directory appears with the first figure: a run that fails at once leaves none.
            self._writer = self._make(log_dir=str(self.directory), purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
