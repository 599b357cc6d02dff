"""A fine-tuning run without an engine: what it was asked, and a script of what it tells.

Also a program, to see a run on a terminal: ``python tests/cli/finetune_support.py finetune ...``;
SECONDS_A_STEP sets its pace.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from offload.train.options import TrainOptions
from offload.train.reports import CommitReport, EndReport, EvalReport, Listener, StepReport


@dataclass
class FakeRun:
    """Stands for ``offload.train.run.Run``."""

    options: TrainOptions
    step_s: float = 0.0
    first: int = 1
    before_step: Callable[[int], None] = lambda _: None
    closed: int = 0
    prediction: None = None
    taken: list[int] = field(default_factory=list)

    def describe(self) -> list[str]:
        return ["plan [of 2 tiers]", "  a step takes 1.0 s"]

    def train(self, listener: Listener, *, should_stop: Callable[[], bool]) -> EndReport:
        of = self.options.max_steps or 3
        every = self.options.save_every or of
        listener.note("2 rows were skipped")
        last = self.first - 1
        for n in range(self.first, of + 1):
            self.before_step(n)
            self._work()
            listener.step(self._step(n, of))
            self.taken.append(n)
            last = n
            if self.options.eval_every and n % self.options.eval_every == 0:
                listener.evaluated(
                    EvalReport(step=n, loss=2.5 / n, label_tokens=77, seconds=0.5, best=True)
                )
            if n % every == 0 or should_stop():
                listener.committed(CommitReport(step=n, seconds=0.25))
            if should_stop():
                break
        done = last == of
        if done:
            for part in range(1, 5):
                self._work()
                listener.phase("writing the model", part * 2**28, 2**30)
        end = EndReport(
            steps=len(self.taken), last_step=last, stopped="done" if done else "interrupted",
            seconds=2.0 * len(self.taken), tokens=1000 * len(self.taken), budget_bytes=4 * 2**30,
            peak_rss_bytes=3 * 2**30, read_bytes=5 * 2**30, written_bytes=2 * 2**30,
            output=str(self.options.output) if done else None,
        )  # fmt: skip
        listener.ended(end)
        return end

    def close(self) -> None:
        self.closed += 1

    def _work(self) -> None:
        if self.step_s:
            threading.Event().wait(self.step_s)

    def _step(self, n: int, of: int) -> StepReport:
        return StepReport(
            step=n, of=of, epoch=n / of, loss=3.0 / n, grad_norm=1.25, lr=1e-5 / n, tokens=1000,
            label_tokens=900, seconds=self.step_s or 2.0,
            lanes={"compute": 0.9 * (self.step_s or 2), "ssd": 0.5 * (self.step_s or 2)},
            read_bytes=2**30, written_bytes=2**30,
        )  # fmt: skip


def fake_engine(runs: list[FakeRun], **settings: object) -> ModuleType:
    """A module for the place of ``offload.train.preparing``; what it prepares goes to ``runs``."""
    module = ModuleType("offload.train.preparing")

    def prepare(options: TrainOptions) -> FakeRun:
        runs.append(FakeRun(options, **settings))  # type: ignore[arg-type]
        return runs[-1]

    module.prepare = prepare  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    import signal

    # A parent that ignores SIGINT (a shell's background job) would hand that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["offload.train.preparing"] = fake_engine(
        [], step_s=float(os.environ["SECONDS_A_STEP"])
    )
    from offload.cli.main import main

    sys.exit(main())
